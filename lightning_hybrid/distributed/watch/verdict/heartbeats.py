"""Heartbeats: each rank writes its record at intervals, and rank 0 finds the ranks that have stopped.

`RankWatch` calls :meth:`Heartbeats.look` at each look, and the judge compares the ages with the timeout. A closed
connection shows most failures at once, but a stopped process or a dead node closes none. Not every rank reads all
records, because the store must serve thousands of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning_hybrid.distributed.watch.board import Board
from lightning_hybrid.distributed.watch.record import Record

_SLEPT = 5.0  # seconds between two looks; if more have passed, this process was stopped
_MOST_BETWEEN = 2.0  # seconds between two heartbeats and between two reads, at most
_HEARTBEATS = 6  # the least number of heartbeats within a timeout


class Heartbeats:
    """The ages of the records of other ranks.

    A rank closes no connection if its process is stopped, or its node is cut off or without power. But it stops
    writing::

        every rank   writes its record every two seconds (1), with its place for the report one message
        rank 0       reads all records every two seconds (1)                                one message
        last rank    reads the record of rank 0, from another node if there are several     one message
        (1) or six times within the timeout, if that is more often

    The watcher's thread writes heartbeats while the rank computes, waits, validates or saves. A working rank is silent
    only if it never lets other threads of Python run. A rank that is cut off cannot reach the store, and detects that
    itself: see :class:`~lightning_hybrid.distributed.watch.watcher.Watcher`, whose ``patience`` is not longer than
    this timeout.

    A rank is not silent before it begins the run, or after it has finished. Its first message to the store is also its
    first heartbeat: see :meth:`~lightning_hybrid.distributed.watch.board.Board.begin`.

    Args:
        board: The board, over the watcher's client of the store.
        seconds: The timeout, in seconds.
        place: Returns the place of this rank in the run, as text.

    Attributes:
        seconds: The timeout, in seconds.
    """

    def __init__(self, board: Board, *, seconds: float, place: Callable[[], str]) -> None:
        self._board, self.seconds, self._place = board, seconds, place
        self._reads = board.rank in (0, board.size - 1)
        self._between = min(_MOST_BETWEEN, seconds / _HEARTBEATS)
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        self._write_at = self._read_at = 0.0
        self._looked = time.monotonic()
        self._seen: dict[int, tuple[Record, float]] = {}  # the last record, and the time when it was first read

    def look(self) -> dict[int, float]:
        """Write a heartbeat if it is due, and return the ages of the records that this rank watches.

        Returns:
            The seconds since each record last changed, by rank: all other ranks on rank 0, rank 0 on the last rank, and
            empty on other ranks. Finished ranks are included.
        """
        now = time.monotonic()
        if now > self._looked + _SLEPT:  # no heartbeat could be read meanwhile
            self._seen = {rank: (record, since + now - self._looked) for rank, (record, since) in self._seen.items()}
        self._looked = now
        if now >= self._write_at:
            self._write_at = now + self._between
            self._board.write(place=self._place())
        if self._reads and now >= self._read_at:
            self._read_at = now + self._between
            for rank, record in self._board.read(sorted({*self._seen, *self._new()})).items():
                if rank not in self._seen or record.number != self._seen[rank][0].number:
                    self._seen[rank] = record, now
        return {rank: now - since for rank, (_, since) in self._seen.items()}

    def _new(self) -> set[int]:
        """Return the ranks to watch that have begun since the last call."""
        if self._board.rank != 0:
            return {0} if not self._seen and self._board.find(0) is not None else set()
        return self._board.begun() - {0} if len(self._seen) < self._board.size - 1 else set()

"""The collectives and messages for which this rank waits, as its watcher finds them.

`RunWatch` makes :class:`Waits`, and `RankWatch` calls :meth:`Waits.look` on the watcher. The judge of the run reads the
entries of all ranks, to find ranks that wait for each other. An *entry* is the value `waiting` in the record of a rank.
Code could note its own waits, but collectives of torch and of the user would be missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_hybrid.distributed.watch.board import Board
from lightning_hybrid.distributed.watch.flight_recorder import ranks_of, read_collectives, read_progress
from lightning_hybrid.distributed.watch.record import Waiting
from lightning_hybrid.distributed.watch.watched_thread import WatchedThread

_STILL = 1.0  # seconds after which a blocked rank writes what it waits for
_TERMINATED = 20.0  # seconds after SIGTERM in which a rank must move; launchers kill after 30 s or more


class Messages(NamedTuple):
    """The messages on the channels of this rank.

    Attributes:
        awaited: (channel, global rank that must act, number) of the message that this rank waits for, if any; see
            :attr:`Waiting.message`.
        sent: The number of messages that this rank has sent, by channel. A note that it is ready to receive counts too.
    """

    awaited: tuple[str, int, int] | None
    sent: dict[str, int]


class Meeting(NamedTuple):
    """A meeting of ranks over the store.

    Attributes:
        name: The name of the comparison.
        ranks: The global ranks.
        number: The number of the last event that this rank has reached.
        place: The place where this rank waits for the others; empty if it does not wait.
        since: The time since which it waits, by `time.monotonic`.
    """

    name: str
    ranks: list[int]
    number: int
    place: str = ""
    since: float = 0.0


class Waits:
    """A writer of what this rank waits for, into its record, once it has been blocked for a second.

    A rank without an entry may do anything, for any time. In a run without faults, only ranks that wait for seconds
    write entries, so steps are not slower.

    After SIGTERM, all ranks must stop before the same batch. If a rank is then blocked in the user's code, because it
    sleeps or waits for something that never comes, it writes this too. It does so only after a while, because it may be
    uploading a file. The end of a `time.sleep` is known, so if the rank will sleep longer than that, it writes this at
    once.

    Args:
        board: The board, over the watcher's client of the store.
        thread: The thread of the run.
        messages: Returns the messages that this rank has sent, and the message that it waits for.
        state: Returns the state of the Trainer.
        meetings: Returns the meetings of this rank with other ranks.
        since: The number of the last collective before the groups of this run were made, see
            :func:`~.flight_recorder.read_collectives`.
    """

    def __init__(
        self,
        board: Board,
        *,
        thread: WatchedThread,
        messages: Callable[[], Messages],
        state: Callable[[], str],
        meetings: Callable[[], Sequence[Meeting]] = tuple,
        since: int = -1,
    ) -> None:
        self._board, self._thread, self._messages, self._state = board, thread, messages, state
        self._meetings, self._since = meetings, since
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        self._progress: object = None  # the state of collectives and messages when the entry was written

    def final(self) -> Waiting:
        """Return the entry of a rank whose run is over."""
        started = read_collectives(self._since).started | _started(self._meetings())
        return Waiting(started=started, sent=self._messages().sent, state=self._state(), finished=True)

    def look(self, seconds_terminating: float | None) -> None:
        """Write what this rank waits for, if anything. The watcher calls this.

        Args:
            seconds_terminating: The seconds since a rank received SIGTERM; ``None`` if no rank has.
        """
        before, waiting = self._board.own.waiting, self._find(seconds_terminating)
        if before is not None and waiting is not None and _same(before, waiting):
            waiting = before
        elif waiting is not None:
            waiting.place, waiting.state = self._thread.place(), self._state()
        if before is not None or waiting is not None:
            self._board.wait(waiting)

    @property
    def knows_what(self) -> bool:
        """True if this rank waits, and it is known for what."""
        waiting = self._board.own.waiting
        return waiting is not None and bool(waiting.collectives or waiting.message)

    def _find(self, seconds_terminating: float | None) -> Waiting | None:
        """Return what this rank waits for; ``None`` if it does not wait, or its wait is not known."""
        thread, meetings = self._thread, self._meetings()
        awaited = [each for each in meetings if each.place and time.monotonic() > each.since + _STILL]
        if thread.seconds_still < _STILL and not awaited:
            return None
        waiting, before = Waiting(), self._board.own.waiting
        messages = self._messages()
        progress = read_progress(), messages.awaited, meetings
        if before is not None and progress[0] is not None and progress == self._progress:
            return before  # reading all collectives takes longer
        self._progress = progress
        if awaited or thread.in_collective or thread.awaits or messages.awaited is not None:
            recorded = read_collectives(self._since, thread.ident)
            pending = recorded.pending
            if awaited or messages.awaited is not None:
                pending = []  # these were started earlier, and are waited for later
            elif thread.in_collective:
                pending = pending[-1:]
            groups = [(group, ranks_of(group), number, kind) for group, number, kind in pending]
            collectives = [(group, list(ranks), number, kind) for group, ranks, number, kind in groups if ranks]
            waiting = Waiting(
                collectives=[*collectives, *((each.name, each.ranks, each.number, each.place) for each in awaited)],
                message=messages.awaited,
                started=recorded.started | _started(meetings),
                sent=messages.sent,
            )
        if waiting.collectives or waiting.message is not None:
            return waiting
        if seconds_terminating is None or thread.is_slow:
            return None
        seconds = min(thread.seconds_still, seconds_terminating) + thread.seconds_of_sleep()
        return waiting if seconds > _TERMINATED else None


def _started(meetings: Sequence[Meeting]) -> dict[str, tuple[int, list[str]]]:
    """Return the meetings that this rank has reached, in the form of :attr:`Waiting.started`."""
    return {each.name: (each.number + 1, []) for each in meetings}


def _same(one: Waiting, other: Waiting) -> bool:
    """Return True if a rank still waits for the same."""
    return one.collectives == other.collectives and one.message == other.message and one.started == other.started

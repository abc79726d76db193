"""The watch of one rank: each look writes its own record, reads the records of others, judges them, and acts.

`StartWatch` makes a :class:`RankWatch` for a rank as soon as there is a store, and `RunWatch` extends it with
:meth:`RankWatch.open` for the work of each run. A :class:`~.watcher.Watcher` calls :meth:`RankWatch.look` about twice a
second. torch's timeouts alone are not sufficient: they end a wait only after minutes, and do not show the rank that
caused it.

The *board* has the entries of all ranks in the store. A *sight* is the set of facts that a rank judges, and a *verdict*
is the result, see `verdict.judge`. The *cause* is the first failure of the run. A *call* asks all watchers for an
answer.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import torch.distributed as dist

from lightning_hybrid.distributed.failure import print_error
from lightning_hybrid.distributed.watch.board import TERMINATE, Board
from lightning_hybrid.distributed.watch.failures import Failures
from lightning_hybrid.distributed.watch.ladder import PATIENCE, Ladder
from lightning_hybrid.distributed.watch.process_ends import ProcessEnds
from lightning_hybrid.distributed.watch.record import Answer, name_of
from lightning_hybrid.distributed.watch.verdict.heartbeats import Heartbeats
from lightning_hybrid.distributed.watch.verdict.judge import (
    BUSY,
    Sight,
    Verdict,
    finished_text,
    gone_text,
    judge,
    store_gone_text,
)
from lightning_hybrid.distributed.watch.verdict.stall import StallWatch
from lightning_hybrid.distributed.watch.verdict.waits import Waits
from lightning_hybrid.distributed.watch.watched_thread import WatchedThread
from lightning_hybrid.error_codes.entry import without_code

_INTERRUPTED = 1.0  # seconds for a rank to run the handler of SIGINT
_ANSWER = 1.5  # seconds for every watcher to answer: two or three looks


class Comparison(Protocol):
    """A comparison of the calls of ranks, such as `Desync`."""

    def look(self) -> Verdict | None:
        """Write new values of this rank, and return a difference if there is one."""


class RankWatch:
    """A watch that looks at the board on the watcher's thread, while the thread of the run may be blocked.

    ::

        a look   own record --> board      heartbeat, what this rank waits for, answers to calls
                 board --> sight --> judge --> verdict --> board: the first failure
                 the first failure is known --> ladder: this rank ends

    Every rank watches the processes on its node, and reads the answers to its calls. One rank, while some ranks wait,
    also reads the records of all ranks: rank 0, or the lowest rank that has not finished the run.

    Args:
        failures: The first failure.
        board: The board, over the watcher's client of the store: a client is locked while it waits for a key.
        thread: The thread of the run.
        heartbeats: Finds ranks that send no heartbeats; ``None`` if heartbeats are disabled.
        abort: The argument of :class:`Ladder`.
        interrupt: The argument of :class:`Ladder`.
        num_lost: Returns the number of connections that have been closed so far, here or by other ranks.
        parent: The process that started this one; this rank ends when the parent ends. ``None`` for no such process.
        end: The argument of :class:`Ladder`.

    Attributes:
        ladder: Ends this rank.
        waits: The argument of :meth:`open`; ``None`` before the first call.
        stall: The argument of :meth:`open`; ``None`` before the first call, too.
        comparisons: The argument of :meth:`open`; empty before the first call.
    """

    def __init__(
        self,
        failures: Failures,
        board: Board,
        *,
        thread: WatchedThread,
        heartbeats: Heartbeats | None,
        abort: Callable[[], None],
        interrupt: Callable[[Exception], bool],
        num_lost: Callable[[], int] = int,
        parent: int | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._failures, self._board = failures, board
        self._thread, self._heartbeats = thread, heartbeats
        self._num_lost, self._parent = num_lost, parent
        self._ends = ProcessEnds()
        self.ladder = Ladder(failures, board, thread, self._ends, abort=abort, interrupt=interrupt, end=end)
        self.waits: Waits | None = None
        self.stall: StallWatch | None = None
        self.comparisons: Sequence[Comparison] = ()
        self._finished: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """Begin a run, on the thread that is watched."""
        self._thread.watch_this()
        self.ladder.begin()
        if self._heartbeats is not None:
            self._heartbeats.begin()
        self._ends.close()
        self._finished.clear()
        self._met: set[int] = set()  # the ranks on this node that have begun
        self._knows_first = False
        self._lost = self._num_lost()
        self._call, self._called_at = 0, 0.0  # the call that was made after a connection was closed, and its time
        self._missing: dict[int, int] = {}  # heartbeats of the ranks that did not answer the last call
        self._suspects: Mapping[int, tuple[int, int]] = {}
        self._cause: str | None = None
        self._known_at = 0.0
        self._sigint_at: float | None = None
        self._sigterm_at: float | None = None

    def open(self, waits: Waits, stall: StallWatch | None, comparisons: Sequence[Comparison]) -> None:
        """Begin to watch the work of a run, too. The thread of the run calls this.

        Args:
            waits: Writes what this rank waits for.
            stall: Detects that nothing finishes; ``None`` if this is disabled.
            comparisons: Compare the calls of ranks.
        """
        waits.begin()
        if stall is not None:
            stall.begin()
        self.waits, self.stall, self.comparisons = waits, stall, comparisons

    def close(self) -> None:
        """End a run: stop watching processes. The watcher must have been closed."""
        self._ends.close()

    def descriptors(self) -> Collection[int]:
        """Return file descriptors that become readable when a look is due."""
        return self._ends.descriptors()

    def look(self, signals: Collection[int] = ()) -> None:
        """Write, read, judge, and end this rank after a failure. The watcher calls this.

        Args:
            signals: The signals since the last look.
        """
        self._thread.look()
        self._failures.gone.update(self._ends.take())
        if signal.SIGINT in signals and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._sigint_at = time.monotonic()
        if self._failures.is_store_silent:  # the store responds again, but other ranks do not know this failure
            self._failures.is_store_silent = False
            self._cause, self._known_at = self._report(self._silence), time.monotonic()
        elif self._cause is None:
            self._cause, self._known_at = self._find(), time.monotonic()
        if self._cause is not None:
            self.ladder.climb(self._cause, self._known_at)
        elif self._sigint_at is not None and time.monotonic() > self._sigint_at + _INTERRUPTED:
            self._sigint_at = None
            self.ladder.wake()

    def end_without_store(self) -> None:
        """End this rank after the store has not responded for long, so that :meth:`look` is blocked.

        Another thread calls this repeatedly.
        """
        if not self._failures.is_store_silent:
            self._failures.is_store_silent = True
            self.ladder.resume_others()  # if the store then responds, the cause can be written
            return
        if self._cause is None:
            self._cause, self._known_at = self._silence, time.monotonic()
        self._thread.look()
        self.ladder.climb(self._cause, self._known_at)

    @property
    def _silence(self) -> str:
        return (
            f"The store through which ranks exchange messages does not respond. Either {self._name_of(0)} or"
            " the launcher is stopped, or the host of one of them is down. [LH228]"
        )

    def _name_of(self, rank: int) -> str:
        return name_of(rank, self._board.hosts)

    # -- the cause -----------------------------------------------------------------------------------------------------

    def _find(self) -> str | None:
        """Return the reason why this run cannot continue; ``None`` if it can."""
        if self._parent is not None and os.getppid() != self._parent:
            name = self._name_of(self._board.rank)
            return self._report(f"The launcher of {name}, such as torchrun, has exited. [LH226]")
        try:
            return self._look_at_board()
        except (dist.DistError, OSError):
            if 0 in self._finished or self._failures.is_over:  # rank 0, which hosts the store, may have exited
                return finished_text([0]) if self._is_blocked else None
            name = self._name_of(0)
            return gone_text([name]) if 0 in self._failures.gone else store_gone_text(name)

    @property
    def _is_blocked(self) -> bool:
        return self._thread.waits and self._thread.seconds_still > PATIENCE

    def _look_at_board(self) -> str | None:
        board = self._board
        self._meet()
        if board.has_event():
            while (kind := board.next_call()) is not None:
                board.answer(self._thread.calls(), self._answer(kind))
            if (cause := board.read_cause()) is not None:
                return self._learn(*cause)
            self._finished = board.finished() - {board.rank}
            if self._sigterm_at is None and board.has_flag(TERMINATE):
                self._sigterm_at = time.monotonic()
        verdict = judge(self._see())
        self._suspects = {} if verdict is None else verdict.suspects
        if verdict is None or not verdict.ends:
            found = (each.look() for each in self.comparisons)
            verdict = next((each for each in found if each is not None), verdict)
        return None if verdict is None else self._act_on(verdict)

    def _see(self) -> Sight:
        """Write the record of this rank, and return what it has to judge."""
        board, gone = self._board, self._failures.gone
        gone.update(self._find_absent())
        sight = Sight(board.size, hosts=board.hosts, gone=gone, finished=self._finished, suspects=self._suspects)
        if dead := gone - self._finished:
            sight.records = board.read(dead & board.begun())
            return sight
        if self._heartbeats is not None:
            sight.ages, sight.heartbeat_timeout = self._heartbeats.look(), self._heartbeats.seconds
            sight.records = board.read(rank for rank, age in sight.ages.items() if age > sight.heartbeat_timeout)
        if self.waits is not None:
            sight.is_terminating = self._sigterm_at is not None
            self.waits.look(None if self._sigterm_at is None else time.monotonic() - self._sigterm_at)
            is_judge = board.rank == min(set(range(board.size)) - self._finished)
            if is_judge and board.num_waiting():
                sight.records = board.read(board.begun())
        knows_what = self.waits is not None and self.waits.knows_what
        sight.waits_for_finished = self._is_blocked and not knows_what
        if self.stall is not None:
            with suppress(Exception):  # for the same reason as in `_answer`
                self.stall.look()
                sight.answers = self.stall.answers()
        return sight

    def _answer(self, kind: str) -> Answer | None:
        """Return the answer of this rank to a call, if there is one."""
        with suppress(Exception):  # the thread of the run may end or destroy its groups meanwhile
            return None if self.stall is None else self.stall.answer(kind)
        return None

    def _find_absent(self) -> list[int]:
        """Return the ranks that have gone, although no rank waits for them.

        If a connection is closed, this rank calls for answers. So the loss of a rank on another node is noticed even
        while the other ranks save, or wait for the store. A connection may be closed for other reasons, and a rank may
        be too busy to answer. Therefore a rank counts as gone after two calls without an answer and without a heartbeat
        in between.
        """
        board, lost = self._board, self._num_lost()
        self._lost = min(self._lost, lost)
        if lost > self._lost and not self._call:
            self._lost = lost
            self._call_all()
        if not self._call or time.monotonic() < self._called_at + _ANSWER:
            return []
        before, call, self._call = self._missing, self._call, 0
        records = board.read(board.absent(call))
        self._missing = {rank: record.number for rank, record in records.items()}
        if not before:
            if records:
                self._call_all()
            return []
        absent = [rank for rank, number in self._missing.items() if before.get(rank) == number]
        self._missing = {}
        return absent

    def _call_all(self) -> None:
        self._call, self._called_at = self._board.call(), time.monotonic()

    def _meet(self) -> None:
        """Watch processes on this node as soon as they have begun this run, and get the host of rank 0."""
        board = self._board
        if not self._knows_first:
            self._knows_first = board.find(0) is not None
        if len(self._met) < board.size:
            new = board.neighbors() - self._met
            self._met |= new
            for rank, record in board.read(sorted(new - {board.rank})).items():
                self._ends.add(rank, record.process)

    def _act_on(self, verdict: Verdict) -> str | None:
        """Write the reason why the run cannot continue, and return it; return ``None`` if the run continues."""
        if verdict.kind == BUSY:
            text = f"{without_code(verdict.text)} The other ranks keep waiting until `timeout` expires."
            print_error(f"[rank {self._board.rank}] {text}")
        if not verdict.ends:
            return None
        if verdict.details:
            print_error(f"[rank {self._board.rank}] {verdict.text}\n{verdict.details}")
        return self._report(verdict.text, verdict.exception)

    def _report(self, text: str, exception: str = "RuntimeError") -> str:
        """Write a failure, unless another rank has written one. Return the first failure."""
        with suppress(dist.DistError, OSError):
            if self._board.write_cause(exception, text):
                self._failures.is_first = True
            if (cause := self._board.read_cause()) is not None:
                return self._learn(*cause)
        return text

    def _learn(self, kind: str, text: str) -> str:
        self._failures.learn(kind, text)
        return text

"""What a rank's watcher does about failures: it finds those that nobody tells, and ends a rank that waits in vain."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import torch.distributed as dist

from lightning_hybrid.distributed.failure import (
    CAUSE,
    EVENT,
    FailureStore,
    Store,
    finished_text,
    gone_text,
    print_error,
    silent_text,
    store_gone_text,
)
from lightning_hybrid.distributed.wait_watch import WaitWatch
from lightning_hybrid.distributed.watch.heartbeats import Heartbeats
from lightning_hybrid.distributed.watch.process_ends import ProcessEnds
from lightning_hybrid.distributed.watch.watched_thread import WatchedThread

_INTERRUPTED = 1.0  # seconds in which a rank comes to the handler of SIGINT, if it can
_STEP = 1.5  # seconds before something stronger is done
_ANSWER = 1.5  # seconds in which every watch answers, if it can: that is two looks or three
_WAITS = 0.5  # seconds in one place after which a rank may wait in vain
_PATIENCE = 3.0  # seconds that a rank waits in one place before its process is ended


class FailureWatch:
    """Looks at the store on the watcher's thread, while the run of this rank may be stuck.

    What nobody tells is found here: a process on this machine that has ended, ranks that have fallen silent, ranks that
    wait for each other, one that waits for a rank whose run is over. What is known ends this rank, each time by the
    mildest means that does::

        a cause is known --> the groups are aborted:     who waits for others gets an exception where it waits
                             and who is stopped goes on, to find out the same
          1.5 s later    --> the thread is interrupted:  so does who is in the user's code; not who saves
          1.5 s later    --> the process is ended:       who waits or computes outside of Python

    A rank that is on its way out already is left alone, unless it comes to wait again.

    Args:
        failures: Of this rank.
        store: A clone of its store: while one thread waits for a key, a store is locked.
        rank: This rank.
        size: The number of ranks.
        thread: That of the run.
        waits: Finds ranks that wait for each other; ``None`` if nobody looks for them, as before a run.
        heartbeats: Finds ranks that send no heartbeats; ``None`` if it is off.
        abort: Wakes who waits in this rank's groups, which are of no use then.
        num_lost: How many connections have been closed so far, here or by other ranks.
        interrupt: Has this exception raised in the thread of the run; whether that is possible.
        parent: The process that started this one, if this one shall not outlive it.
        end: Ends the process.

    Attributes:
        waits: As given.
        interrupt: As given.
    """

    def __init__(
        self,
        failures: FailureStore,
        store: Store,
        *,
        rank: int,
        size: int,
        thread: WatchedThread,
        waits: WaitWatch | None,
        heartbeats: Heartbeats | None,
        abort: Callable[[], None],
        interrupt: Callable[[Exception], bool],
        num_lost: Callable[[], int] = int,
        parent: int | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._failures, self._store, self._rank, self._size = failures, store, rank, size
        self._thread, self._heartbeats = thread, heartbeats
        self.waits, self.interrupt = waits, interrupt
        self._abort, self._num_lost = abort, num_lost
        self._parent, self._end = parent, end
        self._ends = ProcessEnds()
        self._finished: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """A run begins, on the thread that is watched."""
        self._thread.watch_this()
        if self._heartbeats is not None:
            self._heartbeats.begin()
        self._ends.close()
        self._finished.clear()
        self._met: set[int] = set()  # the ranks on this machine that have begun
        self._knows_first = False
        self._lost = self._num_lost()
        self._roll, self._called_at = 0, 0.0  # that was called as a connection was found closed, and when
        self._missing: dict[int, bytes | None] = {}  # heartbeats of the ranks that did not answer the last roll call
        self._has_aborted = self._has_interrupted = False
        self._cause: str | None = None
        self._known_at = 0.0
        self._sigint_at: float | None = None
        self._sigterm_at: float | None = None

    def close(self) -> None:
        """A run is over."""
        self._ends.close()

    def descriptors(self) -> Collection[int]:
        """What can be read when something is to be looked at."""
        return self._ends.descriptors()

    def look(self, signals: Collection[int] = ()) -> None:
        """Answer a roll call, find and read failures, and end this rank if nothing else does.

        Args:
            signals: What has come since.
        """
        self._thread.look()
        self._failures.gone.update(self._ends.take())
        if signal.SIGINT in signals and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._sigint_at = time.monotonic()
        if self._failures.is_store_silent:  # it answers again, and the others know of nothing
            self._failures.is_store_silent = False
            self._cause, self._known_at = self._report(self._silence), time.monotonic()
        elif self._cause is None:
            self._cause = self._find()
            self._known_at = time.monotonic()
        if self._cause is not None:
            self._leave()
        elif self._sigint_at is not None and time.monotonic() > self._sigint_at + _INTERRUPTED:
            self._sigint_at = None
            if self._thread.waits and not self._failures.is_leaving:
                self._failures.is_interrupted = True
                self._abort()  # it comes out of C++, and to the handler

    # -- what is known -------------------------------------------------------------------------------------------------

    def end_without_store(self) -> None:
        """The store has not answered for long, and :meth:`look` waits for it. Called by another thread, repeatedly."""
        if not self._failures.is_store_silent:
            self._failures.is_store_silent = True
            self._ends.resume()  # if it answers then, the others can be told
            return
        if self._cause is None:
            self._cause, self._known_at = self._silence, time.monotonic()
        self._thread.look()
        self._leave()

    @property
    def _silence(self) -> str:
        return (
            f"The store through which ranks exchange messages does not respond. Either {self._failures.name_of(0)} or"
            " the launcher is stopped, or the host of one of them is down. [LH228]"
        )

    def _find(self) -> str | None:
        """Why this run cannot go on, if it cannot."""
        if self._parent is not None and os.getppid() != self._parent:
            own = self._failures.name_of(self._rank)
            return self._report(f"The launcher of {own}, such as torchrun, has exited. [LH226]")
        try:
            return self._look_at_store()
        except (dist.DistError, OSError):
            if 0 in self._finished or self._failures.is_over:  # nothing can be heard any more, and nobody need miss it
                stuck = self._thread.waits and self._thread.seconds_still > _PATIENCE
                return finished_text([0]) if stuck else None
            if 0 in self._failures.gone:
                return gone_text([self._failures.name_of(0)])
            return store_gone_text(self._failures.name_of(0))

    def _look_at_store(self) -> str | None:
        failures, check = self._failures, self._store.check
        self._meet()
        if check([failures.key(EVENT)]):
            failures.answer_rolls(self._store, self._thread.calls)
            if check([failures.key(CAUSE)]):
                return self._learn()
            # Who does not wait need not know whether others still come: of thousands of ranks these are many requests.
            waits = self._thread.waits and self._thread.seconds_still > _WAITS
            others = set(range(self._size) if waits else (0, *failures.gone)) - {self._rank} - self._finished
            self._finished |= {rank for rank in others if check([failures.key(f"finished/{rank}")])}
            if self._sigterm_at is None and check([failures.key("terminate")]):
                self._sigterm_at = time.monotonic()
        gone = sorted(failures.gone - self._finished)
        if gone:
            return self._report(self._gone_text(gone))
        if absent := self._find_absent():
            return self._report(self._gone_text(absent))
        if self._heartbeats is not None and (silent := self._heartbeats.look()):
            for rank in silent:
                failures.description_of(rank, self._store)
            text = silent_text([failures.name_of(rank) for rank in silent], self._heartbeats.seconds)
            return self._report(text + failures.last_seen(silent, self._store))
        terminating = None if self._sigterm_at is None else time.monotonic() - self._sigterm_at
        if self.waits is None:
            return None
        found = self.waits.look(terminating, any_finished=bool(self._finished))
        if found is None and self._finished and not self.waits.knows_what and self._thread.waits:
            # Nothing tells for what it waits.
            found = finished_text(sorted(self._finished)) if self._thread.seconds_still > _PATIENCE else None
        return None if found is None else self._report(found)

    def _gone_text(self, ranks: Sequence[int]) -> str:
        failures = self._failures
        return gone_text([failures.name_of(rank) for rank in ranks]) + failures.last_seen(ranks, self._store)

    def _find_absent(self) -> list[int]:
        """The ranks that have gone while nobody waits for them: a connection is closed, and they do not answer.

        So a rank of another machine is missed while the others save, or wait for the store. A connection may be closed
        for other reasons, and a rank be too busy to answer: the roll is called twice.
        """
        lost = self._num_lost()
        self._lost = min(self._lost, lost)
        if lost > self._lost and not self._roll:
            self._lost = lost
            self._call_roll()
        if not self._roll or time.monotonic() < self._called_at + _ANSWER:
            return []
        before, roll, self._roll = self._missing, self._roll, 0
        silent = self._failures.absent(roll, self._store)
        self._missing = {rank: self._failures.heartbeat_of(rank, self._store) for rank in silent}
        if not before:
            if silent:
                self._call_roll()
            return []
        absent = [rank for rank, last in self._missing.items() if rank in before and before[rank] == last]
        self._missing = {}
        self._failures.gone.update(absent)
        for rank in absent:
            self._failures.description_of(rank, self._store)
        return absent

    def _call_roll(self) -> None:
        self._roll, self._called_at = self._failures.call_roll(self._store), time.monotonic()

    def _meet(self) -> None:
        """Come to know the processes on this machine, and where the store is, as soon as they have begun this run."""
        if not self._knows_first:
            self._knows_first = self._failures.description_of(0, self._store) is not None
        if len(self._met) == self._size:
            return
        for rank in self._failures.neighbours(self._store):
            if rank in self._met:
                continue
            self._met.add(rank)
            description = self._failures.description_of(rank, self._store)
            if rank != self._rank and description is not None:
                self._ends.add(rank, description)

    def _report(self, text: str) -> str:
        """Write down what was found, unless another rank was first; returns what counts."""
        with suppress(dist.DistError, OSError):
            if self._failures.report_text(text, self._store):
                return self._learn()
        return text

    def _learn(self) -> str:
        failures = self._failures
        failures.learn(self._store.get(failures.key(CAUSE)).decode())
        with suppress(Exception):
            self._store.set(failures.key(f"read/{self._rank}"), "")
        return str(failures.cause(patience=0.0))

    # -- what is done --------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        assert self._cause is not None
        thread, seconds = self._thread, time.monotonic() - self._known_at
        if not self._has_aborted and not self._failures.is_leaving:
            self._has_aborted = True
            if not self._failures.is_known:  # nobody could write it
                self._failures.learn_text(self._cause)
            self._failures.failed = True
            self._ends.resume()
            self._abort()
        if self._failures.is_leaving:
            thread.look()  # it may have come out of its wait since this look began
        is_stuck = thread.waits and thread.seconds_still > _PATIENCE
        is_elsewhere = not thread.waits and not thread.is_saving
        if self._failures.is_leaving:
            if is_stuck:
                self._end_process()
        elif seconds > 2 * _STEP and (is_stuck or is_elsewhere):
            self._end_process()
        elif is_elsewhere and not self._has_interrupted and max(seconds, thread.seconds_still) > _STEP:
            self._has_interrupted = True
            self.interrupt(RuntimeError(self._cause))

    def _end_process(self) -> None:
        print_error(f"[rank {self._rank}] {self._cause}\nThis rank exits now. It was at {self._thread.calls()}.")
        with suppress(Exception):
            self._failures.linger(self._store)
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        self._end(1)

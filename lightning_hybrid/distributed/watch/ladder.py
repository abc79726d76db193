"""The ladder of actions that end a rank once the first failure is known, the mildest one first."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from lightning_hybrid.distributed.failure import print_error
from lightning_hybrid.distributed.watch.board import Board
from lightning_hybrid.distributed.watch.failures import Failures
from lightning_hybrid.distributed.watch.process_ends import ProcessEnds
from lightning_hybrid.distributed.watch.watched_thread import WatchedThread

_STEP = 1.5  # seconds before something stronger is done
PATIENCE = 3.0  # seconds that a rank waits in one place before its process is ended


class Ladder:
    """Ends this rank, each time by the mildest means that does.

    ::

        a cause is known --> the groups are aborted:     a rank that waits gets an exception where it waits; processes
                             stopped ones resume:        that are stopped run again, and find the same cause
          1.5 s later    --> the thread is interrupted:  a rank in the user's code gets an exception; not one that saves
          1.5 s later    --> the process is ended:       the rank waits or computes outside of Python

    A rank that is on its way out already is left alone, unless it comes to wait again.

    Args:
        failures: The first failure.
        board: The board, over the store of the watcher.
        thread: The thread of the run.
        ends: The processes of other ranks on this machine.
        abort: Wakes this rank where it waits in its groups, which are of no use afterwards.
        interrupt: Raises an exception in the thread of the run; returns whether that is possible.
        end: Ends the process.

    Attributes:
        interrupt: The function that interrupts the thread of the run.
    """

    def __init__(
        self,
        failures: Failures,
        board: Board,
        thread: WatchedThread,
        ends: ProcessEnds,
        *,
        abort: Callable[[], None],
        interrupt: Callable[[Exception], bool],
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._failures, self._board, self._thread, self._ends = failures, board, thread, ends
        self._abort, self.interrupt, self._end = abort, interrupt, end
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        self._has_aborted = self._has_interrupted = False

    def resume_others(self) -> None:
        """Resume the processes of other ranks on this machine that are stopped."""
        self._ends.resume()

    def wake(self) -> None:
        """Bring the thread out of C++ to the handler of SIGINT, if it waits."""
        if self._thread.waits and not self._failures.is_leaving:
            self._failures.is_interrupted = True
            self._abort()

    def climb(self, cause: str, known_at: float) -> None:
        """Do what is due. Called at every look since the cause is known.

        Args:
            cause: The text of the first failure.
            known_at: The time since which it is known, by `time.monotonic`.
        """
        failures, thread, seconds = self._failures, self._thread, time.monotonic() - known_at
        if not self._has_aborted and not failures.is_leaving:
            self._has_aborted = True
            if not failures.is_known:  # it could not be written
                failures.learn("RuntimeError", cause)
            failures.failed = True
            self.resume_others()
            self._abort()
        if failures.is_leaving:
            thread.look()  # it may have come out of its wait since this look began
        is_stuck = thread.waits and thread.seconds_still > PATIENCE
        is_elsewhere = not thread.waits and not thread.is_saving
        if failures.is_leaving:
            if is_stuck:
                self._end_process(cause)
        elif seconds > 2 * _STEP and (is_stuck or is_elsewhere):
            self._end_process(cause)
        elif is_elsewhere and not self._has_interrupted and max(seconds, thread.seconds_still) > _STEP:
            self._has_interrupted = True
            self.interrupt(RuntimeError(cause))

    def _end_process(self, cause: str) -> None:
        print_error(f"[rank {self._board.rank}] {cause}\nThis rank exits now. It was at {self._thread.calls()}.")
        with suppress(Exception):
            self._failures.linger(self._board)
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        self._end(1)

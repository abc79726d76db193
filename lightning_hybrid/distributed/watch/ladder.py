"""The actions that end a rank once the first failure is known, from the mildest to the strongest.

`RankWatch` makes a :class:`Ladder`, and calls it at each look once the cause is known, on the watcher. Ending the
process at once would be simpler, but an exception in the user's code lets callbacks, loggers and files be closed. A
rank is *leaving* after an exception, while it closes its groups. The *cause* is the first failure of the run.
"""

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

_STEP = 1.5  # seconds between two actions
PATIENCE = 3.0  # seconds for which a rank may wait in one place before its process is ended


class Ladder:
    """A sequence of increasingly strong actions that end this rank.

    ::

        a cause is known --> the groups are aborted:     a rank that waits gets an exception where it waits
                             stopped processes resume:   these processes find the same cause
          1.5 s later    --> the thread is interrupted:  a rank in the user's code gets an exception, unless it saves
          1.5 s later    --> the process is ended:       the rank waits or computes outside of Python

    A rank that is already leaving is left alone, unless it waits again for 3 s. A rank that reads or writes a
    checkpoint, and does not wait for other ranks, is neither interrupted nor ended.

    Args:
        failures: The first failure.
        board: The board, over the watcher's client of the store.
        thread: The thread of the run.
        ends: The processes of other ranks on this node.
        abort: Wakes this rank where it waits in its groups. The groups cannot be used afterwards.
        interrupt: Raises an exception in the thread of the run; returns True if that is possible.
        end: Ends the process with an exit code.

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
        """Resume stopped processes of other ranks on this node."""
        self._ends.resume()

    def wake(self) -> None:
        """Wake the thread of the run if it waits in C++ code, so that it runs the handler of SIGINT."""
        if self._thread.waits and not self._failures.is_leaving:
            self._failures.is_interrupted = True
            self._abort()

    def climb(self, cause: str, known_at: float) -> None:
        """Take the action that is due. The watcher calls this at every look after the cause is known.

        If the store does not respond, another thread calls it.

        Args:
            cause: The text of the first failure.
            known_at: The time since which the cause is known, by `time.monotonic`.
        """
        failures, thread, seconds = self._failures, self._thread, time.monotonic() - known_at
        if not self._has_aborted and not failures.is_leaving:
            self._has_aborted = True
            if not failures.is_known:  # the failure could not be written to the board
                failures.learn("RuntimeError", cause)
            failures.failed = True
            self.resume_others()
            self._abort()
        if failures.is_leaving:
            thread.look()  # the thread may have stopped waiting since this look began
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

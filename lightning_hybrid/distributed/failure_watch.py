"""What a rank's watcher does about failures: it ends a rank that waits for one that will never come."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from lightning_hybrid.distributed.failure import CAUSE, EVENT, FailureStore, Store, finished_text

#: Where a thread is that waits for other ranks: the files of torch's collectives, and of this package.
_WAITING = (str(Path(dist.__file__).parent), str(Path(__file__).parents[1]))
_PATIENCE = 3.0  # seconds that a rank stays in one place before it is ended
_MOST_COMPUTED = 0.05  # seconds in which it does not compute more than this


class FailureWatch:
    """Looks at the store on the watcher's thread, while the run of this rank may be stuck.

    A rank that fails closes its connections, and whoever waits for it is woken. Nothing wakes a rank that waits for one
    that waits itself, that has finished, or that has not yet come to make a group with it: gloo has no `abort` that
    does (torch 2.13). Such a rank says why it ends, and its process ends without more ado. A rank that does something
    else - writes a file, talks to a logger - is left alone: it notices when it comes to the next collective.

    Args:
        failures: Of this rank.
        store: A clone of its store: while one thread waits for a key, a store is locked.
        rank: This rank.
        size: The number of ranks.
        abort: Closes this rank's groups if that wakes who waits in them, as it does for NCCL; ``None`` if it does not.
        end: Ends the process.
    """

    def __init__(
        self,
        failures: FailureStore,
        store: Store,
        *,
        rank: int,
        size: int,
        abort: Callable[[BaseException], None] | None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._failures, self._store, self._rank, self._size = failures, store, rank, size
        self._abort, self._end = abort, end
        self._watched = threading.get_ident()
        self._answered = self._has_aborted = False
        self._cause: str | None = None
        self._place: object = None  # where the run is, and since when
        self._since = self._computed_before = 0.0

    def begin(self) -> None:
        """A run begins, on the thread that is watched."""
        self._watched = threading.get_ident()
        self._answered = False
        self._cause = None

    def look(self) -> None:
        """Answer a roll call, read the first failure, and end this rank if nothing else does."""
        try:
            cause = self._read()
        except Exception:
            cause = "The store of all ranks is gone, so rank 0 or what launched the ranks has ended."
        if cause is None:
            self._place = None
            return
        if self._abort is not None and not self._has_aborted and not self._failures.failed:
            self._has_aborted = self._failures.failed = True
            self._abort(RuntimeError(cause))
        if self._seconds_stuck() > _PATIENCE:
            print(f"[rank {self._rank}] {cause}\nThis rank waited at {self._where()}, and ends.", file=sys.stderr)
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            self._end(1)

    def _read(self) -> str | None:
        """Why this run cannot go on, if it cannot."""
        failures, check = self._failures, self._store.check
        if self._cause is not None or not check([failures.key(EVENT)]):
            return self._cause
        if not self._answered and check([failures.key("roll call")]):
            self._answered = True
            self._store.set(failures.key(f"here/{self._rank}"), self._where())
        if check([failures.key(CAUSE)]):
            text = self._store.get(failures.key(CAUSE)).decode()
            failures.learn(text)
            self._store.set(failures.key(f"read/{self._rank}"), "")
            cause = failures.cause(patience=0.0)
            self._cause = str(cause)
            return self._cause
        others = (rank for rank in range(self._size) if rank != self._rank)
        finished = [rank for rank in others if check([failures.key(f"finished/{rank}")])]
        return finished_text(finished) if finished else None

    def _seconds_stuck(self) -> float:
        """How long the run has been at one place where it waits for other ranks.

        Where no failure is known, it may be one that it comes to again and again: then it computes in between.
        """
        frame = sys._current_frames().get(self._watched)
        if frame is None or not frame.f_code.co_filename.startswith(_WAITING):
            self._place = None
            return 0.0
        place = id(frame), frame.f_lasti, frame.f_code  # not the frame: its variables refer to groups
        computed = 0.0 if self._cause is not None else self._computed()
        if place != self._place or computed > self._computed_before + _MOST_COMPUTED:
            self._place, self._since, self._computed_before = place, time.monotonic(), computed
        return time.monotonic() - self._since

    def _computed(self) -> float:
        """The seconds that a processor has worked for the run's thread; always 0 where the system does not tell."""
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        return 0.0 if clock_of is None else time.clock_gettime(clock_of(self._watched))

    def _where(self) -> str:
        """The place where the run is, and the one in the user's code that led there."""
        frame = sys._current_frames().get(self._watched)
        places: list[str] = []
        while frame is not None and len(places) < 6:
            code = frame.f_code
            places.append(f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})")
            frame = frame.f_back
        return " < ".join(places)

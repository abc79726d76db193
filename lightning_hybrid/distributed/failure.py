"""A failure anywhere ends everything, quickly, with the first cause."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

_KEY = "lightning_hybrid/failure"
_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}


class WrongUseError(ValueError):
    """The user's code does what cannot work in a pipeline. Becomes a `ValueError` of this text on every rank."""


class Store(Protocol):
    """What is needed of `torch.distributed.Store`."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return it."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have been written."""


class FailureStore:
    """Where the first failure of a run is written, and read by every other rank.

    ::

        rank 2: exception in 2F1 --> leave(): text to the store, groups closed --> raises its exception
        rank 1: waits for rank 2 --> its receive fails --> leave(): groups closed --> raises the text of rank 2
        rank 0: waits for rank 1 --> its receive fails --> leave(): groups closed --> raises the text of rank 2

    A closed gloo group fails at once on its peers, so the chain takes milliseconds. NCCL waits on the device: there a
    thread polls the store and aborts this rank's groups.

    Args:
        store: A store that all ranks see.
        name: Distinguishes this run from others over the same store.
        interval: Seconds between two polls of the thread.

    Attributes:
        failed: Whether this rank failed, or aborted because another one did.
    """

    def __init__(self, store: Store, name: str, interval: float = 1.0) -> None:
        self._store = store
        self._key = f"{_KEY}/{name}"
        self._interval = interval
        self.failed = False
        self._stop_watching = threading.Event()

    def report(self, error: BaseException, where: str, *, verbatim: bool = False) -> None:
        """Write a failure down, unless another rank was first.

        Args:
            error: What was raised.
            where: The rank, stage and action.
            verbatim: Whether the others raise the same text, because the error is about what every rank does.
        """
        if self.failed:
            return
        self.failed = True
        kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")
        text = str(error) if verbatim else f"{where} failed: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the store may be gone; then nobody reads it either
            if self._store.add(f"{self._key}/count", 1) == 1:
                self._store.set(self._key, json.dumps([kind, text]))

    def cause(self, patience: float = 2.0) -> Exception | None:
        """The first failure, as the exception to raise here; ``None`` if no rank has written one.

        Args:
            patience: Seconds to wait for one.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                if self._store.check([self._key]):
                    kind, text = json.loads(self._store.get(self._key))
                    return _KINDS.get(kind, RuntimeError)(text)
            except Exception:  # the store died with the rank that hosts it: nobody knows any more
                return None
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)

    def leave(
        self, error: Exception, where: str, abandon: Callable[[], None], *, verbatim: bool = False
    ) -> Exception | None:
        """Leave every process group after an exception, without a collective.

        ::

            error --> is there a cause? ----- no --> report error --.
                      (transport errors                             +--> abandon --> close groups --> cause or None
                       wait for one)   `----- yes ------------------'

        Args:
            error: What was raised on this rank.
            where: The rank, stage and action.
            abandon: Drops all that is under way and would keep connections open.
            verbatim: As in :meth:`report`.

        Returns:
            The first failure, to be raised from ``error``; ``None`` if ``error`` is the first one.
        """
        cause = self.cause(patience=2.0 if is_transport(error) else 0.0)
        if cause is None:
            self.report(error, where, verbatim=verbatim)
        abandon()
        close_groups(error)
        return cause

    def watch(self, abort: Callable[[], None]) -> None:
        """Poll the store from a thread until :meth:`close`, and call ``abort`` when another rank has failed."""
        self._stop_watching = stop = threading.Event()

        def poll() -> None:
            while not (stop.wait(self._interval) or self.failed):
                if self.cause(patience=0.0) is not None:
                    self.failed = True
                    abort()

        threading.Thread(target=poll, name="lightning_hybrid-failure-watch", daemon=True).start()

    def close(self) -> None:
        """End the thread of :meth:`watch`: a run that ended well needs the store no longer."""
        self._stop_watching.set()


def close_groups(error: BaseException | None = None) -> None:
    """Leave every process group without a collective, so that peers that wait for this rank fail at once.

    A gloo group closes its connections when nothing refers to it any more: the package holds groups by weak references,
    and pending work must have been abandoned before.

    Args:
        error: What is being raised: the local variables of the calls that it came through refer to groups and to work.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    with contextlib.suppress(Exception):
        if dist.get_backend() == "nccl" and dist.group.WORLD is not None:
            dist.group.WORLD.abort()
        dist.destroy_process_group()
    gc.collect()


def is_transport(error: BaseException) -> bool:
    """Whether an error only says that another rank has left."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)

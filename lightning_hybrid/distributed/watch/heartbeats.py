"""Heartbeats: each rank counts up in the store, and rank 0 finds the ranks that stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

_SLEPT = 5.0  # seconds between two looks after which this process has been stopped in the meantime
_MOST_BETWEEN = 2.0  # seconds between two heartbeats, and between two reads
_HEARTBEATS = 6  # at least, within a short timeout


class _Store(Protocol):
    """The part of `torch.distributed.Store` that is used."""

    def get(self, key: str) -> bytes:
        """Read."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have been written."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read keys that have been written."""


class Heartbeats:
    """Detector of ranks whose process is stopped, or whose node is cut off or without power: no connection breaks.

    ::

        every rank   writes a heartbeat, a number in the store, every two seconds,          one message
                     and its place in the run, for the report if it stops
        rank 0       reads all heartbeats every two seconds                                 one message
        last rank    reads the heartbeat of rank 0, from another node if there is one

    The watcher's thread writes heartbeats while the rank computes, waits, validates or saves. Only a rank that never
    lets other threads of Python run is silent although it works. A rank that is cut off cannot reach the store, and
    detects that itself: see :class:`~lightning_hybrid.distributed.watch.watcher.Watcher`, whose ``patience`` is the
    same timeout.

    A rank is not silent before it begins the run, or after it has finished. Its first message to the store is also its
    first heartbeat: see :meth:`~lightning_hybrid.distributed.failure.FailureStore.begin`.

    Args:
        store: The store of all ranks, for the watcher alone.
        key: Returns the key in the store of an entry of this run.
        rank: This rank.
        size: The number of ranks.
        seconds: The timeout.
        place: Returns the place of this rank in the run.

    Attributes:
        seconds: The timeout.
    """

    def __init__(
        self,
        store: _Store,
        key: Callable[[str], str],
        *,
        rank: int,
        size: int,
        seconds: float,
        place: Callable[[], str],
    ) -> None:
        self._store, self._key, self.seconds, self._place = store, key, seconds, place
        self._rank, self._size = rank, size
        self._reads = rank in (0, size - 1)
        self._between = min(_MOST_BETWEEN, seconds / _HEARTBEATS)
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        self._count = 0
        self._write_at = self._read_at = 0.0
        self._looked = time.monotonic()
        self._seen: dict[int, tuple[bytes, float]] = {}  # the last heartbeat, and when it was new

    def look(self) -> list[int]:
        """Write a heartbeat if it is time, and return the ranks that have been silent for longer than the timeout."""
        now = time.monotonic()
        if now > self._looked + _SLEPT:  # no heartbeat could be read
            self._seen = {rank: (value, since + now - self._looked) for rank, (value, since) in self._seen.items()}
        self._looked = now
        if now >= self._write_at:
            self._write_at = now + self._between
            self._count += 1
            keys = [self._key(f"heartbeat/{self._rank}"), self._key(f"seen/{self._rank}")]
            values = [str(self._count), self._place()]
            self._store.multi_set(keys, values)  # type: ignore[attr-defined]  # torch's stubs
        if not self._reads or now < self._read_at:
            return []
        self._read_at = now + self._between
        ranks = sorted({*self._seen, *self._new()})
        keys = [self._key(f"heartbeat/{rank}") for rank in ranks]
        for rank, value in zip(ranks, self._store.multi_get(keys) if keys else [], strict=True):
            if rank not in self._seen or value != self._seen[rank][0]:
                self._seen[rank] = value, now
        silent = [rank for rank, (_, since) in self._seen.items() if now > since + self.seconds]
        return [rank for rank in silent if not self._store.check([self._key(f"finished/{rank}")])]

    def _new(self) -> set[int]:
        """Return the ranks whose heartbeats are read and that have begun since the last call, with two requests."""
        if self._rank != 0:
            return {0} if not self._seen and self._store.check([self._key("heartbeat/0")]) else set()
        if len(self._seen) == self._size - 1 or not self._store.check([self._key("begun")]):
            return set()
        return {int(rank) for rank in self._store.get(self._key("begun")).split()} - {0}

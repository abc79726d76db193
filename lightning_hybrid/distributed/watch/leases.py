"""Ranks that have fallen silent: each renews a lease in the store, and rank 0 sees whose has run out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

_SLEPT = 5.0  # seconds between two looks after which this process has been stopped in the meantime
_MOST_BETWEEN = 2.0  # seconds between two renewals, and two times of reading: a rank may be silent for nearly a lease
_RENEWALS = 6  # in the time of a short lease, at least


class _Store(Protocol):
    """What is needed of `torch.distributed.Store`."""

    def get(self, key: str) -> bytes:
        """Read."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have been written."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read keys that have been written."""


class Leases:
    """Finds ranks whose process stands still, or whose machine is cut off or has lost its power: no connection breaks.

    ::

        every rank   renews its lease, a number in the store, every two seconds,            one message
                     and says where it is, for those who miss it
        rank 0       reads all leases every two seconds                                     one message
        last rank    reads that of rank 0, from another machine if there is one

    The watcher renews it, whatever the rank does: in a step, while it validates or saves. So a rank that computes, or
    waits for long, is not silent; one that works without ever letting other threads of Python run is. Who is cut off
    together with others does not reach the store, and finds that by itself: see
    :class:`~lightning_hybrid.distributed.watch.watcher.Watcher`, whose ``patience`` is the length of a lease.

    A rank that has not begun the run is not silent, and neither is one that has come to its end. With the first word
    that a rank says, it has a lease: see :meth:`~lightning_hybrid.distributed.failure.FailureStore.begin`.

    Args:
        store: What all ranks see, for the watcher alone.
        key: The key of something in the store that belongs to this run.
        rank: This rank.
        size: The number of ranks.
        seconds: The length of a lease.
        place: Says where this rank is.

    Attributes:
        seconds: As given.
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
        self._between = min(_MOST_BETWEEN, seconds / _RENEWALS)
        self.begin()

    def begin(self) -> None:
        """A run begins."""
        self._renewals = 0
        self._renew_at = self._read_at = 0.0
        self._looked = time.monotonic()
        self._seen: dict[int, tuple[bytes, float]] = {}  # what was read last, and when it was new

    def look(self) -> list[int]:
        """Renew this rank's lease, and return the ranks that have been silent for longer than one."""
        now = time.monotonic()
        if now > self._looked + _SLEPT:  # nobody could be heard
            self._seen = {rank: (value, since + now - self._looked) for rank, (value, since) in self._seen.items()}
        self._looked = now
        if now >= self._renew_at:
            self._renew_at = now + self._between
            self._renewals += 1
            keys = [self._key(f"lease/{self._rank}"), self._key(f"seen/{self._rank}")]
            values = [str(self._renewals), self._place()]
            self._store.multi_set(keys, values)  # type: ignore[attr-defined]  # torch's stubs
        if not self._reads or now < self._read_at:
            return []
        self._read_at = now + self._between
        ranks = sorted({*self._seen, *self._new()})
        keys = [self._key(f"lease/{rank}") for rank in ranks]
        for rank, value in zip(ranks, self._store.multi_get(keys) if keys else [], strict=True):
            if rank not in self._seen or value != self._seen[rank][0]:
                self._seen[rank] = value, now
        silent = [rank for rank, (_, since) in self._seen.items() if now > since + self.seconds]
        return [rank for rank in silent if not self._store.check([self._key(f"finished/{rank}")])]

    def _new(self) -> set[int]:
        """The ranks that are read, and have begun since this was asked before: two requests, and none for each."""
        if self._rank != 0:
            return {0} if not self._seen and self._store.check([self._key("lease/0")]) else set()
        if len(self._seen) == self._size - 1 or not self._store.check([self._key("begun")]):
            return set()
        return {int(rank) for rank in self._store.get(self._key("begun")).split()} - {0}

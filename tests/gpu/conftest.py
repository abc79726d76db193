"""Ranks of the tests for GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.pool import Pool, Pools

# A process that has asked CUDA itself cannot be copied, and live ranks are copies.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


class FreshPools(Pools):
    """Ranks that live for one run: a second NCCL world in a process ends it (SIGSEGV, torch 2.11 with NCCL 2.28.9)."""

    def __call__(self, size: int, *, lightning: bool = False) -> Pool:
        pool = super().__call__(size, lightning=lightning)
        if size > 1:
            pool.close()
        return pool


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """The ranks of a module's tests."""
    pools = FreshPools()
    yield pools
    pools.close()

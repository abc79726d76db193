"""Fixtures of all tests: live ranks, and a clean slate for every test."""

from __future__ import annotations

import os

# Before torch is imported anywhere: ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's store asks the name server for the name of each peer. If it drops the request, every start takes 5 s longer.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

import gc
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.pool import Pools

if TYPE_CHECKING:
    from tests.results import Results


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """The live ranks of a module's tests."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def ranks(pools: Pools) -> Pools:
    """``ranks(4).run(function, *args)`` runs a module-level function on 4 live ranks and returns results by rank.

    Each run has a gloo default group of exactly these ranks. ``ranks(4, lightning=True)`` has none: there a `Trainer`
    finds the variables that ``torchrun`` sets, and initialises the group itself.
    """
    return pools


@pytest.fixture(scope="module")
def results(pools: Pools, request: pytest.FixtureRequest) -> Results:
    """The trainings of a module's tests of transparency."""
    from tests.results import Results  # with Lightning, which few modules need

    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return Results(pools, [item.callspec.params.get("case") for item in items])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def _environment_restored() -> Iterator[None]:
    """A Trainer writes MASTER_PORT, PL_GLOBAL_SEED, ...: the next test must not read them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _flags_restored() -> Iterator[None]:
    """Flags of torch that a Trainer or a test sets."""
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    benchmark, cudnn_deterministic = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, cudnn_deterministic
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def pytest_configure(config: pytest.Config) -> None:
    """Where the thorough tests are taken too, properties are tried with many examples."""
    if "not thorough" not in config.option.markexpr:
        os.environ.setdefault("LIGHTNING_HYBRID_EXAMPLES", "600")


def pytest_collection_finish() -> None:
    """What was imported stays: runs that collect garbage need not look through it each time."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with ranks are `distributed`; tests for a GPU are skipped, with a reason, where there is none."""
    has_gpu = torch.cuda.is_available()
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.distributed)
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

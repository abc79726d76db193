"""What tests need that were written for one process, to run on several in lock-step."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn

from lightning_hybrid import HybridStrategy

__all__ = ["Together", "give_two_layers", "pipeline_of"]

_TIMEOUT = timedelta(seconds=40)  # of a collective: a rank that failed outside of the Trainer does not come
_PATIENCE = 100.0  # seconds that ranks wait for each other between tests


class Together:
    """Begins and ends each test on all ranks at the same time, in one folder, with a rendezvous of its own.

    Args:
        folder: The ranks have it in common.
        rank: Of this process.
        size: The number of ranks; 1 if there is nobody to meet.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._folder = folder
        self._rank = rank
        self._size = size
        self._number = 0

    def pytest_runtest_logstart(self) -> None:
        self._number += 1
        self._meet("begin")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        # Lightning's fixtures close the process group; nobody may still need this rank's sockets.
        self._meet("end")

    def _meet(self, name: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        paths = [self._folder / f"{self._number}-{name}-{rank}" for rank in range(self._size)]
        paths[self._rank].touch()
        while self._size > 1 and not all(path.exists() for path in paths) and time.monotonic() < deadline:
            time.sleep(0.005)

    @pytest.fixture(autouse=True)
    def _rendezvous_by_file(self) -> Iterator[None]:
        """A port may be taken by another test that runs at the same time; a file is not."""
        initialize, stores = dist.init_process_group, itertools.count()

        def initialize_by_file(*args: Any, **kwargs: Any) -> None:
            store = dist.FileStore(str(self._folder / f"{self._number}-store-{next(stores)}"), kwargs["world_size"])
            initialize(*args, **{**kwargs, "store": store})

        def choose(*args: Any, **kwargs: Any) -> None:
            by_file = kwargs.get("world_size") == self._size and kwargs.get("rank") == self._rank
            (initialize_by_file if by_file else initialize)(*args, **kwargs)

        # Not the fixture of that name: it would come before Lightning's, which look for what tests leave behind.
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(dist, "init_process_group", choose)
            yield

    @pytest.fixture
    def tmp_path(self, tmp_path: Path) -> Path:
        """What one rank saves the others find."""
        if self._size == 1:
            return tmp_path
        common = self._folder / f"{self._number}-files"
        common.mkdir(exist_ok=True)
        return common


class _Environment(LightningEnvironment):
    """A cluster whose processes have been started."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self._rank, self._size = rank, size

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._rank


def pipeline_of(size: int, rank: int) -> Callable[[Any], HybridStrategy]:
    """Makes the strategy of one of `size` ranks, and tells Lightning's connector of the others."""

    def make(connector: Any) -> HybridStrategy:
        connector._parallel_devices = [torch.device("cpu")] * size
        connector._devices_flag = size
        connector.cluster_environment = _Environment(rank, size)
        return HybridStrategy(pipeline_parallel_size=size, timeout=_TIMEOUT)

    return make


class _Body(nn.Sequential):
    """Two layers that answer for the one that tests ask."""

    @property
    def weight(self) -> Tensor:
        return self[-1].weight

    @property
    def bias(self) -> Tensor:
        return self[-1].bias


def give_two_layers() -> None:
    """Lightning's `BoringModel` has one layer; a pipeline needs two."""
    initialize = BoringModel.__init__

    @functools.wraps(initialize)
    def initialize_with_body(model: BoringModel) -> None:
        initialize(model)
        model.layer = _Body(nn.Linear(32, 32), nn.Linear(32, 2))

    BoringModel.__init__ = initialize_with_body

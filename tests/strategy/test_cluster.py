"""The world is what the cluster says, whatever `devices` says: Ray Train counts workers, and knows no nodes."""

from __future__ import annotations

import os
from typing import Any

import pytest
from lightning.fabric.plugins.environments import ClusterEnvironment
from torch import Tensor
from typing_extensions import override

from tests.pool import Pools
from tests.training_jobs import Regression, assert_same, loader, make_trainer, together, weights


class Workers(ClusterEnvironment):
    """As `ray.train.lightning.RayLightningEnvironment`."""

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    @override
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    @override
    def set_world_size(self, size: int) -> None:
        """It is known."""

    @override
    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    @override
    def set_global_rank(self, rank: int) -> None:
        """It is known."""

    @override
    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    @override
    def node_rank(self) -> int:
        return 0


def train(layout: dict[str, Any] | None) -> dict[str, Tensor]:
    where: dict[str, Any] = {} if layout is None else {"devices": "auto", "plugins": [Workers()]}
    trainer, module = make_trainer(layout, **where), Regression()
    trainer.fit(module, loader())
    assert layout is None or trainer.world_size == int(os.environ["WORLD_SIZE"])
    return weights(module)


@pytest.mark.parametrize("layout", [{"pipeline_parallel_size": 2, "num_microbatches": 4}], ids=["pp2"])
def test_every_worker_of_the_cluster_is_a_rank(ranks: Pools, layout: dict[str, Any]) -> None:
    assert_same(together(ranks(2, lightning=True).run(train, layout)), train(None))

"""The world is what the cluster says, whatever `devices` says: Ray Train counts workers, and knows no nodes."""

from __future__ import annotations

import os
from typing import Any

import pytest
from lightning.fabric.plugins.environments import ClusterEnvironment
from typing_extensions import override

from tests.pool import Pools
from tests.training_jobs import Regression, Result, assert_same, loader, together, train


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


def trained(layout: dict[str, Any]) -> Result:
    result = train(Regression(), layout, loader(), devices="auto", plugins=[Workers()])
    assert result.trainer.world_size == int(os.environ["WORLD_SIZE"])
    return result


@pytest.mark.parametrize("layout", [{"pipeline_parallel_size": 2, "num_microbatches": 4}], ids=["pp2"])
def test_every_worker_of_the_cluster_is_a_rank(ranks: Pools, layout: dict[str, Any]) -> None:
    expected = train(Regression(), None, loader())
    results = ranks(2, lightning=True).run(trained, layout)
    assert_same(results, [expected, expected])
    together([result.weights for result in results])

"""Starting the processes of a job."""

from __future__ import annotations

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_hybrid.strategy.launch import announce, make_launcher


@pytest.mark.parametrize(("num_processes", "num_nodes", "launches"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_a_launcher_is_there_for_several_processes(num_processes: int, num_nodes: int, launches: bool) -> None:
    """A launcher of nobody would keep the Trainer out of notebooks, and a thread that watches nobody."""
    launcher = make_launcher(LightningEnvironment(), num_processes, num_nodes)
    assert (launcher is not None) == launches


def test_processes_that_are_there_are_not_launched() -> None:
    assert make_launcher(TorchElasticEnvironment(), 4, 1) is None


def test_the_rank_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (rank_zero_only, fabric_rank_zero_only):
        monkeypatch.setattr(function, "rank", 0, raising=False)
    announce(3)
    assert (rank_zero_only.rank, fabric_rank_zero_only.rank) == (3, 3)

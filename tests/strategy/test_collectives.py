"""Collectives of torch that the user's step calls: refused over stages, let through among the replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.pool import Pools
from tests.training_jobs import Regression, loader, make_trainer

LAYOUT = {"pipeline_parallel_size": 2, "num_microbatches": 2}


class Talking(Regression):
    """Adds up the loss over ranks, in the step or in a hook.

    Args:
        where: ``"stages"``, ``"replicas"`` or ``"hook"``.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.sums: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.where == "stages":
            dist.all_reduce(loss.detach().clone())
        if self.where == "replicas":
            total = torch.ones(())
            dist.all_reduce(total, group=self.device_mesh["data_parallel"].get_group())
            self.sums.append(total.item())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "hook":
            total = torch.ones(())
            dist.all_reduce(total)
            self.sums.append(total.item())


def train(where: str) -> tuple[str, list[float], bool]:
    module, before = Talking(where), dist.all_reduce
    text = ""
    try:
        make_trainer(LAYOUT).fit(module, loader())
    except ValueError as error:
        text = str(error)
    return text, module.sums, dist.all_reduce is before


@pytest.mark.parametrize(("where", "total"), [("stages", None), ("replicas", 2.0), ("hook", 4.0)])
def test_a_collective_in_a_step_is_refused_on_every_rank_if_other_stages_are_in_it(
    ranks: Pools, where: str, total: float | None
) -> None:
    for text, sums, is_restored in ranks(4, lightning=True).run(train, where, timeout=30):
        assert is_restored
        if where == "stages":
            assert text.startswith("`torch.distributed.all_reduce` over ranks [0, 1, 2, 3] was called in a step."), text
        else:
            assert not text
            assert set(sums) == {total}, "what the last stage has kept is shared"

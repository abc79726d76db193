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


class Counting(Regression):
    """Divides by the number of samples of all replicas, found before the layers, which code of its own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[float, float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        group = self.device_mesh["data_parallel"].get_group()
        ones, samples = torch.tensor(1.0), torch.tensor(float(len(x)))
        dist.all_reduce(ones, group=group)
        dist.all_reduce(samples, group=group, async_op=True).wait()
        replicas = self.trainer.strategy.reduce(torch.tensor(1.0), reduce_op="sum")
        h = self.embed(x)
        for layer in self.body:
            h = layer(h)
        loss = (self.head(h) - y).pow(2).sum() / samples
        self.found.append((ones.item(), samples.item(), float(replicas)))
        return loss


def count() -> list[tuple[float, float, float]]:
    module = Counting()
    layout = {**LAYOUT, "num_microbatches": 4, "body": ["body"], "loss_reduction": "sum"}
    make_trainer(layout).fit(module, loader(num_samples=32))
    return module.found


def test_collectives_before_the_layers_of_a_followed_step_run_for_each_microbatch(ranks: Pools) -> None:
    """Nothing is added up twice, and following the step talks to nobody."""
    for found in ranks(4, lightning=True).run(count, timeout=40):
        assert set(found) == {(2.0, 4.0, 2.0)}

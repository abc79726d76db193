"""Trainings with the automatic plan: what it leaves whole, what it does not look at, and who decides."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.distributed.dtensor import full_tensor, is_sharded
from lightning_hybrid.tensor_parallel.plan import make_plan
from tests.pool import Pools
from tests.training_jobs import make_trainer
from tests.zoo import own_blocks
from tests.zoo import tensor as zoo

Layout = Mapping[str, Any] | None
TP2: dict[str, Any] = {"tensor_parallel_size": 2}


def trained(layout: Layout, cls: type[zoo.Example]) -> tuple[dict[str, Tensor], int]:
    """Weights after some steps, and how many parameters are divided."""
    torch.manual_seed(3)
    module = cls(batch_size=8).double()
    make_trainer(layout, max_steps=3, limit_val_batches=0).fit(module)
    named = dict(module.named_parameters())
    weights = {name: full_tensor(parameter.detach()) for name, parameter in named.items()}
    return weights, sum(map(is_sharded, named.values()))


def assert_equal_to_one_process(ranks: Pools, cls: type[zoo.Example], divided: int) -> None:
    expected, _ = trained(None, cls)
    for weights, count in ranks(2, lightning=True).run(trained, TP2, cls):
        assert count == divided
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-10, atol=1e-10, msg=name)


class Penalized(zoo.GPT):
    """A penalty of weights that are divided, beside a loss over divided classes: its gradient is a DTensor."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * sum(each.weight.square().mean() for each in (self.embed, self.head))


def test_a_penalty_of_divided_weights_beside_a_loss_over_divided_classes(ranks: Pools) -> None:
    assert_equal_to_one_process(ranks, Penalized, 4 * 6 + 4)


class SparseCoder(nn.Module):
    """A multilayer perceptron of the user's own, with the usual names, that gives and keeps what is between."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(zoo.DIM, 32), nn.Linear(32, zoo.DIM)

    def forward(self, x: Tensor) -> Tensor:
        self.codes = F.relu(self.fc1(x))
        return x + self.fc2(self.codes)


class SparseCoders(zoo.Sequences):
    """Codes are to be small."""

    def layer(self, index: int) -> nn.Module:
        return SparseCoder()

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + sum(layer.codes.abs().mean() for layer in self.body)


def test_a_block_of_the_users_own_trains_as_in_one_process(ranks: Pools) -> None:
    assert_equal_to_one_process(ranks, SparseCoders, 0)


class Gated(nn.Module):
    """A gated multilayer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(zoo.DIM, 32), nn.Linear(zoo.DIM, 32), nn.Linear(32, zoo.DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class GatedOfTimm(Gated):
    """The same, of a package whose code is known."""

    __module__ = "timm.layers.mlp"


class GatedMLPs(zoo.Sequences):
    def layer(self, index: int) -> nn.Module:
        return GatedOfTimm()


class GatedByMode(Gated):
    """A branch that a user can see to be harmless, and a program cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = "add"

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.mode == "add" else y - x


class OwnGatedMLPs(zoo.Sequences):
    """The plan is what the table at the start proposes."""

    def layer(self, index: int) -> nn.Module:
        return GatedByMode()

    def tensor_parallel_plan(self) -> dict[str, str]:
        reasons = make_plan(self, "auto", 2, sequence_parallel=False).reasons
        (proposal,) = {text[text.index("{") : text.index("}") + 1] for text in reasons.values()}
        plan: dict[str, str] = ast.literal_eval(proposal)
        return plan


class ProvenGatedMLPs(zoo.Sequences):
    """The same code of the user's own."""

    def layer(self, index: int) -> nn.Module:
        return Gated()


@pytest.mark.parametrize("cls", [GatedMLPs, OwnGatedMLPs, ProvenGatedMLPs])
def test_a_gated_multilayer_perceptron(ranks: Pools, cls: type[zoo.Example]) -> None:
    assert_equal_to_one_process(ranks, cls, 6 * 5)


@pytest.mark.parametrize("cls", [own_blocks.TutorialViT, own_blocks.DemoViT])
def test_blocks_of_the_users_own_that_are_proven_are_divided(ranks: Pools, cls: type[zoo.Example]) -> None:
    assert_equal_to_one_process(ranks, cls, 4 * 6)


class Refused(zoo.Sequences):
    """Blocks that are not proven, one of each."""

    def layer(self, index: int) -> nn.Module:
        names = ("a branch by values", "a norm of the whole width", "talking heads", "a counter")
        return own_blocks.REFUSED[names[index % 4]][0]()


def test_blocks_of_the_users_own_that_are_not_proven_stay_whole(ranks: Pools) -> None:
    assert_equal_to_one_process(ranks, Refused, 0)


class Unlike(zoo.TimmViT):
    """Its trial ends in another way on another rank, for want of memory, say."""

    def build(self) -> None:
        super().build()
        for block in self.body:
            block.mlp.act = Failing()


class Failing(nn.GELU):
    __module__ = "timm.layers.activations"

    def forward(self, x: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == 1 and torch.get_default_dtype() == torch.float32 == x.dtype:
            raise RuntimeError("can't allocate memory")
        return super().forward(x)


def test_the_first_ranks_trials_count(ranks: Pools) -> None:
    assert_equal_to_one_process(ranks, Unlike, 4 * 6)

"""Loops over all parameters in a step: penalties, whose terms each stage computes of what it has."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from tests.frame_modules import Block
from tests.modules import WIDTH
from tests.pipeline_parallel.frame.stages import check, cut_of, seed


@pytest.fixture(autouse=True)
def _double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    yield
    torch.set_default_dtype(before)


class Model(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.old = {name: 0.9 * parameter.detach() + 0.1 for name, parameter in self.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.blocks:
            x = layer(x)
        return self.head(x)

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) - x.roll(1)).pow(2).mean()


class TiedModel(Model):
    """Two layers on different stages share a weight, and so do one and the code around the layers."""

    def __init__(self, count: int = 6) -> None:
        super().__init__(count)
        self.blocks[-1].linear.weight = self.blocks[0].linear.weight
        self.head.weight = self.blocks[1].linear.weight


def l2(model: Model) -> Tensor:
    return sum(parameter.pow(2).sum() for parameter in model.parameters())  # type: ignore[return-value]


def l1(model: Model) -> Tensor:
    total = torch.zeros([])
    for parameter in model.parameters():
        total += parameter.abs().sum()
    return total


def orthogonality(model: Model) -> Tensor:
    penalty = torch.zeros([])
    for block in model.blocks:
        weight = block.linear.weight
        penalty = penalty + (weight @ weight.T - torch.eye(WIDTH)).pow(2).sum()
    return penalty


def elastic(model: Model) -> Tensor:
    return torch.stack([(now - model.old[name]).pow(2).sum() for name, now in model.named_parameters()]).sum()


def stacked_norms(model: Model) -> Tensor:
    return torch.stack([parameter.norm() for name, parameter in model.named_parameters() if "weight" in name]).norm()


def joined_norm(model: Model) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).norm()


def products(model: Model) -> Tensor:
    """Neighbours on different stages are compared."""
    weights = [block.linear.weight for block in model.blocks]
    return sum((a * b).sum() for a, b in pairwise(weights))  # type: ignore[return-value]


PENALTIES = [l2, l1, orthogonality, elastic, stacked_norms, joined_norm, products]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("model", [Model, TiedModel])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_is_that_of_all_parameters(penalty: Any, model: type[Model], num_stages: int) -> None:
    made = model()
    x = torch.randn(4, WIDTH)
    check(made, lambda x: made.loss(x) + 1e-2 * penalty(made), (x,), num_stages)
    check(made, lambda x: 1e-2 * penalty(made) + made.loss(x), (x,), num_stages)


def _scalars(graph: Any, values: Iterable[Any]) -> int:
    return len([value for value in values if graph.calls[value.call].num_bytes(value) == 8])


def test_a_sum_over_parameters_is_added_up_on_the_way() -> None:
    made = Model()
    played = check(made, lambda x: made.loss(x) + l2(made), (torch.randn(4, WIDTH),), 4)
    assert [_scalars(played.plan.graph, part.sent) for part in played.plan.parts[:-1]] == [1, 1, 1]
    assert not played.plan.travels


def test_a_parameter_of_a_layer_is_not_written_yet() -> None:
    made = Model()

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            made.blocks[0].linear.weight.mul_(0.9)
        return made.loss(x)

    cut = cut_of(made, 2)
    with cut(), pytest.raises(WrongUseError, match="live on other stages"):
        cut.find_plan(0, step, (torch.randn(4, WIDTH),), seed)


def test_a_layer_may_be_given_the_weight_of_another_one() -> None:
    class Reader(Block):
        def forward(self, x: Tensor, weight: Tensor | None = None, scale: float = 1.0) -> Tensor:
            return super().forward(x) + (0 if weight is None else x @ weight)

    made = Model()
    made.blocks[-1] = Reader()

    def step(x: Tensor) -> Tensor:
        x = made.embed(x)
        for layer in made.blocks[:-1]:
            x = layer(x)
        return made.blocks[-1](x, made.blocks[0].linear.weight).pow(2).mean()

    check(made, step, (torch.randn(4, WIDTH),), 2)


def test_a_penalty_goes_with_parameters_outside_that_have_a_place() -> None:
    made = Model()
    holders = {name: {0} for name in ("embed.weight", "embed.bias")} | {
        name: {1} for name in ("head.weight", "head.bias")
    }
    step = lambda x: made.loss(x) + l2(made)  # noqa: E731
    check(made, step, (torch.randn(4, WIDTH),), 2, cut_of(made, 2, holders=holders))

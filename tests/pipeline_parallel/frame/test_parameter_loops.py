"""Loops over all parameters in a step: penalties and moving averages, of which each stage does its part."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.pipeline_parallel.frame.plan import skipped_writes
from tests.pipeline_parallel.frame.stages import check, cut_of, drawing, seed
from tests.zoo.basic import WIDTH
from tests.zoo.frame import Block


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


class Pair(nn.Module):
    """A student, and a teacher that is its moving average."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.student = nn.ModuleList(Block() for _ in range(count))
        self.teacher = nn.ModuleList(Block() for _ in range(count)).requires_grad_(False)

    @property
    def units(self) -> list[tuple[str, nn.Module]]:
        rows = zip(self.student.named_children(), self.teacher.children(), strict=True)
        return [each for (name, one), two in rows for each in ((f"student.{name}", one), (f"teacher.{name}", two))]

    def pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(self.student.parameters(), self.teacher.parameters(), strict=True)

    def loss(self, x: Tensor) -> Tensor:
        y = x.flip(1)
        for student, teacher in zip(self.student, self.teacher, strict=True):
            x, y = student(x), teacher(y)
        return (x - y.detach()).pow(2).mean()


class PairWithScales(Pair):
    """A pair whose teacher also has a parameter outside the layers, which code before and after the layers uses."""

    def __init__(self, count: int = 4) -> None:
        super().__init__(count)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.average = nn.Parameter(torch.rand(WIDTH), requires_grad=False)

    def pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        return [*super().pairs(), (self.scale, self.average)]

    def loss(self, x: Tensor) -> Tensor:
        y = x.flip(1) * self.average
        x = x * self.scale
        for student, teacher in zip(self.student, self.teacher, strict=True):
            x, y = student(x), teacher(y)
        return (x * self.scale - (y * self.average).detach()).pow(2).mean()


def chained(model: Pair) -> None:
    with torch.no_grad():
        for now, average in model.pairs():
            average.mul_(0.9).add_(now, alpha=0.1)


def assigned(model: Pair) -> None:
    for now, average in model.pairs():
        average.data = average.data * 0.9 + now.data * 0.1


def copied(model: Pair) -> None:
    for now, average in model.pairs():
        average.data.copy_(torch.lerp(average.data, now.detach(), 0.1))


def interpolated(model: Pair) -> None:
    for now, average in model.pairs():
        average.data.lerp_(now.data, 0.1)


UPDATES = [chained, assigned, copied, interpolated]


def _steps(
    model: Pair, step: Any, batches: list[list[Tensor]], *, num_ranks: int = 2, stage_by_stage: bool = False
) -> list[Tensor]:
    """Return the losses of the microbatches of each step; students move between steps.

    Args:
        model: The model, in two stages.
        step: The step.
        batches: The microbatches of each step.
        num_ranks: 1 if one rank has both stages.
        stage_by_stage: If True, a stage runs all microbatches before the next stage begins.
    """
    cut, losses = cut_of(model, 2, model.units, num_ranks=num_ranks), []
    for microbatches in batches:
        with cut():
            plans = [cut.find_plan(0, step, (x,), seed) for x in microbatches]
            skipped, values = skipped_writes(plans), [None] * len(plans)
            actions = [(stage, at) for at in range(len(plans)) for stage in range(2)]
            for stage, at in sorted(actions) if stage_by_stage else actions:
                arguments = plans[at], stage, step, (microbatches[at],), values[at]
                values[at] = cut.run(*arguments, seed=seed, random=drawing, skipped=skipped[at])
            losses += [value.detach() for value in values]
        with torch.no_grad():
            for parameter in model.student.parameters():
                parameter.mul_(0.95)
    return losses


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(
    ("kind", "num_ranks", "stage_by_stage"),
    # Two ranks would have separate copies of parameters outside the layers, but this process has only one.
    [(Pair, 2, False), (PairWithScales, 1, False), (PairWithScales, 1, True)],
)
def test_an_average_moves_once_a_step(
    kind: type[Pair], num_ranks: int, stage_by_stage: bool, update: Any, is_first: bool, num_microbatches: int
) -> None:
    model = kind()
    other = copy.deepcopy(model)

    def step_of(model: Pair) -> Any:
        def step(x: Tensor) -> Tensor:
            if is_first:
                update(model)
            loss = model.loss(x)
            if not is_first:
                update(model)
            return loss

        return step

    batches = [list(torch.randn(2 * num_microbatches, WIDTH).chunk(num_microbatches)) for _ in range(3)]
    losses = _steps(model, step_of(model), batches, num_ranks=num_ranks, stage_by_stage=stage_by_stage)
    expected = []
    for microbatches in batches:
        if is_first:
            update(other)
        expected += [other.loss(x).detach() for x in microbatches]
        if not is_first:
            update(other)
        with torch.no_grad():
            for parameter in other.student.parameters():
                parameter.mul_(0.95)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-12, atol=1e-12)


def test_an_average_that_is_used_before_and_after_needs_one_microbatch() -> None:
    model = Pair()

    def step(x: Tensor) -> Tensor:
        before = sum(average.pow(2).sum() for average in model.teacher.parameters())
        chained(model)
        return model.loss(x) + before

    x = torch.randn(2, WIDTH)
    assert len(_steps(model, step, [[x]])) == 1
    with pytest.raises(WrongUseError, match=r"`mul_` at .* updates the parameter 'teacher.*num_microbatches=1"):
        _steps(model, step, [[x, x]])


def test_what_depends_on_the_batch_is_written_for_each_microbatch() -> None:
    model = Pair()

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            model.teacher[0].linear.bias.add_(x.mean(0))
        return model.loss(x)

    before = model.teacher[0].linear.bias.clone()
    x = torch.randn(2, WIDTH)
    _steps(model, step, [[x, x]])
    torch.testing.assert_close(model.teacher[0].linear.bias, before + 2 * x.mean(0))


def test_a_teacher_on_another_stage_is_refused() -> None:
    model = Pair()

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            model.teacher[0].linear.bias.lerp_(model.student[-1].linear.bias, 0.1)
        return model.loss(x)

    with pytest.raises(
        WrongUseError, match=r"`lerp_` at .* updates the parameter 'teacher.0.linear.bias'.*pipeline_stage"
    ):
        _steps(model, step, [[torch.randn(2, WIDTH)]])

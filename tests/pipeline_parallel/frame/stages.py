"""Plays the stages of a cut model one after the other in one process, and compares with the whole model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.pipeline_parallel.frame.frame import FrameCut
from lightning_hybrid.pipeline_parallel.frame.plan import FramePlan
from lightning_hybrid.pipeline_parallel.frame.units import find_units
from lightning_hybrid.pipeline_parallel.partition import uniform
from lightning_hybrid.pipeline_parallel.schedules import Placement

Step = Callable[..., Any]


def seed(number: int) -> None:
    torch.manual_seed(1000 + number)


@contextmanager
def drawing(number: int) -> Any:
    """Around a unit that draws."""
    before = torch.get_rng_state()
    torch.manual_seed(5000 + number)
    yield
    torch.set_rng_state(before)


@dataclass
class Played:
    """What came out.

    Attributes:
        value: What the step returned on the last stage.
        gradients: By name of parameter, summed over the stages.
        plan: What the stages did.
    """

    value: Any
    gradients: dict[str, Tensor]
    plan: FramePlan

    @property
    def sends(self) -> list[int]:
        """The number of tensors between stages."""
        return [len(part.sent) for part in self.plan.parts[:-1]]


def cut_of(
    module: nn.Module,
    num_stages: int,
    units: Sequence[tuple[str, nn.Module]] | None = None,
    around_discovery: Callable[[], AbstractContextManager[object]] = nullcontext,
    holders: Mapping[str, Collection[int]] | None = None,
    leaf_modules: Sequence[tuple[str, nn.Module]] = (),
    agrees: Callable[[int], bool] = lambda number: True,
    num_ranks: int | None = None,
) -> FrameCut:
    """A cut; with all stages on ranks of their own, if nothing else is said."""
    units = units or find_units(module, num_stages)
    stages = uniform(len(units), num_stages)
    device = torch.device("cpu")
    return FrameCut(
        module,
        units,
        stages,
        Placement.in_turns(num_ranks or num_stages, num_stages // (num_ranks or num_stages)),
        device,
        holders=holders or {},
        remembers=True,
        around_discovery=around_discovery,
        leaf_modules=leaf_modules,
        agrees=agrees,
    )


@contextmanager
def without_values(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Inside, a stage does not have these parameters: whoever uses them gets NaN."""
    parameters = [module.get_parameter(name) for name in names]
    values = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = torch.full_like(parameter, torch.nan)
    yield
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value


def play(
    cut: FrameCut, module: nn.Module, step: Step, arguments: Sequence[Any], num_stages: int, key: Hashable = 0
) -> Played:
    """Run all stages forward and backward; what goes between them is detached, as if it came from elsewhere."""
    module.zero_grad(set_to_none=True)
    boundaries: list[tuple[list[Tensor], list[Tensor]]] = []
    value, inputs = None, None
    with cut():
        plan = cut.find_plan(key, step, arguments, seed)
        for stage in range(num_stages):
            torch.manual_seed(0)
            with without_values(module, [name for name, held in cut.holders.items() if stage not in held]):
                value = cut.run(plan, stage, step, arguments, inputs, seed=seed, random=drawing)
            if stage < num_stages - 1:
                received = [each.detach().requires_grad_(each.requires_grad) for each in value]
                boundaries.append((value, received))
                inputs = [each.clone() if each.requires_grad else each for each in received]
        loss = value["loss"] if isinstance(value, dict) else value
        loss.backward()
        for sent, received in reversed(boundaries):
            pairs = [(a, b.grad) for a, b in zip(sent, received, strict=True) if b.grad is not None]
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return Played(value, gradients, plan)


def check(
    module: nn.Module, step: Step, arguments: Sequence[Any], num_stages: int, cut: FrameCut | None = None
) -> Played:
    """Play the stages, and compare with the whole model: loss and every gradient, in float64."""
    module.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    expected = step(*arguments)
    loss = expected["loss"] if isinstance(expected, dict) else expected
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    played = play(cut or cut_of(module, num_stages), module, step, arguments, num_stages)
    torch.testing.assert_close(played.value, expected, rtol=1e-12, atol=1e-12)
    for name in gradients.keys() | played.gradients.keys():
        zero = torch.zeros_like(module.get_parameter(name))
        got, wanted = played.gradients.get(name, zero), gradients.get(name, zero)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    return played


def one_process(model: nn.Module, step: Callable[..., Any], steps: Sequence[Sequence[Any]]) -> list[Tensor]:
    """The losses of each microbatch of each step, whose gradients are added up."""
    losses = []
    for microbatches in steps:
        for microbatch in microbatches:
            losses.append(step(model, microbatch))
            losses[-1].backward()
    return losses


def chunks(
    model: nn.Module,
    step: Callable[..., Any],
    steps: Sequence[Sequence[Any]],
    num_stages: int = 2,
    cut: FrameCut | None = None,
) -> list[Tensor]:
    """All stages on one rank, one after the other, each with all microbatches."""
    cut = cut or cut_of(model, num_stages, num_ranks=1)
    losses = []
    for microbatches in steps:
        with cut():
            plans = [cut.find_plan(0, lambda x: step(model, x), (each,), seed) for each in microbatches]
            inputs: list[Any] = [None] * len(microbatches)
            sent: list[list[Any]] = []
            for stage in range(num_stages):
                outputs = [
                    cut.run(plan, stage, lambda x: step(model, x), (each,), given, seed=seed, random=drawing)
                    for plan, each, given in zip(plans, microbatches, inputs, strict=True)
                ]
                sent.append([outputs, inputs])
                if stage < num_stages - 1:
                    inputs = [[t.detach().requires_grad_(t.requires_grad) for t in output] for output in outputs]
            losses += outputs
            torch.autograd.backward(outputs)
            for (outputs, _), (_, received) in reversed(list(itertools.pairwise(sent))):
                for values, got in zip(outputs, received, strict=True):
                    pairs = [(a, b.grad) for a, b in zip(values, got, strict=True) if b.grad is not None]
                    torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
    return losses

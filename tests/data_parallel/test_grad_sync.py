from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.axes import Sizes
from lightning_hybrid.data_parallel.grad_sync import GradientSync
from lightning_hybrid.data_parallel.parameter_map import ParameterMap
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.pipeline_parallel.placeholders import PlaceholderTensor, replace_with_placeholders
from lightning_hybrid.pipeline_parallel.schedules import Placement
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from tests.pool import Pools


class Model(nn.Module):
    """Four layers, ties between stages of one rank and of two, and a head outside the body."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(2, 2, bias=False) for _ in range(5)]
        layers[4].weight = layers[1].weight
        self.body = nn.Sequential(*layers[:4], layers[4], nn.BatchNorm1d(2))
        self.head = nn.Linear(2, 2)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("steps", torch.tensor(0))

    def stage_map(self, num_ranks: int, stages: tuple[range, ...]) -> StageMap:
        placement = Placement.in_turns(num_ranks, len(stages) // num_ranks)
        return StageMap("body", tuple(f"body.{key}" for key in self.body._modules), stages, placement)


# Two ranks, two chunks: rank 0 has the layers 0, 1 and 3, rank 1 the layers 2, 4 and 5.
STAGES = (range(2), range(2, 3), range(3, 4), range(4, 6))


def divided(data: int, pipeline: int) -> tuple[Model, Mesh, GradientSync]:
    torch.manual_seed(0)
    model = Model()
    mesh = Mesh(Sizes(data, 1, pipeline))
    stages = STAGES if pipeline == 2 else (range(6),)
    stage_map = model.stage_map(pipeline, stages)
    replace_with_placeholders(model, stage_map, mesh.pipeline_rank)
    return model, mesh, GradientSync(ParameterMap(model, stage_map, mesh))


def real(model: Model) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}


def gradient_of(name: str, rank: int, shape: torch.Size) -> Tensor:
    return torch.full(shape, 10.0**rank) + torch.arange(shape.numel()).view(shape) * len(name)


def reduce_gradients(data: int, pipeline: int, rounds: int) -> list[dict[str, Any]]:
    model, _, grad_sync = divided(data, pipeline)
    stages_of = model.stage_map(pipeline, STAGES if pipeline == 2 else (range(6),)).stages_of
    chunks = range(dist.get_rank() * 2 // (2 * data) if pipeline == 2 else 0, 4 if pipeline == 2 else 1, pipeline)
    found = []
    for _ in range(rounds):
        model.zero_grad()
        waiting = {name for name in real(model) if not name.startswith("unused")}
        for stage in reversed(chunks):
            grad_sync.backward_begins(stage, is_last=True)
            # Each parameter gets its gradient in the first backward of those of its chunks.
            for name in [name for name in waiting if stage == min(chunks) or stage in stages_of(name)]:
                waiting.remove(name)
                parameter = real(model)[name]
                (parameter * gradient_of(name, dist.get_rank(), parameter.shape)).sum().backward()
            grad_sync.backward_ends(stage, is_last=True)
        grad_sync.finish()
        found.append({name: copy.deepcopy(parameter.grad) for name, parameter in real(model).items()})
    grad_sync.remove()
    return found


def test_gradients_are_averaged_over_replicas_and_summed_over_holders(ranks: Pools) -> None:
    # Pipeline outermost: the ranks 0 and 1 are the replicas of the first pipeline rank, 2 and 3 of the second.
    found = ranks(4).run(reduce_gradients, 2, 2, 2)
    shapes = {name: parameter.shape for name, parameter in Model().named_parameters()}
    for step in range(2):
        for name, shape in shapes.items():
            everywhere = name.startswith(("head", "body.1"))  # outside the body; tied to the last layer
            for rank in range(4):
                holders = [0, 1, 2, 3] if everywhere else [0, 1] if rank < 2 else [2, 3]
                gradients = found[rank][step]
                if name.startswith("unused"):
                    assert gradients[name] is None
                elif name in gradients:
                    expected = sum(gradient_of(name, holder, shape) for holder in holders) / 2
                    torch.testing.assert_close(gradients[name], expected)
    held = [{name.rsplit(".", 1)[0] for name in found[rank][0]} for rank in range(4)]
    outside = {"head", "unused"}
    assert held[0] == held[1] == {"body.0", "body.1", "body.3"} | outside
    assert held[2] == held[3] == {"body.2", "body.1", "body.5"} | outside


def test_gradients_of_replicas_without_a_pipeline(ranks: Pools) -> None:
    for gradients in ranks(2).run(reduce_gradients, 2, 1, 1):
        for name, parameter in Model().named_parameters():
            if not name.startswith("unused"):
                expected = (gradient_of(name, 0, parameter.shape) + gradient_of(name, 1, parameter.shape)) / 2
                torch.testing.assert_close(gradients[0][name], expected)


def counted() -> list[str]:
    model, _, grad_sync = divided(1, 2)
    return [name for name, parameter in model.named_parameters() if grad_sync.counts_in_norm(parameter)]


def test_every_parameter_is_counted_by_one_holder(ranks: Pools) -> None:
    first, second = ranks(2).run(counted)
    assert sorted(first + second) == sorted(name for name, _ in Model().named_parameters())
    assert {name.rsplit(".", 1)[0] for name in second} == {"body.2", "body.5"}


def equalized(data: int, pipeline: int) -> dict[str, list[float]]:
    model, _, grad_sync = divided(data, pipeline)
    with torch.no_grad():
        for tensor in (*real(model).values(), *model.buffers()):
            if not tensor.is_meta:
                tensor.fill_(dist.get_rank() + 1)
    grad_sync.broadcast_parameters()
    state = {name: tensor.flatten()[0].item() for name, tensor in model.state_dict().items() if not tensor.is_meta}
    with torch.no_grad():
        for buffer in model.buffers():
            if not buffer.is_meta:
                buffer.fill_(10 * (dist.get_rank() + 1))
    grad_sync.broadcast_buffers()
    again = {f"{name} later": x.flatten()[0].item() for name, x in model.named_buffers() if not x.is_meta}
    return {**state, **again}  # type: ignore[dict-item]


def test_replicas_and_holders_start_equal(ranks: Pools) -> None:
    found = ranks(4).run(equalized, 2, 2)
    for rank, state in enumerate(found):
        for name, value in state.items():
            shared = name.startswith(("head", "unused", "steps", "body.1.", "body.4."))
            first = 0 if shared or rank < 2 else 2
            own = 10 * (rank + 1) if name.startswith(("steps", "body.5.num")) else 10 * (rank // 2 * 2 + 1)
            assert value == (own if name.endswith("later") else first + 1), (rank, name)
    assert found[0] == {**found[1], "steps later": 10}


class Rotary(nn.Module):
    """A block with a table that all blocks share."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", table, persistent=False)


def shared_table(pipeline: int) -> int:
    table = torch.rand(3)
    model = nn.ModuleDict({"body": nn.Sequential(*[Rotary(table) for _ in range(pipeline)])})
    body = model["body"]
    mesh = Mesh(Sizes(1, 1, pipeline))
    stages = tuple(range(i, i + 1) for i in range(pipeline))
    stage_map = StageMap("body", tuple(f"body.{key}" for key in body._modules), stages, Placement.in_turns(pipeline))
    replace_with_placeholders(model, stage_map, mesh.pipeline_rank)
    # Moving a module to a device unties its buffers, but not those that are placeholders.
    for block in body:
        if not block.table.is_meta:
            block.table = block.table.clone()
    grad_sync = GradientSync(ParameterMap(model, stage_map, mesh))
    grad_sync.broadcast_parameters()
    return len(grad_sync._buffers)


def test_tables_that_stages_share_make_the_same_groups_on_every_rank(ranks: Pools) -> None:
    assert ranks(3).run(shared_table, 3, timeout=20.0) == [3, 3, 3]


def dispatched() -> int:
    """How often finishing a step goes through torch's dispatch to placeholders."""
    _, _, grad_sync = divided(1, 2)
    dispatch = PlaceholderTensor.__torch_function__
    calls = []

    def counted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args[0])
        return dispatch(*args, **kwargs)

    with mock.patch.object(PlaceholderTensor, "__torch_function__", classmethod(counted)):
        grad_sync.finish()
    return len(calls)


def test_a_step_costs_nothing_for_placeholders(ranks: Pools) -> None:
    assert ranks(2).run(dispatched) == [0, 0]


@pytest.mark.parametrize("freeze", ["body.0", "head"])
def test_frozen_parameters_get_no_gradient(ranks: Pools, freeze: str) -> None:
    found = ranks(2).run(reduce_frozen, freeze)
    for gradients in found:
        for name, gradient in gradients.items():
            assert (gradient is None) == name.startswith((freeze, "unused"))


def reduce_frozen(freeze: str) -> dict[str, Any]:
    model, _, grad_sync = divided(2, 1)
    model.get_submodule(freeze).requires_grad_(False)
    grad_sync.backward_begins(0, is_last=True)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.startswith("unused"):
            parameter.sum().backward()
    grad_sync.backward_ends(0, is_last=True)
    grad_sync.finish()
    return {name: parameter.grad for name, parameter in model.named_parameters()}

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from lightning_hybrid.pipeline_parallel.schedules import Placement
from lightning_hybrid.pipeline_parallel.stage_map import StageMap, locate

# Five layers on four stages and two ranks: rank 0 has the layers 0, 1 and 3, rank 1 the layers 2 and 4.
STAGES = (range(2), range(2, 3), range(3, 4), range(4, 5))


def place(body: nn.Sequential, name: str = "body", num_ranks: int = 2) -> StageMap:
    return StageMap(
        name,
        tuple(f"{name}.{key}".removeprefix(".") for key in body._modules),
        STAGES,
        Placement.in_turns(num_ranks, len(STAGES) // num_ranks),
    )


def linears(count: int = 5) -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "stages", "ranks"),
    [
        ("body.0.weight", {0}, {0}),
        ("body.1.block.0.weight", {0}, {0}),
        ("body.2.weight", {1}, {1}),
        ("body.3", {2}, {0}),
        ("body.4.bias", {3}, {1}),
        ("head.weight", {0, 3}, {0, 1}),  # outside: where the user's step runs
        ("body.table", {0, 3}, {0, 1}),  # a tensor of the body itself
        ("body", {0, 3}, {0, 1}),
        ("bodyguard.0.weight", {0, 3}, {0, 1}),
        ("other.body.0.weight", {0, 3}, {0, 1}),
    ],
)
def test_where_a_name_lives(name: str, stages: set[int], ranks: set[int]) -> None:
    stage_map = place(nn.Sequential(*linears()))
    assert stage_map.stages_of(name) == stages
    assert stage_map.ranks_of(name) == ranks


@pytest.mark.parametrize("name", ["", "model.net.body"])
def test_the_body_may_be_anywhere(name: str) -> None:
    stage_map = place(nn.Sequential(*linears()), name)
    assert stage_map.stages_of(f"{name}.3.weight".removeprefix(".")) == {2}


def test_layers_may_have_names() -> None:
    body = nn.Sequential(OrderedDict(zip(["embed", "block_1", "2", "0", "head"], linears(), strict=True)))
    stage_map = place(body)
    assert [sorted(stage_map.stages_of(f"body.{name}.weight")) for name in body._modules] == [[0], [0], [1], [2], [3]]


def test_a_slice_of_a_sequential_keeps_old_numbers() -> None:
    body = nn.Sequential(*linears(9))[3:8]
    assert list(body._modules) == ["3", "4", "5", "6", "7"]
    stage_map = place(body)
    assert [sorted(stage_map.stages_of(f"body.{name}.weight")) for name in body._modules] == [[0], [0], [1], [2], [3]]


def test_around_units_everything_is_on_every_stage() -> None:
    stage_map = StageMap(
        "a, b", ("a.0", "b.0", "b.1"), (range(1), range(1, 2), range(2, 3)), Placement.in_turns(3), is_chain=False
    )
    assert stage_map.stages_of("b.0.weight") == {1}
    assert stage_map.stages_of("b.weight") == stage_map.stages_of("head.weight") == {0, 1, 2}


def test_undivided() -> None:
    stage_map = StageMap.uncut()
    assert stage_map.stages_of("anything.0.weight") == {0}
    assert stage_map.ranks_of("anything.0.weight") == {0}


class Tied(nn.Module):
    """Ties of every kind: of two layers on two ranks, of two layers on one rank, of a layer with something outside."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(2, 2, bias=False) for _ in range(5)]
        layers[4].weight = layers[0].weight  # ranks 1 and 0
        layers[3].weight = layers[1].weight  # both on rank 0
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = layers[2].weight


def test_a_tied_tensor_lives_wherever_one_of_its_names_does() -> None:
    module = Tied()
    found = locate(module.named_parameters(remove_duplicate=False), place(module.body))
    assert [place.tensor for place in found] == [module.body[0].weight, module.body[1].weight, module.body[2].weight]
    assert [sorted(place.stages) for place in found] == [[0, 3], [0, 2], [0, 1, 3]]
    assert [place.ranks for place in found] == [(0, 1), (0,), (0, 1)]


def test_a_layer_that_is_used_twice_lives_on_both_stages() -> None:
    shared = nn.Linear(2, 2)
    body = nn.Sequential(shared, *linears(3), shared)
    module = nn.ModuleDict({"body": body})
    found = locate(module.named_parameters(remove_duplicate=False), place(body))
    assert found[0].tensor is shared.weight
    assert found[0].ranks == (0, 1)
    assert len(found) == 2 * 4

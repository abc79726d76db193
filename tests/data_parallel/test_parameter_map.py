from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.axes import Sizes
from lightning_hybrid.data_parallel.parameter_map import ParameterMap
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder, replace_with_placeholders
from lightning_hybrid.pipeline_parallel.schedules import Placement
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from tests.pool import Pools


class Model(nn.Module):
    """Two layers, a norm outside of them, an output layer with the weight of the first one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
        self.norm = nn.LayerNorm(2)
        self.output = nn.Linear(2, 2, bias=False)
        self.output.weight = self.layers[0].weight
        self.register_buffer("steps", torch.zeros(()))


def make_map(pipeline: int) -> ParameterMap:
    model = Model()
    layers = ("layers.0", "layers.1")
    stages = (range(1), range(1, 2)) if pipeline == 2 else (range(2),)
    stage_map = StageMap("layers", layers, stages, Placement.in_turns(pipeline), is_chain=False, places_outside=True)
    mesh = Mesh(Sizes(1, 1, pipeline))
    replace_with_placeholders(model, stage_map, mesh.pipeline_rank)
    return ParameterMap(model, stage_map, mesh)


class Notes:
    """A follower that notes what it is told."""

    def __init__(self, name: str, parameters: ParameterMap, notes: list[Any]) -> None:
        self._name, self._map, self._notes = name, parameters, notes

    def release_parameters(self) -> None:
        self._notes.append((self._name, "releases", sorted(self._map.stage_map.outside)))

    def take_parameters(self, placeholders: Mapping[int, Tensor]) -> None:
        self._notes.append((self._name, "takes", len(placeholders), sorted(self._map.stage_map.outside)))


def owners() -> dict[str, Any]:
    parameters = make_map(2)
    state = parameters.module.state_dict()
    local = [place.stages for place in parameters.parameters() if parameters.is_local(place)]
    owned = sum(parameters.is_owner(place) for place in parameters.parameters() if parameters.is_local(place))
    return {
        "owners": parameters.owners(state),
        "stored": parameters.stored_names(state),
        "part": sorted(parameters.owned_part(state)),
        "local": local,
        "owned": owned,
    }


def test_each_tensor_has_one_owner(ranks: Pools) -> None:
    first, second = ranks(2).run(owners)
    # The tied weight belongs to the first rank that has it, the buffer to the last one, where the whole step runs.
    expected = {"layers.0.weight": 0, "layers.1.weight": 1, "norm.weight": 0, "norm.bias": 0, "output.weight": 0}
    assert first["owners"] == second["owners"] == expected | {"steps": 1}
    assert first["stored"]["output.weight"] == "layers.0.weight"
    assert first["part"] == ["layers.0.weight", "norm.bias", "norm.weight"]
    assert second["part"] == ["layers.1.weight", "steps"]
    both = frozenset((0, 1))
    assert first["local"] == [both, both, both]  # the tied weight and the norm
    assert second["local"] == [both, frozenset((1,)), both, both]
    assert (first["owned"], second["owned"]) == (3, 1)


def moved() -> tuple[list[Any], dict[str, bool], dict[str, int]]:
    parameters, notes = make_map(2), list[Any]()
    first, second = Notes("first", parameters, notes), Notes("second", parameters, notes)
    with parameters.followed_by(first, second):
        parameters.move({"norm.weight": {1}, "norm.bias": {1}})
    parameters.move({})  # nobody follows any more
    gone = {name: is_placeholder(parameter) for name, parameter in parameters.module.named_parameters()}
    return notes, gone, parameters.parameter_owners()


def test_followers_let_go_before_a_move_and_take_after_it(ranks: Pools) -> None:
    for rank, (notes, gone, owned_by) in enumerate(ranks(2).run(moved)):
        names, left = ["norm.bias", "norm.weight"], 2 if rank == 0 else 0
        assert notes == [
            ("first", "releases", []),
            ("second", "releases", []),
            ("first", "takes", left, names),
            ("second", "takes", left, names),
        ]
        assert gone["norm.weight"] == gone["norm.bias"] == (rank == 0)
        assert owned_by["norm.weight"] == 1


def test_one_rank_owns_everything(ranks: Pools) -> None:
    for found in ranks(1).run(all_owned):
        assert found


def all_owned() -> bool:
    parameters = make_map(1)
    return all(parameters.is_local(each) and parameters.is_owner(each) for each in parameters.parameters())

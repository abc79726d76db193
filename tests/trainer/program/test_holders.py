"""The stages that have parameters around the layers, as a traced step needs to know them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import nn

from lightning_hybrid.pipeline_parallel.schedules import Placement
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.trainer.program.frame_program import find_holders


class Tied(nn.Module):
    """An embedding that is the first unit, and a head around the units with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6, bias=False)
        self.embed = nn.Embedding(6, 4)
        self.embed.weight = self.head.weight
        self.norm = nn.LayerNorm(4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])


UNITS = ("embed", "layers.0", "layers.1", "layers.2")
STAGES = tuple(range(at, at + 1) for at in range(4))


@pytest.mark.parametrize(
    ("outside", "is_chain", "expected"),
    [
        ({}, False, {}),
        ({"head.weight": [3]}, False, {"head.weight": {0, 3}}),
        ({"norm.weight": [2]}, False, {"norm.weight": {2}}),
        ({"norm.weight": [0, 1, 2, 3]}, False, {}),
        ({}, True, {"head.weight": {0, 3}, "norm.weight": {0, 3}, "norm.bias": {0, 3}}),
        ({"norm.weight": [3]}, True, {"head.weight": {0, 3}, "norm.weight": {3}, "norm.bias": {0, 3}}),
    ],
)
def test_a_parameter_is_on_the_stages_of_all_its_names(
    outside: dict[str, Sequence[int]], is_chain: bool, expected: dict[str, set[int]]
) -> None:
    placed = {name: frozenset(stages) for name, stages in outside.items()}
    stage_map = StageMap("layers", UNITS, STAGES, Placement.in_turns(4), is_chain=is_chain, outside=placed)
    assert find_holders(Tied(), stage_map) == expected

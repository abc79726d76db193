"""Which stage holds which tensor of a module, and which tensors live on several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from lightning_hybrid.pipeline_parallel.schedules import Placement


@dataclass(frozen=True)
class StageMap:
    """Which stage holds which tensor of the module.

    Layers of the body live on their stage. Everything outside the body lives where the user's step runs: on the first
    and the last stage, or, where the body is no chain, on all of them; until it is known which of them use it.

    Attributes:
        body: The dotted name of the body, ``""`` for the module itself; ``None`` if the module is not cut.
        layers: The dotted names of the body's layers, in order.
        stages: The layers of each stage, by position.
        placement: The rank of each stage.
        is_chain: Whether the user's step only runs on the first and the last stage.
        places_outside: True if the first training batch decides which stages hold the parameters outside the body.
        outside: The stages of the parameters outside the body that the first batch has moved, by their dotted names.
    """

    body: str | None
    layers: tuple[str, ...]
    stages: tuple[range, ...]
    placement: Placement
    is_chain: bool = True
    places_outside: bool = False
    outside: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def uncut(cls) -> StageMap:
        """Return the map of a module that is one stage."""
        return cls(None, (), (range(0),), Placement.in_turns(1))

    @cached_property
    def _stage_of_layer(self) -> dict[str, int]:
        return {self.layers[position]: stage for stage, positions in enumerate(self.stages) for position in positions}

    def stages_of(self, name: str) -> frozenset[int]:
        """The stages that hold the tensor or module of this dotted name."""
        if self.body is not None:
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                stage = self._stage_of_layer.get(".".join(parts[:length]))
                if stage is not None:
                    return frozenset((stage,))
        if name in self.outside:
            return self.outside[name]
        return frozenset((0, len(self.stages) - 1)) if self.is_chain else frozenset(range(len(self.stages)))

    def is_outside(self, name: str) -> bool:
        """Whether the tensor or module of this dotted name is no part of a layer of the body."""
        parts = name.split(".")
        return not any(".".join(parts[:length]) in self._stage_of_layer for length in range(1, len(parts) + 1))

    def ranks_of(self, name: str) -> frozenset[int]:
        """The pipeline ranks that hold the tensor or module of this dotted name."""
        return frozenset(self.placement.ranks[stage] for stage in self.stages_of(name))


@dataclass(frozen=True)
class TensorStages:
    """Where one tensor lives, tied names and all.

    Attributes:
        tensor: The tensor, or its placeholder.
        stages: The stages that use it under any of its names.
        ranks: The pipeline ranks that hold it, ascending.
    """

    tensor: Tensor
    stages: frozenset[int]
    ranks: tuple[int, ...]


def locate(named: Iterable[tuple[str, Tensor]], stage_map: StageMap) -> list[TensorStages]:
    """Find out where tensors live.

    Args:
        named: All names with their tensors, as `named_parameters(remove_duplicate=False)` gives them: a tensor with
            several names lives wherever one of them does.
        stage_map: Which stage holds what.

    Returns:
        One location for each tensor, in the order of the first names; the same on every rank.
    """
    stages_of: dict[int, tuple[Tensor, set[int]]] = {}
    for name, tensor in named:
        _, stages = stages_of.setdefault(id(tensor), (tensor, set()))
        stages |= stage_map.stages_of(name)
    ranks = stage_map.placement.ranks
    return [
        TensorStages(tensor, frozenset(stages), tuple(sorted({ranks[stage] for stage in stages})))
        for tensor, stages in stages_of.values()
    ]

"""Map from the tensors of a module to the stages that hold them.

`strategy.layout` makes a :class:`StageMap` from the body and the partition, before the module is split; every rank has
an equal map. Placeholders, gradient synchronization, checkpoints, summaries and estimates of memory read it. Tensors
are located by name, because names are equal on all ranks and in checkpoints. :func:`locate` resolves ties: a tensor
with several names is on the stages of all its names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from lightning_hybrid.pipeline_parallel.schedules import Placement


@dataclass(frozen=True)
class StageMap:
    """Stages of the tensors and submodules of a module.

    Each layer of the body is on one stage. A tensor outside the body is first on all stages that run the user's step:
    the first and the last stage for a chain (an `nn.Sequential` that the step calls as a whole), otherwise all stages.
    If `places_outside` is True, the first training batch shows the stages that use each parameter outside the body, and
    it moves there (`ParameterMap.move`). Buffers, unused parameters and small parameters outside other bodies than
    chains do not move.

    Attributes:
        body: The dotted name of the body, ``""`` for the module itself; ``None`` if the module is not split.
        layers: The dotted names of the body's layers, in order.
        stages: For each stage, the range of its layers in `layers`.
        placement: The rank of each stage.
        is_chain: True if the body is a chain, so that parameters outside it are at most on the first and the last
            stage. It stays True if the chain is opened during the run, which lets the step run on all stages.
        places_outside: True if the first training batch determines which stages hold the parameters outside the body.
        outside: The stages of the parameters outside the body that the first batch has moved, by dotted name. In
            estimates and summaries before the first batch, the parameters that it is expected to move.
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
        """Return the map of a module that is a single stage."""
        return cls(None, (), (range(0),), Placement.in_turns(1))

    @cached_property
    def _stage_of_layer(self) -> dict[str, int]:
        """The stage of each layer, by dotted name."""
        return {self.layers[position]: stage for stage, positions in enumerate(self.stages) for position in positions}

    def stages_of(self, name: str) -> frozenset[int]:
        """Return the stages that hold the tensor or submodule with this dotted name."""
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
        """Return whether the tensor or submodule with this dotted name is outside the layers of the body."""
        parts = name.split(".")
        return not any(".".join(parts[:length]) in self._stage_of_layer for length in range(1, len(parts) + 1))

    def ranks_of(self, name: str) -> frozenset[int]:
        """Return the pipeline ranks that hold the tensor or submodule with this dotted name."""
        return frozenset(self.placement.ranks[stage] for stage in self.stages_of(name))


@dataclass(frozen=True)
class TensorStages:
    """Stages and ranks of one tensor, which can have several (tied) names.

    Attributes:
        tensor: The tensor, or its placeholder.
        stages: The stages that use the tensor under any of its names.
        ranks: The pipeline ranks that hold the tensor, in ascending order.
    """

    tensor: Tensor
    stages: frozenset[int]
    ranks: tuple[int, ...]


def locate(named: Iterable[tuple[str, Tensor]], stage_map: StageMap) -> list[TensorStages]:
    """Find the stages and ranks of tensors.

    Args:
        named: All names with their tensors, such as `named_parameters(remove_duplicate=False)`. A tensor with several
            names is on the stages of all its names.
        stage_map: The stages of names.

    Returns:
        One entry for each tensor, in the order of the first names; the same on every rank.
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

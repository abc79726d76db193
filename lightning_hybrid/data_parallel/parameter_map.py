"""The places of a module's tensors on the ranks, determined once, and changed in one place.

`ModuleParallelizer` makes one map for a module. All code that needs the place of a tensor reads it here: gradient
synchronization, checkpoints, step programs. The module alone would not suffice: its placeholders show which tensors
this rank lacks, but not which ranks hold them.

A *place* is a :class:`~lightning_hybrid.pipeline_parallel.stage_map.TensorStages`: a tensor with the stages that use
it, and the pipeline ranks that hold it. A *placeholder* takes the place of a tensor that is on other stages. The
*layers* are the modules that are split into stages; parameters *outside* of them may be on several stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_hybrid.distributed.dtensor import is_first_copy, is_tensor_parallel
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.module_names import named_tensors
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder, replace_with_placeholders
from lightning_hybrid.pipeline_parallel.stage_map import StageMap, TensorStages, locate


class Follower(Protocol):
    """A part of a run that depends on the places of parameters."""

    def release_parameters(self) -> None:
        """Release all parameters, before some of them move to other stages."""

    def take_parameters(self, placeholders: Mapping[int, Tensor]) -> None:
        """Use the parameters in their new places.

        Args:
            placeholders: The placeholders of the parameters that have left this rank, by the ids of the parameters.
        """


class ParameterMap:
    """The stages, ranks and owner of each parameter and buffer of a module.

    In a run, the map changes at most once: before the first training batch runs, a trace of it shows which stages use a
    parameter outside the layers.

    ::

        module, stage map, mesh --> ParameterMap --> gradient sync, ZeRO, clipping      local, holders, is_owner
                                         |           checkpoints, weights, gathering    owners, stored names
                                         |           step program                       stage_map
                                         |
        first training batch --------> move(): every follower releases its parameters, placeholders replace them, and
                                       every follower takes the parameters that this rank has now

    Names are read from the module at each call, because users may replace parameters.

    Args:
        module: The user's module, with placeholders for the tensors of other stages.
        stage_map: The stages of its tensors.
        mesh: The mesh.

    Attributes:
        module: The module.
        mesh: The mesh.
        stage_map: The current stages of its tensors.
    """

    def __init__(self, module: nn.Module, stage_map: StageMap, mesh: Mesh) -> None:
        self.module, self.mesh = module, mesh
        self._followers: list[Follower] = []
        self.assign(stage_map)

    def assign(self, stage_map: StageMap) -> None:
        """Set the stages of all tensors. Once a run follows the map, only :meth:`move` may call this."""
        self.stage_map = stage_map
        # Each checkpoint asks for all names.
        self._ranks_of: Callable[[str], frozenset[int]] = cache(stage_map.ranks_of)

    # -- places of tensors ---------------------------------------------------------------------------------------------

    def parameters(self) -> list[TensorStages]:
        """Return the place of each parameter, in the same order on every rank."""
        return locate(self.module.named_parameters(remove_duplicate=False), self.stage_map)

    def buffers(self) -> list[TensorStages]:
        """Return the place of each buffer.

        A buffer with two names has two places: moving a module to a device unties buffers, but not placeholders.
        """
        named = self.module.named_buffers(remove_duplicate=False)
        return [place for each in named for place in locate([each], self.stage_map)]

    def is_local(self, place: TensorStages) -> bool:
        """Return True if this rank has the values of a tensor."""
        return self.mesh.pipeline_rank in place.ranks and not is_placeholder(place.tensor)

    def is_owner(self, place: TensorStages) -> bool:
        """Return True if this rank is the first rank of its replica with a parameter, or with the same shard of it."""
        parameter = place.tensor
        is_first = is_first_copy(parameter) if is_tensor_parallel(parameter) else self.mesh.tensor_rank == 0
        return place.ranks[0] == self.mesh.pipeline_rank and self.mesh.context_rank == 0 and is_first

    # -- names in checkpoints ------------------------------------------------------------------------------------------

    def first_names(self) -> dict[str, str]:
        """Return the name under which each tensor is stored. Tied parameters are stored under their first name."""
        return {name: name for name, _ in named_tensors(self.module)} | self._first_names_of_parameters()

    def _first_names_of_parameters(self) -> dict[str, str]:
        first: dict[int, str] = {}
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: first.setdefault(id(parameter), name) for name, parameter in named}

    def stored_names(self, state: Iterable[str]) -> dict[str, str]:
        """Return the name under which each entry of a state dict of the module is stored."""
        first = self._first_names_of_parameters()
        return {name: first.get(name, name) for name in state}

    def owners(self, names: Iterable[str]) -> dict[str, int]:
        """Return the pipeline rank whose value is saved, by name.

        For a parameter, this is the first rank that holds it under any of its names, because all holders have equal
        values. For a buffer, or another name, this is the last rank that holds it: for a buffer outside the layers, the
        last stage runs all of the user's step.
        """
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        first: dict[int, int] = {}
        for name, parameter in parameters.items():
            rank = min(self._ranks_of(name))
            first[id(parameter)] = min(rank, first.get(id(parameter), rank))
        return {
            name: first[id(parameters[name])] if name in parameters else max(self._ranks_of(name)) for name in names
        }

    def parameter_owners(self) -> dict[str, int]:
        """Return the pipeline rank whose value of each parameter is saved, by the parameter's first name."""
        return self.owners(name for name, _ in self.module.named_parameters())

    def owned_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a state dict of the module that this pipeline rank saves, one for tied tensors."""
        owners, stored = self.owners(state), self.stored_names(state)
        own = (name for name in state if owners[name] == self.mesh.pipeline_rank and stored[name] == name)
        return {name: state[name] for name in own}

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers, or their placeholders, by all their names."""
        return dict(named_tensors(self.module))

    # -- changes of places ---------------------------------------------------------------------------------------------

    @contextmanager
    def followed_by(self, *followers: Follower) -> Iterator[None]:
        """Notify these followers of each move, in this order, inside the context."""
        self._followers += followers
        try:
            yield
        finally:
            for follower in followers:
                self._followers.remove(follower)

    def move(self, outside: Mapping[str, Collection[int]]) -> None:
        """Move parameters outside the layers to the stages that use them. Every rank must call this.

        Args:
            outside: The stages of each parameter that moves, by all its names; the same on every rank.
        """
        for follower in self._followers:
            follower.release_parameters()
        moved = {name: frozenset(stages) for name, stages in outside.items()}
        self.assign(replace(self.stage_map, outside={**self.stage_map.outside, **moved}))
        placeholders = replace_with_placeholders(self.module, self.stage_map, self.mesh.pipeline_rank)
        for follower in self._followers:
            follower.take_parameters(placeholders)

"""Which rank's value of a tensor counts, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.module_names import named_tensors
from lightning_hybrid.pipeline_parallel.stage_map import StageMap


class Ownership:
    """Knows of every tensor of the undivided module which pipeline rank's value counts, and its first name.

    Holders of a parameter agree. Buffers outside the body are right on the last stage, where all of the user's step
    runs.

    Args:
        module: The user's module, with placeholders for what lives elsewhere.
        stage_map: Which stage holds what.
        mesh: The ranks.
    """

    def __init__(self, module: LightningModule, stage_map: StageMap, mesh: Mesh) -> None:
        self._module = module
        self._pipeline_rank = mesh.pipeline_rank
        self.place(stage_map)

    def place(self, stage_map: StageMap) -> None:
        """Tensors live where this map says from here on."""
        self._ranks_of: Callable[[str], frozenset[int]] = cache(stage_map.ranks_of)  # each checkpoint has all names

    def first_names(self) -> dict[str, str]:
        """The names of all tensors of the module, and what a parameter with more than one name is stored as."""
        return {name: name for name, _ in named_tensors(self._module)} | self._first_names_of_parameters()

    def _first_names_of_parameters(self) -> dict[str, str]:
        """The same of the parameters alone, which may be tied."""
        first: dict[int, str] = {}
        named = self._module.named_parameters(remove_duplicate=False)
        return {name: first.setdefault(id(parameter), name) for name, parameter in named}

    def stored_names(self, state: Iterable[str]) -> dict[str, str]:
        """What each name of a state dict of the module is stored as, where what is tied is stored once."""
        first = self._first_names_of_parameters()
        return {name: first.get(name, name) for name in state}

    def owners(self, names: Iterable[str]) -> dict[str, int]:
        """The pipeline rank whose value counts, by name: of a parameter the first that has it, of others the last."""
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        first: dict[int, int] = {}
        for name, parameter in parameters.items():
            rank = min(self._ranks_of(name))
            first[id(parameter)] = min(rank, first.get(id(parameter), rank))
        return {
            name: first[id(parameters[name])] if name in parameters else max(self._ranks_of(name)) for name in names
        }

    def parameter_owners(self) -> dict[str, int]:
        """The pipeline rank whose value counts, for each parameter by its first name."""
        return self.owners(name for name, _ in self._module.named_parameters())

    def part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What counts on this pipeline rank of a state dict of the module, or of a copy of it; tied tensors once."""
        owners, stored = self.owners(state), self.stored_names(state)
        own = (name for name in state if owners[name] == self._pipeline_rank and stored[name] == name)
        return {name: state[name] for name in own}

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers, or their placeholders, by all their names."""
        return dict(named_tensors(self._module))

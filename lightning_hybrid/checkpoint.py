"""An ordinary Lightning checkpoint, although every rank holds only a part: collected on rank 0, picked from on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.exchange import broadcast_object
from lightning_hybrid.materialize import is_stand_in
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.placement import Placement
from lightning_hybrid.shards import divided_like, full

__all__ = ["WholeCheckpoint"]


class WholeCheckpoint:
    """Knows the undivided model and its optimizers by name and number, whatever this rank holds of them.

    Args:
        module: The user's module, with stand-ins for what lives elsewhere.
        placement: Which stage holds what.
        mesh: The ranks.
    """

    def __init__(self, module: LightningModule, placement: Placement, mesh: Mesh) -> None:
        self._module = module
        self._placement = placement
        self._mesh = mesh
        self._groups: dict[int, list[list[nn.Parameter]]] = {}
        self._names: dict[int, list[list[str] | None]] = {}
        self._kept: dict[int, list[list[nn.Parameter]]] = {}

    @property
    def _is_undivided(self) -> bool:
        return self._mesh.pipeline_parallel_size == 1 and self._mesh.tensor_parallel_size == 1

    def module_state(self) -> dict[str, Any]:
        """The state dict of the undivided module on global rank 0, an empty one elsewhere."""
        state = self._module.state_dict()
        if self._is_undivided:
            return state
        parts = self._collect(self.part(state))
        if not parts:
            return {}
        owners, first = self._owners(state), self.first_names()
        return {name: parts[owners[name]][first.get(name, name)] for name in state}

    def part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What counts on this rank of a state dict of the module, or of a copy of it; tied tensors once."""
        owners, first = self._owners(state), self.first_names()
        return {
            name: full(value)
            for name, value in state.items()
            if owners[name] == self._mesh.pipeline_rank and first.get(name, name) == name
        }

    def first_names(self) -> dict[str, str]:
        """The names of all tensors of the module, and what a parameter with several names is stored as."""
        first: dict[int, str] = {}
        parameters = self._module.named_parameters(remove_duplicate=False)
        buffers = self._module.named_buffers(remove_duplicate=False)
        names = {name: first.setdefault(id(parameter), name) for name, parameter in parameters}
        return names | {name: name for name, _ in buffers}

    def from_rank_zero(self, value: Any) -> Any:
        """Global rank 0's value, on the ranks of its model group; ``None`` elsewhere."""
        if self._mesh.data_rank != 0:
            return None
        return broadcast_object(value, 0, self._mesh.control_group)

    def on_rank_zero(self, values: dict[Any, Any]) -> dict[Any, Any]:
        """The values of all ranks of its model group, on global rank 0; nothing elsewhere."""
        return {key: value for _, part in sorted(self._collect(values).items()) for key, value in part.items()}

    def load_module_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Take this rank's part of the undivided module's state dict.

        Raises:
            RuntimeError: If names or shapes do not fit; as torch says it, about the whole module, on every rank.
        """
        self._module.load_state_dict(state, strict=strict)

    def strip(self, optimizer: Optimizer) -> None:
        """Take the stand-ins out of an optimizer; groups stay, even if nothing is left in them.

        Args:
            optimizer: As the user made it, over all parameters.
        """
        self._groups[id(optimizer)] = [list(group["params"]) for group in optimizer.param_groups]
        self._names[id(optimizer)] = [group.get("param_names") for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            kept = [index for index, parameter in enumerate(group["params"]) if not is_stand_in(parameter)]
            for key in ("params", "param_names"):
                if key in group:
                    group[key] = [group[key][index] for index in kept]
        for parameter in [parameter for parameter in optimizer.state if is_stand_in(parameter)]:
            del optimizer.state[parameter]
        self._kept[id(optimizer)] = [group["params"] for group in optimizer.param_groups]

    def group_names(self, optimizer: Optimizer) -> list[dict[str, list[str]]]:
        """What names the parameters of each group of the undivided optimizer.

        Args:
            optimizer: One that was stripped.

        Returns:
            For each group the names in the module as ``"params"``, and ``"param_names"`` if the optimizer has them.
        """
        optimizer = _unwrap(optimizer)
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        return [
            {"params": [names[parameter] for parameter in parameters]} | ({"param_names": own} if own else {})
            for parameters, own in zip(*self._whole_groups(optimizer), strict=True)
        ]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of the undivided optimizer on global rank 0, an empty one elsewhere."""
        optimizer = _unwrap(optimizer)
        local = optimizer.state_dict()
        if self._is_undivided or "param_groups" not in local:  # Lightning's stand-in for no optimizer has no state
            return local
        numbers = self._numbers(optimizer)
        local_parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owners = self._parameter_owners()
        mine = {
            numbers[id(parameter)]: {key: full(value) for key, value in local["state"][index].items()}
            for index, parameter in enumerate(local_parameters)
            if index in local["state"] and owners.get(id(parameter), 0) == self._mesh.pipeline_rank
        }
        parts = self._collect(mine)
        if not parts:
            return {}
        state = {number: value for part in parts.values() for number, value in part.items()}
        groups = []
        for group, parameters, names in zip(local["param_groups"], *self._whole_groups(optimizer), strict=True):
            whole = {**group, "params": [numbers[id(parameter)] for parameter in parameters]}
            groups.append({**whole, "param_names": names} if names is not None else whole)
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_optimizer_states(self, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
        """Take this rank's part of the undivided optimizers' states.

        Raises:
            ValueError: If the optimizers, or their groups, are not those of the checkpoint.
        """
        if self._is_undivided:  # as Lightning does it, whatever the optimizers' states look like
            for optimizer, state in zip(optimizers, states, strict=False):
                optimizer.load_state_dict(dict(state))
            return
        if len(optimizers) != len(states):
            raise ValueError(
                f"The checkpoint has the states of {len(states)} optimizers, but {len(optimizers)} are configured."
                " Return as many from `configure_optimizers` as when it was saved, or load the weights alone."
            )
        for optimizer, state in zip(optimizers, states, strict=True):
            self.load_optimizer_state(optimizer, state)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Take this rank's part of the undivided optimizer's state.

        Raises:
            ValueError: If the groups are not those of this optimizer.
        """
        if "param_groups" not in state:
            return
        optimizer = _unwrap(optimizer)
        if self._has_other_groups(optimizer):
            self.strip(optimizer)
        whole, _ = self._whole_groups(optimizer)
        saved_groups = state["param_groups"]
        if [len(group["params"]) for group in saved_groups] != [len(group) for group in whole]:
            raise ValueError(
                f"The checkpoint's optimizer has parameter groups of {[len(group['params']) for group in saved_groups]}"
                f" parameters, this one of {[len(group) for group in whole]}. Configure it as it was when it was saved."
            )
        saved_numbers = {
            id(parameter): number
            for group, parameters in zip(saved_groups, whole, strict=True)
            for number, parameter in zip(group["params"], parameters, strict=True)
        }
        local, groups, count = {}, [], 0
        for group, saved_group in zip(optimizer.param_groups, saved_groups, strict=True):
            for index, parameter in enumerate(group["params"], start=count):
                if saved_numbers[id(parameter)] in state["state"]:
                    saved = state["state"][saved_numbers[id(parameter)]]
                    local[index] = {key: divided_like(value, parameter) for key, value in saved.items()}
            end = count + len(group["params"])
            part = {**saved_group, "params": list(range(count, end))}
            groups.append({**part, "param_names": group["param_names"]} if "param_names" in group else part)
            count = end
        optimizer.load_state_dict({"state": local, "param_groups": groups})

    def _has_other_groups(self, optimizer: Optimizer) -> bool:
        """Whether groups were replaced since they were stripped: finetuning makes those of the run it resumes."""
        kept = self._kept.get(id(optimizer), [])
        now = [group["params"] for group in optimizer.param_groups[: len(kept)]]
        return len(now) < len(kept) or any(mine is not old for mine, old in zip(now, kept, strict=True))

    def _whole_groups(self, optimizer: Optimizer) -> tuple[list[list[nn.Parameter]], list[list[str] | None]]:
        """The parameters, and their names where the optimizer has them, of each group; also of groups added later."""
        groups = self._groups.get(id(optimizer), [])
        added = [list(group["params"]) for group in optimizer.param_groups[len(groups) :]]
        names = self._names.get(id(optimizer), [])
        return groups + added, names + [group.get("param_names") for group in optimizer.param_groups[len(names) :]]

    def _numbers(self, optimizer: Optimizer) -> dict[int, int]:
        parameters = [parameter for group in self._whole_groups(optimizer)[0] for parameter in group]
        return {id(parameter): number for number, parameter in enumerate(parameters)}

    def _parameter_owners(self) -> dict[int, int]:
        """The first pipeline rank that holds each parameter, by the parameter's identity."""
        owners: dict[int, int] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            first = min(self._placement.ranks_of(name))
            owners[id(parameter)] = min(first, owners.get(id(parameter), first))
        return owners

    def _owners(self, state: Mapping[str, Any]) -> dict[str, int]:
        """The pipeline rank whose value counts, by name.

        Holders of a parameter agree. Buffers outside the body are right on the last stage, where all of
        the user's step runs.
        """
        by_parameter = self._parameter_owners()
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        return {
            name: by_parameter[id(parameters[name])] if name in parameters else max(self._placement.ranks_of(name))
            for name in state
        }

    def _collect(self, mine: dict[Any, Any]) -> dict[int, dict[Any, Any]]:
        """What each pipeline rank has, on global rank 0; stage by stage, through the host."""
        mesh = self._mesh
        if mesh.data_rank != 0 or mesh.tensor_rank != 0:
            return {}
        if mesh.pipeline_rank > 0:
            dist.send_object_list([_to_host(mine)], dst=mesh.rank(0, 0, 0), group=mesh.control_group)
            return {}
        parts = {0: mine}
        for rank in range(1, mesh.pipeline_parallel_size):
            received: list[Any] = [None]
            dist.recv_object_list(received, src=mesh.rank(rank, 0, 0), group=mesh.control_group)
            parts[rank] = received[0]
        return parts


def _to_host(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=False)
    if isinstance(tree, dict):
        return {key: _to_host(value) for key, value in tree.items()}
    return tree


def _unwrap(optimizer: Optimizer) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer

"""A checkpoint as one ordinary file of Lightning: gathered on rank 0, and each rank takes its part of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.optimizer_state import OptimizerStates, check_number, numbered
from lightning_hybrid.checkpoint.ownership import Ownership
from lightning_hybrid.checkpoint.tree_paths import cloned
from lightning_hybrid.distributed.broadcast.tree_broadcast import broadcast_object, receive_tree, send_tree
from lightning_hybrid.distributed.dtensor import full_tensor, is_zero_sharded
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.pytree import flatten, unflatten


class FullCheckpoint:
    """The state of the undivided model and its optimizers, on global rank 0.

    It is gathered stage by stage and tensor by tensor, so no rank holds more than all of it and its own part::

        rank 0 (stage 0)                            rank 2 (stage 1), and rank 3, which shares its layers
        own tensors, to the host
        <-- shapes and plain values -------------------  rank 2
        <-- one tensor --------------------------------  rank 2  <-- its shard -- rank 3

    Args:
        module: The user's module, with placeholders for what lives elsewhere.
        ownership: Which rank's values count.
        optimizers: The undivided optimizers.
        mesh: The ranks.
    """

    def __init__(self, module: LightningModule, ownership: Ownership, optimizers: OptimizerStates, mesh: Mesh) -> None:
        self._module = module
        self._ownership = ownership
        self._optimizers = optimizers
        self._mesh = mesh

    @property
    def is_undivided(self) -> bool:
        """Whether every rank has all of the model."""
        return self._mesh.model_group.size() == 1 and not any(map(is_zero_sharded, self._module.parameters()))

    def module_state(self) -> dict[str, Any]:
        """The state dict of the undivided module on global rank 0, an empty one elsewhere."""
        state = self._module.state_dict()
        if self.is_undivided:
            return state
        stored = self._ownership.stored_names(state)
        found = self.gather(self._ownership.part(state))
        if not found:
            return {}
        full = copy.copy(state)  # with the versions of layers
        full.update({name: found[stored[name]] for name in state})
        return full

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of the undivided optimizer on global rank 0, an empty one elsewhere."""
        if self.is_undivided:
            return optimizer.state_dict()
        named = self._optimizers.state(optimizer)
        if "param_groups" not in named:  # Lightning's placeholder for no optimizer has no state
            return named
        owners, rank = self._ownership.parameter_owners(), self._mesh.pipeline_rank
        state = self.gather({name: value for name, value in named["state"].items() if owners.get(name, 0) == rank})
        return numbered({**named, "state": state}) if self._mesh.is_first else {}

    def load_optimizer_states(self, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
        """Take this rank's part of the undivided optimizers' states.

        Raises:
            ValueError: If the optimizers, or their groups, are not those of the checkpoint.
        """
        if self.is_undivided:  # as Lightning does it, whatever the optimizers' states look like
            for optimizer, state in zip(optimizers, states, strict=False):
                optimizer.load_state_dict(cloned(dict(state)))
            return
        check_number(optimizers, states)
        named = [self._optimizers.by_name(*each) for each in zip(optimizers, states, strict=True)]
        for optimizer, state in zip(optimizers, named, strict=True):
            self._optimizers.load(optimizer, state, clone=True)

    # -- what callbacks put into a checkpoint --------------------------------------------------------------------------

    def broadcast(self, value: Any) -> Any:
        """Global rank 0's value, on the ranks of its model group; ``None`` elsewhere."""
        return broadcast_object(value, 0, self._mesh.control_group) if self._mesh.data_rank == 0 else None

    def gather(self, local: dict[Any, Any]) -> dict[Any, Any]:
        """The values of all pipeline ranks of its model group, full and on the host, on global rank 0.

        Args:
            local: What this rank has; ranks that share layers have the same things, each its shard.

        Returns:
            All of them; nothing on the other ranks.
        """
        mesh = self._mesh
        leaves, spec = flatten(local)
        if mesh.data_rank == 0:
            # A rank that comes here alone waits where its watcher knows for whom, which a receive does not tell.
            dist.barrier(group=mesh.control_group)
        if mesh.data_rank != 0 or mesh.context_rank != 0:
            for leaf in filter(is_zero_sharded, leaves):
                full_tensor(leaf)  # the first replica asks for it, or its ranks that share its sequences
            return {}
        if mesh.pipeline_rank > 0 and mesh.tensor_rank == 0:
            send_tree(local, mesh.rank(0, 0, 0), mesh.control_group, prepare=_full_on_host)
            return {}
        for index, leaf in enumerate(leaves):  # one by one, so that only one rank has the full tensors
            full = _full_on_host(leaf)
            leaves[index] = full if mesh.is_first else None
        if not mesh.is_first:
            return {}
        values: dict[Any, Any] = unflatten(leaves, spec)
        for rank in range(1, mesh.pipeline_parallel_size):
            values |= receive_tree(mesh.rank(rank, 0, 0), mesh.control_group)
        return values


def _full_on_host(value: Any) -> Any:
    """All of a tensor, which ranks that share it must ask for together; anything else as it is."""
    return full_tensor(value).detach().to("cpu", copy=False) if isinstance(value, Tensor) else value

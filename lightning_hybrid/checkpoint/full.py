"""Checkpoints in one ordinary Lightning file: gathered on rank 0 to save, and loaded in part by each rank.

`Checkpointer` makes a :class:`FullCheckpoint` and calls it when checkpoints are files. Such a file is the same as in a
run with one process, so Lightning and other layouts can load it. torch's functions for full state dicts do not know
pipeline stages, and gather DTensors on the device.

A *placeholder* replaces a tensor of another stage on this rank: it has a name and a shape, but no values. A *model
group* is the set of ranks that hold one replica of the model. *Tied* parameters are one parameter with several names.
`checkpoint.parts` checks uses of a module that need all values; :func:`part_expected` is here, because both this
package's own saving and these checks need it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.optimizer_state import OptimizerStates, check_number, numbered
from lightning_hybrid.checkpoint.tree_paths import cloned, replaced, value_at
from lightning_hybrid.data_parallel.parameter_map import ParameterMap
from lightning_hybrid.distributed.dtensor import full_tensor, is_zero_sharded
from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.distributed.pytree import TreeSpec, flatten, flatten_with_path, split_values, unflatten
from lightning_hybrid.distributed.tensor_bytes import as_bytes


class FullCheckpoint:
    """The state of the full model and its optimizers, on global rank 0.

    Except for loading, the methods are collectives of all ranks.

    The state is gathered stage by stage and tensor by tensor, so no rank holds more than the full state and its own
    part::

        rank 0 (stage 0)                            ranks 2 and 3 (stage 1, tensor-parallel)
        own tensors, to the host
        <-- shapes and plain values -------------------  rank 2
        <-- one tensor --------------------------------  rank 2  <-- its shard -- rank 3

    Args:
        module: The user's module, with placeholders for tensors of other stages.
        parameters: The places of the module's tensors.
        optimizers: The states of the full optimizers.
    """

    def __init__(self, module: LightningModule, parameters: ParameterMap, optimizers: OptimizerStates) -> None:
        self._module = module
        self._map = parameters
        self._optimizers = optimizers
        self._mesh = mesh = parameters.mesh
        self._group = GroupRef(mesh.control_group)
        self._is_alone = mesh.model_group.size() == 1
        stages = range(mesh.sizes.pipeline)
        # The global rank of the first tensor-parallel rank of each pipeline rank of this replica.
        self._firsts = [mesh.rank(stage, mesh.data_rank, 0) for stage in stages]

    @property
    def is_undivided(self) -> bool:
        """Return True if every rank has the full model."""
        return self._is_alone and not any(map(is_zero_sharded, self._module.parameters()))

    def module_state(self) -> dict[str, Any]:
        """Return the full state dict of the module on global rank 0, and an empty dict on other ranks.

        If every rank has the full model, each rank returns its own full state dict, without communication.
        """
        state = self._module.state_dict()
        if self.is_undivided:
            return state
        stored = self._map.stored_names(state)
        found = self._gather(self._map.owned_part(state))
        if not found:
            return {}
        full = copy.copy(state)  # keeps the versions of layers
        full.update({name: found[stored[name]] for name in state})
        return full

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state of the optimizer on global rank 0, and an empty dict on other ranks.

        If every rank has the full model, each rank returns its own full state, without communication. If there is no
        optimizer, every rank returns the empty state of Lightning's placeholder.
        """
        groups = getattr(optimizer, "param_groups", ())  # may contain shards even after the module was gathered
        is_sharded = any(is_zero_sharded(parameter) for group in groups for parameter in group["params"])
        if self.is_undivided and not is_sharded:
            return optimizer.state_dict()
        named = self._optimizers.state(optimizer)
        if "param_groups" not in named:  # Lightning's placeholder for no optimizer has no state
            return named
        owners, rank = self._map.parameter_owners(), self._mesh.pipeline_rank
        state = self._gather({name: value for name, value in named["state"].items() if owners.get(name, 0) == rank})
        return numbered({**named, "state": state}) if self._mesh.is_first else {}

    def load_optimizer_states(self, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's part of the full optimizers' states. This is not a collective.

        Args:
            optimizers: The optimizers of the run, whose placeholders were dropped.
            states: The full state of each optimizer, as `Optimizer.state_dict` returns it. Its tensors are copied.

        Raises:
            ValueError: If the optimizers or their groups do not match the checkpoint.
        """
        if self.is_undivided:  # like Lightning, for optimizer states of any structure
            for optimizer, state in zip(optimizers, states, strict=False):
                optimizer.load_state_dict(cloned(dict(state)))
            return
        check_number(optimizers, states)
        named = [self._optimizers.by_name(*each) for each in zip(optimizers, states, strict=True)]
        for optimizer, state in zip(optimizers, named, strict=True):
            self._optimizers.load(optimizer, state, clone=True)

    def fill(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Fill in missing values in copies of the model that callbacks save, such as averages of weights.

        In a copy on global rank 0, tensors of other stages have no values, and tensor-parallel layers have only a
        shard. The checkpoints of the other ranks, which are not written, have the same keys and these values::

            rank 0   state_dict: {embed: 0.1, body.0: 0.2, body.1: meta}  <--.
            rank 1   state_dict: {embed: 0.1, body.0: meta, body.1: 0.3}  ---' the missing value: state_dict, body.1

        Args:
            checkpoint: The Trainer's checkpoint, on every rank. The checkpoint and the callbacks' values are not
                changed.

        Returns:
            The checkpoint, filled on global rank 0.
        """
        first_has = [[path for path, leaf in flatten_with_path(checkpoint) if _is_incomplete(leaf)]]
        dist.broadcast_object_list(first_has, src=self._firsts[0], group=self._ranks())
        missing = first_has[0]
        if not missing:
            return checkpoint
        tied = self._map.first_names()
        local = {path: value_at(checkpoint, path) for path in missing if path[-1] not in tied}
        local = {path: value for path, value in local.items() if isinstance(value, Tensor) and not value.is_meta}
        for root in dict.fromkeys(path[:-1] for path in missing):  # state dicts, or parts of state dicts
            table = value_at(checkpoint, root)
            named = {name: value for name, value in table.items() if name in tied} if isinstance(table, dict) else {}
            local.update({(*root, name): value for name, value in self._map.owned_part(named).items()})
        found = self._gather(local)
        for path in missing if found else []:
            first = (*path[:-1], tied.get(path[-1], path[-1]))
            if first in found:
                found[path] = found[first]
        return replaced(checkpoint, found) if found else checkpoint

    def _ranks(self) -> dist.ProcessGroup:
        group = self._group.weak()
        assert group is not None, "the process groups have been destroyed"
        return group

    def _gather(self, local: dict[Any, Any]) -> dict[Any, Any]:
        """Gather the full values of all pipeline ranks of global rank 0's model group on its host.

        Every rank must call this: ranks of other replicas take part in the gathering of ZeRO shards.

        Args:
            local: The values of this rank by name or path. Tensor-parallel ranks have the same keys, and a shard of
                each tensor.

        Returns:
            All values on global rank 0, and an empty dict on other ranks.
        """
        mesh, group = self._mesh, self._ranks()
        leaves, spec = flatten(local)
        if mesh.data_rank == 0:
            # If a rank arrives here alone, its watcher can name the missing ranks in a barrier, but not in a receive.
            dist.barrier(group=group)
        if mesh.data_rank != 0 or mesh.context_rank != 0:
            for leaf in filter(is_zero_sharded, leaves):
                full_tensor(leaf)  # the first replica, or its context-parallel ranks, takes part in this collective
            return {}
        if mesh.pipeline_rank > 0 and mesh.tensor_rank == 0:
            _send(leaves, spec, self._firsts[0], group)
            return {}
        for index, leaf in enumerate(leaves):  # one by one, so that only one rank has full tensors
            full = _full_on_host(leaf)
            leaves[index] = full if mesh.is_first else None
        if not mesh.is_first:
            return {}
        values: dict[Any, Any] = unflatten(leaves, spec)
        for sender in self._firsts[1:]:
            values |= _receive(sender, group)
        return values


def _send(leaves: list[Any], spec: TreeSpec, target: int, group: dist.ProcessGroup) -> None:
    """Send a tree to the receiving rank, tensor by tensor."""
    dist.send_object_list([split_values(leaves, spec)], dst=target, group=group)
    for leaf in leaves:
        full = _full_on_host(leaf)
        if isinstance(full, Tensor) and full.numel() > 0:
            dist.send(as_bytes(full), dst=target, group=group)


def _receive(source: int, group: dist.ProcessGroup) -> Any:
    """Return the tree that a rank sends by :func:`_send`, with tensors on the host."""
    received: list[Any] = [None]
    dist.recv_object_list(received, src=source, group=group)
    meta, leaves = received[0]
    for index, tensor in meta.tensors():
        packed = torch.empty(tensor.shape.numel() * tensor.dtype.itemsize, dtype=torch.uint8)
        if len(packed) > 0:
            dist.recv(packed, src=source, group=group)
        leaves[index] = packed.view(tensor.dtype).view(tensor.shape)
    return unflatten(leaves, meta.spec)


def _full_on_host(value: Any) -> Any:
    """Return the full tensor, which is a collective of the ranks that shard it; any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    full = full_tensor(value) if isinstance(value, DTensor) else value
    return full.detach().to("cpu", copy=False)


def _is_incomplete(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_meta or isinstance(value, DTensor))


def check_values(checkpoint: dict[str, Any]) -> None:
    """Raise an error if a tensor of a checkpoint has no values.

    Raises:
        ValueError: If there is such a tensor.
    """
    leaves = flatten_with_path(checkpoint)
    empty = [".".join(map(str, path)) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.is_meta]
    if empty:
        raise ValueError(
            "The checkpoint contains tensors on the meta device, which have no values:"
            f" {', '.join(empty[:5])}{', ...' if len(empty) > 5 else ''}. Each rank receives the values of layers on"
            " other stages from the ranks that have these layers, so all ranks must use the same keys. Make sure that"
            " `state_dict` and `on_save_checkpoint`, in callbacks and in the module, save the same keys on every rank."
            " [LH909]"
        )


_PART_EXPECTED: ContextVar[bool] = ContextVar("_PART_EXPECTED", default=False)


def is_part_expected() -> bool:
    """Return True if the caller of `state_dict` or `torch.save` expects only this rank's part of the module."""
    return _PART_EXPECTED.get()


@contextmanager
def part_expected() -> Iterator[None]:
    """Skip the checks of state dicts and of `torch.save` inside the context."""
    token = _PART_EXPECTED.set(True)
    try:
        yield
    finally:
        _PART_EXPECTED.reset(token)

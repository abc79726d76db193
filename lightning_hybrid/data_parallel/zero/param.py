"""A parameter that replicas shard: the rows of a rank between steps, and the unsharded parameter during a step.

`shard_module` replaces parameters by shards. `ZeroParameters` makes a :class:`ShardedParameter` for each shard when a
run starts. Memory reports and estimates use :class:`RowShards`. torch's `fully_shard` is not used: it changes the
classes of modules, and gathers whenever a module runs, so the order of collectives would differ between replicas that
use different layers.

The *owners* of a parameter are the modules in which it is registered, with its names there. The *flat* tensor of a
parameter has the padded shards of all replicas, one after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_hybrid.distributed.dtensor import (
    EXPERTS,
    all_gather_zero,
    copy_attributes,
    from_shard,
    put_local,
    to_local,
)
from lightning_hybrid.distributed.shard_groups import ShardGroups
from lightning_hybrid.torch_internals import FLAT_WEIGHTS

Owner = tuple[nn.Module, str]
"""The module in which a parameter is registered, and the name of the parameter in this module."""

_UNSHARDED = "_unsharded"  # the attribute of a shard that describes the original parameter


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowShards:
    """A division of a tensor's rows over ranks: equally many on each rank, but the last ranks may have fewer, or none.

    ::

        7 rows over 4 ranks     0 1 | 2 3 | 4 5 | 6 -     padded to 8 rows, so that all shards have the same size

    Rows are along the first dimension whose size is not 1, so the rows of a rank are contiguous in memory.

    Attributes:
        shape: The shape of the tensor.
        dim: The dimension along which rows are counted.
        num_ranks: The number of replicas.
    """

    shape: torch.Size
    dim: int
    num_ranks: int

    @classmethod
    def of(cls, shape: torch.Size, num_ranks: int) -> RowShards | None:
        """Return the division of a tensor of this shape; ``None`` if it has fewer than two rows."""
        dim = next((dim for dim, size in enumerate(shape) if size != 1), None)
        return None if dim is None or shape[dim] == 0 else cls(shape, dim, num_ranks)

    @property
    def numel(self) -> int:
        """Return the number of elements of the tensor."""
        return self.shape.numel()

    @property
    def rows_per_rank(self) -> int:
        """Return the number of rows of a full shard, as in `torch.chunk`."""
        return -(-self.shape[self.dim] // self.num_ranks)

    @property
    def padded_numel(self) -> int:
        """Return the number of elements of a shard with its padding, which is the size of a full shard."""
        return self.rows_per_rank * (self.numel // self.shape[self.dim])

    def shard_shape(self, rank: int) -> torch.Size:
        """Return the shape of one rank's shard."""
        size = self.shape[self.dim]
        begin = min(rank * self.rows_per_rank, size)
        sizes = list(self.shape)
        sizes[self.dim] = min(begin + self.rows_per_rank, size) - begin
        return torch.Size(sizes)

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """Return one rank's shard, as a view of the concatenated padded shards.

        Args:
            flat: The concatenated padded shards, with ``num_ranks * padded_numel`` elements.
            rank: The rank.
        """
        shape = self.shard_shape(rank)
        return flat.narrow(0, rank * self.padded_numel, shape.numel()).view(shape)

    def unsharded(self, flat: Tensor) -> Tensor:
        """Return the tensor, as a view of the concatenated padded shards."""
        return flat.narrow(0, 0, self.numel).view(self.shape)


# -- modules -----------------------------------------------------------------------------------------------------------


def find_owners(module: nn.Module) -> dict[int, list[Owner]]:
    """Return the modules and names under which each parameter is registered, by the parameter's identity."""
    owners: dict[int, list[Owner]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((part, name))
    return owners


def set_parameter(parameter: nn.Parameter, owners: Iterable[Owner]) -> None:
    """Register a parameter in its owners, in place of the parameter there."""
    for part, name in owners:
        if hasattr(part, FLAT_WEIGHTS):  # a recurrent layer, whose `__setattr__` updates its list of parameters
            setattr(part, name, parameter)
        else:
            part._parameters[name] = parameter


# -- single parameters -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Unsharded:
    """A description of a parameter before replicas sharded it.

    Attributes:
        shape: The local shape with which layers compute: of the whole parameter, of its tensor-parallel shard, or of
            the experts of this rank in it.
        mesh: The tensor-parallel ranks; ``None`` if the parameter is not tensor-parallel.
        placements: The placements over the tensor-parallel ranks.
        is_expert: True if layers compute with the experts of this rank instead of all rows.
    """

    shape: torch.Size
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]
    is_expert: bool

    def parameter(self, local: Tensor, shard: nn.Parameter) -> nn.Parameter:
        """Return a parameter with these values, and with the attributes of its shard."""
        if self.mesh is not None:
            local = from_shard(local, self.mesh, self.placements, shard)
        parameter = nn.Parameter(local, shard.requires_grad)
        copy_attributes(shard, parameter)
        del vars(parameter)[_UNSHARDED]
        return parameter


def is_shard(parameter: object) -> bool:
    """Return True if :func:`shard` has made this parameter, so that replicas have different rows of it."""
    return isinstance(parameter, DTensor) and _UNSHARDED in vars(parameter)


def is_expert(parameter: object) -> bool:
    """Return True if a parameter is a shard, and layers compute with the experts of this rank instead of all rows."""
    if not is_shard(parameter):
        return False
    before: _Unsharded = vars(parameter)[_UNSHARDED]
    return before.is_expert


def is_gathered(shard: Any) -> bool:
    """Return True if several replicas have shards of the rows with which layers compute."""
    return num_shards(shard)[1] > 1


def num_shards(shard: Any) -> tuple[int, int]:
    """Return the numbers of replicas over which experts are sharded, and that gather the rows of a rank."""
    names = shard.device_mesh.mesh_dim_names
    return shard.device_mesh[EXPERTS].size() if EXPERTS in names else 1, shard.device_mesh.size(-1)


def unsharded_shape(parameter: Tensor) -> torch.Size:
    """Return the local shape of a parameter without the sharding over replicas."""
    before: _Unsharded | None = vars(parameter).get(_UNSHARDED)
    if before is not None:
        return before.shape
    return to_local(parameter).shape if isinstance(parameter, DTensor) else parameter.shape


@torch.no_grad()
def shard(
    parameter: nn.Parameter,
    mesh: DeviceMesh,
    rank: int,
    num_ranks: int,
    *,
    expert_rank: int = 0,
    num_expert_ranks: int = 1,
) -> nn.Parameter:
    """Return one replica's shard of a parameter, with its own memory. Nothing is communicated.

    Args:
        parameter: A plain parameter, or a parameter that is sharded over the tensor-parallel ranks.
        mesh: The tensor-parallel ranks, if there are several; the expert ranks, if there are several; and the replicas,
            which are the last axis.
        rank: The rank of this replica in the group that gathers the parameter.
        num_ranks: The number of replicas in this group.
        expert_rank: The rank of this replica in the group with different experts.
        num_expert_ranks: The number of replicas in this group. It divides the first dimension, which has a row for
            each expert.

    Returns:
        A parameter with the same global shape, of which this rank has some rows; the given parameter if it has fewer
        than two rows.
    """
    local = to_local(parameter)
    has_experts = num_expert_ranks > 1
    if has_experts:
        local = local.chunk(num_expert_ranks)[expert_rank]
    rows = RowShards.of(local.shape, num_ranks)
    if rows is None:
        if not has_experts:
            return parameter
        rows = RowShards(local.shape, 0, num_ranks)
    dim = rows.dim
    own = local.narrow(dim, min(rank * rows.rows_per_rank, local.shape[dim]), rows.shard_shape(rank)[dim])
    before = _Unsharded(local.shape, None, (), has_experts)
    placements: tuple[Placement, ...] = (Replicate(),) * (mesh.ndim - 1 - has_experts)
    if isinstance(parameter, DTensor):
        placements = parameter.placements
        before = _Unsharded(local.shape, parameter.device_mesh, placements, has_experts)
    own, full = own.clone(memory_format=torch.contiguous_format), torch.empty(parameter.shape, device="meta")
    value = from_shard(own, mesh, [*placements, *[Shard(0)] * has_experts, Shard(dim)], full)
    made = nn.Parameter(value, parameter.requires_grad)
    copy_attributes(parameter, made)
    vars(made)[_UNSHARDED] = before
    return made


def full_parameter(value: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """Return a plain parameter with these values, and with the attributes of a parameter that may be a shard."""
    full = nn.Parameter(value, parameter.requires_grad)
    copy_attributes(parameter, full)
    vars(full).pop(_UNSHARDED, None)
    return full


@torch.no_grad()
def unshard(shard: nn.Parameter) -> nn.Parameter:
    """Return a parameter like the original argument of :func:`shard`. All replicas must call this."""
    before: _Unsharded = vars(shard)[_UNSHARDED]
    return before.parameter(all_gather_zero(shard), shard)


class ShardedParameter:
    """A parameter in its two forms: this rank's shard, and the unsharded parameter that layers compute with.

    The unsharded parameter is in a flat tensor with the shards of all ranks, so that gathered values are copied at
    once::

        flat        rank 0's rows | rank 1's rows | rank 2's rows and padding
        unsharded   ------------------------------------------       a view
        sharded                   ---------------                    on rank 1: also a view, or separate memory

    If layers compute with the shard, as with experts that only one replica has, the flat tensor always has memory.

    Args:
        sharded: The result of :func:`shard`.
        owners: The modules and names under which it is registered.
        groups: The groups over which it is sharded.
        aliased: If True, the shard is a view of the flat tensor, which then always has memory.

    Attributes:
        sharded: The shard, which optimizers and checkpoints use.
        unsharded: The unsharded parameter, a view of `flat`. It has no memory while `flat` has none.
        flat: The padded shards of all replicas, ``num_ranks * padded_numel`` elements.
        owners: The argument `owners`.
        groups: The argument `groups`.
        rows: The division of the rows of `unsharded` over the replicas that gather it.
        is_gathered: True if several replicas have shards of the rows with which layers compute.
        is_written: True if a step has written the unsharded parameter, so that the shard is out of date.
    """

    def __init__(self, sharded: nn.Parameter, owners: Sequence[Owner], groups: ShardGroups, *, aliased: bool) -> None:
        before: _Unsharded = vars(sharded)[_UNSHARDED]
        self.is_gathered = is_gathered(sharded)
        self.sharded, self.owners, self.groups = sharded, owners, groups
        self.rows = RowShards.of(before.shape, groups.size) or RowShards(before.shape, 0, groups.size)
        rows, self._rank = self.rows, groups.rank
        self._requires_grad = sharded.requires_grad
        self.is_written = False
        own = to_local(sharded)
        self.flat = own.new_zeros(rows.num_ranks * rows.padded_numel)
        # `.data` gives it a separate version counter. Gathering into it while a graph needs it is safe, because
        # gathered values equal the values that the graph has saved.
        self.unsharded = before.parameter(rows.unsharded(self.flat.data), sharded)
        if aliased or not self.is_gathered:
            view = rows.shard(self.flat, self._rank)
            view.copy_(own)
            put_local(sharded, view)
        else:
            self.free()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        """Return a parameter with the two forms of the copied shard, which is not a view.

        The flat tensor is not copied, because it may have no memory.
        """
        made = object.__new__(ShardedParameter)
        memo[id(self)] = made  # hooks of the owner modules refer to it
        sharded, owners = copy.deepcopy(self.sharded, memo), copy.deepcopy(self.owners, memo)
        made.__init__(sharded, owners, self.groups, aliased=False)  # type: ignore[misc]
        memo[id(self.unsharded)] = made.unsharded
        return made

    def all_gather_input(self) -> Tensor:
        """Return the flat shard with padding, which this rank sends to the other ranks."""
        own = to_local(self.sharded)
        if self._is_aliased(own):
            return self.flat.narrow(0, self._rank * self.rows.padded_numel, self.rows.padded_numel)
        return torch.nn.functional.pad(own.reshape(-1), (0, self.rows.padded_numel - own.numel()))

    def _is_aliased(self, own: Tensor) -> bool:
        """Return True if the shard is a view of the flat tensor; False in a copy of the module, which copies both."""
        address = self.flat.untyped_storage().data_ptr()
        return address != 0 and own.untyped_storage().data_ptr() == address

    def copy_out(self, shards: Tensor) -> None:
        """Copy the gathered shards of all ranks, ``(ranks, padded shard)``, into the unsharded parameter."""
        storage = self.flat.untyped_storage()
        if storage.size() != self.flat.nbytes:
            storage.resize_(self.flat.nbytes)
        flat = self.flat.view(self.rows.num_ranks, self.rows.padded_numel)
        # The local rows are already there, and may be newer than the gathered rows.
        if self._is_aliased(to_local(self.sharded)):
            flat[: self._rank].copy_(shards[: self._rank])
            flat[self._rank + 1 :].copy_(shards[self._rank + 1 :])
        else:
            flat.copy_(shards)

    def update_shard(self) -> None:
        """Copy values that a step has written into the unsharded parameter to the shard."""
        if self.is_written:
            self.is_written = False
            with torch.no_grad():
                to_local(self.sharded).copy_(self.rows.shard(self.flat, self._rank))

    def free(self) -> None:
        """Free the memory of the unsharded parameter.

        The tensor stays, because graphs refer to it, and receives memory again when it is gathered. If the
        parameter is not gathered, its memory is also the memory of the shard, and is kept.
        """
        if self.is_gathered:
            self.flat.untyped_storage().resize_(0)

    def to_unsharded(self) -> None:
        """Register the unsharded parameter, for layers."""
        self.sync_requires_grad()
        set_parameter(self.unsharded, self.owners)

    def to_sharded(self) -> None:
        """Register the shard, for all other code."""
        self.sync_requires_grad()
        set_parameter(self.sharded, self.owners)

    def sync_requires_grad(self) -> None:
        """Give both forms the same `requires_grad`.

        Users change it on the shard between steps, and on the unsharded parameter during a step.
        """
        changed = self.unsharded if self.unsharded.requires_grad != self._requires_grad else self.sharded
        self._requires_grad = changed.requires_grad
        self.unsharded.requires_grad_(self._requires_grad)
        self.sharded.requires_grad_(self._requires_grad)

    def remove(self) -> None:
        """Leave the shard in the module, in separate memory."""
        self.to_sharded()
        own = to_local(self.sharded)
        if self._is_aliased(own):
            put_local(self.sharded, own.clone())

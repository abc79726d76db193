"""A parameter in its two forms: what a rank keeps of it, and the whole that layers compute with."""

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

from lightning_hybrid.data_parallel.zero.rows import RowShards
from lightning_hybrid.distributed.dtensor import all_gather_zero, put_local, to_local

__all__ = ["ShardedParameter", "Slot", "is_divided", "join", "keep_rows", "put", "shape_here", "slots_of"]

Slot = tuple[nn.Module, str]
"""Where a parameter is found: the module, and its name there."""

_MARK = "_whole_of"  # what a shard knows of the whole


@dataclass(frozen=True)
class _Whole:
    """What a parameter was before it was divided over replicas.

    Attributes:
        local: The shape of what each replica's rank had: the whole, or its part of a layer that ranks share.
        mesh: The ranks that share the layer; ``None`` if none do.
        placements: How it was divided over these.
    """

    local: torch.Size
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]


def slots_of(module: nn.Module) -> dict[int, list[Slot]]:
    """Where each parameter is found, under all its names, by the parameter's identity."""
    slots: dict[int, list[Slot]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                slots.setdefault(id(parameter), []).append((part, name))
    return slots


def put(parameter: nn.Parameter, slots: Iterable[Slot]) -> None:
    """Let a parameter be found in these places."""
    for part, name in slots:
        if hasattr(part, "_flat_weights"):  # of recurrent layers of torch, which keep a list of their own
            setattr(part, name, parameter)
        else:
            part._parameters[name] = parameter


def is_divided(parameter: object) -> bool:
    """Whether replicas have different rows of a parameter."""
    return isinstance(parameter, DTensor) and _MARK in vars(parameter)


def shape_here(parameter: Tensor) -> torch.Size:
    """The shape that a parameter has on this rank where replicas do not divide it."""
    told: _Whole | None = vars(parameter).get(_MARK)
    return to_local(parameter).shape if told is None else told.local


@torch.no_grad()
def keep_rows(parameter: nn.Parameter, mesh: DeviceMesh, rank: int, num_ranks: int) -> nn.Parameter:
    """What one replica keeps of a parameter.

    Args:
        parameter: Plain, or divided over the ranks that share its layer.
        mesh: The ranks that share a layer, if there are several, times the replicas.
        rank: Of this replica.
        num_ranks: The number of replicas.

    Returns:
        A parameter with the same shape, of which this rank has some rows; the same one if it has too few.
    """
    local = to_local(parameter)
    rows = RowShards.of(local.shape, num_ranks)
    if rows is None:
        return parameter
    shape = rows.shape_of(rank)
    part = local.narrow(rows.dim, min(rank * rows.per_rank, local.shape[rows.dim]), shape[rows.dim])
    whole = _Whole(local.shape, None, ())
    before: tuple[Placement, ...] = (Replicate(),) * (mesh.ndim - 1)
    if isinstance(parameter, DTensor):
        before = parameter.placements
        whole = _Whole(local.shape, parameter.device_mesh, before)
    value = DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format),
        mesh,
        [*before, Shard(rows.dim)],
        run_check=False,
        shape=parameter.shape,
        stride=torch.empty(parameter.shape, device="meta").stride(),
    )
    shard = nn.Parameter(value, parameter.requires_grad)
    vars(shard).update({key: mark for key, mark in vars(parameter).items() if key != "_is_param"})
    vars(shard)[_MARK] = whole
    return shard


@torch.no_grad()
def join(shard: nn.Parameter) -> nn.Parameter:
    """The parameter that was divided by :func:`keep_rows`; a collective of the replicas."""
    told: _Whole = vars(shard)[_MARK]
    local = all_gather_zero(shard)
    parameter = nn.Parameter(_restored(local, shard, told), shard.requires_grad)
    marks = {key: mark for key, mark in vars(shard).items() if key not in ("_is_param", _MARK)}
    vars(parameter).update(marks)
    return parameter


def _restored(local: Tensor, shard: nn.Parameter, told: _Whole) -> Tensor:
    if told.mesh is None:
        return local
    return DTensor.from_local(
        local, told.mesh, told.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )


class ShardedParameter:
    """A shard of a parameter, and the whole.

    The whole lies in a flat tensor of all shares, so that shares which arrive are copied at once::

        memory      rank 0's rows | rank 1's rows | rank 2's rows and padding
        whole       ------------------------------------------       a view
        shard                     ---------------                    on rank 1: a view too, or memory of its own

    Args:
        shard: What :func:`keep_rows` made.
        slots: Where it is found.
        rank: Of this replica.
        aliased: Whether the shard is a view into the memory of the whole, which is then always there.
    """

    def __init__(self, shard: nn.Parameter, slots: Sequence[Slot], rank: int, *, aliased: bool) -> None:
        told: _Whole = vars(shard)[_MARK]
        mesh = shard.device_mesh  # type: ignore[attr-defined]
        rows = RowShards.of(told.local, mesh.size(mesh.ndim - 1))
        assert rows is not None
        self.shard, self.slots, self.rows, self._rank = shard, slots, rows, rank
        self._trains = shard.requires_grad
        own = to_local(shard)
        self.memory = own.new_zeros(rows.num_ranks * rows.share)
        # Of a version counter of its own: what arrives while a graph needs the whole is what the graph has seen.
        self.whole = nn.Parameter(_restored(rows.whole(self.memory.data), shard, told), shard.requires_grad)
        vars(self.whole).update({key: mark for key, mark in vars(shard).items() if key not in ("_is_param", _MARK)})
        if aliased:
            part = rows.part(self.memory, rank)
            part.copy_(own)
            put_local(shard, part)
        else:
            self.free()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        """A twin of the copied shard, which is not a view; the whole, which may have no memory, is not copied."""
        twin = object.__new__(ShardedParameter)
        memo[id(self)] = twin  # hooks of the modules in which it is found know it
        twin.__init__(copy.deepcopy(self.shard, memo), copy.deepcopy(self.slots, memo), self._rank, aliased=False)  # type: ignore[misc]
        memo[id(self.whole)] = twin.whole
        return twin

    def share(self) -> Tensor:
        """What this rank gives to the others: a full share, flat."""
        own = to_local(self.shard)
        if self._is_aliased(own):
            return self.memory.narrow(0, self._rank * self.rows.share, self.rows.share)
        return torch.nn.functional.pad(own.reshape(-1), (0, self.rows.share - own.numel()))

    def _is_aliased(self, own: Tensor) -> bool:
        """Whether the shard is a view of the whole; in a copy of the module, whose tensors are copied, it is not."""
        there = self.memory.untyped_storage().data_ptr()
        return there != 0 and own.untyped_storage().data_ptr() == there

    def put_whole(self) -> None:
        """Let layers find the whole."""
        self.freeze_or_thaw()
        put(self.whole, self.slots)

    def freeze_or_thaw(self) -> None:
        """Both need gradients, or neither: between steps users change that of the shard, in a step of the whole."""
        changed = self.whole if self.whole.requires_grad != self._trains else self.shard
        self._trains = changed.requires_grad
        self.whole.requires_grad_(self._trains)
        self.shard.requires_grad_(self._trains)

    def put_shard(self) -> None:
        """Let everybody else find the shard."""
        self.freeze_or_thaw()
        put(self.shard, self.slots)

    def take(self, shares: Tensor) -> None:
        """Take the shares of all ranks, ``(ranks, share)``."""
        self.allocate()
        there = self.memory.view(self.rows.num_ranks, self.rows.share)
        if self._is_aliased(to_local(self.shard)):  # own rows are there, and may be newer than what travelled
            there[: self._rank].copy_(shares[: self._rank])
            there[self._rank + 1 :].copy_(shares[self._rank + 1 :])
        else:
            there.copy_(shares)

    def allocate(self) -> None:
        """Memory for the whole."""
        storage = self.memory.untyped_storage()
        size = self.memory.numel() * self.memory.element_size()
        if storage.size() != size:
            storage.resize_(size)

    def free(self) -> None:
        """Let go of the memory of the whole, which graphs refer to: it comes back in the same place."""
        self.memory.untyped_storage().resize_(0)

    def detach(self) -> None:
        """Give the shard memory of its own."""
        own = to_local(self.shard)
        if self._is_aliased(own):
            put_local(self.shard, own.clone())

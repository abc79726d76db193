"""The sharding of parameters and buffers over the tensor-parallel ranks, as DTensors.

`Plan.apply` shards the parameters of each layer of a plan with a :class:`Sharder`, before the first step.
`strategy.gather` makes full tensors again with :func:`unshard`. Trials of blocks (`auto_plan.trial`) use
:func:`shards_of` in one process. torch's `distribute_tensor` does not suffice, because it cannot split each block of a
packed parameter separately, and does not keep ties.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_hybrid.distributed.dtensor import copy_attributes, flatten_blocks, keeping_blocks
from lightning_hybrid.distributed.tensor_bytes import as_bytes
from lightning_hybrid.tensor_parallel.mappings import TensorGroup
from lightning_hybrid.tensor_parallel.styles import ParamSplit


class Sharder:
    """An object that shards parameters and buffers of one module, one by one. Tied parameters stay tied.

    Args:
        module: The full module. Parameters on the meta device may get values before they are sharded, but ties must not
            change after this object is created.
        mesh: The axis of the tensor-parallel ranks, or the axes of their grid.
        group: The group of the same ranks.
        device: The device of the shards.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, group: TensorGroup, device: torch.device) -> None:
        self._mesh = mesh
        self._group = group
        self._device = device
        ties: dict[int, list[tuple[nn.Module, str]]] = {}
        for layer in module.modules():
            for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                ties.setdefault(id(tensor), []).append((layer, name))
        self._ties = {(id(layer), name): owners for owners in ties.values() for layer, name in owners}

    def shard(self, module: nn.Module, name: str, split: ParamSplit) -> None:
        """Replace a parameter or a buffer with a DTensor that holds this rank's shard.

        Each block is divided separately, as the projections of a packed attention require. The parameter ``[3 d, e]``
        is viewed as ``[3, d, e]`` and split along its second dimension::

            rows       q q q q k k k k v v v v
            rank 0     q q     k k     v v
            rank 1         q q     k k     v v

        All ranks of the group must call it, because the first rank broadcasts its values, which all ranks use. All
        modules that hold the tensor get the shard, with the attributes of the tensor. If the layer has no such tensor,
        if the tensor is on the meta device, or if it is sharded already, nothing happens.

        Args:
            module: The module that has the parameter or buffer.
            name: The name of the tensor in the module.
            split: The way in which it is sharded.
        """
        tensor = getattr(module, name)
        if tensor is None or tensor.is_meta or isinstance(tensor, DTensor):
            return
        sharded = self._sharded(tensor, split)
        for owner, leaf in self._ties[id(module), name]:
            setattr(owner, leaf, sharded)

    def _sharded(self, tensor: Tensor, split: ParamSplit) -> Tensor:
        names = self._mesh.mesh_dim_names or ("",)
        with torch.no_grad(), keeping_blocks():
            values = tensor.detach().to(self._device).contiguous()
            dist.broadcast(as_bytes(values), group=self._group(), group_src=0)
            stacked = _stacked_shard(values, split, self._group.rank, self._group.size)
            local = stacked.clone(memory_format=torch.contiguous_format)
            dims = [None if dim is None else dim + (dim >= split.dim) for dim in map(split.dim_of, names)]
            placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
            blockwise = DTensor.from_local(local, self._mesh, placements, run_check=False)
            sharded = flatten_blocks(blockwise, split.dim)
            assert sharded.shape == tensor.shape, "a sharded tensor must keep the full shape"
            if isinstance(tensor, nn.Parameter):
                sharded = nn.Parameter(sharded, requires_grad=tensor.requires_grad)
        copy_attributes(tensor, sharded)
        return sharded


def _stacked_shard(tensor: Tensor, split: ParamSplit, rank: int, size: int) -> Tensor:
    """Return a rank's shard of a full tensor, as a view with a dimension for the blocks before `split.dim`.

    Writes into the view change the full tensor.
    """
    dim, shape = split.dim, tensor.shape
    view = tensor.view(*shape[:dim], split.blocks, shape[dim] // split.blocks, *shape[dim + 1 :])
    for each, parts, index in split.cuts(rank, size):
        view = view.chunk(parts, each + (each >= dim))[index]
    return view


def unshard(shards: Sequence[Tensor], split: ParamSplit) -> Tensor:
    """Return the full tensor from the shards that a :class:`Sharder` made. Nothing is communicated.

    Args:
        shards: The shards of all ranks, in the order of the ranks, as plain tensors.
        split: The way in which the tensor is sharded.
    """
    size, shape = len(shards), list(shards[0].shape)
    for dim, parts, _ in split.cuts(0, size):
        shape[dim] *= parts
    full = shards[0].new_empty(shape)
    for rank, shard in enumerate(shards):
        view = _stacked_shard(full, split, rank, size)
        view.copy_(shard.view(view.shape))
    return full


def shards_of(tensor: Tensor, split: ParamSplit, size: int) -> list[Tensor]:
    """Return the shard of each rank, as a plain tensor. This is the inverse of :func:`unshard`.

    Args:
        tensor: The full tensor.
        split: The way in which the tensor is sharded.
        size: The number of ranks.
    """
    dim = split.dim
    return [_stacked_shard(tensor, split, rank, size).flatten(dim, dim + 1) for rank in range(size)]

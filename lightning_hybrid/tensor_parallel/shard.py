"""Parameters and buffers sharded over the tensor-parallel ranks, as DTensors: checkpoints know every shard."""

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
    """Shards parameters and buffers; one that is tied stays tied.

    Args:
        module: The whole module. Parameters without values may get some until they are sharded, but no other ties.
        mesh: The axis of tensor-parallel ranks, or the axes of their grid, for torch.
        group: The same ranks.
        device: Where shards live.
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
        """Keep this rank's shard of a parameter, or of a buffer.

        With several blocks each of them is divided, as the projections of a packed attention need it. The parameter
        ``[3 d, e]``, seen as ``[3, d, e]``, is split on its second dimension::

            rows       q q q q k k k k v v v v
            rank 0     q q     k k     v v
            rank 1         q q     k k     v v

        Every rank takes the values of the group's first one. All modules that hold the tensor get the shard.

        Args:
            module: Whose parameter or buffer it is.
            name: Its name there.
            split: How it is divided.
        """
        tensor = getattr(module, name)
        if tensor is None or tensor.is_meta or isinstance(tensor, DTensor):
            return  # there is none, it lives elsewhere, or it was sharded before
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
    """What a rank has of a full tensor, as a view, with a dimension for the blocks before the one that is divided."""
    dim, shape = split.dim, tensor.shape
    view = tensor.view(*shape[:dim], split.blocks, shape[dim] // split.blocks, *shape[dim + 1 :])
    for each, parts, index in split.cuts(rank, size):
        view = view.chunk(parts, each + (each >= dim))[index]
    return view


def unshard(shards: Sequence[Tensor], split: ParamSplit) -> Tensor:
    """The full tensor, from what a :class:`Sharder` made of it.

    Args:
        shards: Of all ranks, in their order.
        split: How it is divided.
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
    """What each rank has of a full tensor; the reverse of :func:`unshard`.

    Args:
        tensor: The full tensor.
        split: How it is divided.
        size: The number of ranks.
    """
    dim = split.dim
    return [_stacked_shard(tensor, split, rank, size).flatten(dim, dim + 1) for rank in range(size)]

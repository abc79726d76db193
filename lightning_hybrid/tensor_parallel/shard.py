"""Parameters sharded over the tensor-parallel ranks, as DTensors: optimizers and checkpoints know every shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_hybrid.distributed.dtensor import copy_attributes
from lightning_hybrid.distributed.tensor_bytes import as_bytes
from lightning_hybrid.tensor_parallel.mappings import TensorGroup


class Sharder:
    """Shards parameters; one that is tied stays tied.

    Args:
        module: The whole module. Parameters without values may get some until they are sharded, but no other ties.
        mesh: The tensor-parallel axis, for torch.
        group: The same ranks.
        device: Where shards live.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, group: TensorGroup, device: torch.device) -> None:
        self._mesh = mesh
        self._group = group
        self._device = device
        ties: dict[int, list[tuple[nn.Module, str]]] = {}
        for layer in module.modules():
            for name, parameter in layer._parameters.items():
                ties.setdefault(id(parameter), []).append((layer, name))
        self._ties = {(id(layer), name): owners for owners in ties.values() for layer, name in owners}

    def shard(self, module: nn.Module, name: str, dim: int, *, blocks: int = 1) -> None:
        """Keep this rank's shard of a parameter.

        With several blocks each of them is divided, as the projections of a packed attention need it. The parameter
        ``[3 d, e]``, seen as ``[3, d, e]``, is split on its second dimension::

            rows       q q q q k k k k v v v v
            rank 0     q q     k k     v v
            rank 1         q q     k k     v v

        Every rank takes the values of the group's first one. All modules that hold the parameter get the shard.

        Args:
            module: Whose parameter it is.
            name: Its name there.
            dim: The dimension to divide.
            blocks: Into how many equal blocks the dimension falls.
        """
        parameter = getattr(module, name)
        if parameter is None or parameter.is_meta or isinstance(parameter, DTensor):
            return  # there is none, it lives elsewhere, or it was sharded before
        sharded = self._sharded(parameter, dim, blocks)
        for owner, leaf in self._ties[id(module), name]:
            setattr(owner, leaf, sharded)

    def _sharded(self, parameter: nn.Parameter, dim: int, blocks: int) -> nn.Parameter:
        size = parameter.shape[dim]
        assert size % (self._group.size * blocks) == 0, "a plan shards what can be divided"
        with torch.no_grad():
            values = parameter.detach().to(self._device).contiguous()
            dist.broadcast(as_bytes(values), group=self._group(), group_src=0)
            stacked = values.view(*values.shape[:dim], blocks, size // blocks, *values.shape[dim + 1 :])
            local = self._group.local_chunk(stacked, dim + 1).clone(memory_format=torch.contiguous_format)
            # With more than one block, torch itself finds out the placement of the flattened tensor.
            blockwise: Tensor = DTensor.from_local(local, self._mesh, [Shard(dim + 1)], run_check=False)
            values = blockwise.flatten(dim, dim + 1)
        assert values.shape == parameter.shape
        sharded = nn.Parameter(values, requires_grad=parameter.requires_grad)
        copy_attributes(parameter, sharded)
        return sharded


def unshard(shards: Sequence[Tensor], dim: int, *, blocks: int = 1) -> Tensor:
    """The full tensor, from what a :class:`Sharder` made of it.

    Args:
        shards: Of all ranks, in their order.
        dim: The dimension that is divided.
        blocks: Into how many equal blocks it falls.
    """
    shape = shards[0].shape
    stacked = [shard.view(*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :]) for shard in shards]
    return torch.cat(stacked, dim + 1).flatten(dim, dim + 1)


def shards_of(tensor: Tensor, dim: int, size: int, *, blocks: int = 1) -> list[Tensor]:
    """What each rank has of a full tensor; the reverse of :func:`unshard`.

    Args:
        tensor: The full tensor.
        dim: The dimension that is divided.
        size: The number of ranks.
        blocks: Into how many equal blocks it falls.
    """
    shape = tensor.shape
    stacked = tensor.view(*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])
    return [shard.flatten(dim, dim + 1) for shard in stacked.chunk(size, dim + 1)]

"""Parameters divided over the tensor-parallel ranks, as DTensors: optimizers and checkpoints know every shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_hybrid.distributed.dtensor import copy_attributes
from lightning_hybrid.tensor_parallel.mappings import TensorGroup

__all__ = ["Sharder", "unshard"]


class Sharder:
    """Divides parameters; one that is tied stays tied.

    Args:
        module: The whole module. Parameters without values may get some until they are divided, but no other ties.
        mesh: The tensor-parallel axis, for torch.
        group: The same ranks.
        device: Where shards live.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, group: TensorGroup, device: torch.device) -> None:
        self._mesh = mesh
        self._group = group
        self._device = device
        by_parameter: dict[int, list[tuple[nn.Module, str]]] = {}
        for layer in module.modules():
            for name, parameter in layer._parameters.items():
                by_parameter.setdefault(id(parameter), []).append((layer, name))
        self._places = {(id(layer), name): places for places in by_parameter.values() for layer, name in places}

    def shard(self, module: nn.Module, name: str, dim: int, *, blocks: int = 1) -> None:
        """Keep this rank's part of a parameter.

        With several blocks each of them is divided, as the projections of a packed attention need it. The parameter
        ``[3 d, e]``, seen as ``[3, d, e]``, is split on its second dimension::

            rows       q q q q k k k k v v v v
            rank 0     q q     k k     v v
            rank 1         q q     k k     v v

        Every rank takes the values of the group's first one. The undivided parameter is let go of, in all its places.

        Args:
            module: Whose parameter it is.
            name: Its name there.
            dim: The dimension to divide.
            blocks: Into how many equal blocks the dimension falls.
        """
        parameter = getattr(module, name)
        if parameter is None or parameter.is_meta or isinstance(parameter, DTensor):
            return  # there is none, it lives elsewhere, or it was divided before
        made = self._divided(parameter, dim, blocks)
        for owner, leaf in self._places[id(module), name]:
            setattr(owner, leaf, made)

    def _divided(self, parameter: nn.Parameter, dim: int, blocks: int) -> nn.Parameter:
        size = parameter.shape[dim]
        assert size % (self._group.size * blocks) == 0, "a plan divides what can be divided"
        with torch.no_grad():
            values = parameter.detach().to(self._device).contiguous()
            dist.broadcast(values.view(-1).view(torch.uint8), group=self._group.group, group_src=0)
            seen = values.view(*values.shape[:dim], blocks, size // blocks, *values.shape[dim + 1 :])
            own = seen.chunk(self._group.size, dim + 1)[self._group.rank].clone(memory_format=torch.contiguous_format)
            # Of several blocks, torch itself finds out how the flattened tensor is divided.
            unshard: Tensor = DTensor.from_local(own, self._mesh, [Shard(dim + 1)], run_check=False)
            shards = unshard.flatten(dim, dim + 1)
        assert shards.shape == parameter.shape
        made = nn.Parameter(shards, requires_grad=parameter.requires_grad)
        copy_attributes(parameter, made)
        return made


def unshard(shards: Sequence[Tensor], dim: int, *, blocks: int = 1) -> Tensor:
    """The whole of a tensor that a :class:`Sharder` has divided.

    Args:
        shards: Of all ranks, in their order.
        dim: The dimension that was divided.
        blocks: Into how many equal blocks it had fallen.
    """
    shape = shards[0].shape
    seen = [shard.view(*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :]) for shard in shards]
    return torch.cat(seen, dim + 1).flatten(dim, dim + 1)

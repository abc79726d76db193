"""A module's parameters divided over replicas, and joined again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from lightning_hybrid.data_parallel.broadcast import broadcast_tensors
from lightning_hybrid.data_parallel.zero.param import Slot, is_divided, join, keep_rows, put, slots_of
from lightning_hybrid.distributed.dtensor import is_zero_sharded, to_local
from lightning_hybrid.distributed.mesh import Mesh

__all__ = ["listed_layers", "own_parameters", "shard_module", "unshard_module"]


def shard_module(module: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Let each replica keep its rows of every parameter; the first one's values count.

    Parameter by parameter, so that a device never has more than one whole. Parameters that were divided in an earlier
    run, or by the user, stay as they are.

    Args:
        module: The module, with placeholders for what lives elsewhere.
        mesh: The ranks.
        device: Where the rows go.
    """
    if mesh.data_parallel_size == 1:
        return
    slots = slots_of(module)
    for parameter in [each for each in module.parameters() if not each.is_meta]:
        if is_zero_sharded(parameter):
            continue
        if parameter.device != device:
            parameter.data = parameter.data.to(device)
        broadcast_tensors([to_local(parameter)], mesh.data_group)
        put(keep_rows(parameter, mesh.zero_mesh, mesh.data_rank, mesh.data_parallel_size), slots[id(parameter)])


def unshard_module(module: nn.Module) -> None:
    """Undo :func:`shard_module`, on every rank."""
    slots = slots_of(module)
    for parameter in [each for each in module.parameters() if is_divided(each)]:
        put(join(parameter), slots[id(parameter)])


def listed_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of a module: what is in its outermost lists and sequences of modules, in order."""
    for child in module.children():
        if isinstance(child, (nn.Sequential, *_LISTS)):
            yield from _entries(child)
        else:
            yield from listed_layers(child)


def _entries(container: nn.Module) -> Iterator[nn.Module]:
    """What is in a list of modules; a list in it cannot be called, so what is in that counts."""
    for entry in container.children():
        if isinstance(entry, _LISTS):
            yield from _entries(entry)
        else:
            yield entry


_LISTS = (nn.ModuleList, nn.ModuleDict)


def own_parameters(
    members: Sequence[nn.Module], layers: Mapping[int, Sequence[nn.Module]], slots: Mapping[int, Sequence[Slot]]
) -> Iterator[list[int]]:
    """The parameters that are in each layer and nowhere else; none of a layer that comes several times.

    Args:
        members: The layers.
        layers: All layers of this rank, by stage.
        slots: Where each parameter of the module is found, by identity.

    Yields:
        The identities of the parameters of each of the members.
    """
    counts = Counter(id(layer) for several in layers.values() for layer in several)
    for layer in members:
        inside = slots_of(layer) if counts[id(layer)] == 1 else {}
        yield [key for key, found in inside.items() if len(found) == len(slots[key])]

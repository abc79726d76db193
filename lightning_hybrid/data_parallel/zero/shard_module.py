"""Sharding of a module's parameters over replicas, and its reversal.

`ModuleParallelizer` calls :func:`shard_module` when it parallelizes a module, after tensor parallelism, and
:func:`unshard_module` when it gathers the module. It calls :func:`take_places` for a second run with the same module.
`strategy.layout` finds layers by :func:`listed_layers` if there are no stages, and `ZeroParameters` groups parameters
by :func:`own_parameters`. Sharding is separate from `ZeroParameters`, because a module stays sharded between runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.data_parallel.broadcast import broadcast_tensors
from lightning_hybrid.data_parallel.zero.param import Owner, find_owners, is_shard, set_parameter, shard, unshard
from lightning_hybrid.distributed.dtensor import is_zero_sharded, put_data, to_local
from lightning_hybrid.distributed.mesh import Mesh


def shard_module(
    module: nn.Module, mesh: Mesh, device: torch.device, *, experts: Container[nn.Module], shards_others: bool
) -> None:
    """Shard parameters over the replicas, with the values of the first replica. Every rank must call this.

    Parameters are sharded one by one, so that a device never holds more than one unsharded parameter. Parameters that
    an earlier run or the user has sharded are skipped, and so are placeholders. Parameters with fewer than two rows
    stay as they are, with the values of the first replica.

    Args:
        module: The module, with placeholders for tensors of other stages.
        mesh: The mesh.
        device: The device for the shards.
        experts: The modules whose parameters have a row for each expert. Layers compute with the experts of this rank.
        shards_others: True to shard the parameters of all other modules, too (ZeRO).
    """
    if mesh.num_replicas == 1:
        return
    owners = find_owners(module)
    for parameter in [each for each in module.parameters() if not each.is_meta]:
        if is_zero_sharded(parameter):
            continue
        is_expert = any(owner in experts for owner, _ in owners[id(parameter)])
        if not is_expert and not shards_others:
            continue
        if parameter.device != device:
            parameter.data = parameter.data.to(device)
        broadcast_tensors([to_local(parameter)], mesh.data_group)
        groups = mesh.experts if is_expert else mesh.zero
        own = shard(
            parameter,
            mesh.shard_mesh(groups),
            groups.rank,
            groups.size,
            expert_rank=groups.expert_rank,
            num_expert_ranks=groups.num_expert_ranks,
        )
        set_parameter(own, owners[id(parameter)])


def unshard_module(module: nn.Module) -> None:
    """Undo :func:`shard_module`. Every rank must call this, because it gathers parameters."""
    owners = find_owners(module)
    for parameter in [each for each in module.parameters() if is_shard(each)]:
        set_parameter(unshard(parameter), owners[id(parameter)])


@torch.no_grad()
def take_places(module: nn.Module, earlier: Mapping[str, nn.Parameter]) -> None:
    """Register the shards of an earlier run as parameters again, with the current values of the module.

    Optimizers and callbacks refer to these earlier shards.

    Args:
        module: The module, parallelized as in the earlier run.
        earlier: The shards of the earlier run, by all their names.
    """
    owners = find_owners(module)
    for name, parameter in list(module.named_parameters()):
        known = earlier.get(name)
        if known is None or not _lie_alike(known, parameter):
            continue
        local, values = to_local(known), to_local(parameter)
        if (local.device, local.dtype) == (values.device, values.dtype):
            local.copy_(values)
        else:
            put_data(known, values)
        known.requires_grad_(parameter.requires_grad)
        set_parameter(known, owners[id(parameter)])


def _lie_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, DTensor) or not isinstance(other, DTensor):
        return False
    is_alike = one.shape == other.shape and one.placements == other.placements and one.device_mesh == other.device_mesh
    return is_alike and to_local(one).shape == to_local(other).shape


def listed_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a module: the entries of its outermost module lists and sequences, in order."""
    for child in module.children():
        if isinstance(child, (nn.Sequential, *_LISTS)):
            yield from _entries(child)
        else:
            yield from listed_layers(child)


def _entries(container: nn.Module) -> Iterator[nn.Module]:
    """Yield the entries of a module list. A nested list cannot be called, so its entries are yielded instead."""
    for entry in container.children():
        if isinstance(entry, _LISTS):
            yield from _entries(entry)
        else:
            yield entry


_LISTS = (nn.ModuleList, nn.ModuleDict)


def own_parameters(
    members: Sequence[nn.Module], layers: Mapping[int, Sequence[nn.Module]], owners: Mapping[int, Sequence[Owner]]
) -> Iterator[list[int]]:
    """Yield the parameters that are in each layer and nowhere else; none for a layer that occurs more than once.

    Args:
        members: The layers.
        layers: All layers of this rank, by stage.
        owners: The modules and names of each parameter of the module, by the parameter's identity.

    Yields:
        The identities of the parameters of each member.
    """
    counts = Counter(id(layer) for layers_of_stage in layers.values() for layer in layers_of_stage)
    for layer in members:
        inside = find_owners(layer) if counts[id(layer)] == 1 else {}
        yield [key for key, found in inside.items() if len(found) == len(owners[key])]

"""What a rank will hold, reckoned from the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.config import HybridConfig
from lightning_hybrid.data_parallel.zero.param import RowShards, find_owners, unsharded_shape
from lightning_hybrid.data_parallel.zero.shard_module import own_parameters
from lightning_hybrid.distributed.dtensor import is_zero_sharded, to_local
from lightning_hybrid.memory.account import Held, MemoryUsage, bytes_of, held, state_bytes
from lightning_hybrid.pipeline_parallel.stage_map import StageMap, locate

__all__ = ["estimate"]


def estimate(
    module: LightningModule,
    stage_map: StageMap,
    layers: Mapping[int, Sequence[nn.Module]],
    settings: HybridConfig,
    optimizers: Iterable[Optimizer] | None,
    *,
    rank: int,
    num_replicas: int,
    num_batches: int,
    activations: int | None = None,
) -> MemoryUsage:
    """What a pipeline rank holds; of the first replica, than which no other holds more.

    Args:
        module: The user's module, whole or with placeholders for what other ranks hold.
        stage_map: Which stage holds what.
        layers: The layers of each stage of the rank.
        settings: The settings.
        optimizers: The user's; ``None`` if they are not to be tried.
        rank: The pipeline rank.
        num_replicas: The data-parallel size.
        num_batches: Of an optimizer step.
        activations: What autograd keeps, if that is known.
    """
    every = locate(module.named_parameters(remove_duplicate=False), stage_map)
    own = [location.tensor for location in every if rank in location.ranks]
    owners = find_owners(module)
    layer_of: dict[int, Hashable] = {}
    for stage, several in layers.items():
        for place, keys in enumerate(own_parameters(several, layers, owners)):
            layer_of |= dict.fromkeys(keys, (stage, place))
    members = [Held(unsharded_shape(p), p.element_size(), _gradient(p, settings), layer_of.get(id(p))) for p in own]
    zero_stage = settings.zero_stage if num_replicas > 1 else 0
    parameters, gradients = held(
        members,
        num_replicas=num_replicas,
        zero_stage=zero_stage,
        frees_early=settings.frees_early,
        once=num_batches * settings.num_microbatches == 1,
    )
    shapes = {id(parameter): _shape_of_share(parameter, num_replicas if zero_stage else 1) for parameter in own}
    named = module.named_buffers(remove_duplicate=False)
    buffers = bytes_of(buffer for name, buffer in named if rank in stage_map.ranks_of(name))
    states = None if optimizers is None else _states(optimizers, shapes)
    return MemoryUsage(parameters, gradients, states, activations, buffers)


def _gradient(parameter: Tensor, settings: HybridConfig) -> int:
    """Bytes of an element of its gradient."""
    if not parameter.requires_grad:
        return 0
    return max(4, parameter.element_size()) if settings.float32_gradients else parameter.element_size()


def _shape_of_share(parameter: Tensor, num_replicas: int) -> torch.Size:
    if is_zero_sharded(parameter):
        return to_local(parameter).shape
    rows = RowShards.of(unsharded_shape(parameter), num_replicas)
    return unsharded_shape(parameter) if rows is None else rows.shard_shape(0)


def _states(optimizers: Iterable[Optimizer], shapes: Mapping[int, torch.Size]) -> int | None:
    """The bytes of the optimizers' states for parameters of these shapes, by identity; alike ones are tried once."""
    total = 0
    known: dict[Hashable, int | None] = {}
    for optimizer, group, parameter in _grouped(optimizers):
        if id(parameter) not in shapes or not parameter.requires_grad:
            continue
        key = id(group), shapes[id(parameter)], parameter.dtype
        if key not in known:
            like = torch.empty(key[1], dtype=parameter.dtype, device="meta")
            known[key] = state_bytes(optimizer, group, like)
        found = known[key]
        if found is None:
            return None
        total += found
    return total


def _grouped(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Optimizer, dict[str, object], Tensor]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, group, parameter

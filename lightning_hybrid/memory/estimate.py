"""What a rank will hold, estimated from the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.config import HybridConfig
from lightning_hybrid.data_parallel.zero.param import RowShards, find_owners, unsharded_shape
from lightning_hybrid.data_parallel.zero.shard_module import own_parameters
from lightning_hybrid.distributed.dtensor import is_zero_sharded, to_local
from lightning_hybrid.memory import account
from lightning_hybrid.pipeline_parallel.stage_map import StageMap, locate

_MASTER_BYTES = torch.float32.itemsize


def estimate(
    module: LightningModule,
    stage_map: StageMap,
    layers: Mapping[int, Sequence[nn.Module]],
    optimizers: Iterable[Optimizer] | None,
    config: HybridConfig,
    *,
    rank: int,
    num_replicas: int,
    num_backwards: int,
    activations: int | None = None,
) -> account.MemoryUsage:
    """What a pipeline rank of the first replica will hold, than which no other replica holds more.

    Args:
        module: The user's module, with or without placeholders for what other ranks hold.
        stage_map: Which stage holds what.
        layers: The layers of each stage of the rank.
        optimizers: The user's; ``None`` if they are not to be tried.
        config: The arguments of the strategy.
        rank: The pipeline rank.
        num_replicas: The data-parallel size.
        num_backwards: The backwards of a stage before an optimizer step: microbatches times accumulated batches.
        activations: What autograd saves, if that is known.
    """
    locations = locate(module.named_parameters(remove_duplicate=False), stage_map)
    own = [location.tensor for location in locations if rank in location.ranks]
    slots = find_owners(module)
    layer_of: dict[int, Hashable] = {}
    for stage, members in layers.items():
        for position, keys in enumerate(own_parameters(members, layers, slots)):
            layer_of |= dict.fromkeys(keys, (stage, position))
    parameters, gradients = account.peak_parameter_bytes(
        [
            account.LocalParameter(
                unsharded_shape(p), p.element_size(), _grad_itemsize(p, config.float32_gradients), layer_of.get(id(p))
            )
            for p in own
        ],
        num_replicas=num_replicas,
        zero_stage=config.zero_stage,
        frees_early=config.frees_early,
        single_backward=num_backwards == 1,
    )
    shapes = {id(parameter): _shard_shape(parameter, num_replicas if config.zero_stage else 1) for parameter in own}
    if config.master_weights:  # and at the optimizer's step their gradients
        parameters += sum(_MASTER_BYTES * shape.numel() for shape in shapes.values())
        trained = (shapes[id(each)] for each in own if each.requires_grad)
        gradients = max(gradients, sum(_MASTER_BYTES * shape.numel() for shape in trained))
    named = module.named_buffers(remove_duplicate=False)
    buffers = account.storage_bytes(buffer for name, buffer in named if rank in stage_map.ranks_of(name))
    dtype = torch.float32 if config.master_weights else None
    states = None if optimizers is None else _state_bytes(optimizers, shapes, dtype)
    return account.MemoryUsage(parameters, gradients, states, activations, buffers)


def _grad_itemsize(parameter: Tensor, float32_gradients: bool) -> int:
    if not parameter.requires_grad:
        return 0
    return max(4, parameter.element_size()) if float32_gradients else parameter.element_size()


def _shard_shape(parameter: Tensor, num_replicas: int) -> torch.Size:
    if is_zero_sharded(parameter):
        return to_local(parameter).shape
    rows = RowShards.of(unsharded_shape(parameter), num_replicas)
    return unsharded_shape(parameter) if rows is None else rows.shard_shape(0)


def _state_bytes(
    optimizers: Iterable[Optimizer], shapes: Mapping[int, torch.Size], dtype: torch.dtype | None
) -> int | None:
    """The bytes of the optimizers' states; one trial for each kind.

    Args:
        optimizers: The optimizers.
        shapes: Of their parameters, by identity.
        dtype: In which they work, if that is not the one of the parameters.
    """
    total = 0
    trials: dict[Hashable, int | None] = {}
    for optimizer, group in ((each, group) for each in optimizers for group in each.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in shapes or not parameter.requires_grad:
                continue
            key = id(group), shapes[id(parameter)], dtype or parameter.dtype
            if key not in trials:
                like = torch.empty(key[1], dtype=key[2], device="meta")
                trials[key] = account.optimizer_state_bytes(optimizer, group, like)
            state_bytes = trials[key]
            if state_bytes is None:
                return None
            total += state_bytes
    return total

"""Estimate of the memory of a rank from the shapes of its tensors.

`ModuleParallelizer` makes a :class:`MemoryEstimator` for `MemoryReport`, which logs the estimate at the start of
training. `DryRunStrategy` makes one for the layout search and for the `memory` command, which call it for many layouts
of one module. So results are cached, and the shapes of full tensors are enough: no layout has to be built.

A *replica* is one copy of the model on several ranks. A *placeholder* replaces a tensor of another stage: it has a
shape, but no memory. A *stage map* assigns tensors to stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.config import Settings
from lightning_hybrid.data_parallel.zero.param import RowShards, find_owners, unsharded_shape
from lightning_hybrid.data_parallel.zero.shard_module import own_parameters
from lightning_hybrid.distributed.dtensor import is_zero_sharded, to_local
from lightning_hybrid.memory import account
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.pipeline_parallel.stage_map import StageMap, TensorStages, locate
from lightning_hybrid.tensor_parallel.experts import is_experts

_MASTER_BYTES = torch.float32.itemsize


@dataclass(frozen=True)
class HeldParameter:
    """The properties of a parameter that determine its bytes on a rank.

    Attributes:
        shape: The shape without ZeRO; with tensor parallelism, the shape of this rank's shard.
        shard: The shape of this rank's ZeRO shard; ``None`` if the parameter is not sharded by ZeRO yet.
        dtype: The dtype.
        grad_itemsize: The size in bytes of an element of the gradient; 0 without a gradient.
        layer: The number of the only layer of this rank that has the parameter; ``None`` if no layer or several layers
            have it.
        groups: The parameter groups that contain it, as (optimizer, group) numbers.
        is_expert: True if each row belongs to an expert.
    """

    shape: torch.Size
    shard: torch.Size | None
    dtype: torch.dtype
    grad_itemsize: int
    layer: int | None
    groups: tuple[tuple[int, int], ...]
    is_expert: bool

    def with_experts_of_rank(self, expert_parallel_size: int) -> HeldParameter:
        """Return the parameter with the experts of one rank only."""
        if not self.is_expert or expert_parallel_size == 1 or self.shard is not None:
            return self
        return replace(self, shape=torch.Size((self.shape[0] // expert_parallel_size, *self.shape[1:])))

    def shard_shape(self, num_shards: int) -> torch.Size:
        """Return the shape of the first replica's shard."""
        if self.shard is not None:
            return self.shard
        rows = RowShards.of(self.shape, num_shards)
        return self.shape if rows is None else rows.shard_shape(0)


@dataclass(frozen=True)
class HeldTensors:
    """The parameters and buffers of a pipeline rank. Ranks with equal layers have equal objects.

    Attributes:
        parameters: The parameters, each once.
        buffers: The bytes of the buffers.
    """

    parameters: tuple[HeldParameter, ...]
    buffers: int


class MemoryEstimator:
    """Estimates the bytes on pipeline ranks for one module. Results are cached.

    Args:
        module: The user's module, with or without placeholders for layers of other ranks.
        optimizers: The user's optimizers; ``None`` if they must not be tried, so that their states are unknown.
        float32_gradients: The setting `tuning.float32_gradients`.
    """

    def __init__(
        self, module: LightningModule, optimizers: Iterable[Optimizer] | None, *, float32_gradients: bool
    ) -> None:
        self._module = module
        self._optimizers = None if optimizers is None else list(optimizers)
        self._float32_gradients = float32_gradients
        self._owners = find_owners(module)
        experts = (part for part in module.modules() if is_experts(part))
        self._of_experts = {id(parameter) for part in experts for parameter in part.parameters(recurse=False)}
        self._groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for at, optimizer in enumerate(self._optimizers or ()):
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    self._groups[id(parameter)].append((at, number))
        self._states_of: dict[Hashable, int | None] = {}
        self._described: dict[int, HeldParameter] = {}
        # All equal objects are replaced by one object, so that its identity can be a key.
        self._held: dict[HeldTensors, HeldTensors] = {}
        self._counted: dict[Hashable, MemoryUsage] = {}
        self._latest: tuple[StageMap, list[TensorStages]] | None = None

    def held(self, stage_map: StageMap, layers: Mapping[int, Sequence[nn.Module]], rank: int) -> HeldTensors:
        """Return the parameters and buffers of a pipeline rank.

        Args:
            stage_map: The stages of the parameters.
            layers: The layers of each stage of the rank, by stage.
            rank: The pipeline rank.
        """
        layer_of: dict[int, int] = {}
        of_layers = (keys for members in layers.values() for keys in own_parameters(members, layers, self._owners))
        for number, keys in enumerate(of_layers):
            layer_of |= dict.fromkeys(keys, number)
        own = (location.tensor for location in self._located(stage_map) if rank in location.ranks)
        parameters = tuple(replace(self._alone(p), layer=layer_of.get(id(p))) for p in own)
        own_buffers = (buffer for name, buffer in self._named[1] if rank in stage_map.ranks_of(name))
        found = HeldTensors(parameters, account.storage_bytes(own_buffers))
        return self._held.setdefault(found, found)

    @cached_property
    def _named(self) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        """The parameters and the buffers of the module, by all their names. Cached: a deep module has thousands."""
        module = self._module
        named = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        return list(named[0]), list(named[1])

    def _located(self, stage_map: StageMap) -> list[TensorStages]:
        """Return the stages and ranks of each parameter. The result for the latest stage map is cached."""
        if self._latest is None or self._latest[0] is not stage_map:
            self._latest = stage_map, locate(self._named[0], stage_map)
        return self._latest[1]

    def _alone(self, parameter: Tensor) -> HeldParameter:
        """Return the properties of a parameter outside layers. Cached: reading the local shape of a DTensor is slow."""
        if id(parameter) not in self._described:
            self._described[id(parameter)] = HeldParameter(
                unsharded_shape(parameter),
                to_local(parameter).shape if is_zero_sharded(parameter) else None,
                parameter.dtype,
                _grad_itemsize(parameter, self._float32_gradients),
                None,
                tuple(self._groups.get(id(parameter), ())),
                id(parameter) in self._of_experts,
            )
        return self._described[id(parameter)]

    def usage(self, held: HeldTensors, config: Settings, *, num_shards: int, num_backwards: int) -> MemoryUsage:
        """Return an estimate of the bytes on a rank of the first replica. No other replica needs more.

        Args:
            held: The parameters and buffers of the rank, from :meth:`held`.
            config: The arguments of the strategy: its ZeRO stage, master weights, and when ZeRO frees parameters.
            num_shards: The number of replicas over which ZeRO shards; see :meth:`Settings.num_shards`.
            num_backwards: The number of backwards of a stage per optimizer step: microbatches times accumulated
                batches.

        Returns:
            The estimate, with ``None`` for the activations.
        """
        is_single = num_backwards == 1
        how = config.zero_stage, config.frees_early, config.master_weights, config.expert_parallel_size
        key = id(held), num_shards, *how, is_single
        if key not in self._counted:
            self._counted[key] = self._count(held, config, num_shards, single_backward=is_single)
        return self._counted[key]

    def _count(self, held: HeldTensors, config: Settings, num_shards: int, *, single_backward: bool) -> MemoryUsage:
        of_rank = [p.with_experts_of_rank(config.expert_parallel_size) for p in held.parameters]
        numbers = [config.num_expert_shards(num_shards) if p.is_expert else num_shards for p in of_rank]
        parameters, gradients = account.peak_parameter_bytes(
            [
                account.LocalParameter(p.shape, p.dtype.itemsize, p.grad_itemsize, p.layer, number)
                for p, number in zip(of_rank, numbers, strict=True)
            ],
            zero_stage=config.zero_stage,
            frees_early=config.frees_early,
            single_backward=single_backward,
        )
        shapes = [p.shard_shape(number) for p, number in zip(of_rank, numbers, strict=True)]
        pairs = list(zip(of_rank, shapes, strict=True))
        if config.master_weights:  # during the optimizer step, their gradients are also in memory
            parameters += sum(_MASTER_BYTES * shape.numel() for shape in shapes)
            trained = sum(_MASTER_BYTES * shape.numel() for p, shape in pairs if p.grad_itemsize)
            gradients = max(gradients, trained)
        dtype = torch.float32 if config.master_weights else None
        states = [
            self._state_bytes(group, shape, dtype or p.dtype)
            for p, shape in pairs
            for group in (p.groups if p.grad_itemsize else ())
        ]
        known = [each for each in states if each is not None]
        is_known = self._optimizers is not None and len(known) == len(states)
        return MemoryUsage(parameters, gradients, sum(known) if is_known else None, None, held.buffers)

    def _state_bytes(self, group: tuple[int, int], shape: torch.Size, dtype: torch.dtype) -> int | None:
        """Return the bytes of an optimizer's state for a parameter, tried once per shape; ``None`` if unknown."""
        key = group, shape, dtype
        if key not in self._states_of:
            assert self._optimizers is not None
            optimizer = self._optimizers[group[0]]
            like = torch.empty(shape, dtype=dtype, device="meta")
            self._states_of[key] = account.optimizer_state_bytes(optimizer, optimizer.param_groups[group[1]], like)
        return self._states_of[key]


def _grad_itemsize(parameter: Tensor, float32_gradients: bool) -> int:
    if not parameter.requires_grad:
        return 0
    return max(4, parameter.element_size()) if float32_gradients else parameter.element_size()

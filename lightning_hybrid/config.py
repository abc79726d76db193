"""The arguments of `HybridStrategy`, resolved: plain data that every wing may import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["HybridConfig", "Recompute", "UserPlan", "resolve_sizes"]

#: Which layers are recomputed: see `HybridStrategy`.
Recompute = bool | int | float | str | list[int] | list[str]

#: How layers are shared: a style by name of module, where ``*`` stands for anything between two dots.
UserPlan = Mapping[str, str | ParallelStyle]


@dataclass(frozen=True)
class HybridConfig:
    """The arguments of `HybridStrategy`, resolved, apart from the sizes of the axes."""

    schedule: str
    num_microbatches: int
    num_chunks: int
    partition: str | list[int]
    body: str | None
    tensor_parallel_plan: UserPlan | str | None
    sequence_parallel: bool
    zero_stage: int
    zero_frees: str
    recompute: Recompute
    offload: tuple[str, ...]
    float32_gradients: bool
    broadcast_batches: bool
    loss_reduction: str
    dynamic_shapes: bool
    save_distributed_checkpoint: bool
    async_save: bool
    gather_module_on_teardown: bool
    initial_weights: str | Path | None
    rank_order: str
    timeout: timedelta | None

    @property
    def frees_early(self) -> bool:
        """Whether stage 3 of ZeRO lets go of a layer after each use."""
        return self.zero_frees == "microbatch" or (self.zero_frees == "auto" and self.num_microbatches == 1)

    def cut(self, sizes: tuple[int, int, int], module: nn.Module) -> bool:
        """Whether steps run in stages, in micro-batches or on shared layers, or losses are weighted over replicas."""
        data, tensor, pipeline = sizes
        return (
            tensor > 1
            or pipeline > 1
            or self.num_microbatches > 1
            or (data > 1 and hasattr(module, "microbatch_weight"))
        )


def resolve_sizes(
    world_size: int, data_parallel_size: int | str, tensor_parallel_size: int, pipeline_parallel_size: int
) -> tuple[int, int, int]:
    """The sizes of the three axes.

    Args:
        world_size: The number of processes.
        data_parallel_size: The number of replicas, or ``"auto"`` for all that the other two axes leave.
        tensor_parallel_size: The number of ranks that share each layer.
        pipeline_parallel_size: The number of ranks that share the layers.

    Returns:
        (data, tensor, pipeline) parallel size; their product is ``world_size``.

    Raises:
        ValueError: If the sizes do not multiply to ``world_size``.

    Example:
        >>> resolve_sizes(8, "auto", 2, 2)
        (2, 2, 2)
    """
    model = tensor_parallel_size * pipeline_parallel_size
    if world_size % model:
        raise ValueError(
            f"{world_size} processes cannot be divided into model groups of tensor_parallel_size"
            f" ({tensor_parallel_size}) x pipeline_parallel_size ({pipeline_parallel_size}) = {model} ranks. Set"
            f" `Trainer(devices=..., num_nodes=...)` to a multiple of {model}, or choose sizes whose product divides"
            f" {world_size}."
        )
    data = world_size // model if data_parallel_size == "auto" else int(data_parallel_size)
    if data * model != world_size:
        raise ValueError(
            f"data_parallel_size ({data}) x tensor_parallel_size ({tensor_parallel_size}) x pipeline_parallel_size"
            f" ({pipeline_parallel_size}) = {data * model}, but there are {world_size} processes. Set"
            f" data_parallel_size={world_size // model} or 'auto', or start {data * model} processes."
        )
    return data, tensor_parallel_size, pipeline_parallel_size

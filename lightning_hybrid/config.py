"""The arguments of `HybridStrategy`, resolved."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from lightning.pytorch import LightningModule

from lightning_hybrid.memory.activation_checkpoint.policy import Recompute
from lightning_hybrid.tensor_parallel.plan import UserPlan

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
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
    measure_activations: bool
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

    def cut(self, sizes: tuple[int, int, int], module: LightningModule) -> bool:
        """Whether steps run in stages, in micro-batches or on shared layers, or losses are weighted over replicas."""
        data, tensor, pipeline = sizes
        return (
            tensor > 1
            or pipeline > 1
            or self.num_microbatches > 1
            or (data > 1 and hasattr(module, "microbatch_weight"))
        )

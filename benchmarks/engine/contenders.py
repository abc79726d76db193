"""The same step by the engine of this package and by `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from benchmarks.block import Block
from lightning_hybrid.axes import Sizes
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.pipeline_parallel.engine import Engine
from lightning_hybrid.pipeline_parallel.p2p import make_channels
from lightning_hybrid.pipeline_parallel.schedules import Placement, build

__all__ = ["CONTENDERS", "MODELS", "Step"]

Step = Callable[[], None]


def tiny(num_ranks: int, num_stages: int) -> tuple[list[nn.Module], Tensor]:
    """Two Linear(8) per rank, microbatches of 2 samples: hardly anything but overhead."""
    depth = 2 * num_ranks // num_stages
    return [nn.Sequential(*[nn.Linear(8, 8) for _ in range(depth)]) for _ in range(num_stages)], torch.randn(2, 8)


def normal(num_ranks: int, num_stages: int) -> tuple[list[nn.Module], Tensor]:
    """Eight blocks of width 256, microbatches of 64 samples."""
    depth = 8 // num_stages
    return [nn.Sequential(*[Block(256) for _ in range(depth)]) for _ in range(num_stages)], torch.randn(64, 256)


def large(num_ranks: int, num_stages: int) -> tuple[list[nn.Module], Tensor]:
    """Activations of 2 MiB and hardly any parameters."""
    stages: list[nn.Module] = [
        nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(num_stages)
    ]
    return stages, torch.randn(8192, 64)


MODELS = {"tiny": tiny, "normal": normal, "memory": large}
"""Make the stages, and the input of one microbatch."""


def our_step(name: str, layers: list[nn.Module], batch: Tensor, num_microbatches: int, num_chunks: int) -> Step:
    """A step of this package's engine."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = Mesh(Sizes(1, 1, size), device_type=batch.device.type)
    engine = Engine(rank, make_channels(mesh, Placement.in_turns(size, num_chunks), batch.device, dynamic_shapes=False))
    schedule = build(name, size, num_microbatches, num_chunks)
    last = size * num_chunks - 1

    def step() -> None:
        inputs = batch.chunk(num_microbatches)

        def compute(stage: int, microbatch: int, x: Tensor | None) -> Tensor:
            output: Tensor = layers[stage](inputs[microbatch] if x is None else x)
            return loss_of(output) if stage == last else output

        engine.run(schedule, compute, ["key"] * num_microbatches)

    return step


def torch_step(name: str, layers: list[nn.Module], batch: Tensor, num_microbatches: int, num_chunks: int) -> Step:
    """A step of torch's schedule; it learns shapes in its first step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stages = [
        PipelineStage(layers[i], i, size * num_chunks, batch.device) for i in range(rank, size * num_chunks, size)
    ]
    arguments: dict[str, Any] = {"loss_fn": loss_of, "scale_grads": False}
    schedule = (
        Schedule1F1B(stages[0], num_microbatches, **arguments)
        if name == "1f1b"
        else ScheduleInterleaved1F1B(list(stages), num_microbatches, **arguments)
    )
    inputs = [batch] if rank == 0 else []
    target = {"target": batch.new_zeros(len(batch))} if rank == size - 1 else {}

    def step() -> None:
        schedule.step(*inputs, return_outputs=False, **target)

    return step


CONTENDERS: dict[str, Callable[[str, list[nn.Module], Tensor, int, int], Step]] = {
    "ours": our_step,
    "torch": torch_step,
}
"""Make a step of (schedule, stages, batch, number of microbatches, number of chunks)."""


def loss_of(output: Tensor, target: Tensor | None = None) -> Tensor:
    """Any scalar."""
    return output.pow(2).mean()

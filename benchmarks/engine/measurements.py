"""What is measured on the ranks, and how ranks are started."""

from __future__ import annotations

import copy
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.engine.contenders import CONTENDERS, MODELS

__all__ = ["SCHEDULES", "on_ranks", "peak_growth", "time_rounds"]

SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2}
"""Chunks per rank."""
WARM_UP = 2
"""Rounds that are not counted."""


def time_rounds(
    setting: str, name: str, num_microbatches: int, num_rounds: int, num_steps: int, device_type: str = "cpu"
) -> dict[str, list[tuple[float, float]]]:
    """Return wall seconds (of the slowest rank) and CPU seconds (mean over ranks) of a step, by contender and round."""
    size, num_chunks, device = dist.get_world_size(), SCHEDULES[name], torch.device(device_type)
    torch.manual_seed(0)
    layers, example = MODELS[setting](size, size * num_chunks)
    layers = [layer.to(device) for layer in layers]
    batch = torch.randn(len(example) * num_microbatches, *example.shape[1:]).to(device)
    models = {contender: copy.deepcopy(layers) for contender in CONTENDERS}
    steps = {c: make(name, models[c], batch, num_microbatches, num_chunks) for c, make in CONTENDERS.items()}
    order = random.Random(0)  # the same on all ranks
    rounds: dict[str, list[tuple[float, float]]] = {contender: [] for contender in CONTENDERS}
    for number in range(-WARM_UP, num_rounds):
        for contender in order.sample(list(CONTENDERS), len(CONTENDERS)):
            nn.ModuleList(models[contender]).zero_grad()
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(num_steps):
                steps[contender]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            took = gather([time.perf_counter() - wall, time.process_time() - cpu])
            if number >= 0:
                slowest, mean = max(wall for wall, _ in took), statistics.fmean(cpu for _, cpu in took)
                rounds[contender].append((slowest / num_steps, mean / num_steps))
    compare_gradients(models["ours"], models["torch"])
    return rounds


def compare_gradients(ours: list[nn.Module], theirs: list[nn.Module]) -> None:
    """Both contenders have done the same work."""
    for mine, other in zip(nn.ModuleList(ours).parameters(), nn.ModuleList(theirs).parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad)


def peak_growth(contender: str, num_microbatches: int) -> list[float]:
    """How far the resident memory grows in three steps, at its peak, in MiB by rank."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    layers, example = MODELS["memory"](size, size)
    for layer in layers:
        layer(example[:1]).sum().backward()  # gradients and libraries are there before
    batch = torch.randn(len(example) * num_microbatches, *example.shape[1:])
    step = CONTENDERS[contender]("1f1b", layers, batch, num_microbatches, 1)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = resident("VmRSS")
    for _ in range(3):
        step()
    return [round(growth, 1) for (growth,) in gather([resident("VmHWM") - before])]


def resident(field: str) -> float:
    """MiB, from the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def gather(values: list[float]) -> list[list[float]]:
    """The values of every rank."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    ours = torch.tensor(values, dtype=torch.float64, device=device)
    everyone = [torch.zeros_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, ours)
    return [theirs.tolist() for theirs in everyone]


def on_ranks(size: int, function: Callable[..., Any], *args: Any, device: str = "cpu") -> Any:
    """Run a function on fresh processes, and return the result of rank 0.

    Args:
        size: The number of processes.
        function: The function, which finds the process group of all ranks.
        args: Its arguments.
        device: ``"cpu"`` for gloo, ``"cuda"`` for NCCL; there ranks may share a device.
    """
    with tempfile.TemporaryDirectory() as directory:
        results = mp.get_context("spawn").SimpleQueue()
        arguments = (size, f"file://{directory}/rendezvous", device, results, function, *args)
        mp.start_processes(_serve, arguments, size, start_method="spawn")
        return results.get()


def _serve(
    rank: int, size: int, rendezvous: str, device: str, results: Any, function: Callable[..., Any], *args: Any
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        from tests.devices import devices_of

        os.environ["RANK"] = str(rank)
        shares = devices_of("gpu", size)["devices"] == 1
        torch.cuda.set_device(0 if shares else rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size)
    result = function(*args)
    if rank == 0:
        results.put(result)
    dist.barrier()
    dist.destroy_process_group()

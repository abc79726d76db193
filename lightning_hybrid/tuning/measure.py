"""What the devices of a run and the links between them can do, measured on all ranks at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

import torch
import torch.distributed as dist

from lightning_hybrid.distributed.agreement import all_gather_values
from lightning_hybrid.distributed.process_group import device_backends
from lightning_hybrid.tuning.machine import Machine

_REPEAT = 7
_SMALL_OPERATIONS = 200
_MEETINGS = 20
_LEAST_SECONDS = 1e-7  # no operation or message is taken to be shorter


@dataclass(frozen=True)
class _Sizes:
    """What is measured with.

    Attributes:
        product: Rows and columns of the matrices of a product.
        copied: Bytes of a tensor that is copied, larger than caches.
        summed: Bytes of a tensor that is summed over ranks, likewise.
        computed: Seconds between collectives: on hosts a slice of the scheduler, for which threads wait for a core.
    """

    product: int
    copied: int
    summed: int
    computed: float


_HOST = _Sizes(384, 2**25, 2**25, 4e-3)
_DEVICE = _Sizes(4096, 2**28, 2**26, 5e-4)


def measure_machine(device: torch.device, dtype: torch.dtype, num_nodes: int, memory: float) -> Machine:
    """Measure, on every rank: each counts as much as the others, and they compute at the same time as in a run.

    Args:
        device: Of this rank.
        dtype: That layers compute in.
        num_nodes: The number of machines. With several, links are those between them, and those inside a machine have
            the figures of :class:`Machine` on CUDA devices.
        memory: Bytes of a device that a run may use.
    """
    size = dist.get_world_size()
    sizes = _DEVICE if device.type == "cuda" else _HOST
    computing = _computing(device, dtype, sizes)
    links = _links(device, dtype, sizes) if size > 1 else None
    figures = [median(column) for column in zip(*all_gather_values((*computing, *(links or ()))), strict=True)]
    flops, bandwidth, operation = figures[:3]
    found = Machine(
        memory=memory,
        ranks_per_node=size // num_nodes,
        flops=flops,
        memory_bandwidth=bandwidth,
        operation_seconds=operation,
        overlap=Machine.overlap if device.type == "cuda" else 0.0,  # messages of the host take its processor
        is_here=device.type == "cpu",
    )
    if links is None:
        return found
    latency, of_link, collective = figures[3:]
    values = vars(found) | {"network_latency": latency, "network_bandwidth": of_link, "collective_seconds": collective}
    if num_nodes == 1 or device.type != "cuda":
        values |= {"node_latency": latency, "node_bandwidth": of_link}
    return Machine(**values)


def _computing(device: torch.device, dtype: torch.dtype, sizes: _Sizes) -> tuple[float, float, float]:
    """Operations in a second of products, bytes in a second of copies, and the least that an operation takes."""
    product = _product(device, dtype, sizes)
    source = torch.zeros(sizes.copied, dtype=torch.uint8, device=device)
    target, one = torch.empty_like(source), torch.ones(1, device=device)

    def many() -> None:
        for _ in range(_SMALL_OPERATIONS):
            one + one

    return (
        2 * sizes.product**3 / median(_seconds(product, device)),
        2 * sizes.copied / median(_seconds(lambda: target.copy_(source), device)),
        median(_seconds(many, device)) / _SMALL_OPERATIONS,
    )


def _product(device: torch.device, dtype: torch.dtype, sizes: _Sizes) -> Callable[[], object]:
    matrix = torch.ones(sizes.product, sizes.product, dtype=dtype, device=device)
    return lambda: matrix @ matrix


def _links(device: torch.device, dtype: torch.dtype, sizes: _Sizes) -> tuple[float, float, float]:
    """Seconds until a message arrives, bytes in a second, and what a collective takes more, of sums over all ranks.

    The small sum counts by its shortest time, in which no thread waits for a core. How long they wait where ranks
    compute counts as the mean: that of a few milliseconds or of nothing, as it happens, is what a step adds up.
    """
    place = device if device.type in device_backends() else torch.device("cpu")
    ranks, small = dist.get_world_size(), 1 << 10
    few, many = torch.zeros(small // 4, device=place), torch.zeros(sizes.summed // 4, device=place)
    seconds = min(_seconds(lambda: dist.all_reduce(few), place))
    of_many = median(_seconds(lambda: dist.all_reduce(many), place))
    sent = 2 * (ranks - 1) / ranks * (sizes.summed - small)
    # Where others disturb it, the small one may take as long: half of the time at least is that of the bytes.
    of_bytes = max(of_many - seconds, of_many / 2)
    product = _product(device, dtype, sizes)
    number = max(all_gather_values((math.ceil(sizes.computed / min(_seconds(product, device))),)))[0]

    def compute() -> None:
        for _ in range(number):
            product()

    def compute_and_meet() -> None:
        compute()
        dist.all_reduce(few)

    alone = median(_seconds(compute, device))
    together = median([fmean(_seconds(compute_and_meet, device, _MEETINGS)) for _ in range(_REPEAT)])
    return seconds / (2 * (ranks - 1)), sent / of_bytes, max(0.0, together - alone - seconds)


def _seconds(function: Callable[[], object], device: torch.device, repeat: int = _REPEAT) -> list[float]:
    """Of calls, after two that warm up."""
    times = []
    for _ in range(repeat + 2):
        _wait(device)
        start = time.perf_counter()
        function()
        _wait(device)
        times.append(max(time.perf_counter() - start, _LEAST_SECONDS))
    return times[2:]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def usable_memory(device: torch.device, limit: float | None) -> float:
    """The bytes of a device that a run may use: what was said, or all that a CUDA device has.

    Args:
        device: Of this rank.
        limit: What was said.
    """
    if limit is not None:
        return limit
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return math.inf

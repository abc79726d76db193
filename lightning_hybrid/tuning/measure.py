"""Measurement of the devices of a run and of the links between them, on all ranks at the same time.

`choose_layout` calls :func:`measure_machine` on every rank before the search. Ranks are measured at the same time,
because they share the cores and the memory bandwidth of a node in a run, too. Figures from data sheets are not enough:
the speed of a CPU, and of a link under the run's process group backend, is only known from a measurement.
"""

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

_REPEAT = 7  # measured calls of a function
_SMALL_OPERATIONS = 200  # in one call, because a single one is shorter than the resolution of the clock
_MEETINGS = 20  # computations with a collective after each, in one of the measurements of its overhead
_LEAST_SECONDS = 1e-7  # the shortest time of an operation or a message


@dataclass(frozen=True)
class _Sizes:
    """The sizes of the operations that are measured.

    Attributes:
        product: Rows and columns of the matrices of a product.
        copied: Bytes of the tensor that is copied. It is larger than the caches.
        summed: Bytes of the tensor of an all-reduce. It is larger than the caches.
        computed: Seconds of computation between collectives. On a CPU, this is a time slice of the scheduler, for which
            a thread can wait for a core.
    """

    product: int
    copied: int
    summed: int
    computed: float


_HOST = _Sizes(384, 2**25, 2**25, 4e-3)
_DEVICE = _Sizes(4096, 2**28, 2**26, 5e-4)


def measure_machine(device: torch.device, dtype: torch.dtype, num_nodes: int, memory: float) -> Machine:
    """Measure the machine, and return the medians over all ranks, which compute at the same time as in a run.

    Every rank must call it, because it runs collectives of the default process group.

    Args:
        device: The device of this rank.
        dtype: The dtype of matrix multiplications.
        num_nodes: The number of nodes. With several nodes, the links between them are measured. On CUDA devices, links
            within a node then have the default figures of :class:`Machine`.
        memory: Bytes of a device that a run can use. This value is not exchanged between ranks.

    Returns:
        The figures. With a single rank, links have the default figures.
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
        overlap=Machine.overlap if device.type == "cuda" else 0.0,  # on a CPU, messages take compute time
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
    """Return FLOP/s of matrix products, bytes per second of copies, and the minimum time of an operation."""
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
    """Return the latency in seconds, the bandwidth in bytes per second, and the overhead of a collective in seconds.

    All three are measured with an all-reduce over all ranks. The latency is the shortest time of a small all-reduce, in
    which no thread waits for a core. The overhead is the mean time that a collective takes longer between computations:
    it is sometimes about 0 and sometimes a few milliseconds, and a step contains both.
    """
    place = device if device.type in device_backends() else torch.device("cpu")
    ranks, small = dist.get_world_size(), 1 << 10
    few, many = torch.zeros(small // 4, device=place), torch.zeros(sizes.summed // 4, device=place)
    seconds = min(_seconds(lambda: dist.all_reduce(few), place))
    of_many = median(_seconds(lambda: dist.all_reduce(many), place))
    sent = 2 * (ranks - 1) / ranks * (sizes.summed - small)
    # If other processes disturb the small all-reduce, it can take as long as the large one. Therefore, the bytes count
    # for at least half of the time.
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
    """Return the times of calls, after two calls to warm up."""
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
    """Return the bytes of a device that a run can use: the limit, all memory of a CUDA device, or infinity on a CPU.

    Args:
        device: The device of this rank.
        limit: The limit that the user set, in bytes; ``None`` without a limit.
    """
    if limit is not None:
        return limit
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return math.inf

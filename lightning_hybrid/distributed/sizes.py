"""Sizes of the axes for a number of processes, and the number of batches in an optimizer step.

`HybridStrategy` calls :func:`resolve_sizes` and :func:`check_zero_size` when it knows the number of processes, before
any group is made.
`trainer.optimization` and the commands that plan a run call :func:`accumulated_batches`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from lightning_hybrid.axes import AXES, DATA, Axis, Sizes
from lightning_hybrid.config import choices, preferred


def resolve_sizes(world_size: int, requested: Mapping[str, Any]) -> Sizes:
    """Return the first allowed sizes whose product is the number of processes.

    For each context parallel size, each pipeline parallel size is tried with each tensor parallel size in turn.

    Args:
        world_size: The number of processes.
        requested: The size of each axis, or a list of allowed sizes, by the label of the axis. A missing axis has size
            1. The size of the data axis may be ``"auto"``: the number of ranks that the other axes leave.

    Raises:
        ValueError: If no allowed sizes multiply to `world_size`.

    Example:
        >>> print(resolve_sizes(8, {"data": "auto", "tensor": 2, "pipeline": 2}))
        data 2 x tensor 2 x pipeline 2
        >>> print(resolve_sizes(6, {"data": "auto", "pipeline": [4, 2]}))
        data 3 x tensor 1 x pipeline 2
    """
    requested = {axis.label: requested.get(axis.label, 1) for axis in AXES}
    data, others = requested[DATA.label], [axis for axis in AXES if axis is not DATA]
    allowed = {axis: choices(requested[axis.label]) for axis in others}
    for numbers in itertools.product(*(allowed[axis] for axis in reversed(others))):
        found, rest = divmod(world_size, math.prod(numbers))
        if not rest and data in ("auto", found):
            by_label = {axis.label: number for axis, number in zip(reversed(others), numbers, strict=True)}
            return Sizes(data=found, **by_label)
    if max(map(len, allowed.values())) > 1:
        listed = [f"{axis.argument} {list(allowed[axis])}" for axis in reversed(others) if not axis.is_optional]
        raise ValueError(
            f"{world_size} processes cannot be divided by any combination of the allowed sizes: {', '.join(listed)},"
            f" {DATA.argument} {data!r}{_product([axis for axis in others if axis.is_optional], requested)}."
            f" Allow additional sizes whose product divides {world_size}, such as 1, or start a different number of"
            " processes. [LH107]"
        )
    model, product = math.prod(preferred(requested[axis.label]) for axis in others), _product(others, requested)
    if world_size % model:
        raise ValueError(
            f"{world_size} processes cannot be divided into groups of {model} ranks, the product of the other parallel"
            f" sizes: {product.removeprefix(' x ')} = {model}. Set `Trainer(devices=..., num_nodes=...)` so that the"
            f" number of processes is a multiple of {model}, or choose sizes whose product divides {world_size}."
            " [LH105]"
        )
    raise ValueError(
        f"{world_size} processes do not match the product of the parallel sizes: {DATA.argument} ({data}){product} ="
        f" {data * model}. Set {DATA.argument}={world_size // model} or 'auto', or start {data * model} processes."
        " [LH106]"
    )


def _product(axes: list[Axis], requested: Mapping[str, Any]) -> str:
    """Return the preferred sizes of axes as the end of a product; optional axes of size 1 are omitted."""
    sizes = {axis: preferred(requested[axis.label]) for axis in axes}
    factors = (f" x {axis.argument} ({size})" for axis, size in sizes.items() if size > 1 or not axis.is_optional)
    return "".join(factors)


def check_zero_size(zero_size: int | None, zero_stage: int, num_replicas: int) -> None:
    """Check that groups of `zero_size` replicas can shard parameters.

    Raises:
        ValueError: If the number of replicas is not a multiple of `zero_size`, or if ZeRO is not used.
    """
    if zero_size is None:
        return
    if not zero_stage:
        raise ValueError(
            f"zero_size={zero_size} sets the number of replicas over which ZeRO shards, but zero_stage is 0. Set"
            " zero_stage to 1, 2 or 3, or remove zero_size. [LH141]"
        )
    if num_replicas % zero_size:
        sizes = [size for size in range(2, num_replicas + 1) if num_replicas % size == 0]
        advice = f" Set zero_size to one of {sizes}, or remove it." if sizes else " Remove zero_size and zero_stage."
        raise ValueError(
            f"zero_size={zero_size} does not divide the number of replicas, which is {num_replicas}.{advice} [LH141]"
        )


def check_expert_parallel_size(expert_parallel_size: int, num_replicas: int) -> None:
    """Check that groups of `expert_parallel_size` replicas can share the experts.

    Raises:
        ValueError: If the number of replicas is not a multiple of `expert_parallel_size`.
    """
    if num_replicas % expert_parallel_size:
        sizes = [size for size in range(1, num_replicas + 1) if num_replicas % size == 0]
        raise ValueError(
            f"expert_parallel_size={expert_parallel_size} does not divide the number of replicas, which is"
            f" {num_replicas}. Set expert_parallel_size to one of {sizes}. [LH142]"
        )


def accumulated_batches(global_batch_size: int, batch_size: int, data_parallel_size: int) -> int:
    """Return the number of batches per replica in one optimizer step.

    Args:
        global_batch_size: The samples of one optimizer step, over all replicas.
        batch_size: The batch size of the loader on each replica.
        data_parallel_size: The number of replicas.

    Raises:
        ValueError: If the number is not an integer.

    Example:
        >>> accumulated_batches(64, 8, 2)
        4
    """
    at_once = batch_size * data_parallel_size
    if global_batch_size % at_once:
        sizes = [size for size in range(1, batch_size) if not global_batch_size % (size * data_parallel_size)]
        advice = f" set the batch size of the loader to {sizes[-1]}," if sizes else ""
        raise ValueError(
            f"global_batch_size={global_batch_size} is not a multiple of {at_once}. {data_parallel_size} replicas with"
            f" batches of {batch_size} samples process {at_once} samples at once. Set global_batch_size to a multiple"
            f" of {at_once},{advice} or choose another number of replicas. [LH111]"
        )
    return global_batch_size // at_once

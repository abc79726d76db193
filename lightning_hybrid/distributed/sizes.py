"""Sizes of the axes for a number of processes, and the batches that make an optimizer step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lightning_hybrid.config import choices, preferred


def resolve_sizes(
    world_size: int,
    data_parallel_size: int | str,
    tensor_parallel_size: int | Sequence[int],
    pipeline_parallel_size: int | Sequence[int],
    context_parallel_size: int = 1,
) -> tuple[int, int, int]:
    """The sizes of the axes that every mesh has: of those allowed, the first that go with the number of processes.

    The first pipeline parallel size is tried with each tensor parallel size in turn, then the second one, and so on.

    Args:
        world_size: The number of processes.
        data_parallel_size: The number of replicas, or ``"auto"`` for all that the other two axes leave.
        tensor_parallel_size: The number of ranks that share each layer, or those that are allowed.
        pipeline_parallel_size: The number of ranks that share the layers, or those that are allowed.
        context_parallel_size: The number of ranks that share each sequence.

    Returns:
        (data, tensor, pipeline) parallel size; their product, times ``context_parallel_size``, is ``world_size``.

    Raises:
        ValueError: If no sizes multiply to ``world_size``.

    Example:
        >>> resolve_sizes(8, "auto", 2, 2)
        (2, 2, 2)
        >>> resolve_sizes(6, "auto", 1, [4, 2])
        (3, 1, 2)
    """
    allowed = choices(pipeline_parallel_size), choices(tensor_parallel_size)
    for pipeline, tensor in itertools.product(*allowed):
        replicas, rest = divmod(world_size, tensor * pipeline * context_parallel_size)
        if not rest and data_parallel_size in ("auto", replicas):
            return replicas, tensor, pipeline
    context = f" x context_parallel_size ({context_parallel_size})" if context_parallel_size > 1 else ""
    if max(map(len, allowed)) > 1:
        raise ValueError(
            f"{world_size} processes cannot be divided by any of the allowed sizes: pipeline_parallel_size"
            f" {list(allowed[0])}, tensor_parallel_size {list(allowed[1])}, data_parallel_size {data_parallel_size!r}"
            f"{context}."
            f" Add sizes whose product divides {world_size}, such as 1, or start a different number of processes."
            " [LH107]"
        )
    pipeline, tensor = preferred(pipeline_parallel_size), preferred(tensor_parallel_size)
    model = tensor * pipeline * context_parallel_size
    if world_size % model:
        raise ValueError(
            f"{world_size} processes cannot be divided into model groups of tensor_parallel_size"
            f" ({tensor}) x pipeline_parallel_size ({pipeline}){context} = {model} ranks. Set"
            f" `Trainer(devices=..., num_nodes=...)` to a multiple of {model}, or choose sizes whose product divides"
            f" {world_size}. [LH105]"
        )
    data = int(data_parallel_size)
    raise ValueError(
        f"data_parallel_size ({data}) x tensor_parallel_size ({tensor}) x pipeline_parallel_size"
        f" ({pipeline}){context} = {data * model}, but there are {world_size} processes. Set"
        f" data_parallel_size={world_size // model} or 'auto', or start {data * model} processes. [LH106]"
    )


def accumulated_batches(global_batch_size: int, batch_size: int, data_parallel_size: int) -> int:
    """How many batches of each replica make an optimizer step.

    Args:
        global_batch_size: Samples of an optimizer step, of all replicas.
        batch_size: Of the loader, on each replica.
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
        advice = f" set the batch size to {sizes[-1]}," if sizes else ""
        raise ValueError(
            f"global_batch_size={global_batch_size} is not a multiple of {at_once}: {data_parallel_size} replicas take"
            f" a batch of {batch_size} samples each. Set it to a multiple of {at_once},{advice} or choose another"
            " number of replicas. [LH111]"
        )
    return global_batch_size // at_once

"""The sizes of the axes, from the number of processes."""

from __future__ import annotations

__all__ = ["resolve_sizes"]


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

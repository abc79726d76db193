"""The arguments of `HybridStrategy`, resolved: plain data that every wing may import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor.parallel import ParallelStyle

#: Which layers are recomputed: see `HybridStrategy`.
Recompute = bool | int | float | str | list[int] | list[str]

#: How layers are shared: a style by name of module, where ``*`` stands for anything between two dots.
UserPlan = Mapping[str, str | ParallelStyle]

# What `checks.check_arguments` reads of a field: the types of its value.
_BOOL = {"kinds": (bool,)}
_STR = {"kinds": (str,)}
_OPTIONAL_STR = {"kinds": (str, type(None))}
_OPTIONAL_TIME = {"kinds": (timedelta, type(None))}


@dataclass(frozen=True)
class HybridConfig:
    """The arguments of `HybridStrategy`, resolved, apart from the sizes of the axes."""

    schedule: str = field(metadata=_STR)
    num_microbatches: int
    auto_microbatches: bool  # whether there may be fewer of them for the sake of batch norm
    num_chunks: int
    extra_in_flight: int | list[int] = field(metadata={"kinds": (int, list, tuple)})
    partition: str | list[int] = field(metadata={"kinds": (str, list, tuple)})
    body: str | list[str] | None = field(metadata={"kinds": (str, list, tuple, type(None))})
    tensor_parallel_plan: UserPlan | str | None = field(metadata={"kinds": (str, dict, type(None))})
    sequence_parallel: bool = field(metadata=_BOOL)
    zero_stage: int
    zero_frees: str
    recompute: Recompute
    offload: tuple[str, ...]
    float32_gradients: bool = field(metadata=_BOOL)
    broadcast_batches: bool = field(metadata=_BOOL)
    loss_reduction: str
    dynamic_shapes: bool = field(metadata=_BOOL)
    save_distributed_checkpoint: bool = field(metadata=_BOOL)
    async_save: bool = field(metadata=_BOOL)
    gather_module_on_teardown: bool = field(metadata=_BOOL)
    initial_weights: str | Path | None = field(metadata={"kinds": (str, Path, type(None))})
    rank_order: str = field(metadata=_STR)
    process_group_backend: str | None = field(metadata=_OPTIONAL_STR)
    timeout: timedelta | None = field(metadata=_OPTIONAL_TIME)
    stall_timeout: timedelta | None = field(metadata=_OPTIONAL_TIME)
    lease: timedelta | None = field(metadata=_OPTIONAL_TIME)
    detect_desync: bool = field(metadata=_BOOL)
    on_nonfinite: str

    def extra_of_links(self, num_ranks: int) -> tuple[int, ...]:
        """:attr:`extra_in_flight` for each link between neighbouring ranks of a pipeline."""
        extra = self.extra_in_flight
        return (extra,) * (num_ranks - 1) if isinstance(extra, int) else tuple(extra)

    @property
    def seconds_to_time_out(self) -> float:
        """How long a collective may take."""
        return (self.timeout or default_pg_timeout).total_seconds()

    @property
    def seconds_to_stall(self) -> float | None:
        """How long nothing may finish: some time before a collective gives up, after which nobody can be asked."""
        if self.stall_timeout is None:
            return None
        return min(self.stall_timeout.total_seconds(), 0.8 * self.seconds_to_time_out)

    @property
    def seconds_of_lease(self) -> float | None:
        """How long a rank may give no sign."""
        return None if self.lease is None else self.lease.total_seconds()

    @property
    def shares_casts(self) -> bool:
        """Whether the microbatches of a step share what autocast makes of parameters: not where these are let go of."""
        return self.zero_stage < 3 or not self.frees_early

    @property
    def frees_early(self) -> bool:
        """Whether stage 3 of ZeRO lets go of a layer after each use."""
        return self.zero_frees == "microbatch" or (self.zero_frees == "auto" and self.num_microbatches == 1)


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

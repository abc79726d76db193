"""The arguments of `HybridStrategy`, resolved: plain data that every wing may import."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
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
    extra_in_flight: int | list[int] | str = field(metadata={"kinds": (int, list, tuple, str)})
    partition: str | list[int] = field(metadata={"kinds": (str, list, tuple)})
    body: str | list[str] | None = field(metadata={"kinds": (str, list, tuple, type(None))})
    tensor_parallel_plan: UserPlan | str | None = field(metadata={"kinds": (str, dict, type(None))})
    sequence_parallel: bool = field(metadata=_BOOL)
    zero_stage: int
    global_batch_size: int | None
    zero_frees: str
    recompute: Recompute
    offload: tuple[str, ...]
    float32_gradients: bool = field(metadata=_BOOL)
    master_weights: bool = field(metadata=_BOOL)
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
        """:attr:`extra_in_flight` for each link between neighbouring ranks of a pipeline; with ``"auto"`` none yet."""
        extra = 0 if isinstance(self.extra_in_flight, str) else self.extra_in_flight
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


def choices(size: int | Sequence[int]) -> tuple[int, ...]:
    """The sizes that an axis may have, in order of preference."""
    return (size,) if isinstance(size, int) else tuple(size)


def preferred(size: int | Sequence[int]) -> int:
    """The size of an axis where the number of processes is not known yet: the first one that it may have."""
    return choices(size)[0]


def usual_microbatches(pipeline_parallel_size: int) -> int:
    """How many microbatches ``"auto"`` is."""
    return 4 * pipeline_parallel_size if pipeline_parallel_size > 1 else 1


def resolve_sizes(
    world_size: int,
    data_parallel_size: int | str,
    tensor_parallel_size: int | Sequence[int],
    pipeline_parallel_size: int | Sequence[int],
) -> tuple[int, int, int]:
    """The sizes of the three axes: of those that are allowed, the first that go with the number of processes.

    The first pipeline parallel size is tried with each tensor parallel size in turn, then the second one, and so on.

    Args:
        world_size: The number of processes.
        data_parallel_size: The number of replicas, or ``"auto"`` for all that the other two axes leave.
        tensor_parallel_size: The number of ranks that share each layer, or those that are allowed.
        pipeline_parallel_size: The number of ranks that share the layers, or those that are allowed.

    Returns:
        (data, tensor, pipeline) parallel size; their product is ``world_size``.

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
        replicas, rest = divmod(world_size, tensor * pipeline)
        if not rest and data_parallel_size in ("auto", replicas):
            return replicas, tensor, pipeline
    if max(map(len, allowed)) > 1:
        raise ValueError(
            f"{world_size} processes cannot be divided by any of the sizes that are allowed: pipeline_parallel_size"
            f" {list(allowed[0])}, tensor_parallel_size {list(allowed[1])}, data_parallel_size {data_parallel_size!r}."
            f" Add sizes whose product divides {world_size}, such as 1, or start another number of processes."
        )
    pipeline, tensor = preferred(pipeline_parallel_size), preferred(tensor_parallel_size)
    model = tensor * pipeline
    if world_size % model:
        raise ValueError(
            f"{world_size} processes cannot be divided into model groups of tensor_parallel_size"
            f" ({tensor}) x pipeline_parallel_size ({pipeline}) = {model} ranks. Set"
            f" `Trainer(devices=..., num_nodes=...)` to a multiple of {model}, or choose sizes whose product divides"
            f" {world_size}."
        )
    data = int(data_parallel_size)
    raise ValueError(
        f"data_parallel_size ({data}) x tensor_parallel_size ({tensor}) x pipeline_parallel_size"
        f" ({pipeline}) = {data * model}, but there are {world_size} processes. Set"
        f" data_parallel_size={world_size // model} or 'auto', or start {data * model} processes."
    )


def accumulated_batches(global_batch_size: int, batch_size: int, data_parallel_size: int) -> int:
    """How many batches of each replica make an optimizer step.

    Args:
        global_batch_size: Samples of an optimizer step, of all replicas.
        batch_size: Of the loader, on each replica.
        data_parallel_size: The number of replicas.

    Raises:
        ValueError: If that is no whole number.

    Example:
        >>> accumulated_batches(64, 8, 2)
        4
    """
    at_once = batch_size * data_parallel_size
    if global_batch_size % at_once:
        sizes = [size for size in range(1, batch_size) if not global_batch_size % (size * data_parallel_size)]
        advice = f" or let a batch have {sizes[-1]} samples" if sizes else ""
        raise ValueError(
            f"global_batch_size={global_batch_size} is no whole number of batches: the loader has {batch_size} samples"
            f" in a batch, and there are {data_parallel_size} replicas, so {at_once} samples at a time. Make it a"
            f" multiple of {at_once},{advice} or choose another number of replicas."
        )
    return global_batch_size // at_once

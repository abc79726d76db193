"""The arguments of `HybridStrategy`, resolved: plain data that every wing may import."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import ParamSpec

from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor.parallel import ParallelStyle

_P = ParamSpec("_P")

#: Which layers are recomputed: see `HybridStrategy`.
Recompute = bool | int | float | str | list[int] | list[str]

#: How layers are shared: a style by name of module, or a layout by name of parameter or buffer, where ``*`` stands for
#: anything between two dots.
UserPlan = Mapping[str, str | Mapping[str, str] | ParallelStyle]

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
    searched: tuple[str, ...]  # arguments that are found at the start; until then others stand for them
    memory_limit: float | None  # bytes of a device that what is found may use
    extra_in_flight: int | list[int] | str = field(metadata={"kinds": (int, list, tuple, str)})
    partition: str | list[int] = field(metadata={"kinds": (str, list, tuple)})
    body: str | list[str] | None = field(metadata={"kinds": (str, list, tuple, type(None))})
    tensor_parallel_mode: str
    tensor_parallel_depth: int
    tensor_parallel_plan: UserPlan | str | None = field(metadata={"kinds": (str, dict, type(None))})
    sequence_parallel: bool = field(metadata=_BOOL)
    context_parallel_size: int
    context_parallel: str = field(metadata=_STR)
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
    gather_module_on_teardown: bool | str = field(metadata={"kinds": (bool, str)})
    initial_weights: str | Path | None = field(metadata={"kinds": (str, Path, type(None))})
    rank_order: str = field(metadata=_STR)
    start_method: str
    process_group_backend: str | None = field(metadata=_OPTIONAL_STR)
    timeout: timedelta | None = field(metadata=_OPTIONAL_TIME)
    stall_timeout: timedelta | None = field(metadata=_OPTIONAL_TIME)
    heartbeat_timeout: timedelta | None = field(metadata=_OPTIONAL_TIME)
    detect_desync: bool = field(metadata=_BOOL)
    compare_microbatches: bool = field(metadata=_BOOL)
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
    def seconds_of_heartbeat(self) -> float | None:
        """How long a rank may give no sign."""
        return None if self.heartbeat_timeout is None else self.heartbeat_timeout.total_seconds()

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


def with_context_axis(rank_order: str, context_parallel_size: int) -> str:
    """The order of the axes; that of context parallelism, where there is any, just outside of the tensor-parallel one.

    Args:
        rank_order: As the user gives it; it may leave that axis out.
        context_parallel_size: The number of ranks that share each sequence.

    Example:
        >>> with_context_axis("pp-dp-tp", 2), with_context_axis("cp-pp-dp-tp", 1)
        ('pp-dp-cp-tp', 'pp-dp-tp')
    """
    axes = [axis for axis in rank_order.split("-") if axis != "cp" or context_parallel_size > 1]
    if context_parallel_size > 1 and "cp" not in axes:
        axes.insert(axes.index("tp"), "cp")
    return "-".join(axes)


def usual_microbatches(pipeline_parallel_size: int) -> int:
    """How many microbatches ``"auto"`` is."""
    return 4 * pipeline_parallel_size if pipeline_parallel_size > 1 else 1


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
            f"{world_size} processes cannot be divided by any of the sizes that are allowed: pipeline_parallel_size"
            f" {list(allowed[0])}, tensor_parallel_size {list(allowed[1])}, data_parallel_size {data_parallel_size!r}"
            f"{context}."
            f" Add sizes whose product divides {world_size}, such as 1, or start another number of processes."
        )
    pipeline, tensor = preferred(pipeline_parallel_size), preferred(tensor_parallel_size)
    model = tensor * pipeline * context_parallel_size
    if world_size % model:
        raise ValueError(
            f"{world_size} processes cannot be divided into model groups of tensor_parallel_size"
            f" ({tensor}) x pipeline_parallel_size ({pipeline}){context} = {model} ranks. Set"
            f" `Trainer(devices=..., num_nodes=...)` to a multiple of {model}, or choose sizes whose product divides"
            f" {world_size}."
        )
    data = int(data_parallel_size)
    raise ValueError(
        f"data_parallel_size ({data}) x tensor_parallel_size ({tensor}) x pipeline_parallel_size"
        f" ({pipeline}){context} = {data * model}, but there are {world_size} processes. Set"
        f" data_parallel_size={world_size // model} or 'auto', or start {data * model} processes."
    )


#: How tensor-parallel ranks are arranged.
TENSOR_PARALLEL_MODES = ("1d", "2d", "2.5d", "3d")


@dataclass(frozen=True)
class BlockLayout:
    """How an activation, seen as a matrix, lies in blocks over a grid of ranks.

    Attributes:
        rows: The axes over which rows (samples) are divided, the outermost first.
        features: The axis over which features are divided.
    """

    rows: tuple[str, ...]
    features: str


@dataclass(frozen=True)
class GridShape:
    """The arrangement of tensor-parallel ranks in two or three dimensions.

    An axis is called as the groups of ranks along it are in the papers and in Colossal-AI. 2 x 2 ranks, and 2 x 2 x 2::

        2d, 2.5d (depth 2)                      3d
        depth 0   0 1    depth 1   4 5          output 0   0 1    output 1   4 5      weight: to the right
                  2 3              6 7                     2 3               6 7      input:  down

        row      [0,1] [2,3] [4,5] [6,7]        weight   [0,1] [2,3] [4,5] [6,7]
        column   [0,2] [1,3] [4,6] [5,7]        input    [0,2] [1,3] [4,6] [5,7]
        depth    [0,4] [1,5] [2,6] [3,7]        output   [0,4] [1,5] [2,6] [3,7]

    Attributes:
        mode: One of :data:`TENSOR_PARALLEL_MODES`, but for the first.
        axes: Names and sizes, the outermost first.
        outer: The layout of what enters a pair of layers, and leaves it.
        inner: The layout between the two layers of a pair.
    """

    mode: str
    axes: tuple[tuple[str, int], ...]
    outer: BlockLayout
    inner: BlockLayout

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.parts(name for name, _ in self.axes)

    def parts(self, names: Iterable[str]) -> int:
        """Into how many parts several axes divide something."""
        return math.prod(dict(self.axes)[name] for name in names)

    def index(self, rank: int, names: Iterable[str]) -> int:
        """Which of these parts a tensor-parallel rank has."""
        index = 0
        coordinates = self.coordinates(rank)
        for name in names:
            index = index * dict(self.axes)[name] + coordinates[name]
        return index

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a tensor-parallel rank is, by axis."""
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return found

    def ranks_along(self, names: Collection[str]) -> list[int]:
        """The tensor-parallel ranks that differ from the first one along some axes alone."""
        coordinates = [self.coordinates(rank) for rank in range(self.size)]
        others = [name for name, _ in self.axes if name not in names]
        return [rank for rank, at in enumerate(coordinates) if not any(at[name] for name in others)]

    @property
    def mesh_axes(self) -> dict[str, tuple[str, ...]]:
        """The axes of the mesh over which parameters lie, by name.

        Of a cube, a weight has one of its sides divided over ``"output"``, and the other over ``"input"`` and
        ``"weight"``, which are one axis there: what torch finds out about tensors over three axes takes it minutes.
        """
        parts = [("output",), ("input", "weight")] if self.mode == "3d" else [(name,) for name, _ in self.axes]
        return {"_".join(axes): axes for axes in parts}

    def groups(self) -> list[tuple[str, ...]]:
        """The axes along which ranks work together: each alone, and those over which the rows of a layout lie."""
        rows = [layout.rows for layout in (self.outer, self.inner)]
        return list(dict.fromkeys([*((name,) for name, _ in self.axes), *rows]))


def grid_shape(mode: str, size: int, depth: int = 1) -> GridShape | None:
    """The arrangement of tensor-parallel ranks; ``None`` for ``"1d"``, where they are in a line, and for a single one.

    Args:
        mode: One of :data:`TENSOR_PARALLEL_MODES`.
        size: The number of tensor-parallel ranks.
        depth: Of ``"2.5d"``: how many squares there are.

    Raises:
        ValueError: If they cannot be arranged so.

    Example:
        >>> grid_shape("2.5d", 8, 2).axes
        (('depth', 2), ('column', 2), ('row', 2))
    """
    if mode == "1d" or size == depth == 1:
        return None
    power, number = (3, 1) if mode == "3d" else (2, depth)
    edge = next(edge for edge in itertools.count(1) if number * (edge + 1) ** power > size)
    if number * edge**power != size:
        form = {"2d": "a square", "2.5d": f"tensor_parallel_depth ({depth}) x a square", "3d": "a cube"}[mode]
        near = [number * each**power for each in (edge, edge + 1)]
        near = near[:1] if near[0] > size else near
        raise ValueError(
            f"tensor_parallel_mode={mode!r} needs a tensor_parallel_size that is {form}, got {size}. The nearest"
            f" {'is' if len(near) == 1 else 'are'} {' and '.join(map(str, near))}."
        )
    if mode == "3d":
        outer, inner = BlockLayout(("input", "weight"), "output"), BlockLayout(("output", "weight"), "input")
        return GridShape(mode, tuple((name, edge) for name in ("output", "input", "weight")), outer, inner)
    layout = BlockLayout(("depth", "column") if mode == "2.5d" else ("column",), "row")
    axes = (("depth", depth),) if mode == "2.5d" else ()
    return GridShape(mode, (*axes, ("column", edge), ("row", edge)), layout, layout)


def check_grid(mode: str, sizes: Iterable[int], depth: int, *, sequence_parallel: bool) -> None:
    """Check how tensor-parallel ranks are to be arranged.

    Args:
        mode: One of :data:`TENSOR_PARALLEL_MODES`.
        sizes: The numbers of ranks that are allowed.
        depth: As of :func:`grid_shape`.
        sequence_parallel: Whether sequences are divided.

    Raises:
        ValueError: If these do not go together.
    """
    if depth > 1 and mode != "2.5d":
        raise ValueError(
            f"tensor_parallel_depth={depth} is a number of squares, as tensor_parallel_mode='2.5d' has several; got"
            f" tensor_parallel_mode={mode!r}. Leave it out, or use '2.5d'."
        )
    if mode != "1d" and sequence_parallel:
        raise ValueError(
            f"sequence_parallel=True divides activations over ranks in a line; tensor_parallel_mode={mode!r} has them"
            " divided already, over samples and features. Leave one of the two out."
        )
    for size in sizes:
        grid_shape(mode, size, depth)


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
            f"global_batch_size={global_batch_size} is not a multiple of {at_once}: {data_parallel_size} replicas take"
            f" a batch of {batch_size} samples each. Set it to a multiple of {at_once},{advice} or choose another"
            " number of replicas."
        )
    return global_batch_size // at_once


def suggests_names(init: Callable[_P, None]) -> Callable[_P, None]:
    """Let a constructor name the argument that an unknown one is probably meant to be.

    Args:
        init: An ``__init__`` whose arguments all have names.
    """
    names = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        for name in kwargs:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                advice = f"did you mean {close[0]!r}?" if close else f"There are {', '.join(names)}."
                raise TypeError(f"HybridStrategy has no argument {name!r}; {advice}")
        init(*args, **kwargs)

    return checked

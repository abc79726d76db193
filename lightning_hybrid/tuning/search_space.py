"""The layouts that a search compares.

:func:`layouts` makes them for :func:`~.search.search`. A :class:`SearchSpace` has the values of each argument: at the
start of a run, the values of the open arguments (:func:`search_space`), and all values for
``lightning-hybrid suggest``. The values cannot simply be multiplied, because some exclude each other, such as grids of
tensor-parallel ranks and context parallelism.

A *kind* of context parallelism is a value of ``context_parallel``. An *arrangement* of tensor-parallel ranks is a mode
and a depth: a line (``"1d"``), or a grid (``"2d"``, ``"2.5d"``, ``"3d"``). A *chunk* is one of the stages of a pipeline
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from lightning_hybrid.axes import AXES, CONTEXT, DATA, PIPELINE, TENSOR, Sizes, complete_order
from lightning_hybrid.config import Settings, choices, usual_microbatches
from lightning_hybrid.distributed.arrangement import arrange
from lightning_hybrid.strategy.open_arguments import MOST_CHUNKS, RECOMPUTE
from lightning_hybrid.tensor_parallel.context_parallel.attention import KINDS
from lightning_hybrid.tuning.candidates import Layout, Step, arrangements, divisors

#: Schedules, with the number of chunks of a rank.
SCHEDULES_TRIED = (
    ("1f1b", 1),
    ("gpipe", 1),
    *(("interleaved_1f1b", chunks) for chunks in range(2, MOST_CHUNKS + 1)),
)


@dataclass(frozen=True)
class SearchSpace:
    """The values of each argument that a search tries; ``None`` for all values.

    Attributes:
        data: Numbers of replicas.
        tensor: Tensor-parallel sizes.
        tensor_mode: ``tensor_parallel_mode`` and ``tensor_parallel_depth``. Sizes that do not match them are not tried.
        pipeline: Pipeline-parallel sizes.
        context: Context-parallel sizes.
        context_kinds: Values of ``context_parallel``.
        num_microbatches: Returns the number of microbatches for a number of pipeline ranks. If a replica's batch has
            fewer samples, their number is used.
        schedules: Schedules, with the number of chunks of a rank.
        zero_stages: ZeRO stages, if there are several replicas. With one replica, only stage 0 is tried.
        zero_sizes: The value of ``zero_size``, where ``None`` means all replicas; empty to try all replicas, and the
            replicas of one node.
        expert_sizes: Values of ``expert_parallel_size``. Only divisors of the number of replicas are tried.
        recompute: Kinds of recomputation: False, ``"selective"`` or True.
        some_layers: If True, layouts that fit only with recomputation are also tried with the fewest recomputed layers.
    """

    data: Collection[int] | None = None
    tensor: Collection[int] | None = None
    tensor_mode: tuple[str, int] | None = None
    pipeline: Collection[int] | None = None
    context: Collection[int] | None = None
    context_kinds: Sequence[str] = KINDS
    num_microbatches: Callable[[int], int] | None = None
    schedules: Sequence[tuple[str, int]] | None = None
    zero_stages: Sequence[int] = (0, 1, 2, 3)
    zero_sizes: Sequence[int | None] = ()
    expert_sizes: Sequence[int] = (1,)
    recompute: Sequence[bool | str] = RECOMPUTE
    some_layers: bool = False

    def sizes(self, num_ranks: int, max_tensor: int, max_context: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the data, tensor, pipeline and context sizes for a number of ranks.

        Args:
            num_ranks: The product of the sizes.
            max_tensor: The largest tensor-parallel size, unless `tensor` lists the sizes.
            max_context: The largest context-parallel size, unless `context` lists the sizes.
        """
        for tensor in divisors(num_ranks):
            if tensor not in self.tensor if self.tensor is not None else tensor > max_tensor:
                continue
            for context in divisors(num_ranks // tensor):
                if context not in self.context if self.context is not None else context > max_context:
                    continue
                for pipeline in divisors(num_ranks // tensor // context):
                    data = num_ranks // tensor // context // pipeline
                    if _is_in(pipeline, self.pipeline) and _is_in(data, self.data):
                        yield data, tensor, pipeline, context

    def kinds_of(self, context: int) -> Sequence[str]:
        """Return the kinds of attention communication for a context-parallel size."""
        return KINDS[:1] if context == 1 else self.context_kinds

    def arrangements_of(self, tensor: int, context: int) -> Sequence[tuple[str, int]]:
        """Return the arrangements of tensor-parallel ranks for two sizes; empty if the mode excludes them."""
        if self.tensor_mode is None:
            return arrangements(tensor)[: 1 if context > 1 else None]
        mode, depth = self.tensor_mode
        try:
            return [("1d", 1) if arrange(mode, tensor, depth).is_line else self.tensor_mode]
        except ValueError:
            return []

    def zeros_of(self, sizes: Sizes, rank_order: str, ranks_per_node: int) -> Iterator[tuple[int, int | None]]:
        """Yield the ZeRO stages with the numbers of replicas over which they shard.

        Args:
            sizes: The number of ranks along each axis.
            rank_order: The order of the axes, as for :func:`.complete_order`.
            ranks_per_node: The number of ranks on a node.
        """
        inside = ranks_per_node // sizes.stride(DATA, complete_order(rank_order, sizes.by_key))
        found = self.zero_sizes or ((None, inside) if 1 < inside < sizes.data else (None,))
        for stage in self.zero_stages if sizes.data > 1 else (0,):
            if stage:
                yield from ((stage, size) for size in found if size is None or sizes.data % size == 0)
            elif None in found:
                yield stage, None

    def schedules_of(self, pipeline: int) -> Sequence[tuple[str, int]]:
        """Return the schedules for a number of pipeline ranks, with the number of chunks of a rank."""
        return SCHEDULES_TRIED[:1] if pipeline == 1 else self.schedules or SCHEDULES_TRIED


EVERYTHING = SearchSpace()


def _is_in(value: int, allowed: Collection[int] | None) -> bool:
    return allowed is None or value in allowed


def layouts(
    num_ranks: int, step: Step, max_tensor: int, ranks_per_node: int, space: SearchSpace = EVERYTHING
) -> Iterator[Layout]:
    """Yield every layout of a search space.

    A layout combines sizes whose product is the number of ranks, with a number of replicas that is possible for the
    step, and a value of each other argument. If the space does not restrict them, the values are: ``p``, ``2 p``,
    ``4 p``, ... microbatches, up to one for each sample of a replica; 1F1B and GPipe with one chunk on each rank, and
    interleaved 1F1B with two to four; each ZeRO stage if there are several replicas, over all replicas or over those of
    a node; and every kind of recomputation. With context parallelism, every kind of attention communication is tried.
    With tensor parallelism and without context parallelism, every arrangement of the ranks is tried.

    Args:
        num_ranks: The number of ranks of the run.
        step: The samples of a step.
        max_tensor: The largest tensor-parallel size, unless the space lists the sizes.
        ranks_per_node: The number of ranks on a node. It is the largest context-parallel size, unless the space lists
            the sizes.
        space: The values that are tried.
    """
    for data, tensor, pipeline, context in space.sizes(num_ranks, max_tensor, ranks_per_node):
        if not step.is_possible(data):
            continue
        batch = step.batch(data)
        if space.num_microbatches is None:
            numbers = microbatch_numbers(pipeline, batch)
        else:
            numbers = [min(space.num_microbatches(pipeline), batch)]
        sizes = Sizes(data, tensor, pipeline, context)
        options = product(
            numbers,
            space.schedules_of(pipeline),
            space.zeros_of(sizes, step.rank_order, ranks_per_node),
            space.recompute,
            space.kinds_of(context),
            space.arrangements_of(tensor, context),
            [experts for experts in space.expert_sizes if data % experts == 0],
        )
        for number, (schedule, chunks), (zero, size), recompute, kind, mode, experts in options:
            others = number, schedule, chunks, zero, recompute, (), context, kind, *mode, size, experts
            yield Layout(data, tensor, pipeline, *others)


def microbatch_numbers(pipeline: int, samples: int) -> list[int]:
    """Return the numbers of microbatches to try: ``p``, ``2 p``, ... or one for each sample if there are fewer.

    Args:
        pipeline: The number of pipeline ranks.
        samples: The number of samples in the batch.
    """
    if samples < pipeline:
        return [samples]
    numbers = [pipeline]
    while 2 * numbers[-1] <= samples:
        numbers.append(2 * numbers[-1])
    return numbers


def search_space(config: Settings, sizes: Mapping[str, Any], expert_sizes: Sequence[int] = (1,)) -> SearchSpace:
    """Return the search space for the open arguments of a configuration. All other arguments keep their values.

    Args:
        config: The arguments of `HybridStrategy`, with provisional values of the open ones.
        sizes: The sizes that the user set, by the labels of the axes: a number, a list of the allowed numbers, or
            ``"auto"``.
        expert_sizes: The values of ``expert_parallel_size`` that the module allows.
    """
    searched = config.searched
    data = sizes[DATA.label]
    tried = {
        axis: None if axis.argument in searched and not isinstance(size, (list, tuple)) else choices(size)
        for axis, size in ((axis, sizes[axis.label]) for axis in AXES if axis is not DATA)
    }
    given_mode = config.tensor_parallel_mode, config.tensor_parallel_depth
    given, has_extra = (config.schedule, config.num_chunks), any(config.extra_of_links(2))
    schedules = [
        pair
        for pair in SCHEDULES_TRIED
        if ("schedule" in searched or pair[0] == given[0]) and ("num_chunks" in searched or pair[1] == given[1])
        if pair[0] != "gpipe" or not has_extra  # with GPipe, all microbatches are in flight anyway
    ]
    return SearchSpace(
        data=None if data == "auto" else (data,),
        tensor=tried[TENSOR],
        tensor_mode=None if "tensor_parallel_mode" in searched else given_mode,
        pipeline=tried[PIPELINE],
        context=tried[CONTEXT],
        context_kinds=KINDS if "context_parallel" in searched else (config.context_parallel,),
        num_microbatches=None if "num_microbatches" in searched else _microbatches(config),
        schedules=schedules or [given],
        zero_stages=range(4) if "zero_stage" in searched else (config.zero_stage,),
        zero_sizes=() if "zero_size" in searched else (config.zero_size,),
        expert_sizes=expert_sizes if "expert_parallel_size" in searched else (config.expert_parallel_size,),
        recompute=RECOMPUTE if "recompute" in searched else (_supported(config.recompute),),
        some_layers="recompute" in searched,
    )


def _microbatches(config: Settings) -> Any:
    """Return the fixed number of microbatches as a function of the number of pipeline ranks."""
    return usual_microbatches if config.auto_microbatches else lambda pipeline: config.num_microbatches


def _supported(recompute: Any) -> bool | str:
    assert isinstance(recompute, (bool, str)), "resolve_open rejects other values"
    return recompute

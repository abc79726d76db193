"""Candidates of a layout search, and the training step for which their costs are compared.

:func:`search_space.layouts` makes the candidates, and the cost model reads them::

    suggest                          Step         every layout trains on the same number of samples
    suggest --keep-batch,            LoaderStep   every replica trains on one batch of the loader, whose size a run
    layout="auto"                                 cannot change; the search compares the time per sample
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from lightning_hybrid.axes import AXES, Sizes
from lightning_hybrid.distributed.sizes import accumulated_batches

#: The number of tensor-parallel ranks, ``tensor_parallel_mode`` and ``tensor_parallel_depth``.
TensorKey = tuple[int, str, int]
NO_TENSOR: TensorKey = (1, "1d", 1)
#: The number of context-parallel ranks and ``context_parallel``.
ContextKey = tuple[int, str]
NO_CONTEXT: ContextKey = (1, "ulysses")


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@dataclass(frozen=True)
class Layout:
    """A layout: sizes and other arguments of `HybridStrategy`.

    Attributes:
        data: The number of replicas.
        tensor: `tensor_parallel_size`.
        pipeline: `pipeline_parallel_size`.
        num_microbatches: As in `HybridStrategy`, like `schedule`, `num_chunks` and `zero_stage`.
        recompute: As in `HybridStrategy`, or the number of recomputed layers of each stage.
        extra_in_flight: The number of additional microbatches in flight over each link between pipeline ranks, which
            hide its latency; empty if no link needs any.
        context: `context_parallel_size`.
        context_kind: `context_parallel`.
        tensor_mode: `tensor_parallel_mode`.
        tensor_depth: `tensor_parallel_depth`.
        zero_size: As in `HybridStrategy`; ``None`` for all replicas.
        experts: `expert_parallel_size`.
    """

    data: int
    tensor: int
    pipeline: int
    num_microbatches: int = 1
    schedule: str = "1f1b"
    num_chunks: int = 1
    zero_stage: int = 0
    recompute: bool | str | tuple[int, ...] = False
    extra_in_flight: tuple[int, ...] = ()
    context: int = 1
    context_kind: str = "ulysses"
    tensor_mode: str = "1d"
    tensor_depth: int = 1
    zero_size: int | None = None
    experts: int = 1

    @cached_property
    def sizes(self) -> Sizes:
        """The number of ranks along each axis."""
        return Sizes(**{axis.label: getattr(self, axis.label) for axis in AXES})

    @property
    def num_shards(self) -> int:
        """The number of replicas over which ZeRO shards a parameter; 1 if ZeRO is not used."""
        return (self.zero_size or self.data) if self.zero_stage else 1

    @property
    def tensor_key(self) -> TensorKey:
        """The number of tensor-parallel ranks and their arrangement."""
        return self.tensor, self.tensor_mode, self.tensor_depth

    @property
    def context_key(self) -> ContextKey:
        """The number of context-parallel ranks and the kind of attention communication."""
        return self.context, self.context_kind

    @property
    def stages_key(self) -> tuple[Hashable, ...]:
        """The fields that determine the costs of its stages for a microbatch of a given size."""
        return *self.tensor_key, *self.context_key, self.pipeline, self.num_chunks, self.recompute

    @property
    def num_ranks(self) -> int:
        """The number of processes of the layout."""
        return self.sizes.num_ranks

    @property
    def schedule_key(self) -> tuple[str, int, int, int, tuple[int, ...]]:
        """The fields that determine the schedule: the arguments of :func:`schedule_cache.schedule_of`."""
        return self.schedule, self.pipeline, self.num_microbatches, self.num_chunks, self.extra_in_flight


def arrangements(tensor: int) -> list[tuple[str, int]]:
    """Return the possible arrangements of tensor-parallel ranks: ``tensor_parallel_mode`` and depth.

    Squares and cubes have at least two ranks on each side, and ``"2.5d"`` has at least two squares.

    Args:
        tensor: The number of tensor-parallel ranks.

    Example:
        >>> arrangements(8)
        [('1d', 1), ('2.5d', 2), ('3d', 1)]
    """
    found = [("1d", 1)]
    sides = range(2, tensor + 1)
    found += [("2d", 1) for side in sides if side**2 == tensor]
    found += [("2.5d", tensor // side**2) for side in sides if tensor % side**2 == 0 and tensor > side**2]
    return found + [("3d", 1) for side in sides if side**3 == tensor]


@dataclass(frozen=True)
class Step:
    """An optimizer step that trains on the same number of samples under every layout.

    Attributes:
        samples: The number of samples that all replicas together process between two accumulations.
        accumulated: The number of batches that each replica accumulates in an optimizer step.
        rank_order: The order of the axes that the user sets in `Launch`. The layouts of a search differ in the optional
            axes that they have, so the order of a single configuration does not fit all of them.
        reshard_after_forward: When ZeRO stage 3 reshards parameters, as in `Tuning`.
    """

    samples: int
    accumulated: int = 1
    rank_order: str = "pp-dp-tp"
    reshard_after_forward: bool | str = "auto"

    def batch(self, replicas: int) -> int:
        """Return the samples of a replica's batch, or of the largest one, for a number of replicas."""
        return -(-self.samples // replicas)

    def accumulations(self, replicas: int) -> int:
        """Return the number of batches of an optimizer step, for a number of replicas."""
        return self.accumulated

    def is_possible(self, replicas: int) -> bool:
        """Return True if the samples can be split evenly over a number of replicas."""
        return self.samples % replicas == 0

    def microbatch(self, layout: Layout) -> int:
        """Return the samples of the largest microbatch."""
        return -(-self.batch(layout.data) // layout.num_microbatches)

    def total(self, layout: Layout) -> int:
        """Return the samples of an optimizer step."""
        return self.batch(layout.data) * layout.data * self.accumulations(layout.data)


@dataclass(frozen=True)
class LoaderStep(Step):
    """An optimizer step in which each replica trains on whole batches of the loader.

    The number of samples therefore grows with the number of replicas, unless `global_batch_size` is set.

    Attributes:
        samples: The number of samples in a batch of the loader, for each replica.
        global_batch_size: The number of samples of an optimizer step, summed over all replicas, as in `HybridStrategy`.
            If it is ``None``, a step has `accumulated` batches.
    """

    global_batch_size: int | None = None

    def batch(self, replicas: int) -> int:
        """Return the samples of a batch of the loader."""
        return self.samples

    def accumulations(self, replicas: int) -> int:
        """Return the number of batches with which the replicas reach `global_batch_size`.

        Raises:
            ValueError: If :meth:`is_possible` is False.
        """
        if self.global_batch_size is None:
            return self.accumulated
        return accumulated_batches(self.global_batch_size, self.samples, replicas)

    def is_possible(self, replicas: int) -> bool:
        """Return True if the replicas reach `global_batch_size` with whole batches."""
        return self.global_batch_size is None or self.global_batch_size % (self.samples * replicas) == 0

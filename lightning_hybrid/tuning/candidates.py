"""A layout that may be chosen, and the step that it is to do."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from lightning_hybrid.axes import Sizes
from lightning_hybrid.distributed.sizes import accumulated_batches


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@dataclass(frozen=True)
class Layout:
    """What is chosen. The sizes and options are arguments of `HybridStrategy`."""

    data: int
    tensor: int
    pipeline: int
    num_microbatches: int = 1
    schedule: str = "1f1b"
    num_chunks: int = 1
    zero_stage: int = 0
    recompute: bool | str | tuple[int, ...] = False  # or how many layers of each stage
    extra_in_flight: tuple[int, ...] = ()
    context: int = 1
    context_kind: str = "ulysses"
    tensor_mode: str = "1d"
    tensor_depth: int = 1

    @property
    def sizes(self) -> Sizes:
        """The number of ranks along each axis."""
        return Sizes(self.data, self.tensor, self.pipeline, self.context)

    @property
    def sharing(self) -> tuple[int, str, int]:
        """How many ranks share layers, and how they are arranged."""
        return self.tensor, self.tensor_mode, self.tensor_depth

    @property
    def stages_key(self) -> tuple[Hashable, ...]:
        """The fields that determine the costs of its stages for a microbatch of a given size."""
        return *self.sharing, self.context, self.context_kind, self.pipeline, self.num_chunks, self.recompute

    @property
    def num_ranks(self) -> int:
        """The processes that it needs."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def schedule_key(self) -> tuple[str, int, int, int, tuple[int, ...]]:
        """What decides about the schedule, as :func:`schedule_of` wants it."""
        return self.schedule, self.pipeline, self.num_microbatches, self.num_chunks, self.extra_in_flight


def arrangements(tensor: int) -> list[tuple[str, int]]:
    """How so many ranks that share layers may be arranged: ``tensor_parallel_mode``, and its depth.

    Squares and cubes have two ranks or more on each side, and there are several squares with ``"2.5d"``.

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
    """The problem: what an optimizer step is to do, wherever.

    Attributes:
        samples: Of all replicas together, in a batch of each.
        accumulated: Batches of an optimizer step.
        rank_order: The axes, outermost first, as in `Launch`.
        reshard_after_forward: When stage 3 of ZeRO frees, as in `Tuning`.
    """

    samples: int
    accumulated: int = 1
    rank_order: str = "pp-dp-tp"
    reshard_after_forward: bool | str = "auto"

    def batch(self, replicas: int) -> int:
        """The samples of a batch of each of so many replicas, or of the largest of these batches."""
        return -(-self.samples // replicas)

    def accumulations(self, replicas: int) -> int:
        """The batches of an optimizer step of so many replicas."""
        return self.accumulated

    def is_possible(self, replicas: int) -> bool:
        """Whether so many replicas can do it."""
        return self.samples % replicas == 0

    def microbatch(self, layout: Layout) -> int:
        """The samples of the largest microbatch."""
        return -(-self.batch(layout.data) // layout.num_microbatches)

    def total(self, layout: Layout) -> int:
        """The samples of an optimizer step."""
        return self.batch(layout.data) * layout.data * self.accumulations(layout.data)


@dataclass(frozen=True)
class LoaderStep(Step):
    """A step of replicas that each get a batch as the loader gives it, whatever their number.

    Attributes:
        samples: Of each batch.
        global_batch_size: Samples of an optimizer step, of all replicas, as in `HybridStrategy`; ``None`` for the
            batches that `accumulated` says.
    """

    global_batch_size: int | None = None

    def batch(self, replicas: int) -> int:
        """As the loader gives it."""
        return self.samples

    def accumulations(self, replicas: int) -> int:
        """As many as make up the samples of a step."""
        if self.global_batch_size is None:
            return self.accumulated
        return accumulated_batches(self.global_batch_size, self.samples, replicas)

    def is_possible(self, replicas: int) -> bool:
        """Whether so many replicas make up the samples of a step by whole batches."""
        return self.global_batch_size is None or self.global_batch_size % (self.samples * replicas) == 0

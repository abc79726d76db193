"""The results of a recorder as plain values, which outlive the module and can be sent between processes.

`Recorder` fills a :class:`Record` in a dry run, often in a copy of the process, and `ModuleProfile` reads it for each
layout. A recorder itself cannot be kept: it refers to the module, to fake tensors and to process groups.

A record is valid for all layouts with the same tensor-parallel arrangement, and its tables have the fields of a layout
as keys. A *cut* is the assignment of layers to stages. A *run* has the *traces* of a step, which are the counts of a
forward with one microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.tuning.candidates import ContextKey, Layout
from lightning_hybrid.tuning.dry_run.traces import Timing, Trace


@dataclass(frozen=True)
class Cut:
    """The assignment of layers to stages.

    Attributes:
        names: The dotted names of the layers, in order; ``None`` without a pipeline if the module has no layers.
        positions: For each stage, the range of its layers in `names`; without a pipeline, one range of all layers.
    """

    names: tuple[str, ...] | None
    positions: tuple[range, ...]


class HeldBy(NamedTuple):
    """The fields of a layout that determine the memory of its pipeline ranks, without activations.

    Attributes:
        pipeline: The number of pipeline ranks.
        num_chunks: The number of chunks of a rank, which are its stages.
        num_shards: The number of replicas over which ZeRO shards a parameter.
        zero_stage: The ZeRO stage.
        num_microbatches: 1, or 2 for any larger number.
        master_weights: True if master weights are included.
        experts: The number of replicas over which experts are sharded.
    """

    pipeline: int
    num_chunks: int
    num_shards: int
    zero_stage: int
    num_microbatches: int
    master_weights: bool
    experts: int


@dataclass(frozen=True)
class Record:
    """The record of a step for one arrangement of the tensor-parallel ranks.

    Attributes:
        divided_share: The share of the parameters that tensor parallelism shards; 0 without tensor parallelism. If
            tensor parallelism shards none, nothing else is recorded.
        batch_size: The number of samples in a batch of the loader.
        cuts: The assignment of layers to stages, or why it is not possible, by pipeline ranks and chunks.
        runs: Traces with a larger and a smaller microbatch, or only with the larger one if the batch cannot be split;
            or why the step cannot run. By the names of the layers and the kind of context parallelism.
        times: The times of forwards, from the largest microbatch to the smallest, by the names of the layers; empty if
            forwards are not timed.
        usages: The memory of each pipeline rank, without activations, by the fields that determine it.
        expert_sizes: The numbers of replicas over which experts can be sharded.
    """

    divided_share: float
    batch_size: int = 0
    cuts: Mapping[tuple[int, int], Cut | str] = field(default_factory=dict)
    runs: Mapping[tuple[tuple[str, ...] | None, ContextKey], tuple[Trace, ...] | str] = field(default_factory=dict)
    times: Mapping[tuple[str, ...] | None, tuple[Timing, ...]] = field(default_factory=dict)
    usages: Mapping[HeldBy, tuple[MemoryUsage, ...]] = field(default_factory=dict)
    expert_sizes: tuple[int, ...] = (1,)

    def cut_error(self, layout: Layout) -> str:
        """Return why layers cannot be split into the stages of a layout; empty if they can."""
        found = self.cuts[layout.pipeline, layout.num_chunks]
        return found if isinstance(found, str) else ""

    def context_error(self, layout: Layout) -> str:
        """Return why the context parallelism of a layout cannot be used; empty if it can, or if it was not recorded."""
        found = self.cuts[layout.pipeline, layout.num_chunks]
        names = found.names if isinstance(found, Cut) else None
        run = self.runs.get((names, layout.context_key), "")
        return run if isinstance(run, str) else ""

    def trace_error(self, layout: Layout) -> str:
        """Return why the layers cannot be recomputed, or why the step cannot run; otherwise empty."""
        if self.division(layout).names is None and layout.recompute:
            return "the module has no list of layers, so no layer can be recomputed"
        return self.context_error(layout)

    def division(self, layout: Layout) -> Cut:
        """Return the assignment of layers to stages. Call it only if :meth:`cut_error` is empty."""
        found = self.cuts[layout.pipeline, layout.num_chunks]
        assert isinstance(found, Cut)
        return found

    def traces(self, layout: Layout) -> tuple[Trace, ...]:
        """Return the traces with a larger and, if there is one, a smaller microbatch.

        Call it only if there are no errors.
        """
        found = self.runs[self.division(layout).names, layout.context_key]
        assert not isinstance(found, str)
        return found

    def timings(self, layout: Layout) -> tuple[Timing, ...]:
        """Return the times of forwards, from the largest microbatch to the smallest.

        Call it only if they were measured.
        """
        return self.times[self.division(layout).names]

    def held(self, layout: Layout, *, master_weights: bool) -> tuple[MemoryUsage, ...]:
        """Return the memory of each pipeline rank, without activations.

        Args:
            layout: The layout.
            master_weights: True if master weights are included.
        """
        sizes = layout.pipeline, layout.num_chunks, layout.num_shards
        number = min(layout.num_microbatches, 2)
        return self.usages[HeldBy(*sizes, layout.zero_stage, number, master_weights, layout.experts)]

"""The findings of a recorder, as plain values: they outlive its module, and can be sent from process to process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.tensor_parallel.context_parallel.attention import KINDS
from lightning_hybrid.tuning.candidates import Layout
from lightning_hybrid.tuning.dry_run.traces import Timing, Trace

#: A division of sequences: the context-parallel size, and how attention communicates.
Share = tuple[int, str]
#: Undivided sequences.
WHOLE: Share = (1, KINDS[0])


@dataclass(frozen=True)
class Cut:
    """How layers go to stages.

    Attributes:
        names: The dotted names of the layers; ``None`` if there are none, and no pipeline.
        positions: The layers of each stage; all of them without a pipeline.
    """

    names: tuple[str, ...] | None
    positions: tuple[range, ...]


class HeldBy(NamedTuple):
    """The fields that determine what the pipeline ranks of a layout hold, apart from activations.

    Attributes:
        pipeline: Pipeline ranks.
        num_chunks: Chunks of a rank.
        data: Replicas.
        zero_stage: Of ZeRO.
        num_microbatches: 1; 2 for several.
        master_weights: True if master copies count.
    """

    pipeline: int
    num_chunks: int
    data: int
    zero_stage: int
    num_microbatches: int
    master_weights: bool


@dataclass(frozen=True)
class Record:
    """What a step does and needs where ranks share its layers in one way.

    Attributes:
        divided_share: The share of the parameters that tensor parallelism divides; if it is none, nothing else is
            recorded.
        batch_size: The samples of the loader's batch.
        cuts: How layers go to stages, or why they cannot, by pipeline ranks and chunks.
        runs: The forwards with a larger and a smaller microbatch, or the larger one alone, if it has a single sample;
            or why the step cannot run so; by the names of the layers and the division of sequences.
        times: What forwards took, from the largest microbatch to the smallest, by the names of the layers.
        usages: What each pipeline rank holds, apart from activations.
    """

    divided_share: float
    batch_size: int = 0
    cuts: Mapping[tuple[int, int], Cut | str] = field(default_factory=dict)
    runs: Mapping[tuple[tuple[str, ...] | None, Share], tuple[Trace, ...] | str] = field(default_factory=dict)
    times: Mapping[tuple[str, ...] | None, tuple[Timing, ...]] = field(default_factory=dict)
    usages: Mapping[HeldBy, tuple[MemoryUsage, ...]] = field(default_factory=dict)

    def cut_error(self, layout: Layout) -> str:
        """Return why layers cannot be divided into so many stages; empty if they can."""
        found = self.cuts[layout.pipeline, layout.num_chunks]
        return found if isinstance(found, str) else ""

    def share_error(self, layout: Layout) -> str:
        """Return why ranks cannot share sequences so; empty if they can."""
        found = self.cuts[layout.pipeline, layout.num_chunks]
        names = found.names if isinstance(found, Cut) else None
        run = self.runs.get((names, (layout.context, layout.context_kind)), "")
        return run if isinstance(run, str) else ""

    def trace_error(self, layout: Layout) -> str:
        """Return why the layers cannot run again; empty if they can."""
        if self.division(layout).names is None and layout.recompute:
            return "the module has no list of layers, so no layer can be recomputed"
        return self.share_error(layout)

    def division(self, layout: Layout) -> Cut:
        """Return how layers go to stages."""
        found = self.cuts[layout.pipeline, layout.num_chunks]
        assert isinstance(found, Cut)
        return found

    def traces(self, layout: Layout) -> tuple[Trace, ...]:
        """Return the forwards with a larger and a smaller microbatch."""
        found = self.runs[self.division(layout).names, (layout.context, layout.context_kind)]
        assert not isinstance(found, str)
        return found

    def timings(self, layout: Layout) -> tuple[Timing, ...]:
        """Return what forwards took."""
        return self.times[self.division(layout).names]

    def held(self, layout: Layout, *, master_weights: bool) -> tuple[MemoryUsage, ...]:
        """Return what each pipeline rank holds, apart from activations.

        Args:
            layout: The layout.
            master_weights: Whether master copies count.
        """
        sizes = layout.pipeline, layout.num_chunks, layout.data
        return self.usages[HeldBy(*sizes, layout.zero_stage, min(layout.num_microbatches, 2), master_weights)]

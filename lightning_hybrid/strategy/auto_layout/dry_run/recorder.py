"""The first training step of a module, recorded for each cut into stages and each division of sequences."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from lightning_hybrid.config import HybridConfig
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.memory.estimate import HeldTensors, MemoryEstimator
from lightning_hybrid.pipeline_parallel.body import Body
from lightning_hybrid.pipeline_parallel.splitting.microbatch import find_batch_size, split_into
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.strategy import layout as layouts
from lightning_hybrid.strategy.auto_layout.candidates import MOST_CHUNKS, Layout
from lightning_hybrid.strategy.auto_layout.dry_run.dry_run import DryRunStrategy, StopAfterFirstStepError
from lightning_hybrid.strategy.auto_layout.dry_run.traces import Stopwatch, Timing, Trace, Watch
from lightning_hybrid.strategy.summary import divided_share
from lightning_hybrid.tensor_parallel.context_parallel.attention import KINDS
from lightning_hybrid.tensor_parallel.grid.layers import GridAttention, GridLayer, GridLayerNorm, GridLinear
from lightning_hybrid.tensor_parallel.plan import Plan

_TIMED = 3  # forwards, of which the shortest counts
_BLOCKS = (GridLinear, GridAttention, GridLayerNorm)
_UNCUT = StageMap(None, (), (range(0),), 1)

#: A division of sequences: the context-parallel size, and how attention communicates.
Share = tuple[int, str]
#: Undivided sequences.
WHOLE: Share = (1, KINDS[0])


@dataclass(frozen=True)
class Cut:
    """How layers go to stages.

    Attributes:
        body: Of the layers; ``None`` if there is none, and no pipeline.
        stage_map: As in a run, where nothing is cut without a pipeline.
    """

    body: Body | None
    stage_map: StageMap

    @property
    def key(self) -> Hashable:
        """What is equal where the layers are the same."""
        return self.body.names if self.body else None

    @property
    def undivided(self) -> StageMap:
        """All layers on one stage."""
        if self.body is None:
            return _UNCUT
        return StageMap(self.body.name, self.body.names, (range(len(self.body.layers)),), 1)

    @property
    def positions(self) -> tuple[range, ...]:
        """The layers of each stage; all of them without a pipeline."""
        if self.stage_map.body is not None:
            return self.stage_map.stages
        return (range(len(self.body.layers) if self.body else 0),)


class Recorder(DryRunStrategy):
    """A strategy that records the first training step, and answers questions about it afterwards.

    Attributes:
        batch_size: The samples of the loader's batch.
        divided_share: The share of the parameters that tensor parallelism divides.
    """

    def __init__(
        self,
        *args: Any,
        only: Layout | None,
        shares: Sequence[Share],
        least_share: int,
        measure: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._only, self._shares, self._least_share, self._is_measured = only, shares, least_share, measure
        self._held_by_ranks = lru_cache(maxsize=None)(self._find_held)

    def setup(self, trainer: Any) -> None:
        """Find all cuts before layers are shared: they are those of the whole module."""
        self._making.close()
        module, config, (data, tensor, _) = self._module, self._config, self.sizes
        plan = layouts.find_plan(module, config, tensor, None) if tensor > 1 else None
        self.divided_share = 0.0 if plan is None else divided_share(plan, module)
        if plan is not None and not self.divided_share:  # nobody asks what its ranks do
            raise StopAfterFirstStepError
        self._planned: set[tuple[str, ...]] = set()  # layers that the plan can divide
        self._cuts: dict[tuple[int, int], Cut | str] = {}
        sizes = (size for size in range(1, data + 1) if data % size == 0)
        numbers = [(size, chunks) for size in sizes for chunks in range(1, (MOST_CHUNKS if size > 1 else 1) + 1)]
        for pipeline, chunks in numbers if self._only is None else [(self._only.pipeline, self._only.num_chunks)]:
            self._cuts[pipeline, chunks] = self._find_cut(replace(config, num_chunks=chunks), pipeline, plan)
        super().setup(trainer)

    def _find_cut(self, config: HybridConfig, pipeline: int, plan: Plan | None) -> Cut | str:
        module, tensor = self._module, self.sizes[1]
        try:
            if pipeline > 1:
                body, stage_map = layouts.find_stages(module, config, pipeline)
                if tensor > 1 and body.chain is None and body.names not in self._planned:
                    layouts.find_plan(module, config, tensor, body)  # raises if the layers cannot be divided
                    self._planned.add(body.names)
                return Cut(body, layouts.expect_outside(module, layouts.with_plan(stage_map, body, plan, module)))
        except (ValueError, TypeError) as error:
            return str(error)
        try:
            return Cut(layouts.find_layers(module, config, 1), _UNCUT)
        except (ValueError, TypeError):
            return Cut(None, _UNCUT)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep two microbatches of different size.

        Raises:
            StopAfterFirstStepError: Always.
            ValueError: If the module optimizes by hand, or the batch does not say how many samples it has.
        """
        module = self._module
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} optimizes by hand (automatic_optimization=False): what it computes in a step"
                " cannot be told apart, so no layout can be suggested."
            )
        size = find_batch_size(batch)
        if not size:
            raise ValueError(
                f"The number of samples of a {type(batch).__name__} is not known; return tensors or lists."
            )
        self.batch_size = size
        split = getattr(module, "split_batch", None)
        microbatches = _of_different_sizes(split_into(batch, number, split)[0][0] for number in (1, 2))
        self._traces: dict[Hashable, tuple[Trace, ...] | str] = {}
        self._timings: dict[Hashable, tuple[Timing, ...]] = {}
        for cut in {cut.key: cut for cut in self._cuts.values() if isinstance(cut, Cut)}.values():
            for share in self._shares:
                error = self._share_error_before(cut, share)
                self._traces[cut.key, share] = error or self._trace(cut, share, microbatches, args)
            if self._is_measured:
                halved = (split_into(batch, 2**power, split)[0][0] for power in range(size.bit_length()))
                self._timings[cut.key] = tuple(self._times(_of_different_sizes(halved), args, cut))
        raise StopAfterFirstStepError

    def _share_error_before(self, cut: Cut, share: Share) -> str:
        """Return why a division is refused before it is tried, by the length of the sequences; empty if it is tried."""
        context, _ = share
        whole = self._traces.get((cut.key, WHOLE), ())
        length = whole[0].length if isinstance(whole, tuple) and whole else 0
        if context > 1 and length < self._least_share * context:
            return (
                f"of a sequence of {length} positions each of {context} ranks would have fewer than"
                f" {self._least_share}, so that messages cost more than shares save"
            )
        return ""

    def _trace(
        self, cut: Cut, share: Share, microbatches: Sequence[Any], args: Sequence[Any]
    ) -> tuple[Trace, ...] | str:
        """The step with each of the microbatches, or why it cannot be run so."""
        context, kind = share
        if cut.body is None and context > 1:
            return "there are no layers that get shares: the module has no lists of layers"
        again = cut.body is not None  # their saved tensors are noted for every kind of recomputation
        config = replace(self._config, recompute=again, context_parallel_size=context, context_parallel=kind)
        group = self._context_group(context) if context > 1 else None
        traces = []
        for microbatch in microbatches:
            watch = Watch(cut.body, group, self._blocks())
            try:
                saved = self._follow(microbatch, args, config, cut.body, cut.undivided, watch)
            except WrongUseError as error:
                if group is None:
                    raise
                return str(error)
            size = find_batch_size(microbatch)
            assert size is not None
            traces.append(Trace(size, watch.counter, saved, watch.outputs, watch.length))
        return tuple(traces)

    def _blocks(self) -> list[GridLayer]:
        """The layers that compute with blocks, without the regions around some."""
        return [part for part in self._module.modules() if isinstance(part, _BLOCKS)]

    def _times(self, microbatches: Iterable[Any], args: Sequence[Any], cut: Cut) -> Iterator[Timing]:
        """Of each microbatch, down to what is too small for the module, as one sample may be for batch norm."""
        for number, microbatch in enumerate(microbatches):
            try:
                timing = self._time(microbatch, args, cut)
            except ValueError:
                if number == 0:
                    raise
                return
            yield timing

    def _time(self, microbatch: Any, args: Sequence[Any], cut: Cut) -> Timing:
        """The seconds of each place in a forward with numbers: the shortest of some, after one that warms up."""
        if not self._has_values:
            raise ValueError(
                f"{type(self._module).__name__} has no values to be measured with."
            )  # made, and tried again
        config = replace(self._config, recompute=False)
        runs = []
        for _ in range(_TIMED + 1):
            watch = Stopwatch()
            self._measure(microbatch, args, config, cut.body, cut.undivided, watch, nullcontext())
            runs.append(watch.seconds)
        size = find_batch_size(microbatch)
        assert size is not None
        return Timing(size, {label: min(seconds.get(label, 0.0) for seconds in runs[1:]) for label in runs[-1]})

    def cut_error(self, layout: Layout) -> str:
        """Why layers cannot be divided into so many stages; nothing if they can."""
        found = self._cuts[layout.pipeline, layout.num_chunks]
        return found if isinstance(found, str) else ""

    def share_error(self, layout: Layout) -> str:
        """Why ranks cannot share sequences so; nothing if they can."""
        found = self._traces.get(self._key(layout), "")
        return found if isinstance(found, str) else ""

    def trace_error(self, layout: Layout) -> str:
        """Why the layers cannot run again; nothing if they can."""
        if self.cut(layout).body is None and layout.recompute:
            return "there are no layers to run again: the module has no lists of layers"
        return self.share_error(layout)

    def _key(self, layout: Layout) -> Hashable:
        found = self._cuts[layout.pipeline, layout.num_chunks]
        return found.key if isinstance(found, Cut) else None, (layout.context, layout.context_kind)

    def cut(self, layout: Layout) -> Cut:
        """How layers go to stages."""
        found = self._cuts[layout.pipeline, layout.num_chunks]
        assert isinstance(found, Cut)
        return found

    def traces(self, layout: Layout) -> tuple[Trace, ...]:
        """The forwards with a larger and a smaller microbatch; the larger one alone, if it has a single sample."""
        found = self._traces[self._key(layout)]
        assert not isinstance(found, str)
        return found

    def timings(self, layout: Layout) -> tuple[Timing, ...]:
        """What forwards took, from the largest microbatch to the smallest."""
        return self._timings[self.cut(layout).key]

    @cached_property
    def _estimator(self) -> MemoryEstimator:
        return MemoryEstimator(self._module, self.optimizers, float32_gradients=self._config.float32_gradients)

    def held(self, layout: Layout, accumulated: int, *, master_weights: bool) -> tuple[MemoryUsage, ...]:
        """What each pipeline rank holds, apart from activations.

        Args:
            layout: The layout.
            accumulated: Batches of an optimizer step.
            master_weights: Whether master copies count.
        """
        config = replace(
            self._config,
            num_microbatches=layout.num_microbatches,
            num_chunks=layout.num_chunks,
            zero_stage=layout.zero_stage,
            master_weights=master_weights,
        )
        numbers = {"num_replicas": layout.data, "num_backwards": layout.num_microbatches * accumulated}
        ranks = self._held_by_ranks(layout.pipeline, layout.num_chunks)
        return tuple(self._estimator.usage(held, config, **numbers) for held in ranks)

    def _find_held(self, pipeline: int, num_chunks: int) -> list[HeldTensors]:
        """Find the parameters and buffers of each pipeline rank."""
        cut = self._cuts[pipeline, num_chunks]
        assert isinstance(cut, Cut)
        body = cut.body if cut.stage_map.body is not None else None
        layers = (layouts.find_own_layers(self._module, body, cut.stage_map, rank) for rank in range(pipeline))
        return [self._estimator.held(cut.stage_map, each, rank) for rank, each in enumerate(layers)]


def _of_different_sizes(microbatches: Iterable[Any]) -> list[Any]:
    """One microbatch of each size: a batch that cannot be split is the same for every number of microbatches."""
    return list({find_batch_size(microbatch): microbatch for microbatch in microbatches}.values())

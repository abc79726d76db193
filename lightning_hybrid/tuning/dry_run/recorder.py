"""A strategy that records the first training step, for every way to split layers and shard sequences.

`ModuleProfile` runs it with :func:`~.dry_run.run_first_step`, once for each arrangement of the tensor-parallel ranks,
because sharded layers cannot be restored. All other choices of a layout can be examined in the same process: the layers
of a stage are found before they are sharded, and the step runs as a single stage, with each kind of context
parallelism. A dry run for each layout would take hours.

A *cut* is the assignment of layers to stages. A *kind of context parallelism* is a size and an argument
``context_parallel``. A *trace* has the counts of one forward with one microbatch, by layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from lightning_hybrid.config import Settings
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.expert_parallel.experts import expert_sizes
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.memory.estimate import MemoryEstimator
from lightning_hybrid.pipeline_parallel.body import Body
from lightning_hybrid.pipeline_parallel.schedules import Placement
from lightning_hybrid.pipeline_parallel.splitting.microbatch import find_batch_size, split_into
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.strategy import layout as layouts
from lightning_hybrid.strategy.open_arguments import MOST_CHUNKS
from lightning_hybrid.strategy.summary import divided_share
from lightning_hybrid.tensor_parallel.experts import is_experts
from lightning_hybrid.tensor_parallel.layers import ParallelLayer
from lightning_hybrid.tensor_parallel.plan import Plan
from lightning_hybrid.tuning.candidates import NO_CONTEXT, ContextKey, Layout, divisors
from lightning_hybrid.tuning.dry_run.dry_run import DryRunStrategy, StopAfterFirstStepError
from lightning_hybrid.tuning.dry_run.record import Cut, HeldBy, Record
from lightning_hybrid.tuning.dry_run.saved_tensors import merged
from lightning_hybrid.tuning.dry_run.traces import StepTimer, Timing, Trace, TraceRecorder

_TIMED = 3  # forwards; the shortest time counts
_UNCUT = StageMap.uncut()


@dataclass(frozen=True)
class _Cut:
    """The assignment of layers to stages, with the layers themselves.

    Attributes:
        body: The layers; ``None`` without a pipeline if the module has no layers.
        stage_map: The stage map of a run, which is uncut without a pipeline.
    """

    body: Body | None
    stage_map: StageMap

    @property
    def as_one_stage(self) -> StageMap:
        """The stage map with all layers on one stage."""
        if self.body is None:
            return _UNCUT
        return StageMap(self.body.name, self.body.names, (range(len(self.body.layers)),), Placement.in_turns(1))

    @property
    def plain(self) -> Cut:
        """The assignment without the layers themselves."""
        if self.stage_map.body is not None:
            positions = self.stage_map.stages
        else:
            positions = (range(len(self.body.layers) if self.body else 0),)
        return Cut(self.body.names if self.body else None, positions)


class Recorder(DryRunStrategy):
    """A strategy that records the first training step for many layouts.

    Args:
        args: Positional arguments of :class:`DryRunStrategy`. The sizes have all ranks outside tensor-parallel groups
            as replicas; the record has all ways to split these ranks.
        only: The only layout to record; ``None`` for all layouts with the given tensor-parallel arrangement.
        contexts: The kinds of context parallelism to try, in this order.
        least_positions: The smallest number of positions per rank for which context parallelism is tried.
        measure: If True, forwards are timed. This needs values of parameters.
        kwargs: Keyword arguments of :class:`DryRunStrategy`.

    Attributes:
        record: The record, after the step. If the plan shards no layers, it is empty.
    """

    record: Record

    def __init__(
        self,
        *args: Any,
        only: Layout | None,
        contexts: Sequence[ContextKey],
        least_positions: int,
        measure: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._only, self._contexts, self._least_positions, self._is_measured = only, contexts, least_positions, measure

    def setup(self, trainer: Any) -> None:
        """Assign layers to stages before the layers are sharded, because stages are found in the full module.

        Raises:
            StopAfterFirstStepError: If the tensor-parallel plan shards no layers.
            ValueError, TypeError: As at the start of training.
        """
        self._making.close()
        module, config, sizes = self._module, self._config, self.sizes
        self._plan = layouts.find_plan(module, config, sizes.tensor) if sizes.tensor > 1 else None
        self.record = Record(0.0 if self._plan is None else divided_share(self._plan, module))
        if self._plan is not None and not self.record.divided_share:  # then, no layout uses the record
            raise StopAfterFirstStepError
        self._bodies: dict[int, Body] = {}
        self._cuts: dict[tuple[int, int], _Cut | str] = {}
        numbers = [
            (size, chunks) for size in divisors(sizes.data) for chunks in range(1, (MOST_CHUNKS if size > 1 else 1) + 1)
        ]
        for pipeline, chunks in numbers if self._only is None else [(self._only.pipeline, self._only.num_chunks)]:
            self._cuts[pipeline, chunks] = self._find_cut(replace(config, num_chunks=chunks), pipeline)
        super().setup(trainer)

    def _find_plan(self) -> Plan:
        assert self._plan is not None
        return self._plan

    def _find_cut(self, config: Settings, pipeline: int) -> _Cut | str:
        """Return the stages for a number of pipeline ranks, or why layers cannot be split into that many."""
        module, plan = self._module, self._plan
        try:
            if pipeline > 1:
                body, stage_map = layouts.find_stages(
                    module, config, pipeline, self._layers(pipeline * config.num_chunks)
                )
                return _Cut(body, layouts.expect_outside(module, layouts.with_plan(stage_map, body, plan, module)))
        except (ValueError, TypeError) as error:
            return str(error)
        try:
            return _Cut(self._layers(1), _UNCUT)
        except (ValueError, TypeError):
            return _Cut(None, _UNCUT)

    def _layers(self, num_stages: int) -> Body:
        """Return the layers for a number of stages; cached, because finding them in a deep module takes long."""
        if num_stages not in self._bodies:
            self._bodies[num_stages] = layouts.find_layers(self._module, self._config, num_stages)
        return self._bodies[num_stages]

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the step with two microbatches of different sizes: the whole batch, and the first half.

        A batch of one sample has only one size. With `measure`, forwards are also timed with the whole batch, half of
        it, a quarter and so on.

        Raises:
            StopAfterFirstStepError: If the step has been recorded.
            ValueError: If the module uses manual optimization, the number of samples of the batch is unknown, or
                forwards cannot be timed because parameters have no values.
            Exception: The errors of the step without context parallelism.
        """
        module = self._module
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} uses manual optimization (automatic_optimization=False). No layout can be"
                " suggested, because it is unknown which forward and backward passes its step runs. [LH133]"
            )
        size = find_batch_size(batch)
        if not size:
            raise ValueError(
                f"The number of samples in a batch is unknown, because the batch is of type {type(batch).__name__}."
                " Return tensors or lists from the data loader. [LH134]"
            )
        split = getattr(module, "split_batch", None)
        microbatches = _of_different_sizes(split_into(batch, number, split)[0][0] for number in (1, 2))
        found = {key: cut if isinstance(cut, str) else cut.plain for key, cut in self._cuts.items()}
        runs: dict[Any, tuple[Trace, ...] | str] = {}
        times: dict[Any, tuple[Timing, ...]] = {}
        for cut in {cut.plain.names: cut for cut in self._cuts.values() if isinstance(cut, _Cut)}.values():
            names = cut.plain.names
            for key in self._contexts:
                error = self._too_short(runs.get((names, NO_CONTEXT), ()), key)
                runs[names, key] = error or self._trace(cut, key, microbatches, args)
            if self._is_measured:
                halved = (split_into(batch, 2**power, split)[0][0] for power in range(size.bit_length()))
                times[names] = tuple(self._times(_of_different_sizes(halved), args, cut))
        sizes = self._expert_sizes(self.sizes.data)
        self.record = Record(self.record.divided_share, size, found, runs, times, dict(self._usages()), sizes)
        raise StopAfterFirstStepError

    def _too_short(self, whole: tuple[Trace, ...] | str, key: ContextKey) -> str:
        """Return why sequences are too short for a kind of context parallelism; empty if they are long enough."""
        context, _ = key
        length = whole[0].length if isinstance(whole, tuple) and whole else 0
        if context > 1 and length < self._least_positions * context:
            return (
                f"with {length} positions per sequence, each of {context} ranks has fewer than {self._least_positions}"
                " positions, so communication takes more time than sharding saves"
            )
        return ""

    def _trace(
        self, cut: _Cut, key: ContextKey, microbatches: Sequence[Any], args: Sequence[Any]
    ) -> tuple[Trace, ...] | str:
        """Return traces of the step with each microbatch, or why the step cannot run with context parallelism."""
        context, kind = key
        if cut.body is None and context > 1:
            return "the module has no list of layers, so no layer can compute on sequence shards"
        again = cut.body is not None  # then, saved tensors are recorded for every kind of recomputation
        config = self._config.changed({"recompute": again, "context_parallel_size": context, "context_parallel": kind})
        group = self._context_group(context) if context > 1 else None
        traces = []
        for microbatch in microbatches:
            experts = [part for part in self._module.modules() if is_experts(part)]
            recorder = TraceRecorder(cut.body, group, self._blocks(), experts)
            try:
                saved = self._follow(microbatch, args, config, cut.body, cut.as_one_stage, recorder)
            except WrongUseError as error:
                if group is None:
                    raise
                return str(error)
            size = find_batch_size(microbatch)
            assert size is not None
            saved = {recompute: merged(of_kind) for recompute, of_kind in saved.items()}
            traces.append(Trace(size, recorder.counter.counts, saved, recorder.outputs, recorder.length))
        return tuple(traces)

    def _blocks(self) -> list[ParallelLayer]:
        """Return the layers that sum gradients of vectors, such as biases, over ranks."""
        layers = (part for part in self._module.modules() if isinstance(part, ParallelLayer))
        return [layer for layer in layers if layer.sums_vector_gradients]

    def _times(self, microbatches: Iterable[Any], args: Sequence[Any], cut: _Cut) -> Iterator[Timing]:
        """Yield the times with each microbatch, from the largest, up to a size that the module refuses.

        Batch norm, for example, refuses a single sample.

        Raises:
            ValueError: If the module refuses the largest size, or has no values.
        """
        for number, microbatch in enumerate(microbatches):
            try:
                timing = self._time(microbatch, args, cut)
            except ValueError:
                if number == 0:
                    raise
                return
            yield timing

    def _time(self, microbatch: Any, args: Sequence[Any], cut: _Cut) -> Timing:
        """Return the shortest time of each label in several forwards with values, after one forward to warm up."""
        if not self._has_values:
            # The module is then made with values, and the step runs again.
            raise ValueError(f"{type(self._module).__name__} has no parameter values, so it cannot be timed.")
        config = replace(self._config, recompute=False)
        runs = []
        for _ in range(_TIMED + 1):
            timer = StepTimer()
            self._measure(microbatch, args, config, cut.body, cut.as_one_stage, timer, nullcontext())
            runs.append(timer.seconds)
        size = find_batch_size(microbatch)
        assert size is not None
        return Timing(size, {label: min(seconds.get(label, 0.0) for seconds in runs[1:]) for label in runs[-1]})

    def _expert_sizes(self, num_replicas: int) -> tuple[int, ...]:
        """Return the numbers of replicas over which experts can be sharded."""
        return tuple(expert_sizes(self._module, num_replicas)) if self._config.expert_parallel == "data" else (1,)

    def _usages(self) -> Iterator[tuple[HeldBy, tuple[MemoryUsage, ...]]]:
        """Yield the memory of each pipeline rank under every layout, without activations."""
        module, config, only = self._module, self._config, self._only
        estimator = MemoryEstimator(module, self.optimizers, float32_gradients=config.tuning.float32_gradients)
        options = {(0, False), *((zero, config.master_weights) for zero in range(4))}
        for (pipeline, chunks), cut in self._cuts.items():
            if isinstance(cut, str):
                continue
            body = cut.body if cut.stage_map.body is not None else None
            layers = (layouts.find_own_layers(module, body, cut.stage_map, rank) for rank in range(pipeline))
            held = [estimator.held(cut.stage_map, each, rank) for rank, each in enumerate(layers)]
            numbers_of_shards = divisors(self.sizes.data // pipeline) if only is None else {1, only.num_shards}
            sizes = self._expert_sizes(self.sizes.data // pipeline) if only is None else {1, only.experts}
            for shards, (zero, master), number, experts in product(numbers_of_shards, options, (1, 2), sizes):
                if shards > 1 and not zero:
                    continue
                by = HeldBy(pipeline, chunks, shards, zero, number, master, experts)
                of_layout = config.changed(
                    {
                        "num_microbatches": number,
                        "zero_stage": zero,
                        "master_weights": master,
                        "expert_parallel_size": experts,
                    }
                )
                backwards = number * module.trainer.accumulate_grad_batches
                numbers = {"num_shards": shards, "num_backwards": backwards}
                yield by, tuple(estimator.usage(each, of_layout, **numbers) for each in held)


def _of_different_sizes(microbatches: Iterable[Any]) -> list[Any]:
    """Return one microbatch of each size. If a batch cannot be split, all microbatches have the same size."""
    return list({find_batch_size(microbatch): microbatch for microbatch in microbatches}.values())

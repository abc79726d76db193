"""What a module costs: its step is run on shapes, once for each way to share and to recompute its layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision

from lightning_hybrid.config import HybridConfig
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.memory.estimate import estimate
from lightning_hybrid.pipeline_parallel.body import Body
from lightning_hybrid.pipeline_parallel.microbatch import find_batch_size, split_into
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.strategy import layout as layouts
from lightning_hybrid.strategy.auto_layout.cost_model import MOST_CHUNKS, RECOMPUTE, Layout, StageCost
from lightning_hybrid.strategy.auto_layout.dry_run.dry_run import (
    DryRunStrategy,
    StopAfterFirstStepError,
    run_first_step,
)
from lightning_hybrid.strategy.auto_layout.dry_run.saved_tensors import labels_of_stages, saved_bytes
from lightning_hybrid.strategy.auto_layout.dry_run.traces import (
    Stopwatch,
    Timing,
    Trace,
    Watch,
    value_at,
    value_between,
)
from lightning_hybrid.strategy.auto_layout.machine import Machine
from lightning_hybrid.strategy.summary import divided_share
from lightning_hybrid.tensor_parallel.plan import Plan

_TIMED = 3  # forwards, of which the shortest counts
_UNCUT = StageMap(None, (), (range(0),), 1)


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


class ModuleProfile:
    """The :class:`~lightning_hybrid.strategy.auto_layout.cost_model.Profile` of a user's module.

    What is counted with two microbatches of different size is put on a line through both: operations, messages and
    activations grow with the samples. Seconds do not quite, because of caches and of what a call takes by itself: with
    `measure` microbatches of half the size, a quarter and so on are timed, and what lies between is interpolated.

    Args:
        make: Makes the user's module and its data: a datamodule, loaders, or ``None`` if the module has them.
        config: The arguments of `HybridStrategy`: what a layout leaves open.
        num_ranks: Of the run.
        machine: Says how long an operation takes.
        measure: Whether forwards are timed here, on the processor, and the machine's figures only say how much faster
            a share of a layer is than all of it.
        only: The one layout that will be asked for; ``None`` for any.
        precision: The precision plugin.
        trainer: Other arguments of the Trainer.
    """

    def __init__(
        self,
        make: Callable[[], tuple[LightningModule, Any]],
        config: HybridConfig,
        num_ranks: int,
        machine: Machine,
        *,
        measure: bool = False,
        only: Layout | None = None,
        precision: Precision,
        **trainer: Any,
    ) -> None:
        self._machine, self._config, self._is_measured = machine, config, measure
        self._accumulated = int(trainer.get("accumulate_grad_batches", 1))
        self._least_tensor = only.tensor if only else 1
        open_config = replace(config, recompute=False, num_chunks=1)

        def run(tensor: int) -> _Recorder:
            sizes = (num_ranks // tensor, tensor, 1)
            make_strategy = partial(_Recorder, open_config, sizes, only=only, measure=measure and tensor == 1)
            return run_first_step(make, make_strategy, precision=precision, **trainer)

        self._recorder = lru_cache(maxsize=None)(run)
        self._stages_of = lru_cache(maxsize=None)(self._find_stages)
        self._held_by = lru_cache(maxsize=None)(self._find_held)
        self._seconds_of = lru_cache(maxsize=None)(self._find_seconds)
        self._errors: dict[int, str] = {}

    @property
    def batch_size(self) -> int:
        """The samples of a batch of the loader.

        Raises:
            ValueError, TypeError: As at the start of training.
        """
        return self._recorder(self._least_tensor).batch_size

    def refuse(self, layout: Layout) -> tuple[str, str] | None:
        """Why the module cannot be divided by a layout: in short, and in full; ``None`` if it can."""
        if layout.tensor not in self._errors:
            self._errors[layout.tensor] = self._find_error(layout.tensor)
        if error := self._errors[layout.tensor]:
            return "layers cannot be shared", error
        recorder = self._recorder(layout.tensor)
        if error := recorder.cut_error(layout):
            return "layers cannot be divided into so many stages", error
        if error := recorder.trace_error(layout):
            return "layers cannot run again", error
        return None

    def divided_shares(self) -> dict[int, float]:
        """The share of the parameters that is divided, by the size of tensor parallelism: of those asked for so far."""
        return {
            size: self._recorder(size).divided_share for size, error in self._errors.items() if size > 1 and not error
        }

    def _find_error(self, tensor: int) -> str:
        if tensor == 1:
            return ""
        try:
            share = self._recorder(tensor).divided_share
        except (ValueError, TypeError) as error:
            return str(error)
        return "" if share else f"tensor_parallel_plan={self._config.tensor_parallel_plan!r} divides nothing of it"

    def stages(self, layout: Layout, samples: int) -> Sequence[StageCost]:
        """As :class:`~lightning_hybrid.strategy.auto_layout.cost_model.Profile` says."""
        key = Layout(1, layout.tensor, layout.pipeline, num_chunks=layout.num_chunks, recompute=layout.recompute)
        return self._stages_of(key, samples)

    def held(self, layout: Layout) -> Sequence[MemoryUsage]:
        """As :class:`~lightning_hybrid.strategy.auto_layout.cost_model.Profile` says."""
        return self._held(layout, master_weights=self._config.master_weights)

    def _held(self, layout: Layout, *, master_weights: bool) -> tuple[MemoryUsage, ...]:
        number = min(layout.num_microbatches, 2)  # one, or several
        layout = replace(layout, num_microbatches=number, schedule="1f1b", recompute=False, extra_in_flight=())
        return self._held_by(layout, master_weights)

    def weights(self, layout: Layout) -> Sequence[tuple[int, int]]:
        """As :class:`~lightning_hybrid.strategy.auto_layout.cost_model.Profile` says."""
        usages = self._held(replace(layout, zero_stage=0), master_weights=False)  # which are not sent
        return [(usage.parameters, usage.gradients) for usage in usages]

    def num_layers(self, layout: Layout) -> Sequence[int]:
        """As :class:`~lightning_hybrid.strategy.auto_layout.cost_model.Profile` says."""
        return [len(positions) for positions in self._recorder(layout.tensor).cut(layout).positions]

    def _find_stages(self, layout: Layout, samples: int) -> tuple[StageCost, ...]:
        recorder = self._recorder(layout.tensor)
        positions = recorder.cut(layout).positions
        costs = []
        for stage, labels in enumerate(labels_of_stages(positions)):
            last = positions[stage][-1] if positions[stage] else None
            parts = _parts(layout, stage, labels, positions[stage])
            of_parts = [(part, of_part, recorder.traces(part)) for part, of_part in parts]
            seconds = [self._seconds_of(part, samples, label) for part, of_part in parts for label in of_part]
            saved = [
                value_at(samples, traces, [saved_bytes(trace.saved, of_part) for trace in traces])
                for _, of_part, traces in of_parts
            ]
            traces = of_parts[0][2]
            costs.append(
                StageCost(
                    forward=sum(forward for forward, _ in seconds),
                    recomputed=sum(again for _, again in seconds),
                    saved=sum(saved),
                    output=value_at(samples, traces, [trace.outputs.get(last, 0) for trace in traces]),
                    **self._messages(samples, of_parts),
                )
            )
        return tuple(costs)

    def _find_seconds(self, layout: Layout, samples: int, label: Hashable) -> tuple[float, float]:
        """Of the forward of one place in the step, and of what of it runs again."""
        forward, again = self._count_seconds(layout, samples, label)
        if self._is_measured:
            whole = replace(layout, tensor=1)
            timings = self._recorder(1).timings(whole)
            measured = value_between(samples, [(each.samples, each.seconds.get(label, 0.0)) for each in timings])
            counted, _ = self._count_seconds(whole, samples, label)
            factor = measured / counted if counted else 0.0
            forward, again = factor * forward, factor * again
        return forward, again

    def _count_seconds(self, layout: Layout, samples: int, label: Hashable) -> tuple[float, float]:
        traces, machine = self._recorder(layout.tensor).traces(layout), self._machine
        forward = again = 0.0
        for alike in _pairs([trace.counter.operations[label] for trace in traces]):
            flops = value_at(samples, traces, [operation.flops for operation in alike])
            moved = value_at(samples, traces, [operation.bytes for operation in alike])
            seconds = max(flops / machine.flops, moved / machine.memory_bandwidth, machine.operation_seconds)
            forward += seconds
            if isinstance(label, int) and (layout.recompute is True or (layout.recompute and not alike[0].is_kept)):
                again += seconds
        return forward, again

    def _messages(
        self, samples: int, parts: Iterable[tuple[Layout, Iterable[Hashable], Sequence[Trace]]]
    ) -> dict[str, float]:
        sent = hops = collectives = repeated = 0.0
        for layout, labels, traces in parts:
            tensor = layout.tensor
            for label in labels:
                for alike in _pairs([trace.counter.messages[label] for trace in traces]):
                    size = value_at(samples, traces, [message.bytes for message in alike])
                    share = alike[0].passes * (tensor - 1)
                    sent, hops, collectives = sent + share * size / tensor, hops + share, collectives + 1
                    repeated += share * size / tensor if isinstance(label, int) and layout.recompute is True else 0.0
        return {
            "tensor_sent": sent,
            "tensor_hops": hops,
            "tensor_collectives": collectives,
            "tensor_repeated": repeated / sent if sent else 0.0,
        }

    def _find_held(self, layout: Layout, master_weights: bool) -> tuple[MemoryUsage, ...]:
        return self._recorder(layout.tensor).held(layout, self._accumulated, master_weights=master_weights)


def _parts(
    layout: Layout, stage: int, labels: Sequence[Hashable], layers: Sequence[int]
) -> list[tuple[Layout, list[Hashable]]]:
    """The places of a stage whose layers run again, and the others, each with a layout that treats all alike."""
    if not isinstance(layout.recompute, tuple):
        return [(layout, list(labels))]
    again = set(layers[: layout.recompute[stage]])
    return [
        (replace(layout, recompute=is_again), [label for label in labels if (label in again) == is_again])
        for is_again in (False, True)
    ]


def _pairs(rows: list[list[Any]]) -> list[tuple[Any, ...]]:
    """The same operation in each of the traces; in the first one alone, if they are not alike."""
    if len({len(row) for row in rows}) == 1:
        return list(zip(*rows, strict=True))
    return [(each,) * len(rows) for each in rows[0]]


class _Recorder(DryRunStrategy):
    """A strategy that records the first training step, and answers questions about it afterwards.

    Attributes:
        batch_size: The samples of the loader's batch.
        divided_share: The share of the parameters that tensor parallelism divides.
    """

    def __init__(self, *args: Any, only: Layout | None, measure: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._only, self._is_measured = only, measure
        self._recompute: Sequence[bool | str] = RECOMPUTE
        if only is not None:
            assert not isinstance(only.recompute, tuple), "what is said of some layers is known from two runs"
            self._recompute = (only.recompute,)

    def setup(self, trainer: Any) -> None:
        """Find all cuts before layers are shared: they are those of the whole module."""
        module, config, (data, tensor, _) = self._module, self._config, self.sizes
        plan = layouts.find_plan(module, config, tensor, None) if tensor > 1 else None
        self.divided_share = 0.0 if plan is None else divided_share(plan, module)
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
                if tensor > 1 and body.chain is None:
                    layouts.find_plan(module, config, tensor, body)
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
        microbatches = [split_into(batch, number, split)[0][0] for number in ((1, 2) if size > 1 else (1,))]
        self._traces: dict[Hashable, tuple[Trace, ...] | str] = {}
        self._timings: dict[Hashable, tuple[Timing, ...]] = {}
        for cut in {cut.key: cut for cut in self._cuts.values() if isinstance(cut, Cut)}.values():
            for recompute in self._recompute:
                self._traces[cut.key, recompute] = self._trace(cut, recompute, microbatches, args)
            if self._is_measured:
                halved = [split_into(batch, 2**power, split)[0][0] for power in range(size.bit_length())]
                self._timings[cut.key] = tuple(self._time(each, args, cut) for each in halved)
        raise StopAfterFirstStepError

    def _trace(
        self, cut: Cut, recompute: bool | str, microbatches: Sequence[Any], args: Sequence[Any]
    ) -> tuple[Trace, ...] | str:
        """The step with each of the microbatches, or why it cannot be run so."""
        if cut.body is None and recompute:
            return "there are no layers to run again: the module has no lists of layers"
        config = replace(self._config, recompute=recompute)
        traces = []
        for microbatch in microbatches:
            watch = Watch(cut.body)
            saved = self._follow(microbatch, args, config, cut.body, cut.undivided, watch)
            size = find_batch_size(microbatch)
            assert size is not None
            traces.append(Trace(size, watch.counter, saved, watch.outputs))
        return tuple(traces)

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

    def trace_error(self, layout: Layout) -> str:
        """Why the layers cannot run again; nothing if they can."""
        found = self._traces[self.cut(layout).key, layout.recompute]
        return found if isinstance(found, str) else ""

    def cut(self, layout: Layout) -> Cut:
        """How layers go to stages."""
        found = self._cuts[layout.pipeline, layout.num_chunks]
        assert isinstance(found, Cut)
        return found

    def traces(self, layout: Layout) -> tuple[Trace, ...]:
        """The forwards with a larger and a smaller microbatch; the larger one alone, if it has a single sample."""
        found = self._traces[self.cut(layout).key, layout.recompute]
        assert not isinstance(found, str)
        return found

    def timings(self, layout: Layout) -> tuple[Timing, ...]:
        """What forwards took, from the largest microbatch to the smallest."""
        return self._timings[self.cut(layout).key]

    def held(self, layout: Layout, accumulated: int, *, master_weights: bool) -> tuple[MemoryUsage, ...]:
        """What each pipeline rank holds, apart from activations.

        Args:
            layout: The layout.
            accumulated: Batches of an optimizer step.
            master_weights: Whether master copies count.
        """
        cut = self.cut(layout)
        body = cut.body if cut.stage_map.body is not None else None
        config = replace(
            self._config,
            num_microbatches=layout.num_microbatches,
            num_chunks=layout.num_chunks,
            zero_stage=layout.zero_stage,
            master_weights=master_weights,
        )
        return tuple(
            estimate(
                self._module,
                cut.stage_map,
                layouts.find_own_layers(self._module, body, cut.stage_map, rank),
                self.optimizers,
                config,
                rank=rank,
                num_replicas=layout.data,
                num_backwards=layout.num_microbatches * accumulated,
            )
            for rank in range(layout.pipeline)
        )

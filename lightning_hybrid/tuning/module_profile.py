"""The costs of a module under any layout, from one dry run on fake tensors for each tensor-parallel arrangement.

`choose_layout` and ``lightning-hybrid suggest`` make a :class:`ModuleProfile` for the cost model, and ``plan`` makes
one for a single layout. A dry run executes a training step on fake tensors and takes seconds, so it cannot run for each
of thousands of layouts. It counts operations, messages and saved tensors by *label*, and a stage costs the sum of its
labels::

    layout --> arrangement --> Record, from a dry run --> labels of each stage --> StageCost of each stage

- *label*: a layer, by its position, or the code before the first layer, or all other code outside the layers;
- *arrangement*: the number of tensor-parallel ranks, ``tensor_parallel_mode`` and depth;
- *record*: the results of a dry run: the stages of the layers, the traces, the times and the memory;
- *trace*: the counts of one forward with one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision

from lightning_hybrid.axes import Sizes
from lightning_hybrid.config import Settings
from lightning_hybrid.distributed.arrangement import check_arrangement
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.tensor_parallel.context_parallel.attention import KINDS
from lightning_hybrid.tensor_parallel.context_parallel.context_parallel import check_context_parallel
from lightning_hybrid.tuning.candidates import NO_CONTEXT, NO_TENSOR, ContextKey, Layout, TensorKey
from lightning_hybrid.tuning.cost_model import StageCost
from lightning_hybrid.tuning.dry_run.dry_run import run_first_step
from lightning_hybrid.tuning.dry_run.record import Record
from lightning_hybrid.tuning.dry_run.recorder import Recorder
from lightning_hybrid.tuning.dry_run.saved_tensors import labels_of_stages
from lightning_hybrid.tuning.dry_run.stage_parts import StagePart, cost_of_label
from lightning_hybrid.tuning.dry_run.traces import Trace, value_at, value_between
from lightning_hybrid.tuning.machine import Machine
from lightning_hybrid.tuning.process_copy import Copies, num_processors

_MOST_SECONDS = 600.0  # limit for a copy of the process; after that, its step runs in this process
#: The smallest number of positions per rank for which context parallelism is tried unless the user requests it.
LEAST_POSITIONS = 1024


class ModuleProfile:
    """The :class:`~lightning_hybrid.tuning.cost_model.Profile` of a user's module.

    Operations, messages and activations grow linearly with the number of samples, so they are counted for two
    microbatches of different sizes, and extrapolated. Times do not grow linearly, because of caches and of the fixed
    overhead of each call. With `measure`, forwards of the unsharded module are timed with the whole batch, half of it,
    a quarter and so on. Times between these sizes are interpolated, and scaled for sharded layers.

    Args:
        make: Makes the user's module and its data: a datamodule, loaders, or ``None`` if the module has them. It is
            called for each dry run, because a step changes the module.
        config: The arguments of `HybridStrategy` that a layout does not change.
        num_ranks: The number of ranks of the run.
        machine: The machine, which determines the time of an operation.
        contexts: The context-parallel sizes to try; ``None`` for all sizes up to the number of ranks of a node with
            which each rank has :data:`LEAST_POSITIONS` positions.
        measure: If True, forwards are timed on this CPU, and the figures of the machine determine only the time of a
            sharded layer in relation to the time of the full layer.
        only: The only layout whose costs will be requested, as for ``lightning-hybrid plan``; ``None`` for any layout.
        precision: The precision plugin.
        trainer: Other arguments of the Trainer, see :func:`step_arguments`.

    The first method call that needs a record runs a dry run in this process. Its errors are errors of these methods: if
    the step cannot run even without tensor parallelism, they raise a `ValueError`, a `TypeError` or an error of the
    module.
    """

    def __init__(
        self,
        make: Callable[[], tuple[LightningModule, Any]],
        config: Settings,
        num_ranks: int,
        machine: Machine,
        *,
        contexts: Collection[int] | None = None,
        measure: bool = False,
        only: Layout | None = None,
        precision: Precision,
        **trainer: Any,
    ) -> None:
        self._machine, self._config, self._is_measured = machine, config, measure
        self._base = only.tensor_key if only else NO_TENSOR
        open_config = replace(config, recompute=False, num_chunks=1, context_parallel_size=1)

        least_positions = LEAST_POSITIONS if contexts is None else 0
        self._contexts = range(1, machine.ranks_per_node + 1) if contexts is None else contexts

        def run(key: TensorKey) -> Record:
            tensor, mode, depth = key
            sizes = Sizes(num_ranks // tensor, tensor)
            sharded = open_config.changed({"tensor_parallel_mode": mode, "tensor_parallel_depth": depth})
            tried = [only.context_key] if only else self._context_keys(num_ranks // tensor, mode)
            options: dict[str, Any] = {"only": only, "contexts": tried, "least_positions": least_positions}
            make_strategy = partial(Recorder, sharded, sizes, measure=measure and tensor == 1, **options)
            return run_first_step(make, make_strategy, precision=precision, **trainer).record

        self._run = run
        self._records: dict[TensorKey, Record | str] = {}
        self._copies: Copies[TensorKey, Record | str] = Copies({}, most=0, time_limit=0.0)
        self._refusal = cache(self._find_refusal)
        self._stages: dict[Hashable, Sequence[StageCost]] = {}
        self._weights: dict[Hashable, Sequence[tuple[int, int]]] = {}
        self._contents: dict[Hashable, Sequence[_Content]] = {}
        self._label_costs: dict[Hashable, StageCost] = {}

    def _context_keys(self, num_ranks: int, mode: str) -> list[ContextKey]:
        """Return the sizes and kinds of context parallelism to try for a number of ranks and `tensor_parallel_mode`."""
        sizes = [size for size in self._contexts if size > 1 and num_ranks % size == 0]
        return [NO_CONTEXT, *(each for each in product(sizes, KINDS) if not self._refusal(False, *each, mode))]

    def _find_refusal(self, recompute: Any, size: int, kind: str, mode: str) -> str:
        """Return why these arguments rule out context parallelism, whatever the module; empty if they do not."""
        config = self._config
        divides = config.sequence_parallel
        try:
            check_context_parallel(
                size, kind, sequence_parallel=divides, recompute=recompute, tensor_parallel_mode=mode
            )
        except ValueError as error:
            return str(error)
        return ""

    @contextmanager
    def recorded_ahead(self, layouts: Iterable[Layout]) -> Iterator[None]:
        """Record the step for some layouts while entered, in copies of this process that run in parallel.

        The step without tensor parallelism is recorded first, in this process.

        Args:
            layouts: The layouts whose costs will be requested, in this order.

        Raises:
            ValueError, TypeError: As at the start of training, or if the step cannot run on fake tensors.
        """
        # Before the copies start: timing needs idle processors, and the copies inherit the caches that this fills.
        self._record(self._base)
        keys = dict.fromkeys(layout.tensor_key for layout in layouts)
        functions = {each: partial(self._find, each) for each in keys if each not in self._records}
        with Copies(functions, most=num_processors(), time_limit=_MOST_SECONDS) as self._copies:
            yield

    def _record(self, key: TensorKey) -> Record:
        """Return the record for an arrangement that can be used; the errors of the others become a `ValueError`."""
        found = self.record_or_error(key)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def record_or_error(self, key: TensorKey) -> Record | str:
        """Return the record of the step for an arrangement of tensor-parallel ranks, or why it cannot be used.

        Raises:
            ValueError, TypeError: If the step cannot run even without tensor parallelism.
        """
        if key not in self._records:
            self._records[key] = self._copies.take(key) or self._find(key)
        return self._records[key]

    def _find(self, key: TensorKey) -> Record | str:
        """Run the step for an arrangement, see :meth:`record_or_error`. A copy of this process may call it."""
        tensor, mode, depth = key
        if tensor == 1:
            return self._run(key)
        try:
            check_arrangement(mode, [tensor], depth, sequence_parallel=self._config.sequence_parallel)
            record = self._run(key)
        except (ValueError, TypeError) as error:
            return str(error)
        plan, beside = self._config.tensor_parallel_plan, "" if mode == "1d" else f" with tensor_parallel_mode={mode!r}"
        return (
            record if record.divided_share else f"tensor_parallel_plan={plan!r} shards no layers of the module{beside}"
        )

    @property
    def batch_size(self) -> int:
        """The number of samples in a batch of the loader.

        Raises:
            ValueError, TypeError: As at the start of training.
        """
        return self._record(self._base).batch_size

    @property
    def expert_sizes(self) -> tuple[int, ...]:
        """The numbers of replicas over which experts can be sharded.

        Raises:
            ValueError, TypeError: As at the start of training.
        """
        return self._record(self._base).expert_sizes

    def refuse(self, layout: Layout) -> tuple[str, str] | None:
        """Return why the module does not support a layout, as a short and a full text; ``None`` if it does.

        Call it before :meth:`stages`, :meth:`held`, :meth:`weights` and :meth:`num_layers`, which fail for other
        layouts. It also starts the next waiting copy of :meth:`recorded_ahead`.

        Raises:
            ValueError, TypeError: If the step cannot run even without tensor parallelism.
        """
        self._copies.advance()
        record = self.record_or_error(layout.tensor_key)
        if isinstance(record, str):
            return "tensor parallelism cannot be used", record
        if layout.context > 1 and (error := self._context_error(layout)):
            return "context parallelism cannot be used", error
        if error := record.cut_error(layout):
            return "layers cannot be split into that many stages", error
        if error := record.trace_error(layout):
            return "layers cannot be recomputed", error
        return None

    def divided_shares(self) -> dict[int, float]:
        """Return the share of the parameters that 1D tensor parallelism shards, for each size recorded so far."""
        return {
            size: record.divided_share
            for (size, mode, _), record in self._records.items()
            if size > 1 and mode == "1d" and isinstance(record, Record)
        }

    def _context_error(self, layout: Layout) -> str:
        """Return why the context parallelism of a layout cannot be used; empty if it can."""
        refused = self._refusal(layout.recompute, layout.context, layout.context_kind, layout.tensor_mode)
        if refused or layout.tensor_key == self._base:
            return refused or self._record(layout.tensor_key).context_error(layout)
        # To find out if a layer supports context parallelism, it runs with values. A sharded layer cannot, because the
        # messages of other ranks have no values. So the record of the full layers is asked first.
        full = _with_tensor(layout, self._base)
        return self._record(self._base).context_error(full) or self._record(layout.tensor_key).context_error(layout)

    def stages(self, layout: Layout, samples: int) -> Sequence[StageCost]:
        """Return the costs of the stages, see `Profile`; equal stages share one object."""
        key = layout.stages_key, samples
        if key not in self._stages:
            contents = self._contents_of(layout)
            costs = {each: self._stage_cost(each, samples) for each in dict.fromkeys(contents)}
            self._stages[key] = [costs[each] for each in contents]
        return self._stages[key]

    def held(self, layout: Layout) -> Sequence[MemoryUsage]:
        """Return the memory of each pipeline rank, see `Profile`."""
        return self._record(layout.tensor_key).held(layout, master_weights=self._config.master_weights)

    def weights(self, layout: Layout) -> Sequence[tuple[int, int]]:
        """Return the bytes of parameters and of gradients of each pipeline rank, see `Profile`."""
        number = min(layout.num_microbatches, 2)  # memory differs only between one microbatch and several
        key = layout.tensor_key, layout.pipeline, layout.num_chunks, layout.data, number, layout.experts
        if key not in self._weights:
            # The bytes are sizes of messages. Master weights are never sent.
            usages = self._record(layout.tensor_key).held(replace(layout, zero_stage=0), master_weights=False)
            self._weights[key] = [(usage.parameters, usage.gradients) for usage in usages]
        return self._weights[key]

    def num_layers(self, layout: Layout) -> Sequence[int]:
        """Return the number of layers of each stage, see `Profile`."""
        return [len(positions) for positions in self._record(layout.tensor_key).division(layout).positions]

    def _stage_cost(self, content: _Content, samples: int) -> StageCost:
        """Return the cost of a stage for a microbatch of a given size."""
        parts = content.parts
        cost = sum((each for part in parts for each in self._costs(part, samples)), StageCost())
        saved = sum(value_at(samples, part.traces, part.saved) for part in parts)
        return replace(cost, saved=saved, output=value_at(samples, parts[0].traces, content.outputs))

    def _costs(self, part: StagePart, samples: int) -> Iterator[StageCost]:
        """Yield the costs of the labels of a part; without timed forwards, labels with equal records are grouped."""
        if not self._is_measured:
            for label, number in part.kinds.items():
                yield self._cost_of_label(part.traces, samples, label, part.layout) * number
            return
        full = _with_tensor(replace(part.layout, context=NO_CONTEXT[0], context_kind=NO_CONTEXT[1]), NO_TENSOR)
        record = self._record(NO_TENSOR)
        timings, traces = record.timings(full), record.traces(full)
        for label in part.labels:
            measured = value_between(samples, [(each.samples, each.seconds.get(label, 0.0)) for each in timings])
            counted = self._cost_of_label(traces, samples, label, full).forward
            cost = self._cost_of_label(part.traces, samples, label, part.layout)
            yield cost.with_forward(measured / counted * cost.forward if counted else 0.0)

    def _cost_of_label(self, traces: Sequence[Trace], samples: int, label: Hashable, layout: Layout) -> StageCost:
        key = id(traces), samples, label, layout.recompute, layout.context_kind  # the records keep their traces alive
        if key not in self._label_costs:
            self._label_costs[key] = cost_of_label(traces, samples, label, layout, self._machine)
        return self._label_costs[key]

    def _contents_of(self, layout: Layout) -> Sequence[_Content]:
        """Return the contents of each stage; equal stages share one object."""
        key = layout.stages_key
        if key not in self._contents:
            alike: dict[Hashable, _Content] = {}
            found = self._find_contents(layout)
            self._contents[key] = [alike.setdefault(each.key(self._is_measured), each) for each in found]
        return self._contents[key]

    def _find_contents(self, layout: Layout) -> Iterator[_Content]:
        """Yield the contents of each stage, in order."""
        record = self._record(layout.tensor_key)
        positions = record.division(layout).positions
        for stage, labels in enumerate(labels_of_stages(positions)):
            parts = [
                StagePart.of(part, of_part, record.traces(part))
                for part, of_part in _parts(layout, stage, labels, positions[stage])
            ]
            last = positions[stage][-1] if positions[stage] else None
            yield _Content(parts, [trace.outputs.get(last, 0) for trace in parts[0].traces])


@dataclass(frozen=True, eq=False)
class _Content:
    """The contents of a stage.

    Attributes:
        parts: The labels of the stage, grouped by recomputation.
        outputs: The bytes that the stage sends to the next stage, in each trace.
    """

    parts: Sequence[StagePart]
    outputs: Sequence[int]

    def key(self, is_measured: bool) -> Hashable:
        """Return a key that is equal for stages with equal costs; with timed labels, no two stages are equal."""
        parts = (
            (part.layout.recompute, *(part.labels if is_measured else part.kinds.items()), *part.saved)
            for part in self.parts
        )
        return *parts, *self.outputs


def _with_tensor(layout: Layout, key: TensorKey) -> Layout:
    """Return a layout with another arrangement of the tensor-parallel ranks."""
    tensor, mode, depth = key
    return replace(layout, tensor=tensor, tensor_mode=mode, tensor_depth=depth)


def _parts(
    layout: Layout, stage: int, labels: Sequence[Hashable], layers: Sequence[int]
) -> list[tuple[Layout, list[Hashable]]]:
    """Return the labels of a stage grouped by recomputation, each group with a layout that recomputes all or none."""
    if not isinstance(layout.recompute, tuple):
        return [(layout, list(labels))]
    again = set(layers[: layout.recompute[stage]])
    return [
        (replace(layout, recompute=is_again), [label for label in labels if (label in again) == is_again])
        for is_again in (False, True)
    ]

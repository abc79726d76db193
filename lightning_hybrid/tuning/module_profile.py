"""The costs of a module: its step runs on shapes, once for each division of its layers and its sequences."""

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
from lightning_hybrid.tuning.candidates import Layout
from lightning_hybrid.tuning.cost_model import StageCost
from lightning_hybrid.tuning.dry_run.dry_run import run_first_step
from lightning_hybrid.tuning.dry_run.place_cost import StagePart, cost_of_place
from lightning_hybrid.tuning.dry_run.record import WHOLE, Record, Share
from lightning_hybrid.tuning.dry_run.recorder import Recorder
from lightning_hybrid.tuning.dry_run.saved_tensors import labels_of_stages
from lightning_hybrid.tuning.dry_run.traces import Trace, value_at, value_between
from lightning_hybrid.tuning.machine import Machine
from lightning_hybrid.tuning.process_copy import Copies, num_processors

Sharing = tuple[int, str, int]  # of layers: see `Layout.sharing`
_UNSHARED: Sharing = (1, "1d", 1)  # nobody shares layers
_MOST_SECONDS = 600.0  # of a copy of the process, before its step runs here
#: Positions: where ranks would have fewer of a sequence, nobody shares it unasked.
LEAST_SHARE = 1024


class ModuleProfile:
    """The :class:`~lightning_hybrid.tuning.cost_model.Profile` of a user's module.

    What is counted with two microbatches of different size is put on a line through both: operations, messages and
    activations grow with the samples. Seconds do not quite, because of caches and of what a call takes by itself: with
    `measure` microbatches of half the size, a quarter and so on are timed, and what lies between is interpolated.

    Args:
        make: Makes the user's module and its data: a datamodule, loaders, or ``None`` if the module has them.
        config: The arguments of `HybridStrategy`: what a layout leaves open.
        num_ranks: Of the run.
        machine: Says how long an operation takes.
        contexts: The numbers of ranks that may share a sequence; ``None`` for those up to the ranks of a node where
            each would have :data:`LEAST_SHARE` positions.
        measure: Whether forwards are timed here, on the processor, and the machine's figures only say how much faster
            a share of a layer is than all of it.
        only: The one layout that will be asked for; ``None`` for any.
        precision: The precision plugin.
        trainer: Other arguments of the Trainer.
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
        self._least = only.sharing if only else _UNSHARED
        open_config = replace(config, recompute=False, num_chunks=1, context_parallel_size=1)

        least_share = LEAST_SHARE if contexts is None else 0
        self._contexts = range(1, machine.ranks_per_node + 1) if contexts is None else contexts

        def run(sharing: Sharing) -> Record:
            tensor, mode, depth = sharing
            sizes = Sizes(num_ranks // tensor, tensor)
            shared = open_config.changed({"tensor_parallel_mode": mode, "tensor_parallel_depth": depth})
            shares = [(only.context, only.context_kind)] if only else self._shares(num_ranks // tensor, mode)
            here = {"only": only, "shares": shares, "least_share": least_share, "measure": measure and tensor == 1}
            make_strategy: Callable[..., Recorder] = partial(Recorder, shared, sizes, **here)  # type: ignore[arg-type]
            return run_first_step(make, make_strategy, precision=precision, **trainer).record

        self._run = run
        self._records: dict[Sharing, Record | str] = {}
        self._copies: Copies[Sharing, Record | str] = Copies({}, most=0, time_limit=0.0)
        self._refusal = cache(self._find_refusal)
        self._stages: dict[Hashable, Sequence[StageCost]] = {}
        self._weights: dict[Hashable, Sequence[tuple[int, int]]] = {}
        self._contents: dict[Hashable, Sequence[_Content]] = {}
        self._place_costs: dict[Hashable, StageCost] = {}

    def _shares(self, num_ranks: int, mode: str) -> list[Share]:
        """Return the divisions of sequences over a number of ranks, under a `tensor_parallel_mode`."""
        sizes = [size for size in self._contexts if size > 1 and num_ranks % size == 0]
        return [WHOLE, *(each for each in product(sizes, KINDS) if not self._refusal(False, *each, mode))]

    def _find_refusal(self, recompute: Any, size: int, kind: str, mode: str) -> str:
        """Why sequences are not shared so, whatever the module is; nothing if they may be."""
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
        """Record the step for some layouts while entered, in copies of this process beside it.

        Args:
            layouts: The layouts that will be asked for, in this order.
        """
        self._record(self._least)  # first and alone: it may be timed, and fills caches that the copies share
        sharings = dict.fromkeys(layout.sharing for layout in layouts)
        functions = {each: partial(self._find, each) for each in sharings if each not in self._records}
        with Copies(functions, most=num_processors(), time_limit=_MOST_SECONDS) as self._copies:
            yield

    def _record(self, sharing: Sharing) -> Record:
        found = self.record_or_error(sharing)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def record_or_error(self, sharing: Sharing) -> Record | str:
        """Return the record of the step where ranks share layers in one way, or why they cannot."""
        if sharing not in self._records:
            self._records[sharing] = self._copies.take(sharing) or self._find(sharing)
        return self._records[sharing]

    def _find(self, sharing: Sharing) -> Record | str:
        tensor, mode, depth = sharing
        if tensor == 1:
            return self._run(sharing)
        try:
            check_arrangement(mode, [tensor], depth, sequence_parallel=self._config.sequence_parallel)
            record = self._run(sharing)
        except (ValueError, TypeError) as error:
            return str(error)
        plan, beside = self._config.tensor_parallel_plan, "" if mode == "1d" else f" with tensor_parallel_mode={mode!r}"
        return (
            record if record.divided_share else f"tensor_parallel_plan={plan!r} shards no layers of the module{beside}"
        )

    @property
    def batch_size(self) -> int:
        """The samples of a batch of the loader.

        Raises:
            ValueError, TypeError: As at the start of training.
        """
        return self._record(self._least).batch_size

    def refuse(self, layout: Layout) -> tuple[str, str] | None:
        """Why the module cannot be divided by a layout: in short, and in full; ``None`` if it can."""
        self._copies.advance()
        record = self.record_or_error(layout.sharing)
        if isinstance(record, str):
            return "tensor parallelism cannot be used", record
        if layout.context > 1 and (error := self._share_error(layout)):
            return "context parallelism cannot be used", error
        if error := record.cut_error(layout):
            return "layers cannot be split into that many stages", error
        if error := record.trace_error(layout):
            return "layers cannot be recomputed", error
        return None

    def divided_shares(self) -> dict[int, float]:
        """The share of the parameters that ranks in a line divide, by their number: of those asked for so far."""
        return {
            size: record.divided_share
            for (size, mode, _), record in self._records.items()
            if size > 1 and mode == "1d" and isinstance(record, Record)
        }

    def _share_error(self, layout: Layout) -> str:
        refused = self._refusal(layout.recompute, layout.context, layout.context_kind, layout.tensor_mode)
        if refused or layout.sharing == self._least:
            return refused or self._record(layout.sharing).share_error(layout)
        # Layers that are divided are not tried, as what their ranks send has no numbers.
        whole = _with_sharing(layout, self._least)
        return self._record(whole.sharing).share_error(whole) or self._record(layout.sharing).share_error(layout)

    def stages(self, layout: Layout, samples: int) -> Sequence[StageCost]:
        """Return the costs of the stages, see `Profile`; equal stages share one object."""
        key = layout.stages_key, samples
        if key not in self._stages:
            contents = self._contents_of(layout)
            costs = {each: self._stage_cost(each, samples) for each in dict.fromkeys(contents)}
            self._stages[key] = [costs[each] for each in contents]
        return self._stages[key]

    def held(self, layout: Layout) -> Sequence[MemoryUsage]:
        """As :class:`~lightning_hybrid.tuning.cost_model.Profile` says."""
        return self._record(layout.sharing).held(layout, master_weights=self._config.master_weights)

    def weights(self, layout: Layout) -> Sequence[tuple[int, int]]:
        """As :class:`~lightning_hybrid.tuning.cost_model.Profile` says."""
        number = min(layout.num_microbatches, 2)
        key = layout.sharing, layout.pipeline, layout.num_chunks, layout.data, number
        if key not in self._weights:
            # Master copies are not sent.
            usages = self._record(layout.sharing).held(replace(layout, zero_stage=0), master_weights=False)
            self._weights[key] = [(usage.parameters, usage.gradients) for usage in usages]
        return self._weights[key]

    def num_layers(self, layout: Layout) -> Sequence[int]:
        """As :class:`~lightning_hybrid.tuning.cost_model.Profile` says."""
        return [len(positions) for positions in self._record(layout.sharing).division(layout).positions]

    def _stage_cost(self, content: _Content, samples: int) -> StageCost:
        """Add up the labels of a stage, for a microbatch of so many samples."""
        parts = content.parts
        cost = sum((each for part in parts for each in self._costs(part, samples)), StageCost())
        saved = sum(value_at(samples, part.traces, part.saved) for part in parts)
        return replace(cost, saved=saved, output=value_at(samples, parts[0].traces, content.outputs))

    def _costs(self, part: StagePart, samples: int) -> Iterator[StageCost]:
        """Give the costs of the labels of a stage; labels with equal records together, unless forwards were timed."""
        if not self._is_measured:
            for label, number in part.kinds.items():
                yield self._cost_of_place(part.traces, samples, label, part.layout) * number
            return
        whole = _with_sharing(replace(part.layout, context=WHOLE[0], context_kind=WHOLE[1]), _UNSHARED)
        record = self._record(_UNSHARED)
        timings, traces = record.timings(whole), record.traces(whole)
        for label in part.labels:
            measured = value_between(samples, [(each.samples, each.seconds.get(label, 0.0)) for each in timings])
            counted = self._cost_of_place(traces, samples, label, whole).forward
            cost = self._cost_of_place(part.traces, samples, label, part.layout)
            yield cost.with_forward(measured / counted * cost.forward if counted else 0.0)

    def _cost_of_place(self, traces: Sequence[Trace], samples: int, label: Hashable, layout: Layout) -> StageCost:
        key = id(traces), samples, label, layout.recompute, layout.context_kind  # records keep their traces
        if key not in self._place_costs:
            self._place_costs[key] = cost_of_place(traces, samples, label, layout, self._machine)
        return self._place_costs[key]

    def _contents_of(self, layout: Layout) -> Sequence[_Content]:
        """Return the contents of each stage; stages with equal records share one object."""
        key = layout.stages_key
        if key not in self._contents:
            alike: dict[Hashable, _Content] = {}
            found = self._find_contents(layout)
            self._contents[key] = [alike.setdefault(each.key(self._is_measured), each) for each in found]
        return self._contents[key]

    def _find_contents(self, layout: Layout) -> Iterator[_Content]:
        record = self._record(layout.sharing)
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
        parts: Its labels, grouped by recomputation.
        outputs: The bytes that it sends to the next stage, in each trace.
    """

    parts: Sequence[StagePart]
    outputs: Sequence[int]

    def key(self, is_measured: bool) -> Hashable:
        """Return a key that is equal for stages with equal costs; timed labels make each stage different."""
        parts = (
            (part.layout.recompute, *(part.labels if is_measured else part.kinds.items()), *part.saved)
            for part in self.parts
        )
        return *parts, *self.outputs


def _with_sharing(layout: Layout, sharing: Sharing) -> Layout:
    tensor, mode, depth = sharing
    return replace(layout, tensor=tensor, tensor_mode=mode, tensor_depth=depth)


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

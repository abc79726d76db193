"""What a module costs: its step is run on shapes, once for each way to share and to recompute its layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision

from lightning_hybrid.config import HybridConfig, check_grid
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.strategy.auto_layout.candidates import RECOMPUTE, Layout
from lightning_hybrid.strategy.auto_layout.cost_model import StageCost
from lightning_hybrid.strategy.auto_layout.dry_run.dry_run import run_first_step
from lightning_hybrid.strategy.auto_layout.dry_run.operations import Message
from lightning_hybrid.strategy.auto_layout.dry_run.recorder import WHOLE, Recorder, Way, way_of
from lightning_hybrid.strategy.auto_layout.dry_run.saved_tensors import labels_of_stages, saved_bytes
from lightning_hybrid.strategy.auto_layout.dry_run.traces import Trace, value_at, value_between
from lightning_hybrid.strategy.auto_layout.machine import NO_MESSAGES, Machine, Messages
from lightning_hybrid.tensor_parallel.context_parallel.attention import KINDS
from lightning_hybrid.tensor_parallel.context_parallel.context_parallel import check_context_parallel

_UNSHARED = (1, "1d", 1)  # nobody shares layers
#: Positions: where ranks would have fewer of a sequence, nobody shares it unasked.
LEAST_SHARE = 1024


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
        config: HybridConfig,
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
        self._accumulated = int(trainer.get("accumulate_grad_batches", 1))
        self._least = only.sharing if only else _UNSHARED
        open_config = replace(config, recompute=False, num_chunks=1, context_parallel_size=1)

        def run(tensor: int, mode: str, depth: int) -> Recorder:
            sizes = (num_ranks // tensor, tensor, 1)
            shared = replace(open_config, tensor_parallel_mode=mode, tensor_parallel_depth=depth)
            ways = [way_of(only)] if only else self._ways(num_ranks // tensor, mode)
            here = {"only": only, "ways": ways, "least_share": least_share, "measure": measure and tensor == 1}
            make_strategy: Callable[..., Recorder] = partial(Recorder, shared, sizes, **here)  # type: ignore[arg-type]
            return run_first_step(make, make_strategy, precision=precision, **trainer)

        self._recorder = lru_cache(maxsize=None)(run)
        self._stages_of = lru_cache(maxsize=None)(self._find_stages)
        self._held_by = lru_cache(maxsize=None)(self._find_held)
        self._seconds_of = lru_cache(maxsize=None)(self._find_seconds)
        self._errors: dict[tuple[int, str, int], str] = {}
        self._contexts = range(1, machine.ranks_per_node + 1) if contexts is None else contexts
        least_share = LEAST_SHARE if contexts is None else 0

    def _ways(self, num_ranks: int, mode: str) -> list[Way]:
        """How layers may run where they, arranged so, and then sequences are shared by so many ranks."""
        sizes = [size for size in self._contexts if size > 1 and num_ranks % size == 0]
        ways: list[Way] = [(recompute, *WHOLE) for recompute in RECOMPUTE]
        return ways + [each for each in product(RECOMPUTE, sizes, KINDS) if not self._refusal(*each, mode)]

    def _refusal(self, recompute: Any, size: int, kind: str, mode: str) -> str:
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

    @property
    def batch_size(self) -> int:
        """The samples of a batch of the loader.

        Raises:
            ValueError, TypeError: As at the start of training.
        """
        return self._recorder(*self._least).batch_size

    def refuse(self, layout: Layout) -> tuple[str, str] | None:
        """Why the module cannot be divided by a layout: in short, and in full; ``None`` if it can."""
        if layout.sharing not in self._errors:
            self._errors[layout.sharing] = self._find_error(*layout.sharing)
        if error := self._errors[layout.sharing]:
            return "layers cannot be shared", error
        recorder = self._recorder(*layout.sharing)
        if layout.context > 1 and (error := self._share_error(layout)):
            return "sequences cannot be shared", error
        if error := recorder.cut_error(layout):
            return "layers cannot be divided into so many stages", error
        if error := recorder.trace_error(layout):
            return "layers cannot run again", error
        return None

    def divided_shares(self) -> dict[int, float]:
        """The share of the parameters that ranks in a line divide, by their number: of those asked for so far."""
        sizes = [size for (size, mode, _), error in self._errors.items() if size > 1 and mode == "1d" and not error]
        return {size: self._recorder(size, "1d", 1).divided_share for size in sizes}

    def _share_error(self, layout: Layout) -> str:
        refused = self._refusal(*way_of(layout), layout.tensor_mode)
        if refused or layout.sharing == self._least:
            return refused or self._recorder(*layout.sharing).share_error(layout)
        # Layers that are divided are not tried, as what their ranks send has no numbers.
        whole = _with_sharing(layout, *self._least)
        return self._recorder(*whole.sharing).share_error(whole) or self._recorder(*layout.sharing).share_error(layout)

    def _find_error(self, tensor: int, mode: str, depth: int) -> str:
        if tensor == 1:
            return ""
        try:
            check_grid(mode, [tensor], depth, sequence_parallel=self._config.sequence_parallel)
            share = self._recorder(tensor, mode, depth).divided_share
        except (ValueError, TypeError) as error:
            return str(error)
        plan, beside = self._config.tensor_parallel_plan, "" if mode == "1d" else f" with tensor_parallel_mode={mode!r}"
        return "" if share else f"tensor_parallel_plan={plan!r} divides nothing of it{beside}"

    def stages(self, layout: Layout, samples: int) -> Sequence[StageCost]:
        """As :class:`~lightning_hybrid.strategy.auto_layout.cost_model.Profile` says."""
        key = replace(layout, data=1, num_microbatches=1, schedule="1f1b", zero_stage=0, extra_in_flight=())
        return self._stages_of(key, samples)

    def held(self, layout: Layout) -> Sequence[MemoryUsage]:
        """As :class:`~lightning_hybrid.strategy.auto_layout.cost_model.Profile` says."""
        return self._held(layout, master_weights=self._config.master_weights)

    def _held(self, layout: Layout, *, master_weights: bool) -> tuple[MemoryUsage, ...]:
        number = min(layout.num_microbatches, 2)  # one, or several
        layout = replace(layout, num_microbatches=number, schedule="1f1b", recompute=False, extra_in_flight=())
        return self._held_by(replace(layout, context=WHOLE[0], context_kind=WHOLE[1]), master_weights)

    def weights(self, layout: Layout) -> Sequence[tuple[int, int]]:
        """As :class:`~lightning_hybrid.strategy.auto_layout.cost_model.Profile` says."""
        usages = self._held(replace(layout, zero_stage=0), master_weights=False)  # which are not sent
        return [(usage.parameters, usage.gradients) for usage in usages]

    def num_layers(self, layout: Layout) -> Sequence[int]:
        """As :class:`~lightning_hybrid.strategy.auto_layout.cost_model.Profile` says."""
        return [len(positions) for positions in self._recorder(*layout.sharing).cut(layout).positions]

    def _find_stages(self, layout: Layout, samples: int) -> tuple[StageCost, ...]:
        recorder = self._recorder(*layout.sharing)
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
                    forward=sum(forward for forward, _, _ in seconds),
                    recomputed=sum(again for _, again, _ in seconds),
                    saved=sum(saved),
                    output=value_at(samples, traces, [trace.outputs.get(last, 0) for trace in traces]),
                    context_beside=sum(beside for _, _, beside in seconds),
                    **self._messages(samples, of_parts),
                )
            )
        return tuple(costs)

    def _find_seconds(self, layout: Layout, samples: int, label: Hashable) -> tuple[float, float, float]:
        """Of the forward of one place in the step, of what of it runs again, and of what a ring sends beside."""
        seconds = self._count_seconds(layout, samples, label)
        if self._is_measured:
            whole = _with_sharing(replace(layout, context=WHOLE[0], context_kind=WHOLE[1]), *_UNSHARED)
            timings = self._recorder(*_UNSHARED).timings(whole)
            measured = value_between(samples, [(each.samples, each.seconds.get(label, 0.0)) for each in timings])
            counted, _, _ = self._count_seconds(whole, samples, label)
            factor = measured / counted if counted else 0.0
            forward, again, beside = (factor * each for each in seconds)
            return forward, again, beside
        return seconds

    def _count_seconds(self, layout: Layout, samples: int, label: Hashable) -> tuple[float, float, float]:
        traces, machine = self._recorder(*layout.sharing).traces(layout), self._machine
        forward = again = beside = 0.0
        for alike in _pairs([trace.counter.operations[label] for trace in traces]):
            flops = value_at(samples, traces, [operation.flops for operation in alike])
            moved = value_at(samples, traces, [operation.bytes for operation in alike])
            seconds = max(flops / machine.flops, moved / machine.memory_bandwidth, machine.operation_seconds)
            forward += seconds
            if isinstance(label, int) and (layout.recompute is True or (layout.recompute and not alike[0].is_kept)):
                again += seconds
            if layout.context_kind == "ring" and alike[0].is_attention:  # of its blocks
                beside += seconds
        return forward, again, beside

    def _messages(
        self, samples: int, parts: Iterable[tuple[Layout, Iterable[Hashable], Sequence[Trace]]]
    ) -> dict[str, Any]:
        """What a stage sends, as attributes of its cost."""
        tensor = tensor_back = context = context_back = NO_MESSAGES
        tensor_again = context_again = 0.0
        for layout, labels, traces in parts:
            for label in labels:
                runs_again = isinstance(label, int) and bool(layout.recompute)
                messages, of_back = _sums(samples, traces, [trace.counter.messages[label] for trace in traces])
                tensor, tensor_back = tensor + messages, tensor_back + of_back
                tensor_again += messages.sent if runs_again and layout.recompute is True else 0.0
                messages, of_back = _sums(samples, traces, [trace.counter.context_messages[label] for trace in traces])
                context, context_back = context + messages, context_back + of_back
                context_again += messages.sent if runs_again else 0.0
        return {
            "tensor": tensor,
            "tensor_back": tensor_back,
            "tensor_repeated": tensor_again / tensor.sent if tensor.sent else 0.0,
            "context": context,
            "context_back": context_back,
            "context_repeated": context_again / context.sent if context.sent else 0.0,
        }

    def _find_held(self, layout: Layout, master_weights: bool) -> tuple[MemoryUsage, ...]:
        return self._recorder(*layout.sharing).held(layout, self._accumulated, master_weights=master_weights)


def _with_sharing(layout: Layout, tensor: int, mode: str, depth: int) -> Layout:
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


def _sums(samples: int, traces: Sequence[Trace], rows: list[list[Message]]) -> tuple[Messages, Messages]:
    """Of a forward, and of its backward, what is sent for so many samples."""
    there = back = NO_MESSAGES
    for alike in _pairs(rows):
        there += replace(alike[0].there, sent=value_at(samples, traces, [each.there.sent for each in alike]))
        back += replace(alike[0].back, sent=value_at(samples, traces, [each.back.sent for each in alike]))
    return there, back


def _pairs(rows: list[list[Any]]) -> list[tuple[Any, ...]]:
    """The same operation in each of the traces; in the first one alone, if they are not alike."""
    if len({len(row) for row in rows}) == 1:
        return list(zip(*rows, strict=True))
    return [(each,) * len(rows) for each in rows[0]]

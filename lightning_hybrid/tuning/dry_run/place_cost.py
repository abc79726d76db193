"""The cost of one part of a step, a layer or the code around the layers, from traces of the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_hybrid.tuning.candidates import Layout
from lightning_hybrid.tuning.dry_run.operations import Message
from lightning_hybrid.tuning.dry_run.saved_tensors import saved_bytes
from lightning_hybrid.tuning.dry_run.traces import Trace, value_at
from lightning_hybrid.tuning.machine import NO_MESSAGES, Machine, Messages


@dataclass(frozen=True)
class PlaceCost:
    """The cost of one label of a trace, a layer or the code around the layers, for one microbatch.

    Attributes:
        forward: Seconds of its forward.
        again: Seconds of the forward that run again in backward.
        beside: Seconds of a forward that compute beside the messages of a ring.
        tensor: Messages to the ranks that share its layers, in a forward.
        tensor_back: Those of a backward, without the recomputed ones.
        tensor_again: Bytes of the forward's that backward sends once more, because it is recomputed.
        context: Messages to the ranks that share sequences, in a forward.
        context_back: Those of a backward, without the recomputed ones.
        context_again: Bytes of the forward's that backward sends once more, because it is recomputed.
    """

    forward: float = 0.0
    again: float = 0.0
    beside: float = 0.0
    tensor: Messages = NO_MESSAGES
    tensor_back: Messages = NO_MESSAGES
    tensor_again: float = 0.0
    context: Messages = NO_MESSAGES
    context_back: Messages = NO_MESSAGES
    context_again: float = 0.0

    def __add__(self, other: PlaceCost) -> PlaceCost:
        return PlaceCost(*(mine + its for mine, its in zip(_values(self), _values(other), strict=True)))

    def __mul__(self, number: int) -> PlaceCost:
        return PlaceCost(*(value * number for value in _values(self)))

    def with_forward(self, seconds: float) -> PlaceCost:
        """Scale all seconds so that a forward takes this many."""
        factor = seconds / self.forward if self.forward else 0.0
        return replace(self, forward=factor * self.forward, again=factor * self.again, beside=factor * self.beside)


def _values(cost: PlaceCost) -> Iterable[Any]:
    return vars(cost).values()


def cost_of_place(
    traces: Sequence[Trace], samples: int, label: Hashable, layout: Layout, machine: Machine
) -> PlaceCost:
    """Add up the operations and messages of a label.

    Args:
        traces: The traces of the larger and the smaller microbatch.
        samples: The samples of the microbatch to estimate.
        label: A layer, by position, or the code before or after the layers.
        layout: Says what runs again in backward, and how attention communicates.
        machine: Says how long an operation takes.
    """
    recompute = layout.recompute if isinstance(label, int) else False
    operations, messages, context_messages = zip(*(trace.counts.of(label) for trace in traces), strict=True)
    forward = again = beside = 0.0
    for alike in _pairs(operations):
        flops = value_at(samples, traces, [operation.flops for operation in alike])
        moved = value_at(samples, traces, [operation.bytes for operation in alike])
        seconds = max(flops / machine.flops, moved / machine.memory_bandwidth, machine.operation_seconds)
        forward += seconds
        if recompute is True or (recompute and not alike[0].is_kept):
            again += seconds
        if layout.context_kind == "ring" and alike[0].is_attention:  # of its blocks
            beside += seconds
    tensor, tensor_back = _sums(samples, traces, messages)
    context, context_back = _sums(samples, traces, context_messages)
    tensor_again = tensor.sent if recompute is True else 0.0
    context_again = context.sent if recompute else 0.0
    return PlaceCost(forward, again, beside, tensor, tensor_back, tensor_again, context, context_back, context_again)


@dataclass(frozen=True)
class StagePart:
    """The labels of a stage whose layers are recomputed in the same way.

    Attributes:
        layout: A layout that treats all layers as these.
        labels: The layers, by position, and the code before and after them.
        traces: The traces of the larger and the smaller microbatch.
        kinds: The number of labels with equal records, by the first of these labels.
        saved: The bytes that they save for backward, in each trace.
    """

    layout: Layout
    labels: Sequence[Hashable]
    traces: Sequence[Trace]
    kinds: Mapping[Hashable, int]
    saved: Sequence[int]

    @classmethod
    def of(cls, layout: Layout, labels: Sequence[Hashable], traces: Sequence[Trace]) -> StagePart:
        """Group the labels by their records."""
        first, *others = (trace.first_alike for trace in traces)
        kinds = Counter(
            first[label] if all(each[label] == first[label] for each in others) else label for label in labels
        )
        assert not isinstance(layout.recompute, tuple), "recompute must be the same for all layers"
        saved = [saved_bytes(trace.saved[layout.recompute], labels) for trace in traces]
        return cls(layout, labels, traces, kinds, saved)


def _sums(samples: int, traces: Sequence[Trace], rows: Sequence[Sequence[Message]]) -> tuple[Messages, Messages]:
    """Add up the messages of a forward and those of its backward, for a number of samples."""
    there = back = NO_MESSAGES
    for alike in _pairs(rows):
        there += replace(alike[0].there, sent=value_at(samples, traces, [each.there.sent for each in alike]))
        back += replace(alike[0].back, sent=value_at(samples, traces, [each.back.sent for each in alike]))
    return there, back


def _pairs(rows: Sequence[Sequence[Any]]) -> Iterable[tuple[Any, ...]]:
    """Pair the same record of each trace; if the traces have other numbers of records, repeat those of the first."""
    if len({len(row) for row in rows}) == 1:
        return zip(*rows, strict=True)
    return [(each,) * len(rows) for each in rows[0]]

"""Parts of a stage, and the cost of a layer or of the code around the layers, from traces of a step.

`ModuleProfile` calls :func:`cost_of_label` for each label of a stage, and adds up the costs. A *label* is the position
of a layer, or a text for code outside the layers. A *trace* has the operations and messages of a forward with one
microbatch, by label. If a layout recomputes only some layers of a stage, the stage has two *parts*, because recomputed
layers save other tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_hybrid.tuning.candidates import Layout
from lightning_hybrid.tuning.cost_model import StageCost
from lightning_hybrid.tuning.dry_run.saved_tensors import saved_bytes
from lightning_hybrid.tuning.dry_run.traces import Trace, value_at
from lightning_hybrid.tuning.machine import Machine
from lightning_hybrid.tuning.messages import NO_EXCHANGE, Exchange


def cost_of_label(
    traces: Sequence[Trace], samples: int, label: Hashable, layout: Layout, machine: Machine
) -> StageCost:
    """Add up the operations and messages of a label. The fields `saved` and `output` of the result stay 0.

    Args:
        traces: The traces of the larger and, if there is one, the smaller microbatch.
        samples: The number of samples in the microbatch of the layout.
        label: A layer, by position, or the code before or after the layers, which is not recomputed.
        layout: A layout in which all layers are recomputed in the same way. It also determines attention communication.
        machine: The machine, which determines the time of an operation.
    """
    recompute = layout.recompute if isinstance(label, int) else False
    counts = (trace.counts.of(label) for trace in traces)
    operations, messages, context_messages, token_messages = zip(*counts, strict=True)
    forward = recomputed = overlappable = 0.0
    for alike in _pairs(operations):
        flops = value_at(samples, traces, [operation.flops for operation in alike])
        moved = value_at(samples, traces, [operation.bytes for operation in alike])
        seconds = max(flops / machine.flops, moved / machine.memory_bandwidth, machine.operation_seconds)
        forward += seconds
        if recompute is True or (recompute and not alike[0].is_kept):
            recomputed += seconds
        if layout.context_kind == "ring" and alike[0].is_attention:  # of blocks of the ring
            overlappable += seconds
    tensor = _sum(samples, traces, messages, repeats=recompute is True)
    context = _sum(samples, traces, context_messages, repeats=bool(recompute))
    tokens = _sum(samples, traces, token_messages, repeats=bool(recompute))
    return StageCost(forward, recomputed, overlappable, tensor, context, tokens)


@dataclass(frozen=True)
class StagePart:
    """The labels of a stage whose layers are recomputed in the same way.

    Attributes:
        layout: A layout in which all layers are recomputed in this way.
        labels: The layers, by position, and the code before and after them.
        traces: The traces of the larger and the smaller microbatch.
        kinds: The number of labels with equal records, by the first of these labels.
        saved: The bytes that the labels save for the backward, in each trace.
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


def _sum(samples: int, traces: Sequence[Trace], rows: Sequence[Sequence[Exchange]], *, repeats: bool) -> Exchange:
    """Add up messages for a number of samples.

    Args:
        samples: The number of samples.
        traces: The traces of the larger and the smaller microbatch.
        rows: The messages in each trace.
        repeats: True if the backward sends the messages of the forward again.
    """
    total = NO_EXCHANGE
    for alike in _pairs(rows):
        forward = replace(alike[0].forward, sent=value_at(samples, traces, [each.forward.sent for each in alike]))
        backward = replace(alike[0].backward, sent=value_at(samples, traces, [each.backward.sent for each in alike]))
        total += Exchange(forward, backward)
    return replace(total, repeated=total.forward.sent) if repeats else total


def _pairs(rows: Sequence[Sequence[Any]]) -> Iterable[tuple[Any, ...]]:
    """Pair the records of the traces. If their numbers differ, use the records of the first trace for all traces."""
    if len({len(row) for row in rows}) == 1:
        return zip(*rows, strict=True)
    return [(each,) * len(rows) for each in rows[0]]

"""The tensors that autograd saves in a step for its backward, by label, and the most memory that they take.

A dry run labels tensors with :func:`labeled_layers`: one forward then shows the activations of every stage of every
layout, because a stage saves the tensors of its labels (:func:`labels_of_stages`). `DryRunStrategy` makes
:class:`Activations` from them, and `ModuleProfile` adds them up for layouts.

The *body* has the layers that a pipeline splits into stages. A *storage* is the memory of a tensor and its views; it
counts once, even if several tensors use it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_hybrid.memory.account import SavedTensorMeter
from lightning_hybrid.pipeline_parallel.body import Body
from lightning_hybrid.pipeline_parallel.schedules import Schedule

#: The labels of code outside the layers: before the first layer, and after it, including code between layers. A layer
#: has its position in the body as its label.
BEFORE, AFTER = "before the body", "after the body"

#: The bytes of each storage that a step saves, by label and by a key of the storage.
Saved = dict[Hashable, dict[Hashable, int]]


@dataclass(frozen=True)
class Activations:
    """The activations that autograd saves.

    Attributes:
        per_microbatch: The bytes of a microbatch in each stage, in the order of the stages.
        copies: The bytes of weights that autocast has cast, in each stage. All microbatches of a run share them, except
            for the first one (see :class:`SharedCasts`). The bytes of `per_microbatch` do not include them.
    """

    per_microbatch: Sequence[int]
    copies: Sequence[int]

    def peak(self, schedule: Schedule, rank: int) -> int:
        """Return the largest number of bytes that a pipeline rank holds at a time."""
        current = peak = 0
        begun: Counter[int] = Counter()
        for action in schedule.actions[rank]:
            own = self.copies[action.stage] if action.microbatch == 0 else 0
            if action.kind.kept > 0:
                begun[action.stage] += 1
                shared = self.copies[action.stage] if begun[action.stage] == 2 else 0
                current += self.per_microbatch[action.stage] + own + shared
                peak = max(peak, current)
            elif action.kind.kept < 0:
                current -= self.per_microbatch[action.stage] + own
        return peak


def labels_of_stages(stages: Sequence[range]) -> list[list[Hashable]]:
    """Return the labels of the parts of a step that each stage runs.

    Args:
        stages: The layers of each stage.
    """
    labels: list[list[Hashable]] = [list(layers) for layers in stages]
    labels[0].insert(0, BEFORE)
    labels[-1] += [BEFORE, AFTER] if len(labels) > 1 else [AFTER]  # the last stage also runs a step from its beginning
    return labels


def saved_bytes(saved: Saved, labels: Iterable[Hashable]) -> int:
    """Return the saved bytes of some labels; each storage counts once."""
    return sum({key: size for label in labels for key, size in saved[label].items()}.values())


def merged(saved: Saved) -> Saved:
    """Merge the storages that are saved under the same labels into one, and number the merged storages.

    The sums of :func:`saved_bytes` stay the same, and a record takes less memory.
    """
    places, sizes = defaultdict[Hashable, list[int]](list), dict[Hashable, int]()
    for place, storages in enumerate(saved.values()):
        sizes |= storages
        for key in storages:
            places[key].append(place)
    totals: Counter[tuple[int, ...]] = Counter()
    for key, of_key in places.items():
        totals[tuple(of_key)] += sizes[key]
    found: list[dict[Hashable, int]] = [{} for _ in saved]
    for number, (at, size) in enumerate(sorted(totals.items())):
        for place in at:
            found[place][number] = size
    return dict(zip(saved, found, strict=True))


@contextmanager
def labeled_layers(body: Body | None, meter: SavedTensorMeter) -> Iterator[None]:
    """Set the label of the meter to the position of the layer that runs, while entered.

    Before the first layer, the label is :data:`BEFORE`, and after any layer, it is :data:`AFTER`.
    """
    meter.label = BEFORE

    def begin(index: int) -> Callable[[nn.Module, Any], None]:
        return lambda layer, args: setattr(meter, "label", index)

    def end(layer: nn.Module, args: Any, output: Any) -> None:
        meter.label = AFTER

    with ExitStack() as hooks:
        for index, layer in enumerate(body.layers if body else ()):
            hooks.enter_context(layer.register_forward_pre_hook(begin(index)))
            hooks.enter_context(layer.register_forward_hook(end))
        yield

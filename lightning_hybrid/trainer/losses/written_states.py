"""State that forwards write from the batch: codebooks, running statistics of a user's own layer, quantiles.

With microbatches, such a state is written several times in a step, which may change training.
:class:`~.microbatch_comparison.MicrobatchComparison` compares the states s after forwards of two microbatches A and B
with the states after one forward of both joined, J, and warns or uses one microbatch if they differ. ::

    samples in one microbatch          s --> s(J)
    in two, each starting from s       s --> s(A),  s --> s(B)
    in two, one after the other        s --> s(A) --> s(AB), as in a step

If s(J) equals s(A) and s(B), the state does not depend on the batch. Otherwise, s(AB) is computed, and must equal s(J),
which holds for a sum or a maximum over samples. The loss of B must be the same after s(A) as after s. It differs, for
example, if a step compares samples with a queue of earlier samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.distributed.module_names import join_names
from lightning_hybrid.distributed.replaced import tables_of
from lightning_hybrid.pipeline_parallel.frame.stage_states import find_owners

__all__ = ["Change", "Difference", "WrittenStates", "find_differences", "find_of_batch", "is_used", "state_text"]

_ROUNDINGS = 16  # the number of rounding errors by which sums may differ
_MOST_NAMED = 4


class _Place(NamedTuple):
    """A state, by its path and by its entry in a dictionary of attributes or buffers."""

    path: str
    table: dict[str, Any]
    name: str
    value: Tensor  # the value at construction


class Change(NamedTuple):
    """A state before and after a forward.

    Attributes:
        before: The old value, float64.
        after: The new value, float64, with the same shape.
        epsilon: The machine epsilon of the original dtype; 0 for integers.
    """

    before: Tensor
    after: Tensor
    epsilon: float


class Difference(NamedTuple):
    """A state whose final value differs if there are microbatches.

    Attributes:
        path: The path of the buffer or attribute.
        size: The largest difference of its numbers, relative to the largest change in a step.
    """

    path: str
    size: float


class WrittenStates:
    """Buffers and tensor attributes of a module and of the objects in it, except parameters and metrics.

    Placeholders of other stages and tensor subclasses are also excluded.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = {path: owner for path, owner in find_owners([module]).items() if not isinstance(owner, Metric)}
        self._places = [
            _Place(join_names(path, name), table, name, value)
            for path, owner in owners.items()
            for table in tables_of(owner)
            for name, value in table.items()
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and _has_numbers(value)
        ]

    def read(self, former: Callable[[Tensor], Tensor | None]) -> dict[str, Change]:
        """Return the changes of states that were written, or replaced by tensors of the same shape, by path.

        Args:
            former: Returns the old value of a tensor that was written in place; ``None`` for other tensors.
        """
        found = {}
        for place in self._places:
            now, before = place.table.get(place.name), former(place.value)
            if before is None:
                before = place.value
                if now is before:
                    continue
            if isinstance(now, Tensor) and now.shape == before.shape and _has_numbers(now):
                epsilon = torch.finfo(now.dtype).eps if now.is_floating_point() else 0.0
                found[place.path] = Change(before.detach().double(), now.detach().double().clone(), epsilon)
        return found


def _has_numbers(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not tensor.is_meta and tensor.layout is torch.strided and not tensor.is_complex()


def find_of_batch(changes: Sequence[Mapping[str, Change]], rounding: float) -> list[str]:
    """Return the paths of the states whose new values depend on the batch.

    Args:
        changes: The changes with all samples in one microbatch, and with each of two microbatches, from the same
            states, by path. A state that one of these forwards did not write also counts.
        rounding: The relative difference that rounding can explain.
    """
    found = []
    for path in sorted({path for of_run in changes for path in of_run}):
        joined, *alone = [of_run.get(path) for of_run in changes]
        bound = math.inf if joined is None else _bound(joined, rounding)
        if joined is None or any(each is None or _gap(joined.after, each.after) > bound for each in alone):
            found.append(path)
    return found


def is_used(alone: float, after: float, rounding: float) -> bool:
    """Return True if the loss of a microbatch depends on the state that an earlier microbatch of the step has written.

    Args:
        alone: The loss of the microbatch with the state from before the step.
        after: The loss of the microbatch with the state after the earlier microbatch.
        rounding: The relative difference that rounding can explain.
    """
    if math.isnan(alone) or math.isnan(after):
        return math.isnan(alone) != math.isnan(after)
    return not abs(alone - after) <= rounding * max(abs(alone), abs(after))


def find_differences(joined: Mapping[str, Change], parts: Mapping[str, Change], rounding: float) -> list[Difference]:
    """Return the states whose values after two microbatches differ from the values after both joined.

    Args:
        joined: The changes with both microbatches joined.
        parts: The changes with one microbatch after the other.
        rounding: The relative difference that rounding can explain.
    """
    found = []
    for path in sorted(joined.keys() & parts.keys()):
        gap, change = _gap(joined[path].after, parts[path].after), _gap(joined[path].before, joined[path].after)
        if not gap <= _bound(joined[path], rounding):
            found.append(Difference(path, gap / change if change else math.inf))
    return found


def _bound(change: Change, rounding: float) -> float:
    """Return the largest difference that rounding can explain, in the change and in its sum with the old value."""
    before, after, epsilon = change
    return rounding * _gap(before, after) + _ROUNDINGS * epsilon * max(_size(before), _size(after))


def _gap(first: Tensor, second: Tensor) -> float:
    return _size(first - second)


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def state_text(
    found: Sequence[Difference], used: Sequence[str], losses: tuple[float, float] | None, number: int, *, switches: bool
) -> str:
    """Return the warning about states that microbatches change.

    Args:
        found: The states whose final values differ with microbatches.
        used: The paths of the states whose new values depend on the batch.
        losses: The loss of the second microbatch without and with the first microbatch before it; ``None`` if they are
            equal.
        number: The number of microbatches.
        switches: If True, batches run as one microbatch from now on.
    """
    paths = [each.path for each in found] or list(used)
    names = ", ".join(map(repr, paths[:_MOST_NAMED]))
    names += f" and {len(paths) - _MOST_NAMED} others" if len(paths) > _MOST_NAMED else ""
    text = f"The forward pass updates {names} with values that depend on the batch."
    if found:
        largest = max(each.size for each in found)
        text += (
            " If the same samples run as two microbatches instead of one, the change of the state differs by"
            f" {100 * largest:.2g}%."
        )
    if losses is not None:
        text += (
            f" The loss of the second microbatch depends on the state: the loss is {losses[1]:.6g} if the first"
            f" microbatch runs before the second, but {losses[0]:.6g} if not."
        )
    if switches:
        return (
            f"{text} Each batch now runs as one microbatch instead of {number}, so that training matches a single"
            f" process. To let each microbatch update the state, set `num_microbatches={number}`."
        )
    return (
        f"{text} With the {number} microbatches that you set, the state is updated once for each microbatch. Set"
        " `num_microbatches=1` to match a single process."
    )

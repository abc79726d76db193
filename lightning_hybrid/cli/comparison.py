"""Comparison of two trainings on the same batches, value by value in the order in which they were computed.

`cli.check` calls :func:`compare` after each pair of trainings, and :func:`comparison_table` for its output. The order
matters, because the first difference is the closest to its cause.

The *reference* is the record of one process. It has trained on the batches of all replicas, so each step of it has as
many batches as all replicas together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.cli.check_training import TrainingRecord

# Smaller values are compared by their absolute difference, relative to this number, because the digits of a gradient
# that is zero except for rounding are arbitrary.
_SMALLEST = 1e-3
_OVER_REPLICAS: tuple[Callable[[Sequence[float]], float], ...] = (lambda v: sum(v) / len(v), sum, min, max)


@dataclass(frozen=True)
class Comparison:
    """A value, computed once in one process and once under the layout.

    Attributes:
        step: The number of the optimizer step, starting at 1; ``None`` for values at the end of training.
        name: ``"loss"``, ``"gradient norm"``, ``"log NAME"``, ``"weight NAME"`` or ``"buffer NAME"``.
        expected: The value in one process. A tensor is represented by its norm, and a step with several batches by the
            mean over its batches. If training in one process did not produce the value, ``expected`` is ``nan``.
        actual: The value under the layout, computed in the same way.
        difference: The relative difference from the expected value. For tensors, ``difference`` is the norm of the
            difference tensor, divided by the norm of the expected tensor. Therefore, ``difference`` can be above 0 even
            if ``expected`` and ``actual`` are equal. The divisor is at least 1e-3 for a number, and at least 1e-3 times
            the square root of N for a tensor of N numbers. For a step with several batches, ``difference`` is the
            largest difference in any of the batches.
    """

    step: int | None
    name: str
    expected: float
    actual: float
    difference: float


def compare(
    reference: TrainingRecord, ranks: Sequence[TrainingRecord], *, steps: int, replicas: int
) -> tuple[Comparison, ...]:
    """Compare training under a layout with training in one process.

    Args:
        reference: The record of one process, which trained on the batches of all replicas in turn.
        ranks: The record of every rank, in the order of ranks. The first rank must have the weights.
        steps: The number of optimizer steps.
        replicas: The number of replicas.

    Returns:
        The values of each step, then the values at the end. With several replicas, buffers are excluded, because the
        first replica's buffers are used, as in DDP.
    """
    firsts = [next(rank for rank in ranks if rank.data_rank == number) for number in range(replicas)]
    compared: list[Comparison] = []
    for step in range(steps):
        losses = zip(*(_of_step(first.losses, step, steps) for first in firsts), strict=True)
        expected = _of_step(reference.losses, step, steps)
        actual = [loss for of_batch in losses for loss in of_batch]
        if expected or actual:
            compared.append(_scalars(step + 1, "loss", expected, actual))
        compared += _logged(reference, firsts, step, steps)
        norms = [_of_step(each.grad_norms, step, steps) for each in (reference, firsts[0])]
        compared.append(_scalars(step + 1, "gradient norm", *norms))
    compared += _epoch_logged(reference, firsts)
    compared += _weights(reference, ranks[0], with_buffers=replicas == 1)
    return tuple(compared)


def interleaved(replicas: Sequence[TrainingRecord]) -> TrainingRecord:
    """Return the records of replicas in one process each as one record, with their batches in turn.

    Gradient norms and weights, which are equal on all replicas, are from the first record.
    """
    losses = zip(*(each.losses for each in replicas), strict=True)
    logged = zip(*(each.logged for each in replicas), strict=True)
    return replace(
        replicas[0],
        losses=[loss for of_step in losses for loss in of_step],
        logged=[values for of_step in logged for values in of_step],
    )


def relative_difference(expected: float, actual: float) -> float:
    """Return the difference of two numbers, relative to the first or, if it is smaller, to 1e-3.

    The result is 0 if they are equal or both NaN, and otherwise infinite if one of them is not finite.
    """
    if expected == actual or (math.isnan(expected) and math.isnan(actual)):
        return 0.0
    difference = abs(actual - expected) / max(abs(expected), _SMALLEST)
    return difference if math.isfinite(difference) else math.inf


def _of_step(values: Sequence[Any], step: int, steps: int) -> list[Any]:
    """Return the part of a list over all batches that belongs to one step."""
    each = len(values) // steps
    return list(values[step * each : (step + 1) * each])


def _scalars(step: int | None, name: str, expected: Sequence[float], actual: Sequence[float]) -> Comparison:
    if len(expected) != len(actual) or not expected:
        return Comparison(step, name, _mean(expected), _mean(actual), math.inf)
    difference = max(map(relative_difference, expected, actual))
    return Comparison(step, name, _mean(expected), _mean(actual), difference)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _logged(reference: TrainingRecord, firsts: Sequence[TrainingRecord], step: int, steps: int) -> Iterator[Comparison]:
    """Yield comparisons of the values that were logged in a step.

    A value is either the replica's own, or with ``sync_dist=True`` a mean, sum, minimum or maximum over the replicas.
    The record does not contain the reduction, so the reduction with the smallest difference is used.
    """
    replicas = len(firsts)
    expected = _of_step(reference.logged, step, steps)
    actual = list(zip(*(_of_step(first.logged, step, steps) for first in firsts), strict=True))
    names = dict.fromkeys(name for logged in (*expected, *(each for row in actual for each in row)) for name in logged)
    for name in names:
        found: list[Comparison] = []
        of_one = [logged.get(name, math.nan) for logged in expected]
        rows = [of_one[first : first + replicas] for first in range(0, len(of_one), replicas)]
        of_layout = [logged.get(name, math.nan) for row in actual for logged in row]
        found.append(_scalars(step + 1, f"log {name}", of_one, of_layout))
        for reduce in _OVER_REPLICAS if replicas > 1 else ():
            reduced = [reduce(row) for row in rows for _ in row]
            found.append(_scalars(step + 1, f"log {name}", reduced, of_layout))
        yield min(found, key=lambda each: each.difference)


def _epoch_logged(reference: TrainingRecord, firsts: Sequence[TrainingRecord]) -> Iterator[Comparison]:
    """Yield comparisons of values that were logged only at the end of the epoch."""
    of_steps = {name for logged in reference.logged for name in logged}
    names = dict.fromkeys((*reference.epoch_logged, *(name for first in firsts for name in first.epoch_logged)))
    for name in names:
        if name in of_steps:
            continue
        expected = reference.epoch_logged.get(name, math.nan)
        actual = [first.epoch_logged.get(name, math.nan) for first in firsts]
        found = [_scalars(None, f"log {name}", [expected], [reduce(actual)]) for reduce in _OVER_REPLICAS]
        yield min(found, key=lambda each: each.difference)


def _weights(reference: TrainingRecord, first: TrainingRecord, *, with_buffers: bool) -> Iterator[Comparison]:
    for name in dict.fromkeys((*reference.weights, *first.weights)):
        is_parameter = name in reference.parameter_names
        if not is_parameter and not with_buffers:
            continue
        kind = "weight" if is_parameter else "buffer"
        expected, actual = reference.weights.get(name), first.weights.get(name)
        difference = math.inf if expected is None or actual is None else _tensor_difference(expected, actual)
        yield Comparison(None, f"{kind} {name}", _norm(expected), _norm(actual), difference)


def _norm(tensor: Tensor | None) -> float:
    return math.nan if tensor is None else float(torch.linalg.vector_norm(tensor.double()))


def _tensor_difference(expected: Tensor, actual: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of the expected tensor or to a minimum."""
    if expected.shape != actual.shape:
        return math.inf
    difference = _norm(actual.double() - expected.double()) / max(
        _norm(expected), _SMALLEST * math.sqrt(max(1, expected.numel()))
    )
    return difference if math.isfinite(difference) else 0.0 if torch.equal(expected, actual) else math.inf


def comparison_table(comparisons: tuple[Comparison, ...], tolerance: float, most: int) -> str:
    """Return a table of all losses, logged values and gradient norms, and of the weights and buffers that differ most.

    If no weight or buffer differs by more than the tolerance, one row has the largest difference of all of them.

    Args:
        comparisons: The comparisons.
        tolerance: The largest relative difference of equal values.
        most: The largest number of weights and buffers in the table.
    """
    tensors = [each for each in comparisons if each.name.startswith(("weight ", "buffer "))]
    rows = [("step", "value", "one process", "this layout", "difference")]
    rows += [_row(each, each.name, tolerance) for each in comparisons if each not in tensors]
    shown = sorted(
        (each for each in tensors if each.difference > tolerance),
        key=lambda each: (each.name.startswith("buffer "), -each.difference),
    )
    if tensors and not shown:
        largest = max(tensors, key=lambda each: each.difference)
        rows.append(("end", f"{len(tensors)} weights and buffers", "", "", f"{largest.difference:.0e}"))
    rows += [_row(each, each.name, tolerance) for each in shown[:most]]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = []
    for step, name, *numbers in rows:
        cells = [step.rjust(widths[0]), name.ljust(widths[1])]
        cells += [text.rjust(width) for text, width in zip(numbers, widths[2:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    if len(shown) > most:
        lines.append(f"and {len(shown) - most} others of the {len(tensors)} weights and buffers")
    if any(each.difference > tolerance for each in comparisons):
        lines.append(f"<: differs by more than {tolerance:.0e}")
    return "\n".join(lines)


def _row(comparison: Comparison, name: str, tolerance: float) -> tuple[str, str, str, str, str]:
    step = "end" if comparison.step is None else str(comparison.step)
    mark = " <" if comparison.difference > tolerance else ""
    expected, actual = f"{comparison.expected:.12g}", f"{comparison.actual:.12g}"
    return step, name, expected, actual, f"{comparison.difference:.0e}{mark}"

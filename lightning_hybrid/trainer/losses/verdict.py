"""The verdict on a loss: two microbatches joined are compared with the same two microbatches alone.

The loss ``L(J)`` of two microbatches A and B joined to one batch J is compared with ``L(A)`` and ``L(B)``. The weights
``w`` have the sum 1, and are fractions of the samples or of `microbatch_weight`::

    L(J) = w(A) L(A) + w(B) L(B)        a mean over samples: losses of microbatches are averaged
    L(J) = L(A) + L(B)                  a sum over samples: losses of microbatches are summed
    otherwise                           the loss couples samples, or is a mean over something else (:mod:`.causes`)

This module handles only numbers and batches; :class:`~.microbatch_comparison.MicrobatchComparison` runs the forwards in
the first training steps, and decides from the verdict how losses of microbatches are combined. *Targets* are the class
labels of a cross entropy, and a *term* is a mean cross entropy that is a summand of the loss (:mod:`.loss_terms`). A
*pair* is two microbatches, with three losses: of both joined, and of each alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.messages.lazy_tensor import LazyTensor
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.pipeline_parallel.splitting.batch_contents import is_opaque
from lightning_hybrid.pipeline_parallel.splitting.microbatch import split_into
from lightning_hybrid.trainer.losses.divisors import Divisor
from lightning_hybrid.trainer.losses.loss_terms import PAIR, LabelCount, TermCounts, joined_terms

__all__ = [
    "HALF_ROUNDING",
    "LARGE_COEFFICIENT",
    "SMALL",
    "Verdict",
    "coarsest",
    "copied",
    "joined_parts",
    "joined_verdict",
    "judge",
    "judge_logs",
    "judge_pairs",
    "places_of_first",
    "rounding_of",
    "router_losses_scaled",
    "structure_of",
]

#: The relative difference that rounding can explain, by the dtype of the computation.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF_ROUNDING = 2e-2
#: A router loss that causes a smaller relative difference leads only to a note.
SMALL = 0.01
#: The coefficient with which a router loss dominates the whole loss.
LARGE_COEFFICIENT = 10.0
#: The smallest number of samples to compare. Losses over fewer samples may agree by chance, for example if both of two
#: samples are masked.
ENOUGH = 8
#: Small microbatches are joined to :data:`ENOUGH` samples only if a sample has at most this many numbers. Otherwise,
#: microbatches may be small because samples are large, and then the joined batch may not fit in memory.
_SMALL_SAMPLE = 4096

Kind = Literal["mean", "sum", "other", "unknown"]
LogKind = Literal["mean", "weighted", "sum"]


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        kind: ``"mean"``, ``"sum"`` or ``"other"`` as above; ``"unknown"`` if the numbers do not show it, as with two
            equal losses.
        joined: The loss of the samples of both microbatches together.
        parts: The loss of each microbatch alone.
        expected: The weighted mean of the losses of the microbatches.
        labels: The way to count targets if the loss is a mean over them.
        logs: The kinds of logged values that are not means over samples, by name: ``"weighted"`` like the loss, or
            ``"sum"``.
        terms: The ways to count targets if only terms of the loss are means over them.
        divisors: The numbers of the batch by which the loss may be divided; ``None`` if no search was made.
    """

    kind: Kind
    joined: float
    parts: tuple[float, float]
    expected: float
    labels: LabelCount | None = None
    logs: Mapping[str, LogKind] = field(default_factory=dict)
    terms: TermCounts | None = None
    divisors: tuple[Divisor, ...] | None = None

    @property
    def difference(self) -> float:
        """Return the difference of the losses, relative to the joined loss; infinity if a loss is not finite."""
        gap = abs(self.joined - self.expected)
        if math.isnan(gap) or math.isinf(gap):
            return math.inf
        return gap / abs(self.joined) if self.joined else math.inf if gap else 0.0


def structure_of(signature: Any) -> Hashable:
    """Return the structure of a batch: containers, dtypes and numbers of dimensions, without lengths.

    Args:
        signature: The result of :func:`~.splitting.microbatch.signature`.
    """
    spec, leaves = signature
    return spec, tuple((len(leaf[0]), *leaf[1:]) if len(leaf) == 3 else leaf[:1] for leaf in leaves)


def joined_parts(
    batch: Any, num_microbatches: int, user_split: Callable[[Any, int], Sequence[Any]] | None
) -> tuple[list[Any], list[int]]:
    """Return samples of a batch together and in two halves, as separate batches, for several pairs of halves.

    If each microbatch has at least twice :data:`ENOUGH` samples, microbatches are halved, so no batch is larger than
    the batches of the step. Otherwise, the batch is split into half as many microbatches, each of which is two
    microbatches of the step joined, and these are halved. So no tensors have to be joined, and a module's `split_batch`
    splits as it does in the step.

    With at least four microbatches, there are two pairs, and more pairs until they have :data:`ENOUGH` samples. A batch
    of about this size and its halves may follow, because most pairs of two samples do not show that a loss couples the
    samples of a class. If its halves are the same samples as the first two pairs, they are the same objects, so that
    one forward serves both.

    Args:
        batch: The batch of a training step.
        num_microbatches: The number of microbatches in that step.
        user_split: The module's `split_batch`; ``None`` if it has none.

    Returns:
        Three batches for each pair, whose tensors are copies, and the number of samples in each batch. Both lists are
        empty if the batch has too few samples for a pair.
    """
    found: tuple[list[Any], list[int]] = [], []
    number, pairs = num_microbatches, min(2, max(1, num_microbatches // 2))
    batches, totals = split_into(batch, number, user_split)
    if min(totals) < 2 * ENOUGH:
        number = max(1, num_microbatches // 2)
        batches, totals = split_into(batch, number, user_split)
    samples = 0
    for joined, total in zip(batches, totals, strict=True):
        if samples < ENOUGH or len(found[0]) < pairs * PAIR:
            samples += _add_halves(found, joined, total, user_split)
    larger = max(1, sum(totals) // ENOUGH)
    if found[0] and totals[0] < ENOUGH and larger < number and _num_numbers(batch) <= _SMALL_SAMPLE * sum(totals):
        batches, totals = split_into(batch, larger, user_split)
        pairs_before = len(found[0]) // PAIR
        if _add_halves(found, batches[0], totals[0], user_split) and user_split is None and pairs_before > 1:
            firsts = (0, PAIR)
            # Batches are split in the order of their samples.
            if found[1][-2:] == [found[1][first] for first in firsts]:
                found[0][-2:] = [found[0][first] for first in firsts]
    return found


def places_of_first(batches: Sequence[Any]) -> list[int]:
    """Return for each batch the index of the first batch that is the same object."""
    places: dict[int, int] = {}
    return [places.setdefault(id(batch), place) for place, batch in enumerate(batches)]


def _add_halves(
    found: tuple[list[Any], list[int]],
    joined: Any,
    total: int,
    user_split: Callable[[Any, int], Sequence[Any]] | None,
) -> int:
    """Add a batch and its halves to the batches to compare, and return its number of samples; 0 if it has no halves."""
    parts, counts = split_into(joined, 2, user_split)
    if len(parts) != 2 or 0 in counts:
        return 0
    found[0].extend(map(copied, (joined, *parts)))
    found[1].extend((total, *counts))
    return total


def _num_numbers(batch: Any) -> int:
    return sum(leaf.numel() for leaf in flatten(batch)[0] if isinstance(leaf, Tensor))


def copied(batch: Any) -> Any:
    """Return a batch with copies of its tensors and other objects, but without copies of lazy tensors.

    A lazy tensor is a tensor of the batch that this rank receives only when its values are read.
    """
    leaves, spec = flatten(batch)
    return unflatten([_copied_leaf(leaf) for leaf in leaves], spec)


def _copied_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf if isinstance(leaf, LazyTensor) else leaf.clone()  # a copy would read the tensor
    return copy.copy(leaf) if is_opaque(leaf) else leaf


def judge(losses: Sequence[float], weights: Sequence[float], dtype: torch.dtype) -> Verdict:
    """Return the verdict on a loss from three values.

    Args:
        losses: The loss of the joined microbatches, and the loss of each microbatch alone.
        weights: The weight of each microbatch alone; the sum is 1.
        dtype: The dtype of the computation, which determines the rounding.
    """
    joined, first, second = losses
    expected = sum(weight * part for weight, part in zip(weights, (first, second), strict=True) if weight)
    rounding = rounding_of(dtype)
    scale = max(map(abs, losses))
    kind: Kind
    if not math.isfinite(joined):
        kind = "unknown"
    elif abs(joined - expected) <= rounding * scale:
        kind = "unknown" if abs(first - second) <= rounding * scale else "mean"
    elif abs(joined - (first + second)) <= rounding * scale:
        kind = "sum"
    else:
        kind = "other"
    return Verdict(kind, joined, (first, second), expected)


def judge_pairs(
    losses: Sequence[float],
    counts: Sequence[int],
    sizes: Sequence[float],
    labels: LabelCount | None,
    terms: TermCounts | None,
    numbers: Sequence[Mapping[str, float]],
    dtype: torch.dtype,
) -> list[Verdict]:
    """Return the verdict on each pair of microbatches.

    Args:
        losses: The losses of three batches for each pair: both joined, and each alone.
        counts: The number of samples of each batch.
        sizes: The weight of each batch.
        labels: The way to count targets if the loss is a mean over them.
        terms: The ways to count targets if terms of the loss are means over them. The losses include these weights
            already.
        numbers: The numbers that each forward logged, by name.
        dtype: The dtype of the computation.
    """
    verdicts = []
    for of_pair in (slice(first, first + PAIR) for first in range(0, len(losses), PAIR)):
        weights, shares = _parts(sizes[of_pair][1:]), _parts(counts[of_pair][1:])
        verdict = judge(losses[of_pair], weights, dtype)
        if labels is not None and (verdict.kind == "unknown" or verdict.difference <= HALF_ROUNDING):
            verdict = replace(verdict, kind="mean")  # the terms of the loss show this
        if terms is not None and verdict.kind == "unknown" and math.isfinite(verdict.joined):
            verdict = replace(verdict, kind="mean")  # the rest of the loss is equal in all three
        if verdict.kind == "mean":
            verdict = replace(verdict, labels=labels, terms=terms)
        logs = judge_logs(numbers[of_pair], losses[of_pair], shares, weights, verdict, dtype)
        verdicts.append(replace(verdict, logs=logs))
    return verdicts


def rounding_of(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding can explain, for a computation with this dtype."""
    return _ROUNDING.get(dtype, HALF_ROUNDING)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype with the largest rounding errors, which determines the rounding of the whole computation."""
    return max(dtypes, key=rounding_of)


def judge_logs(
    values: Sequence[Mapping[str, float]],
    losses: Sequence[float],
    shares: Sequence[float],
    weights: Sequence[float],
    verdict: Verdict,
    dtype: torch.dtype,
) -> dict[str, LogKind]:
    """Return the kind of each logged value: a mean over samples, weighted like the loss, or a sum.

    Args:
        values: The logged numbers by name, of the joined microbatches and of each alone.
        losses: The losses of the same batches.
        shares: The fraction of the samples in each microbatch alone.
        weights: The weight of each microbatch alone in the loss.
        verdict: The verdict on the loss. A logged value that equals the loss is of the same kind.
        dtype: The dtype of the computation.

    Returns:
        The kinds by name; names whose kind is ambiguous are left out.
    """
    kinds: dict[str, LogKind] = {}
    for name in values[0].keys() & values[1].keys() & values[2].keys():
        joined, *parts = (of_batch[name] for of_batch in values)
        if [joined, *parts] == list(losses) and (verdict.kind == "sum" or verdict.labels is not None):
            kinds[name] = "sum" if verdict.kind == "sum" else "weighted"
            continue
        if not math.isfinite(joined) or parts[0] == parts[1]:
            continue
        candidates: dict[LogKind, Sequence[float]] = {"mean": shares, "weighted": weights, "sum": (1.0, 1.0)}
        size = rounding_of(dtype) * max(map(abs, (joined, *parts)))
        fitting = [
            kind
            for kind, factors in candidates.items()
            if abs(joined - sum(f * part for f, part in zip(factors, parts, strict=True) if f)) <= size
        ]
        if fitting and (fitting[0] == "mean" or len(fitting) == 1):
            kinds[name] = fitting[0]
    return kinds


def joined_verdict(found: Sequence[Verdict]) -> Verdict:
    """Return the verdict on several pairs, of one or of all ranks: the worst one, with the common findings of all.

    If there are means and sums, or different ways to count targets, the kind is ``"other"``.
    """
    known = [verdict for verdict in found if verdict.kind != "unknown"]
    if not known:
        return Verdict("unknown", math.nan, (math.nan, math.nan), math.nan)
    worst = max(known, key=lambda verdict: (verdict.kind == "other", verdict.kind == "sum", verdict.difference))
    explained = [verdict.divisors for verdict in known if verdict.divisors is not None]
    divisors = [each for each in (worst.divisors or ()) if all(each in others for others in explained)]
    worst = replace(worst, divisors=tuple(divisors))
    if worst.kind == "sum" and any(verdict.kind == "mean" for verdict in known):
        return replace(worst, kind="other")
    labels = {verdict.labels for verdict in known} - {None}
    terms = joined_terms([verdict.terms for verdict in known])
    if len(labels) + len(terms) > 1:  # the losses of replicas are of different kinds
        return replace(worst, kind="other", labels=None, terms=None)
    logs: dict[str, set[LogKind]] = {}
    for verdict in known:
        for name, kind in verdict.logs.items():
            logs.setdefault(name, set()).add(kind)
    return replace(
        worst,
        labels=next(iter(labels), None),
        terms=next(iter(terms), None),
        logs={name: next(iter(kinds)) for name, kinds in logs.items() if len(kinds) == 1 and "mean" not in kinds},
    )


@contextmanager
def router_losses_scaled(module: nn.Module, largest: float) -> Iterator[float | None]:
    """Scale the coefficients of router losses in mixture-of-experts models of transformers inside the context.

    Args:
        module: The user's module.
        largest: The new value of the largest coefficient; 0 to remove router losses.

    Yields:
        The factor of the coefficients; ``None`` if the module has no router losses.
    """
    routers = [part for part in module.modules() if getattr(part, "router_aux_loss_coef", 0)]
    before = [float(part.router_aux_loss_coef) for part in routers]  # type: ignore[arg-type]
    factor = largest / max(map(abs, before)) if before else None
    try:
        for part, value in zip(routers, before, strict=True):
            part.router_aux_loss_coef = value * factor  # type: ignore[assignment, operator]
        yield factor
    finally:
        for part, value in zip(routers, before, strict=True):
            part.router_aux_loss_coef = value  # type: ignore[assignment]


def _parts(sizes: Sequence[float]) -> list[float]:
    """Return each size divided by the sum of sizes; zeros if the sum is 0."""
    return [size / sum(sizes) if sum(sizes) else 0.0 for size in sizes]

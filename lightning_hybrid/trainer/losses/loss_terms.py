"""Losses that consist of means over targets: recognized in the first steps, then weighted by the targets of each batch.

Without this, users would have to define `microbatch_weight` for each loss over masked labels. *Targets* are the class
labels of a cross entropy. :class:`~.microbatch_comparison.MicrobatchComparison` uses this module if there are
microbatches, and :class:`~.replica_targets.ReplicaTargets` if each replica runs its batch as a whole.

During some forwards of a step (see :mod:`.verdict`), each call of a mean cross entropy is a *term* of the loss::

    loss = a1 * term1 + a2 * term2 + ... + rest

The coefficients are derivatives. In a comparison, each term is detached from the graph, so only the code after the term
is recorded. Replicas that run whole batches find the coefficients in the graph of their first step instead. If the
targets are a leaf of the batch, or a leaf without its first position (causal models shift their labels), they are
counted before each later forward::

    no rest, and all terms count the same targets    microbatches are weighted by these targets (LabelCount)
    anything else                                    microbatches are weighted by their samples, and each term is
                                                     multiplied by its fraction of the targets divided by its
                                                     fraction of the samples (TermCounts)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from lightning_hybrid.distributed.class_losses import normalizer_of
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.pipeline_parallel.splitting.microbatch import find_batch_size
from lightning_hybrid.trainer.losses.loss_weights import weighted, weighted_sum

__all__ = [
    "PAIR",
    "LabelCount",
    "LossTerms",
    "TargetMean",
    "TargetMeans",
    "TermCounts",
    "as_weighed",
    "common_count",
    "common_names",
    "common_terms",
    "joined_terms",
    "tells_enough",
    "times_factor",
    "with_copied_classes",
]

#: The number of batches that are compared for a pair: the samples together, and each half of them.
PAIR = 3

_EXACT = 1e-6  # the relative difference at which coefficients, which are products of few numbers, count as equal


@dataclass(frozen=True)
class LabelCount:
    """A `microbatch_weight` that was recognized: the sum of the class weights of the targets that count.

    Attributes:
        leaf: The position of the targets among the leaves of a batch.
        shift: If True, the first position of each sequence does not count.
        ignore_index: The class that does not count.
        weight: The weights of all classes; ``None`` for 1 each.
        length_of: The leaf whose second dimension is the class that does not count, because targets are positions and
            this is the first position after the end. Targets beyond it do not count either. ``None`` to use
            `ignore_index`.
    """

    leaf: int
    shift: bool
    ignore_index: int
    weight: tuple[float, ...] | None
    length_of: int | None = None

    def __call__(self, microbatch: Any) -> Tensor:
        """Return the weight of a microbatch, shape ``()``; its number of samples if it has no such targets."""
        found = self.find_targets(flatten(microbatch)[0])
        if found is None:
            return torch.tensor(find_batch_size(microbatch) or 1)
        labels, ignore_index = found
        weight = None if self.weight is None else _weights_on(self.weight, labels.device)
        return normalizer_of(labels, weight, ignore_index)

    def find_targets(self, leaves: Sequence[Any]) -> tuple[Tensor, int] | None:
        """Return the targets among the leaves of a batch and the class that does not count, or ``None``."""
        labels = leaves[self.leaf] if self.leaf < len(leaves) else None
        if not _are_classes(labels, shift=self.shift):
            return None
        labels, ignore_index = labels[..., 1:] if self.shift else labels, self.ignore_index
        if self.length_of is not None:
            sequences = leaves[self.length_of] if self.length_of < len(leaves) else None
            if not isinstance(sequences, Tensor) or sequences.ndim < 2:
                return None
            ignore_index = sequences.shape[1]
            labels = labels.clamp(0, ignore_index)
        return labels, ignore_index


@dataclass(frozen=True)
class TermCounts:
    """The way to count the targets of each term, in a loss that is not a mean over one set of targets.

    Attributes:
        counts: Pairs of the number of a cross-entropy call in a forward and the way to count its targets. Terms without
            an entry are means over samples.
    """

    counts: tuple[tuple[int, LabelCount], ...]


@lru_cache(maxsize=16)
def _weights_on(weight: tuple[float, ...], device: torch.device) -> Tensor:
    """Return class weights on a device, float64. The host waits for the copy only once, as the result is cached."""
    return torch.tensor(weight, dtype=torch.float64, device=device)


@dataclass
class _Term:
    """A mean cross entropy that a forward has computed, and its arguments.

    Attributes:
        call: The number of the call among the cross-entropy calls of the forward.
        target: The class labels.
        weight: The weights of all classes; ``None`` for 1 each.
        ignore_index: The class that does not count.
        is_in_graph: True if the computed term requires a gradient.
        value: The value that the forward uses instead of the mean.
        factor: A factor of the value and of its gradient, shape ``()``: 0 without targets, otherwise 1 at first.
        coefficient: The derivative of the loss with respect to the value.
        number: The number by which the mean is divided, shape ``()``.
    """

    call: int
    target: Tensor
    weight: Tensor | None
    ignore_index: int
    is_in_graph: bool
    value: Tensor = field(init=False)
    factor: Tensor = field(init=False)  # multiplies the value and its gradient
    coefficient: float = 0.0

    def __post_init__(self) -> None:
        self.number = normalizer_of(self.target, self.weight, self.ignore_index)
        self.factor = (self.number > 0).double()


class HasFactor(Protocol):
    """A term of a loss with a factor, shape ``()``, which may change between forward and backward."""

    @property
    def factor(self) -> Tensor:
        """Return the factor."""


class _TimesFactor(torch.autograd.Function):
    """A product that saves no tensors, so activation checkpointing can recompute a loss without this product."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, term: HasFactor) -> Tensor:
        ctx.term = term
        return weighted_sum([mean], [term.factor])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return weighted(gradients[0], ctx.term.factor), None


def times_factor(mean: Tensor, term: HasFactor) -> Tensor:
    """Return a mean multiplied by the factor of its term. A mean over no targets, which is 0 / 0, times 0 is 0.

    Args:
        mean: The mean, shape ``()``.
        term: The term. The backward reads its factor again.
    """
    product: Tensor = _TimesFactor.apply(mean, term)  # type: ignore[no-untyped-call]
    return product


@dataclass(frozen=True)
class TargetMean:
    """A term of the loss of one forward, with a coefficient other than zero.

    Attributes:
        call: The number of the cross-entropy call in the forward.
        ways: The ways to count its targets that are possible for its batch, the preferred way first.
        coefficient: Its factor in the loss.
        value: Its value; 0 without targets.
        number: The number by which it is divided: the sum of the class weights of the targets that count.
        share: The number of targets per sample, including ignored targets.
        is_uneven: True if targets are ignored, or classes have weights.
        is_in_graph: True if the computed term requires a gradient.
    """

    call: int
    ways: tuple[LabelCount, ...]
    coefficient: float
    value: float
    number: float
    share: float
    is_uneven: bool
    is_in_graph: bool

    @property
    def tells(self) -> bool:
        """Return True if the term has targets and a finite value."""
        return self.number > 0 and math.isfinite(self.value)


@dataclass(frozen=True)
class TargetMeans:
    """The findings in one forward whose loss contains means over targets. Ranks can send them to each other.

    Attributes:
        terms: The means, in the order of their calls.
        has_rest: True if the loss contains something else.
        loss: The loss, in which terms without targets are 0.
        names: The names of logged values that equal the loss or a term, with or without its coefficient.
    """

    terms: tuple[TargetMean, ...]
    has_rest: bool
    loss: float
    names: frozenset[str] = frozenset()


@dataclass
class LossTerms:
    """The terms of the loss of one forward, found by observing its cross-entropy calls.

    Pass :meth:`observe` to `class_losses.observed` around the forward, then call :meth:`close` with the loss.

    Attributes:
        in_step: True if the forward belongs to a step, whose backward follows. Otherwise, terms are detached from the
            graph.
        terms: The terms that the loss depends on.
        loss: The loss, in which terms without targets are 0.
        rest: The part of the loss that is in none of the terms.
    """

    in_step: bool = False
    terms: list[_Term] = field(default_factory=list)
    loss: float = 0.0
    rest: float = 0.0
    _num_calls: int = 0
    _is_open: bool = True

    def observe(self, mean: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
        """Record a term of the loss, and return the value to use instead; this is an `Observer` of class losses.

        Terms inside a transform of `torch.func`, which has its own graphs, are ignored. A mean over no targets, which
        is NaN, becomes 0, so that the rest of the loss can be computed. Unless the forward is in a step, gradients are
        turned on from the first term on.

        Args:
            mean: The mean cross entropy, shape ``()``.
            target: The class labels.
            weight: The weights of all classes; ``None`` for 1 each.
            ignore_index: The class that does not count.
        """
        if not self._is_open:  # a checkpoint recomputes the loss
            return mean
        call, self._num_calls = self._num_calls, self._num_calls + 1
        try:
            alone = mean.detach().requires_grad_()
        except RuntimeError:
            return mean
        if self.in_step and not mean.requires_grad:
            return mean
        term = _Term(call, target.detach(), weight, ignore_index, mean.requires_grad)
        if self.in_step:
            term.value = times_factor(mean, term)
        else:
            term.value = weighted_sum([alone.detach()], [term.factor]).requires_grad_()
            torch.set_grad_enabled(True)  # the end of the caller's `no_grad` context resets this
        self.terms.append(term)
        # A step may add to its loss in place. This would change the term, and it is an error for a leaf.
        return term.value.clone()

    def close(self, loss: Tensor) -> None:
        """Compute the coefficients of the terms from the finished loss, and drop terms with coefficient 0.

        Args:
            loss: The loss of the forward, shape ``()``.
        """
        self._is_open = False
        gradients: Sequence[Tensor | None] = [None] * len(self.terms)
        if loss.requires_grad and self.terms:
            values = [term.value for term in self.terms]
            gradients = torch.autograd.grad(loss, values, retain_graph=self.in_step, allow_unused=True)
        used = []
        for term, gradient in zip(self.terms, gradients, strict=True):
            if gradient is not None and float(gradient) != 0.0:
                term.coefficient = float(gradient)
                used.append(term)
        self.terms = used
        self.loss = float(loss.detach())
        self.rest = self.loss - sum(term.coefficient * float(term.value.detach()) for term in used)

    @property
    def is_empty(self) -> bool:
        """Return True if a term has no targets, so that the loss is NaN in the user's code."""
        return any(float(term.number) == 0 for term in self.terms)

    def find_means(
        self, batch: Any, count: int, rounding: float, numbers: Mapping[str, float] | None = None
    ) -> TargetMeans | None:
        """Return the means over targets in the loss of the forward; ``None`` if there are none.

        Args:
            batch: The batch.
            count: Its number of samples.
            rounding: The relative error of a loss.
            numbers: The numbers that the forward logged, by name.
        """
        if not self.terms:
            return None
        leaves = flatten(batch)[0]
        means = [
            TargetMean(
                term.call,
                ways=tuple(_ways(term, leaves)),
                coefficient=term.coefficient,
                value=float(term.value.detach()),
                number=float(term.number),
                share=term.target.numel() / count,
                is_uneven=term.weight is not None or bool((term.target == term.ignore_index).any()),
                is_in_graph=term.is_in_graph,
            )
            for term in self.terms
        ]
        values = [self.loss, *(factor * mean.value for mean in means for factor in (1.0, mean.coefficient))]
        return TargetMeans(
            tuple(means),
            has_rest=abs(self.rest) > rounding * max(map(abs, values)),
            loss=self.loss,
            names=frozenset(
                name
                for name, number in (numbers or {}).items()
                if any(math.isclose(number, value, rel_tol=_EXACT) for value in values)
            ),
        )


def common_count(found: Sequence[TargetMeans | None]) -> LabelCount | None:
    """Return the common way to count targets if the losses of several forwards are means over targets.

    Args:
        found: The findings in each forward; ``None`` if its loss contains no such means.

    Returns:
        ``None`` if a loss has no terms, or has a rest, or has terms with different targets; or if all samples have
        equally many targets, all of which count.
    """
    by_call = _terms_by_call(found)
    if by_call is None or any(means is None or means.has_rest for means in found):
        return None
    terms = [term for of_call in by_call.values() for term in of_call]
    return None if _are_even(terms) else _common_way(terms)


def common_terms(found: Sequence[TargetMeans | None]) -> TermCounts | None:
    """Return the common way to count the targets of each term, from the findings in several forwards.

    Args:
        found: As for :func:`common_count`.

    Returns:
        ``None`` if the losses have different terms, or the targets of a term are not in the batch; or if all terms are
        means over samples.
    """
    by_call, counts = _terms_by_call(found) or {}, []
    if all(map(_are_even, by_call.values())):
        return None
    for call, terms in by_call.items():
        way = _common_way(terms) if all(term.is_in_graph for term in terms) else None
        if way is not None:  # equal numbers of targets per sample may become unequal later
            counts.append((call, way))
        elif not _are_even(terms):
            return None
    return TermCounts(tuple(counts))


def joined_terms(found: Sequence[TermCounts | None]) -> set[TermCounts]:
    """Return the union of the counts of several replicas as one element; all their counts if these contradict."""
    several = {terms for terms in found if terms is not None}
    counts = sorted({entry for terms in several for entry in terms.counts}, key=lambda entry: entry[0])
    return several if len(dict(counts)) < len(counts) or not counts else {TermCounts(tuple(counts))}


def as_weighed(found: Sequence[TargetMeans | None], counts: Sequence[int], terms: TermCounts | None) -> list[float]:
    """Return the losses of batches and their parts, in which the terms of each part have the weights of their targets.

    Args:
        found: The findings in three forwards for each pair: both parts joined, and each part alone.
        counts: The number of samples in each batch.
        terms: The ways to count the targets of terms; ``None`` if losses need no change.

    Returns:
        The losses, in which terms without targets are 0; NaN for a forward without terms.
    """
    losses = [math.nan if means is None else means.loss for means in found]
    of_calls = dict(terms.counts) if terms is not None else {}
    for part, means in enumerate(found):
        first = part - part % PAIR
        joined = found[first]
        if part == first or means is None or joined is None:
            continue
        share = counts[part] / counts[first]
        for term, whole in zip(means.terms, joined.terms, strict=True):
            if term.call in of_calls and whole.number:
                losses[part] += term.coefficient * term.value * (term.number / whole.number / share - 1.0)
    return losses


def tells_enough(found: Sequence[TargetMeans | None]) -> bool:
    """Return True if forwards show what a loss is: a forward has no terms, or each term has targets in some forward."""
    terms = [term for means in found if means is not None for term in means.terms]
    if None in found or not terms:
        return None in found
    return {term.call for term in terms} == {term.call for term in terms if term.tells}


def common_names(found: Sequence[TargetMeans | None]) -> frozenset[str]:
    """Return the names of the logged values that are means over targets in all of several forwards."""
    return frozenset.intersection(*(each.names for each in found if each is not None))


def with_copied_classes(batch: Any) -> Any:
    """Return a batch with copies of its integer and boolean tensors, because a step may write into its labels."""
    leaves, spec = flatten(batch)
    copies = [leaf.clone() if type(leaf) is Tensor and not leaf.is_floating_point() else leaf for leaf in leaves]
    return unflatten(copies, spec)


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= _EXACT * max(abs(a), abs(b))


def _are_classes(labels: Any, *, shift: bool) -> TypeGuard[Tensor]:
    """Return True if a leaf of a batch may hold targets. If targets are shifted, the leaf must hold sequences."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        return False
    return labels.ndim > int(shift)


def _terms_by_call(found: Sequence[TargetMeans | None]) -> dict[int, list[TargetMean]] | None:
    """Return the terms of forwards by their calls; ``None`` if forwards have other terms or other coefficients."""
    by_call: dict[int, list[TargetMean]] = {}
    for means in found:
        for term in () if means is None else means.terms:
            by_call.setdefault(term.call, []).append(term)
    for terms in by_call.values():
        first = next((term for term in terms if term.tells), terms[0])
        telling = (term.coefficient for term in terms if term.tells)
        if len(terms) < len(found) or not all(_is_close(each, first.coefficient) for each in telling):
            return None
    return by_call or None


def _are_even(terms: Sequence[TargetMean]) -> bool:
    """Return True if all samples have equally many targets, all of which count."""
    return len({term.share for term in terms}) == 1 and not any(term.is_uneven for term in terms)


def _common_way(terms: Sequence[TargetMean]) -> LabelCount | None:
    return next((way for way in terms[0].ways if all(way in term.ways for term in terms)), None)


def _ways(term: _Term, leaves: Sequence[Any]) -> Iterator[LabelCount]:
    """Yield the possible ways to count the targets of a term in a batch, the preferred way first."""
    weight = None if term.weight is None else tuple(term.weight.detach().double().tolist())
    kept = term.target[term.target != term.ignore_index].sort().values
    lengths: list[int | None] = [
        number
        for number, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[1] == term.ignore_index
    ]
    for length_of in (*lengths, None):
        for leaf in range(len(leaves)):
            for shift in (False, True):
                way = LabelCount(leaf, shift, term.ignore_index if length_of is None else -1, weight, length_of)
                found = way.find_targets(leaves)
                if found is not None and _holds(found[0][found[0] != found[1]], kept):
                    yield way


def _holds(labels: Tensor, targets: Tensor) -> bool:
    """Return True if labels, in any order, are the sorted targets of a term."""
    return labels.shape == targets.shape and torch.equal(labels.sort().values, targets.to(labels))

"""Losses that are means over targets: recognized in the step, and counted in the batch from then on.

In three forwards of a step (see :mod:`.verdict`) every call of a mean cross entropy is a *term* of the loss::

    loss = a1 * term1 + a2 * term2 + ... + rest

The coefficients are derivatives: each term is taken out of the graph, so only what the step does after it is recorded.
Replicas that take a batch whole find them in the graph of their first step, and compare. If there is no rest and all
terms count the same targets, the loss is a mean over these. Where they are a leaf of the batch, or one without its
first position (causal models shift their labels), they are counted before each forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lightning_hybrid.distributed.class_losses import normalizer_of
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.pipeline_parallel.splitting.microbatch import find_batch_size

__all__ = [
    "LabelCount",
    "LossTerms",
    "TargetMean",
    "common_count",
    "common_names",
    "find_label_count",
    "with_copied_classes",
]

_EXACT = 1e-6  # coefficients that are equal, relative; they are products of few numbers


@dataclass(frozen=True)
class LabelCount:
    """A `microbatch_weight` that was recognized: the weights of the targets that count.

    Attributes:
        leaf: The position of the targets among the leaves of a batch.
        shift: If True, the first position of each sequence does not count.
        ignore_index: The class that does not count.
        weight: Of all classes, on the host; ``None`` for 1 each.
    """

    leaf: int
    shift: bool
    ignore_index: int
    weight: tuple[float, ...] | None

    def __call__(self, microbatch: Any) -> Tensor:
        """Return the weight of a microbatch, shape ``()``; its samples if it has another structure, without targets."""
        leaves = flatten(microbatch)[0]
        labels = leaves[self.leaf] if self.leaf < len(leaves) else None
        if not _are_classes(labels, shift=self.shift):
            return torch.tensor(find_batch_size(microbatch) or 1)
        if self.shift:
            labels = labels[..., 1:]
        weight = None if self.weight is None else _weights_on(self.weight, labels.device)
        return normalizer_of(labels, weight, self.ignore_index)


@lru_cache(maxsize=16)
def _weights_on(weight: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the weights of classes on a device; the host waits for the copy once."""
    return torch.tensor(weight, dtype=torch.float64, device=device)


@dataclass
class _Term:
    value: Tensor
    target: Tensor
    weight: Tensor | None
    ignore_index: int
    coefficient: float = 0.0


@dataclass(frozen=True)
class TargetMean:
    """The finding of one forward whose loss is a mean over targets; other ranks may be told of it.

    Attributes:
        ways: Those of counting its targets that its batch allows, the preferred one first.
        coefficients: Of the terms of the loss.
        is_finite: Whether the loss is a number: of no targets the mean is NaN.
        share: The number of targets for each sample.
        is_uneven: Whether targets are ignored, or classes have weights.
        names: Those of logged values that are the loss, or one of its terms.
    """

    ways: tuple[LabelCount, ...]
    coefficients: tuple[float, ...]
    is_finite: bool
    share: float
    is_uneven: bool
    names: frozenset[str] = frozenset()


@dataclass
class LossTerms:
    """The terms of the loss of one forward.

    Attributes:
        in_step: Whether the forward is that of a step, whose backward follows; otherwise terms are taken out of the
            graph.
        terms: Those that the loss depends on.
        rest: The part of the loss that is in none of them.
    """

    in_step: bool = False
    terms: list[_Term] = field(default_factory=list)
    rest: float = 0.0
    _is_open: bool = True

    def observe(self, mean: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
        """Record what the step does with a term: an observer of class losses.

        Terms inside of a transform of `torch.func`, which has graphs of its own, are left alone.
        """
        if not self._is_open:  # a checkpoint computes its loss again
            return mean
        try:
            alone = mean.detach().requires_grad_()
        except RuntimeError:
            return mean
        if self.in_step:
            if not mean.requires_grad:
                return mean
            alone = mean
        self.terms.append(_Term(alone, target.detach(), weight, ignore_index))
        if not self.in_step:
            torch.set_grad_enabled(True)  # the caller's `no_grad` ends it
        return alone.clone()  # steps add to their loss in place, which would change the term, and a leaf refuses

    def close(self, loss: Tensor) -> None:
        """Find the coefficients, once the loss is there."""
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
        self.rest = float(loss.detach()) - sum(term.coefficient * float(term.value.detach()) for term in used)

    def find_mean(
        self, batch: Any, count: int, loss: float, rounding: float, numbers: Mapping[str, float] | None = None
    ) -> TargetMean | None:
        """Return what the forward tells of a mean over targets; ``None`` if its loss is something else.

        Args:
            batch: The batch.
            count: Its number of samples.
            loss: Of the batch.
            rounding: The relative error of a loss.
            numbers: What the forward logged, by name.
        """
        values = [float(term.value.detach()) for term in self.terms]
        weights = {float(normalizer_of(term.target, term.weight, term.ignore_index)) for term in self.terms}
        if len(weights) != 1:
            return None
        is_finite = loss == loss
        if is_finite and abs(self.rest) > rounding * max(abs(loss), *map(abs, values)):
            return None
        term, leaves = self.terms[0], flatten(batch)[0]
        weight = None if term.weight is None else tuple(term.weight.detach().double().tolist())
        return TargetMean(
            ways=tuple(
                LabelCount(leaf, shift, term.ignore_index, weight)
                for leaf in range(len(leaves))
                for shift in (False, True)
                if _holds(leaves[leaf], term, shift=shift)
            ),
            coefficients=tuple(term.coefficient for term in self.terms),
            is_finite=is_finite,
            share=term.target.numel() / count,
            is_uneven=weight is not None or bool((term.target == term.ignore_index).any()),
            names=frozenset(
                name
                for name, number in (numbers or {}).items()
                if any(number == value or (number != number and value != value) for value in (loss, *values))
            ),
        )


def common_count(found: Sequence[TargetMean | None]) -> LabelCount | None:
    """Return how targets are counted, from the findings of several forwards.

    Args:
        found: One for each forward; ``None`` where the loss is something else.

    Returns:
        ``None`` if one of the losses is something else, or all samples have equally many targets, which all count.
    """
    means = [each for each in found if each is not None]
    if not means or len(means) < len(found):
        return None
    coefficients = next((each.coefficients for each in means if each.is_finite), means[0].coefficients)
    for each in means:
        if len(each.coefficients) != len(coefficients):
            return None
        if each.is_finite and not all(map(_is_close, each.coefficients, coefficients)):
            return None
    if len({each.share for each in means}) == 1 and not any(each.is_uneven for each in means):
        return None
    return next((way for way in means[0].ways if all(way in each.ways for each in means)), None)


def common_names(found: Sequence[TargetMean | None]) -> frozenset[str]:
    """Return the names of the logged values that are means over targets, from the findings of several forwards."""
    return frozenset.intersection(*(each.names for each in found if each is not None))


def find_label_count(
    batches: Sequence[Any], counts: Sequence[int], losses: Sequence[float], found: Sequence[LossTerms], rounding: float
) -> LabelCount | None:
    """Recognize a loss that is a mean over targets, from the forwards of some batches.

    Args:
        batches: The batches.
        counts: Their numbers of samples.
        losses: Of each.
        found: The terms of each.
        rounding: The relative error of a loss.

    Returns:
        As :func:`common_count`.
    """
    forwards = zip(found, batches, counts, losses, strict=True)
    return common_count([terms.find_mean(batch, count, loss, rounding) for terms, batch, count, loss in forwards])


def with_copied_classes(batch: Any) -> Any:
    """Return a batch whose whole numbers are copies: a step may write into its labels."""
    leaves, spec = flatten(batch)
    copies = [leaf.clone() if type(leaf) is Tensor and not leaf.is_floating_point() else leaf for leaf in leaves]
    return unflatten(copies, spec)


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= _EXACT * max(abs(a), abs(b))


def _are_classes(labels: Any, *, shift: bool) -> TypeGuard[Tensor]:
    """Return whether a leaf of a batch may be targets; those that are shifted are sequences."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        return False
    return labels.ndim > int(shift)


def _holds(labels: Any, term: _Term, *, shift: bool) -> bool:
    """Return whether the targets of a term are a leaf of the batch, in any order."""
    if not _are_classes(labels, shift=shift):
        return False
    labels = labels[..., 1:] if shift else labels
    kept, targets = labels[labels != term.ignore_index], term.target[term.target != term.ignore_index]
    return kept.shape == targets.shape and torch.equal(kept.sort().values, targets.to(kept).sort().values)

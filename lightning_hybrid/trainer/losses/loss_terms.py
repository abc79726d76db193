"""Losses that are means over targets: recognized in the step, and counted in the batch from then on.

In three forwards of a step (see :mod:`.verdict`) every call of a mean cross entropy is a *term* of the loss::

    loss = a1 * term1 + a2 * term2 + ... + rest

The coefficients are derivatives: each term is taken out of the graph, so only what the step does after it is recorded.
If there is no rest and all terms count the same targets, the loss is a mean over these. Where they are a leaf of the
batch, or one without its first position (causal models shift their labels), they are counted before each forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lightning_hybrid.distributed.class_losses import normalizer_of
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.pipeline_parallel.splitting.microbatch import find_batch_size

__all__ = ["LabelCount", "LossTerms", "find_label_count"]

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


@dataclass
class LossTerms:
    """The terms of the loss of one forward.

    Attributes:
        terms: Those that the loss depends on.
        rest: The part of the loss that is in none of them.
    """

    terms: list[_Term] = field(default_factory=list)
    rest: float = 0.0
    _is_open: bool = True

    def observe(self, mean: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
        """Take a term out of the graph, and record what the step does with it: an observer of class losses.

        Terms inside of a transform of `torch.func`, which has graphs of its own, are left alone.
        """
        if not self._is_open:  # a checkpoint computes its loss again
            return mean
        try:
            mean = mean.detach().requires_grad_()
        except RuntimeError:
            return mean
        self.terms.append(_Term(mean, target.detach(), weight, ignore_index))
        torch.set_grad_enabled(True)  # the caller's `no_grad` ends it
        return mean.clone()  # steps add to their loss in place, which a leaf refuses

    def close(self, loss: Tensor) -> None:
        """Find the coefficients, once the loss is there."""
        self._is_open = False
        gradients: Sequence[Tensor | None] = [None] * len(self.terms)
        if loss.requires_grad and self.terms:
            gradients = torch.autograd.grad(loss, [term.value for term in self.terms], allow_unused=True)
        used = []
        for term, gradient in zip(self.terms, gradients, strict=True):
            if gradient is not None and float(gradient) != 0.0:
                term.coefficient = float(gradient)
                used.append(term)
        self.terms = used
        self.rest = float(loss.detach()) - sum(term.coefficient * float(term.value.detach()) for term in used)


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
        How the targets of a batch are counted; ``None`` if the loss is something else, or all samples have equally many
        targets, which all count.
    """
    first = found[0].terms
    if not first or any(len(each.terms) != len(first) for each in found):
        return None
    for each, loss in zip(found, losses, strict=True):
        finite = loss == loss  # of no targets the mean is NaN
        if finite and abs(each.rest) > rounding * max(abs(loss), *(abs(float(t.value.detach())) for t in each.terms)):
            return None
        if finite and any(not _is_close(a.coefficient, b.coefficient) for a, b in zip(each.terms, first, strict=True)):
            return None
        weights = {float(normalizer_of(term.target, term.weight, term.ignore_index)) for term in each.terms}
        if len(weights) > 1:
            return None
    term = first[0]
    targets = [each.terms[0].target for each in found]
    shares = {target.numel() / count for target, count in zip(targets, counts, strict=True)}
    if term.weight is None and len(shares) == 1 and not any((each == term.ignore_index).any() for each in targets):
        return None
    weight = None if term.weight is None else tuple(term.weight.detach().double().tolist())
    for leaf in range(len(flatten(batches[0])[0])):
        for shift in (False, True):
            if all(map(_holds(leaf, shift), batches, found)):
                return LabelCount(leaf, shift, term.ignore_index, weight)
    return None


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= _EXACT * max(abs(a), abs(b))


def _are_classes(labels: Any, *, shift: bool) -> TypeGuard[Tensor]:
    """Return whether a leaf of a batch may be targets; those that are shifted are sequences."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        return False
    return labels.ndim > int(shift)


def _holds(leaf: int, shift: bool) -> Callable[[Any, LossTerms], bool]:
    """Return whether the targets of a batch are this leaf of it, in any order."""

    def holds(batch: Any, found: LossTerms) -> bool:
        labels, term = flatten(batch)[0][leaf], found.terms[0]
        if not _are_classes(labels, shift=shift):
            return False
        labels = labels[..., 1:] if shift else labels
        kept, targets = labels[labels != term.ignore_index], term.target[term.target != term.ignore_index]
        return kept.shape == targets.shape and torch.equal(kept.sort().values, targets.to(kept).sort().values)

    return holds

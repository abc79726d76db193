"""What the forwards of several batches tell of a loss: of two microbatches joined, and of each alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.trainer.losses.divisors import fits, sizes_of
from lightning_hybrid.trainer.losses.loss_terms import LabelCount, LossTerms, TargetMean
from lightning_hybrid.trainer.losses.verdict import HALF_ROUNDING, Verdict, judge, judge_logs, rounding_of

__all__ = ["PAIR", "Run", "judge_pairs"]

#: Batches of a pair: two microbatches joined, and each alone.
PAIR = 3


class Run(NamedTuple):
    """The forwards of some batches.

    Attributes:
        batches: The batches, as they were before.
        counts: Their numbers of samples.
        losses: Of each.
        terms: Those of each loss.
        numbers: What each logged, by name.
        dtype: Of the computation.
        has_drawn: Whether something was drawn that may differ from forward to forward.
    """

    batches: Sequence[Any]
    counts: Sequence[int]
    losses: Sequence[float]
    terms: Sequence[LossTerms]
    numbers: Sequence[Mapping[str, float]]
    dtype: torch.dtype
    has_drawn: bool

    def find_means(self) -> list[TargetMean | None]:
        """Return what each forward tells of a mean over targets."""
        forwards = zip(self.terms, self.batches, self.counts, self.losses, self.numbers, strict=True)
        rounding = rounding_of(self.dtype)
        return [terms.find_mean(batch, count, loss, rounding, logged) for terms, batch, count, loss, logged in forwards]

    def explain(self, verdicts: Sequence[Verdict], class_weights: Mapping[str, Tensor]) -> list[Verdict]:
        """Return the verdicts on pairs, with the numbers of their batches by which the loss may be divided."""
        parts = [number for number in range(len(self.batches)) if number % PAIR]
        sizes = sizes_of([self.batches[number] for number in parts], class_weights)
        found = []
        for number, verdict in enumerate(verdicts):
            losses = self.losses[PAIR * number : PAIR * (number + 1)]
            bound = rounding_of(self.dtype) * max((abs(loss) for loss in losses if math.isfinite(loss)), default=0.0)
            if verdict.kind == "other" and math.isfinite(verdict.expected):
                bound = min(bound, abs(verdict.joined - verdict.expected) / 4)
            fitting = (each for each, own in sizes.items() if fits(losses, own[2 * number : 2 * number + 2], bound))
            found.append(replace(verdict, divisors=tuple(fitting)))
        return found


def judge_pairs(
    losses: Sequence[float],
    counts: Sequence[int],
    sizes: Sequence[float],
    labels: LabelCount | None,
    numbers: Sequence[Mapping[str, float]],
    dtype: torch.dtype,
) -> list[Verdict]:
    """Judge each pair of microbatches.

    Args:
        losses: Of three batches for each pair: joined, and each alone.
        counts: Their numbers of samples.
        sizes: The numbers by which they weigh.
        labels: How their targets are counted, if the loss is a mean over them.
        numbers: The numbers that each logged, by name.
        dtype: Of the computation.
    """
    verdicts = []
    for of_pair in (slice(first, first + PAIR) for first in range(0, len(losses), PAIR)):
        weights, shares = _parts(sizes[of_pair][1:]), _parts(counts[of_pair][1:])
        verdict = judge(losses[of_pair], weights, dtype)
        if labels is not None and (verdict.kind == "unknown" or verdict.difference <= HALF_ROUNDING):
            verdict = replace(verdict, kind="mean")  # it is known by its terms
        if verdict.kind == "mean":
            verdict = replace(verdict, labels=labels)
        logs = judge_logs(numbers[of_pair], losses[of_pair], shares, weights, verdict, dtype)
        verdicts.append(replace(verdict, logs=logs))
    return verdicts


def _parts(sizes: Sequence[float]) -> list[float]:
    """Return the shares of some sizes; zeros if there is nothing to share."""
    return [size / sum(sizes) if sum(sizes) else 0.0 for size in sizes]

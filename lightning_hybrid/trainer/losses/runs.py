"""The results of the forwards of a comparison, and the conclusions about the loss.

:class:`~.microbatch_comparison.MicrobatchComparison` makes a :class:`Run` after forwards without side effects, on ranks
with the last stage. This class has nothing to do with the `Run` of a strategy. A *pair* is a group of :data:`PAIR`
batches: some samples together, and each half of them alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.trainer.losses.divisors import fits, sizes_of
from lightning_hybrid.trainer.losses.loss_terms import PAIR, LossTerms, TargetMeans
from lightning_hybrid.trainer.losses.verdict import Verdict, rounding_of

__all__ = ["Run"]


class Run(NamedTuple):
    """The results of the forwards of some batches.

    Attributes:
        batches: The batches, as they were before the forwards.
        counts: The number of samples of each batch.
        losses: The loss of each batch; NaN if one of its terms is a mean over no targets.
        terms: The cross-entropy terms of each loss.
        numbers: The numbers that each forward logged, by name.
        dtype: The coarsest dtype of the computation.
        has_drawn: True if random numbers were drawn that may differ between forwards.
    """

    batches: Sequence[Any]
    counts: Sequence[int]
    losses: Sequence[float]
    terms: Sequence[LossTerms]
    numbers: Sequence[Mapping[str, float]]
    dtype: torch.dtype
    has_drawn: bool

    def at(self, places: Sequence[int]) -> Run:
        """Return the run of the batches at these positions, which may repeat."""
        return self._replace(
            batches=[self.batches[place] for place in places],
            counts=[self.counts[place] for place in places],
            losses=[self.losses[place] for place in places],
            terms=[self.terms[place] for place in places],
            numbers=[self.numbers[place] for place in places],
        )

    def find_means(self) -> list[TargetMeans | None]:
        """Return the means over targets in the loss of each forward; ``None`` for a loss without such means."""
        forwards = zip(self.terms, self.batches, self.counts, self.numbers, strict=True)
        rounding = rounding_of(self.dtype)
        return [terms.find_means(batch, count, rounding, logged) for terms, batch, count, logged in forwards]

    def explain(self, verdicts: Sequence[Verdict], class_weights: Mapping[str, Tensor]) -> list[Verdict]:
        """Return the verdicts on pairs, with the divisors that explain the losses of each pair.

        The batches of the run must be the batches of these pairs, in the same order.

        Args:
            verdicts: The verdict on each pair.
            class_weights: The result of :func:`~.divisors.find_class_weights`.
        """
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

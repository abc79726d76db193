"""Weights for the terms of a loss that are means over targets, if the loss also contains means over samples.

::

    microbatch        samples n1 of N        samples n2 of N        targets of a term: w1 + w2 = W
    loss              n1/N (c1 term + rest)  + n2/N (c2 term + rest)        with  ci = (wi / W) / (ni / N)
                      = (w1 term + w2 term) / W  +  a mean over samples

Microbatches and replicas are therefore weighted by their samples, and so are logged values of a term.

A *term* is a mean cross entropy that is a summand of the loss; :mod:`.loss_terms` recognizes terms in the first steps.
`TrainingStep` (on the last stage) and `ReplicaTargets` make a :class:`TermWeights` for each batch, and enter
:meth:`TermWeights.of_microbatch` around each forward. One weight for each microbatch, as in :mod:`.loss_weights`, would
be wrong for the rest of such a loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.distributed.class_losses import normalizer_of, observed
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.trainer.losses.loss_terms import TermCounts, times_factor
from lightning_hybrid.trainer.losses.loss_weights import LossWeights

__all__ = ["TermWeights"]

_EXACT = 1e-6  # the relative difference that is allowed, because class weights may be summed in another order


class _Factor(NamedTuple):
    """A constant factor, shape ``()``, as the argument of :func:`times_factor`."""

    factor: Tensor


class TermWeights:
    """The factors of the terms of a loss for each microbatch of a batch. Construction is a collective over replicas.

    The collective includes only the ranks of this stage in other replicas.

    Args:
        terms: The ways to count the targets of each term.
        microbatches: The microbatches of this replica.
        shares: Each microbatch's fraction of the samples of this replica's batch.
        mesh: The mesh.
        device: The device of this rank.
    """

    def __init__(
        self, terms: TermCounts, microbatches: Sequence[Any], shares: Sequence[float], mesh: Mesh, device: torch.device
    ) -> None:
        ways = list(dict.fromkeys(way for _, way in terms.counts))
        weights = dict(zip(ways, LossWeights.of_each(ways, microbatches, mesh, device), strict=True))
        self._numbers = {call: weights[way].each for call, way in terms.counts}
        of_ways = {way: _over(weights[way].factors(), shares) for way in ways}
        self._factors = {call: of_ways[way] for call, way in terms.counts}

    @contextmanager
    def of_microbatch(self, microbatch: int) -> Iterator[None]:
        """Multiply the terms of the forward of a microbatch by their factors inside the context.

        A call whose targets do not match the count, such as a call of another task, stays a mean over samples.
        """
        calls = count()

        def weigh(mean: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
            call = next(calls)
            if call not in self._numbers:
                return mean
            counted = self._numbers[call][microbatch]
            found = normalizer_of(target, None if weight is None else weight.double(), ignore_index).to(counted)
            is_counted = (found - counted).abs() <= _EXACT * counted
            return times_factor(mean, _Factor(torch.where(is_counted, self._factors[call][microbatch], 1.0)))

        with observed(weigh):
            yield


def _over(factors: Sequence[Tensor], shares: Sequence[float]) -> list[Tensor]:
    """Return factors divided by fractions; 0 where the fraction is 0."""
    pairs = zip(factors, shares, strict=True)
    return [factor / share if share else torch.zeros_like(factor) for factor, share in pairs]

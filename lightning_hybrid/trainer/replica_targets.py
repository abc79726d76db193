"""Losses of replicas with one microbatch each: means over targets are recognized, and weighted by their targets.

A *term* of a loss is the mean of a cross entropy, and its *targets* are the classes that the mean counts (without
ignored labels). With unequal numbers of targets, the plain mean over replicas of such losses would differ from the loss
of a single process. ::

    first step      forward of each replica  -->  TargetMeans of each  -->  all replicas: one LabelCount, or one
                                                                            TermCounts, or neither
    later steps     targets are counted before the forward, and summed over the replicas

If the first step does not show the kind of loss, for example because no replica has a loss, up to three more steps are
examined. If the loss is something else, later steps are the user's own steps without changes.

`UncutTrainingStep` calls :meth:`ReplicaTargets.run` for each batch. `MicrobatchComparison`, which does the same for
`TrainingStep`, runs additional forwards. Here, no forward runs twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_hybrid.distributed.agreement import all_gather_values
from lightning_hybrid.distributed.class_losses import observed
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.pipeline_parallel.splitting.microbatch import find_batch_size
from lightning_hybrid.trainer.lightning_internals import results_through
from lightning_hybrid.trainer.losses.loss_terms import (
    LabelCount,
    LossTerms,
    TargetMeans,
    TermCounts,
    common_count,
    common_names,
    common_terms,
    tells_enough,
    with_copied_classes,
)
from lightning_hybrid.trainer.losses.loss_weights import LossWeights
from lightning_hybrid.trainer.losses.term_weights import TermWeights
from lightning_hybrid.trainer.losses.verdict import rounding_of
from lightning_hybrid.trainer.results.logging import Log, merge_logs

__all__ = ["ReplicaTargets"]

_MOST = 4  # steps that are examined at most, because it can happen that no replica has a loss in the first step


class ReplicaTargets:
    """A weighting of the losses of replicas by their targets. All replicas call this object at the same steps.

    Args:
        module: The user's module.
        mesh: The mesh, in which each rank is a replica.
        device: The device of this rank.
        is_asked: True to recognize means over targets. With a single replica, nothing is recognized.
    """

    def __init__(self, module: LightningModule, mesh: Mesh, device: torch.device, *, is_asked: bool) -> None:
        self._module, self._mesh, self._device = module, mesh, device
        self._left = _MOST if is_asked and mesh.num_replicas > 1 else 0
        self._labels: LabelCount | None = None
        self._terms: TermCounts | None = None
        self._kinds: Mapping[str, str] = {}  # "weighted" for each logged value that is a mean over targets, by name

    @property
    def is_looking(self) -> bool:
        """Return True if replicas compare their losses after the forward of the next step."""
        return self._left > 0

    def run(self, step: Callable[[], Any], batch: Any) -> tuple[Any, LossWeights | None]:
        """Run the user's step, and log values that are means over targets with the weights of their targets.

        This is a collective over the replicas while losses are compared, and later if the loss contains means over
        targets.

        Args:
            step: Runs the user's step.
            batch: The batch of the step.

        Returns:
            The output of the step, and the weights by which the caller multiplies the loss; ``None`` if there are none.
            If only terms of the loss are means over targets, the loss in the output already contains their weights.
        """
        if self._labels is not None:
            weights = LossWeights.of(self._labels, [batch], self._mesh, self._device)
            with results_through(self._module.trainer, partial(self._log, weights)):
                return step(), weights
        if self._terms is not None:
            with TermWeights(self._terms, [batch], [1.0], self._mesh, self._device).of_microbatch(0):
                return step(), None
        return self._look(step, batch) if self.is_looking else (step(), None)

    def _look(self, step: Callable[[], Any], batch: Any) -> tuple[Any, LossWeights | None]:
        """Run one of the first steps, and find out from the losses of all replicas how to weight them.

        This is a collective over the replicas. The arguments and the result are as for :meth:`run`.
        """
        batch = with_copied_classes(batch)
        terms, held = LossTerms(in_step=True), list[tuple[Callable[..., None], Log]]()

        def log(write: Callable[..., None], name: str, value: Any, **arguments: Any) -> None:
            # Values that replicas would average immediately wait here until their weights are known.
            if terms.terms and arguments.get("sync_dist") and isinstance(value, Tensor):
                held.append((write, Log(name, value.detach().clone(), None, arguments)))
            else:
                write(name, value, **arguments)

        with observed(terms.observe), results_through(self._module.trainer, log):
            output = step()
        own = self._judge(output, batch, terms, [entry for _, entry in held])
        group = self._mesh.data_control_group
        found = [each for of_replica in all_gather_values(own, group) for each in of_replica]
        tells = tells_enough(found)
        self._left = 0 if tells else self._left - 1
        weights = None
        if tells:
            self._labels = common_count(found)
            self._terms = common_terms(found) if self._labels is None else None
        if self._terms is not None:
            output = self._weigh_terms(output, terms, found, [entry for _, entry in held])
        elif self._labels is None and any(own) and terms.is_empty:
            output = _plus(output, math.nan)  # a mean over no targets is NaN in the user's code, but was replaced by 0
        if self._labels is not None:
            self._kinds = dict.fromkeys(common_names(found), "weighted")
            count = float(self._labels(batch))
            counts = torch.tensor([count, sum(all_gather_values(count, group))], dtype=torch.float64).to(self._device)
            weights = LossWeights(counts[:1], counts[1], self._mesh.num_replicas)
        for write, entry in held:
            if weights is None:
                write(entry.name, entry.value, **entry.arguments)
            else:
                self._log(weights, write, entry.name, entry.value, **entry.arguments)
        return output, weights

    def _weigh_terms(
        self, output: Any, terms: LossTerms, found: Sequence[TargetMeans | None], logs: Sequence[Log]
    ) -> Any:
        """Multiply the terms of a step that has run by their targets relative to the mean over replicas.

        Args:
            output: The output of the step; ``None`` if it has no loss.
            terms: The terms of its loss, whose gradients are multiplied in the backward.
            found: The findings in the steps of all replicas.
            logs: The logged values. A value that equals the loss or a term, with or without its coefficient, is changed
                in place.

        Returns:
            The output, whose loss has the multiplied terms.
        """
        assert self._terms is not None
        totals = defaultdict[int, float](float)
        for mean in (mean for means in found if means is not None for mean in means.terms):
            totals[mean.call] += mean.number
        of_calls = dict(self._terms.counts)
        changes, change = list[tuple[float, float]](), 0.0
        for term in terms.terms:
            if term.call in of_calls and totals[term.call]:
                factor = float(term.number) * self._mesh.num_replicas / totals[term.call]
                term.factor = torch.full_like(term.factor, factor)
                value = float(term.value.detach())
                changes += [(value, value * factor), (value * term.coefficient, value * term.coefficient * factor)]
                change += value * term.coefficient * (factor - 1.0)
        if output is not None:
            changes.insert(0, (terms.loss, terms.loss + change))
            output = _plus(output, change)
        for entry in logs:
            number = float(entry.value)
            new = next((new for old, new in changes if math.isclose(old, number, rel_tol=1e-6)), None)
            entry.value = entry.value if new is None else entry.value + (new - number)
        return output

    def _judge(self, output: Any, batch: Any, terms: LossTerms, logs: Sequence[Log]) -> list[TargetMeans | None]:
        """Return the findings in the step of this replica.

        Args:
            output: The output of the step.
            batch: The batch of the step.
            terms: The terms that were recorded in the step.
            logs: The logged values.

        Returns:
            A list with one entry, which is ``None`` if the loss contains no means over targets; an empty list if the
            step has no loss.
        """
        loss = _loss_in(output)
        if output is None:
            return []
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not terms.terms:
            return [None]
        terms.close(loss)
        numbers = {entry.name: float(entry.value) for entry in logs}
        count = find_batch_size(batch) or 1
        return [terms.find_means(batch, count, rounding_of(loss.dtype), numbers)]

    def _log(self, weights: LossWeights, write: Callable[..., None], name: str, value: Any, **arguments: Any) -> None:
        """Log a value. A mean over targets is logged with the weight of its targets.

        Args:
            weights: The weights of the batch.
            write: Adds a value to Lightning's results.
            name: The name of the value.
            value: The value.
            arguments: The other arguments of ``write``.
        """
        if self._kinds.get(name) == "weighted" and isinstance(value, Tensor):
            [entry] = merge_logs([[Log(name, value, None, arguments)]], [1], 1, weights, self._kinds)
            value, arguments = entry.value, entry.arguments
        write(name, value, **arguments)


def _loss_in(output: Any) -> Any:
    """Return the loss in the output of `training_step`; ``None`` if it has none."""
    return output.get("loss") if isinstance(output, Mapping) else output


def _plus(output: Any, change: float) -> Any:
    """Return the output of `training_step` with a number added to its loss."""
    loss = _loss_in(output) + change
    return {**output, "loss": loss} if isinstance(output, Mapping) else loss

"""Replicas that take their batches whole: a loss that is a mean over targets is weighted by these, without a hook.

::

    first step      forward of each replica  -->  TargetMean of each  -->  all replicas: one LabelCount, or none
    later steps     targets are counted before the forward, and summed over the replicas

Nothing is run twice. A step whose loss is something else is Lightning's own from the second one on.
"""

from __future__ import annotations

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
    TargetMean,
    common_count,
    common_names,
    with_copied_classes,
)
from lightning_hybrid.trainer.losses.loss_weights import LossWeights
from lightning_hybrid.trainer.losses.verdict import rounding_of
from lightning_hybrid.trainer.results.logging import Log, merge_logs

__all__ = ["ReplicaTargets"]

_MOST = 4  # steps that are looked at: no replica may have a loss in a first one


class ReplicaTargets:
    """The targets of the losses of replicas; all of them call it at the same steps.

    Args:
        module: The user's module.
        mesh: The ranks, each of which is a replica.
        device: Where this rank computes.
        is_asked: Whether anything is to be recognized.
    """

    def __init__(self, module: LightningModule, mesh: Mesh, device: torch.device, *, is_asked: bool) -> None:
        self._module, self._mesh, self._device = module, mesh, device
        self._left = _MOST if is_asked and mesh.data_parallel_size > 1 else 0
        self._labels: LabelCount | None = None
        self._kinds: Mapping[str, str] = {}  # of logged values

    @property
    def is_looking(self) -> bool:
        """Whether replicas meet after the forward of the next step, to find out what their losses are."""
        return self._left > 0

    def run(self, step: Callable[[], Any], batch: Any) -> tuple[Any, LossWeights | None]:
        """Run the user's step, and log the values that are means over targets as such.

        Args:
            step: Runs it.
            batch: Its batch.

        Returns:
            What it returned; and what the batch counts, ``None`` if all replicas count the same.
        """
        if self._labels is not None:
            weights = LossWeights.of(self._labels, [batch], self._mesh, self._device)
            with results_through(self._module.trainer, partial(self._log, weights)):
                return step(), weights
        return self._look(step, batch) if self.is_looking else (step(), None)

    def _look(self, step: Callable[[], Any], batch: Any) -> tuple[Any, LossWeights | None]:
        """Run a first step, and find out with the other replicas what its loss is."""
        batch = with_copied_classes(batch)
        terms, held = LossTerms(in_step=True), list[tuple[Callable[..., None], Log]]()

        def log(write: Callable[..., None], name: str, value: Any, **arguments: Any) -> None:
            # Replicas would have averaged what waits here before it is known what they count.
            if terms.terms and arguments.get("sync_dist") and isinstance(value, Tensor):
                held.append((write, Log(name, value.detach().clone(), None, arguments)))
            else:
                write(name, value, **arguments)

        with observed(terms.observe), results_through(self._module.trainer, log):
            output = step()
        own = self._judge(output, batch, terms, [entry for _, entry in held])
        group = self._mesh.data_control_group
        found = [each for of_replica in all_gather_values(own, group) for each in of_replica]
        tells = any(each is None or each.is_finite for each in found)
        self._left = 0 if tells else self._left - 1
        weights = None
        if tells:
            self._labels = common_count(found)
        if self._labels is not None:
            self._kinds = dict.fromkeys(common_names(found), "weighted")
            count = float(self._labels(batch))
            counts = torch.tensor([count, sum(all_gather_values(count, group))], dtype=torch.float64).to(self._device)
            weights = LossWeights(counts[:1], counts[1], self._mesh.data_parallel_size)
        for write, entry in held:
            if weights is None:
                write(entry.name, entry.value, **entry.arguments)
            else:
                self._log(weights, write, entry.name, entry.value, **entry.arguments)
        return output, weights

    def _judge(self, output: Any, batch: Any, terms: LossTerms, logs: Sequence[Log]) -> list[TargetMean | None]:
        """Return what the step of this replica tells; nothing if it has no loss."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if output is None:
            return []
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not terms.terms:
            return [None]
        terms.close(loss)
        numbers = {entry.name: float(entry.value) for entry in logs}
        count = find_batch_size(batch) or 1
        return [terms.find_mean(batch, count, float(loss.detach()), rounding_of(loss.dtype), numbers)]

    def _log(self, weights: LossWeights, write: Callable[..., None], name: str, value: Any, **arguments: Any) -> None:
        """Log a value; one that is a mean over targets counts by these among the replicas."""
        if self._kinds.get(name) == "weighted" and isinstance(value, Tensor):
            [entry] = merge_logs([[Log(name, value, None, arguments)]], [1], 1, weights, self._kinds)
            value, arguments = entry.value, entry.arguments
        write(name, value, **arguments)

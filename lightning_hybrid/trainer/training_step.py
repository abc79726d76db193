"""One training step in micro-batches: forward and backward in one schedule, loss and logs on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_hybrid.data_parallel.grad_sync import GradientSync
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.pipeline_parallel.microbatch import find_batch_size, signature, sizes, split_batch
from lightning_hybrid.pipeline_parallel.placeholders import without_value_text
from lightning_hybrid.pipeline_parallel.schedules import Schedule, build, build_forward
from lightning_hybrid.tensor_parallel.vocab_parallel import to_plain_tensors
from lightning_hybrid.trainer.batch_hooks import to_device
from lightning_hybrid.trainer.results.logging import merge_logs
from lightning_hybrid.trainer.results.outputs import merge_outputs
from lightning_hybrid.trainer.step_context import StepContext

__all__ = ["TrainingStep", "split_into"]

_TRAINING = 0  # tells the random numbers of training from those of evaluation


class TrainingStep:
    """Runs the user's `training_step` through the pipeline.

    Args:
        pipeline: The parts.
        grad_sync: Sums and averages the gradients.
        schedule: The name of the schedule.
        num_microbatches: The wished number of micro-batches.
        loss_reduction: ``"mean"`` or ``"sum"``: how the user's loss reduces over the samples of a batch.
    """

    def __init__(
        self,
        pipeline: StepContext,
        grad_sync: GradientSync,
        *,
        schedule: str,
        num_microbatches: int,
        loss_reduction: str,
    ) -> None:
        self._pipeline = pipeline
        self._grad_sync = grad_sync
        self._schedule = schedule
        self._num_microbatches = num_microbatches
        self._loss_reduction = loss_reduction

    def __call__(
        self,
        arguments: Sequence[Any],
        *,
        step: int,
        context: Callable[[], AbstractContextManager[None]],
        scale: Callable[[Tensor], Tensor],
        backward: bool,
        reduce: bool,
    ) -> Any:
        """Run one batch.

        Args:
            arguments: Of the user's `training_step`; the first one is the batch.
            step: The number of this batch since training began; random numbers depend on it.
            context: The precision plugin's context.
            scale: Divides the loss by the number of accumulated batches, and scales it for fp16.
            backward: Whether gradients are wanted.
            reduce: Whether the gradients shall be summed over holders and averaged over replicas.

        Returns:
            What `training_step` returned, merged over the micro-batches: the same on every rank, without a graph.
        """
        pipeline, grad_sync = self._pipeline, self._grad_sync
        microbatches, counts = self._split(arguments[0])
        weights, factors = self._weights(microbatches, counts)
        outputs: list[Any] = []

        def compute(stage: int, microbatch: int, inputs: Any) -> Any:
            grad_sync.forward_begins(stage)
            with context():
                value = self._compute(stage, microbatch, inputs, (microbatches[microbatch], *arguments[1:]), step)
                if stage < pipeline.num_stages - 1:
                    return value
                outputs.append(value)
                return scale(_weighted(_loss_of(value), factors[microbatch]))

        version = pipeline.version(gradients=backward)
        keys = [(version, signature(microbatch)) for microbatch in microbatches]
        with (
            pipeline.step(num_microbatches=len(counts), counts=counts) as records,
            torch.set_grad_enabled(backward),
            grad_sync.step(),
        ):
            pipeline.run(
                self._schedule_of(len(counts), backward=backward),
                compute,
                keys,
                backward_begins=lambda stage, last: grad_sync.backward_begins(stage, is_last=last and reduce),
                backward_ends=lambda stage, last: grad_sync.backward_ends(stage, is_last=last and reduce, frees=last),
            )
            if reduce:
                with pipeline.profile("reduce"):
                    grad_sync.finish()
        return pipeline.share(
            lambda: (
                merge_outputs(outputs, counts, _total(outputs, weights)),
                merge_logs(records, counts, self._num_microbatches),
            )
        )

    def _schedule_of(self, num_microbatches: int, *, backward: bool) -> Schedule:
        num_ranks, num_chunks = self._pipeline.num_ranks, self._pipeline.num_chunks
        if backward:
            return build(self._schedule, num_ranks, num_microbatches, num_chunks)
        return build_forward(num_ranks, num_microbatches, num_chunks)

    def _compute(self, stage: int, microbatch: int, inputs: Any, arguments: Sequence[Any], step: int) -> Any:
        """The part of one stage: its layers, and the user's code on the first and the last one."""
        pipeline = self._pipeline
        is_last = stage == pipeline.num_stages - 1
        if stage == 0 or is_last:
            arguments = (to_device(arguments[0], pipeline.device), *arguments[1:])
            pipeline.enter_user_code(_TRAINING, step, microbatch, keep=is_last)
        training_step = pipeline.module.training_step
        if pipeline.cut is None:
            return to_plain_tensors(training_step(*arguments))
        layers = pipeline.layers(stage, _TRAINING, step, microbatch)
        if stage == 0:
            return pipeline.cut.until_body(training_step, arguments, layers)
        if is_last:
            return to_plain_tensors(pipeline.cut.around_body(training_step, arguments, lambda _: layers(inputs)))
        return layers(inputs)

    def _split(self, batch: Any) -> tuple[list[Any], list[int]]:
        microbatches, counts = split_into(batch, self._num_microbatches, self._pipeline.module)
        if not self._grad_sync.zero.reduces_each_backward or self._num_microbatches == 1:
            return microbatches, counts
        # Replicas take part in the same collectives, so the one with the smallest batch decides.
        least = self._pipeline.mesh.data_parallel_min(len(counts))
        return (microbatches, counts) if least == len(counts) else split_into(batch, least, self._pipeline.module)

    def _weights(self, microbatches: list[Any], counts: list[int]) -> tuple[list[float | Tensor], list[float | Tensor]]:
        """What each micro-batch counts.

        Returns:
            Its share of the reported loss, and the factor of its loss before backward. They differ where the user
            names the normaliser: then gradients, which are averaged over replicas, follow the sum over all replicas.
        """
        if self._loss_reduction == "sum":
            return [1.0] * len(counts), [1.0] * len(counts)
        weigh = getattr(self._pipeline.module, "microbatch_weight", None)
        if weigh is None:
            shares: list[float | Tensor] = [count / sum(counts) for count in counts]
            return shares, shares
        mesh = self._pipeline.mesh
        if not (self._pipeline.is_first or self._pipeline.is_last):
            return [0.0] * len(counts), [0.0] * len(counts)  # never used: no loss here
        device = self._pipeline.module.device
        each = torch.stack([torch.as_tensor(weigh(m), dtype=torch.float64, device=device) for m in microbatches])
        own = each.sum()
        total = own.clone()
        dist.all_reduce(total, group=mesh.data_group)
        return list((each / own).nan_to_num()), list((each * (mesh.data_parallel_size / total)).nan_to_num())


def split_into(batch: Any, num_microbatches: int, module: LightningModule) -> tuple[list[Any], list[int]]:
    """Split a training batch, by the module's `split_batch` if it has one.

    Args:
        batch: The batch.
        num_microbatches: The wished number of micro-batches.
        module: The user's module.

    Returns:
        The micro-batches, and the number of samples of each.

    Raises:
        ValueError: If `split_batch` returns none.
    """
    user_split = getattr(module, "split_batch", None)
    if user_split is None:
        return split_batch(batch, num_microbatches)
    microbatches = list(user_split(batch, num_microbatches))
    if not microbatches:
        raise ValueError("`split_batch` returned no micro-batches; it must return a list with at least one.")
    found = [find_batch_size(microbatch) for microbatch in microbatches]
    counts = [count for count in found if count is not None]
    if len(counts) == len(found):
        return microbatches, counts
    _, total = split_batch(batch, 1)
    return microbatches, sizes(max(total[0], len(microbatches)), len(microbatches))


def _loss_of(output: Any) -> Tensor:
    """The loss in what `training_step` returned.

    Raises:
        RuntimeError: If it returned ``None``; Lightning does not allow that in distributed training either.
        MisconfigurationException: If there is no loss in it.
        WrongUseError: If the loss has no value on this rank.
    """
    if output is None:
        raise RuntimeError(
            "Skipping the `training_step` by returning None in distributed training is not supported."
            " It is recommended that you rewrite your training logic to avoid having to skip the step in the first"
            " place."
        )
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise MisconfigurationException(
            "In automatic_optimization, `training_step` must return a Tensor or a dict with the key 'loss'; it returned"
            f" {f'a dict with the keys {list(output)}' if isinstance(output, Mapping) else type(output).__name__}."
        )
    if loss.is_meta:
        raise WrongUseError(without_value_text("the loss of `training_step`"))
    return loss


def _weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """The loss times a weight, in the loss's precision."""
    if isinstance(weight, Tensor):
        return loss * weight.to(loss.dtype)
    return loss if weight == 1.0 else loss * weight


def _total(outputs: Sequence[Any], weights: Sequence[float | Tensor]) -> Tensor:
    """The loss of the batch, without a graph."""
    losses = [_share(_loss_of(output).detach(), weight) for output, weight in zip(outputs, weights, strict=True)]
    return sum(losses[1:], losses[0])


def _share(loss: Tensor, weight: float | Tensor) -> Tensor:
    """What a micro-batch adds to the loss: nothing if it counts nothing, also where its own mean is 0 / 0."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, _weighted(loss, weight), torch.zeros_like(loss))
    return _weighted(loss, weight)

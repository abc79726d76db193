"""Changes to Lightning's automatic optimization: a step with its own backward, and a fixed global batch size.

`HybridStrategy.setup` makes these objects when a fit starts. During the run, :class:`ReplicaClosure` replaces
Lightning's closure, which the optimizer step calls for each batch. :class:`GlobalBatch` is a callback for
`HybridStrategy(global_batch_size=...)`.

Lightning's closure cannot be used for two reasons. It zeroes gradients after the step, but a pipeline step has already
computed them. It also skips the backward on a replica without a loss, but the other replicas wait for this replica in
collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch import Tensor

from lightning_hybrid.distributed.agreement import agree, check_equal
from lightning_hybrid.distributed.sizes import accumulated_batches
from lightning_hybrid.trainer.run_callback import RunCallback


class ReplicaClosure(Closure):
    """A closure that zeroes gradients, and runs step and backward. The step may compute gradients itself.

    A replica without a loss still takes part in the backward of the other replicas.

    Args:
        step_fn: Runs the step.
        backward_fn: Runs the backward of a loss; ``None`` to skip it.
        zero_grad_fn: Zeroes the gradients; ``None`` if gradients are accumulated, or the backward is skipped.
        backward_without_loss: Takes part in the backward if this replica has no loss, and returns True if another
            replica has one.
        has_gradients: True if the step also computes gradients. Lightning zeroes gradients *between* step and backward,
            which would delete these gradients.
    """

    def __init__(
        self,
        step_fn: Callable[[], ClosureResult],
        backward_fn: Callable[[Tensor], None] | None = None,
        zero_grad_fn: Callable[[], None] | None = None,
        *,
        backward_without_loss: Callable[[], bool],
        has_gradients: bool,
    ) -> None:
        super().__init__(step_fn, backward_fn, zero_grad_fn)
        self._step, self._backward, self._zero_grad = step_fn, backward_fn, zero_grad_fn
        self._backward_without_loss, self._has_gradients = backward_without_loss, has_gradients
        self._stand_in: Tensor | None = None

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Zero the gradients, and run step and backward. The arguments are ignored.

        Returns:
            The result of the step. Its loss is ``None`` if this replica has no loss.
        """
        if self._zero_grad is not None and self._has_gradients:
            self._zero_grad()
        result = self._step()
        if result.closure_loss is None:
            self.warning_cache.warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")
        if self._zero_grad is not None and not self._has_gradients:
            self._zero_grad()
        self._stand_in = None
        if self._backward is not None and result.closure_loss is not None:
            self._backward(result.closure_loss)
        elif self._backward is not None and self._backward_without_loss():
            self._stand_in = torch.zeros(())
        return result

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the loss for the optimizer; 0 if only another replica has one, because ``None`` skips an fp16 step."""
        loss: Tensor | None = super().__call__(*args, **kwargs)
        return self._stand_in if loss is None else loss


class GlobalBatch(RunCallback):
    """A callback that sets the number of accumulated batches, so that an optimizer step has a fixed number of samples.

    The Trainer calls its hook at the start of each epoch. The strategy calls the other methods at the start and the end
    of a fit.

    Args:
        size: The number of samples in an optimizer step, over all replicas.
        num_replicas: The number of replicas.
        trainer: The Trainer.
    """

    def __init__(self, size: int, num_replicas: int, trainer: Trainer) -> None:
        self._size, self._num_replicas, self._trainer = size, num_replicas, trainer
        self._former = trainer.accumulate_grad_batches
        self._batch_size: Any = None

    def accumulate(self) -> None:
        """Set the Trainer's `accumulate_grad_batches`, after creating its training loader; call it on every rank.

        `HybridStrategy.setup` calls this before schedulers read the number of steps.

        Raises:
            ValueError: On every rank, if the loader has no batch size, if batch sizes differ between ranks, or if the
                size is not divisible by the batch size times the number of replicas.
        """
        trainer = self._trainer
        trainer.fit_loop.setup_data()
        self._batch_size = getattr(trainer.train_dataloader, "batch_size", None)
        check_equal({"batch_size of the training loader": str(self._batch_size)}, "Use the same loader on all ranks.")
        trainer.accumulate_grad_batches = agree(self._accumulated)

    def _accumulated(self) -> int:
        """Return the number of batches of a replica in an optimizer step.

        Raises:
            ValueError: If the loader has no batch size, or the size is not divisible by the batch size times the number
                of replicas.
        """
        if not isinstance(self._batch_size, int):
            raise ValueError(
                f"global_batch_size={self._size} requires a training loader with a `batch_size`, but this loader has"
                " none. Pass the Trainer a single `DataLoader(..., batch_size=...)`, or set"
                " `Trainer(accumulate_grad_batches=...)` instead. [LH138]"
            )
        return accumulated_batches(self._size, self._batch_size, self._num_replicas)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the number if the Trainer has created new loaders with another batch size.

        This is then a collective over all ranks, so the batch size must change on all of them.
        """
        if getattr(trainer.train_dataloader, "batch_size", None) != self._batch_size:
            self.accumulate()

    def restore(self) -> None:
        """Restore the Trainer's former `accumulate_grad_batches`."""
        self._trainer.accumulate_grad_batches = self._former


def check_accumulation(size: int, trainer: Trainer, module: LightningModule) -> None:
    """Check that the number of accumulated batches is not set in another way, too.

    `HybridStrategy.setup_environment` calls this at the start of a fit with `global_batch_size`.

    Args:
        size: The strategy's `global_batch_size`.
        trainer: The Trainer, with all its callbacks.
        module: The user's module.

    Raises:
        ValueError: If the Trainer or a callback also sets it, or if the module uses manual optimization.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if trainer.accumulate_grad_batches != 1:
        other = f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})"
    elif any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
        other = GradientAccumulationScheduler.__name__
    elif not module.automatic_optimization:
        other = f"the manual optimization of {type(module).__name__}"
    else:
        return
    raise ValueError(
        f"global_batch_size={size} sets the number of accumulated batches, but so does {other}. Use only one of the"
        " two. [LH137]"
    )

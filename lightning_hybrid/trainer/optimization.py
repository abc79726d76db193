"""Lightning's automatic optimization: for a step that is one schedule, and with a number of samples that stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch import Tensor

from lightning_hybrid.config import accumulated_batches
from lightning_hybrid.distributed.agreement import agree, check_equal


class PipelineClosure(Closure):
    """Zeroes the gradients, runs the step - in which the gradients come to be - and then calls the backward hooks.

    Lightning zeroes gradients *between* step and backward, which would wipe what a schedule has computed.

    Args:
        step_fn: Runs the schedule.
        backward_fn: Calls the backward hooks; ``None`` to skip them.
        zero_grad_fn: Zeroes the gradients; ``None`` to accumulate.
    """

    def __init__(
        self,
        step_fn: Callable[[], ClosureResult],
        backward_fn: Callable[[Tensor], None] | None = None,
        zero_grad_fn: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(step_fn, backward_fn, zero_grad_fn)
        self._step, self._call_backward_hooks, self._zero_grad = step_fn, backward_fn, zero_grad_fn

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Run what an optimizer step needs."""
        if self._zero_grad is not None:
            self._zero_grad()
        result = self._step()
        if self._call_backward_hooks is not None and result.closure_loss is not None:
            self._call_backward_hooks(result.closure_loss)
        return result


class GlobalBatch(Callback):
    """Has as many batches accumulated as make up the samples of an optimizer step, whatever the number of replicas.

    Args:
        size: Samples of an optimizer step, of all replicas.
        data_parallel_size: The number of replicas.
        trainer: The Trainer.
    """

    def __init__(self, size: int, data_parallel_size: int, trainer: Trainer) -> None:
        self._size, self._data_parallel_size, self._trainer = size, data_parallel_size, trainer
        self._former = trainer.accumulate_grad_batches
        self._batch_size: Any = None

    def accumulate(self) -> None:
        """Tell the Trainer, whose training loader is made now if it has not been; to be called on every rank.

        Raises:
            ValueError: If the loader does not say its batch size, the size is not the same on every rank, or it does
                not go with the number of replicas; on every rank.
        """
        trainer = self._trainer
        trainer.fit_loop.setup_data()
        self._batch_size = getattr(trainer.train_dataloader, "batch_size", None)
        check_equal({"batch_size of the training loader": str(self._batch_size)}, "Give all ranks the same loader.")
        trainer.accumulate_grad_batches = agree(self._accumulated)

    def _accumulated(self) -> int:
        if not isinstance(self._batch_size, int):
            raise ValueError(
                f"global_batch_size={self._size} needs the number of samples in a batch, and the training loader has no"
                " `batch_size`. Give the Trainer one `DataLoader(..., batch_size=...)`, or set"
                " `Trainer(accumulate_grad_batches=...)` instead."
            )
        return accumulated_batches(self._size, self._batch_size, self._data_parallel_size)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loaders may have been made anew, with other batches."""
        if getattr(trainer.train_dataloader, "batch_size", None) != self._batch_size:
            self.accumulate()

    def restore(self) -> None:
        """Give the Trainer its own number back."""
        self._trainer.accumulate_grad_batches = self._former


def check_accumulation(size: int, trainer: Trainer, module: LightningModule) -> None:
    """Check that nobody else says how many batches are accumulated.

    Args:
        size: The samples of an optimizer step that the strategy was given.
        trainer: The Trainer, with all of its callbacks.
        module: The user's module.

    Raises:
        ValueError: If somebody does.
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
        f"global_batch_size={size} says how many batches are accumulated, and so does {other}. Leave out one of them."
    )

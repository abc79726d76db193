"""The strategy's part in steps: what the Trainer asks for when a batch is trained with or evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.strategy.saving import SavingStrategy
from lightning_hybrid.trainer.training_step import TrainingStep

__all__ = ["SteppingStrategy"]


class SteppingStrategy(SavingStrategy):
    """Steps through the pipeline, or Lightning's own with averaged gradients where nothing is cut."""

    _sync_blocked = False

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch forward, and with a pipeline backward too."""
        parts = self._parts
        parts.batch_start.close()
        parts.grad_sync.broadcast_buffers()
        return self._uncut_step(*args, **kwargs) if parts.training is None else self._cut_step(parts.training, args)

    def _cut_step(self, training: TrainingStep, args: tuple[Any, ...]) -> Any:
        loop = self._module.trainer.fit_loop.epoch_loop
        backward = not loop.automatic_optimization._skip_backward
        return training(
            args,
            step=loop.total_batch_idx,
            context=self.precision_plugin.train_step_context,
            scale=self._scale_loss,
            backward=backward,
            reduce=backward and not self._sync_blocked,
        )

    def _uncut_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's own; whole parameters stay until after the backward, which the Trainer calls."""
        grad_sync = self._parts.grad_sync
        wholes = grad_sync.wholes
        if wholes is None:
            grad_sync.forward_begins(0)
            with self._parts.around_forwards():
                return super().training_step(*args, **kwargs)
        wholes.open()
        grad_sync.forward_begins(0)
        try:
            with self._parts.around_forwards():
                output = super().training_step(*args, **kwargs)
        except BaseException:
            wholes.abandon()
            raise
        loop = self._module.trainer.fit_loop.epoch_loop
        automatic = self._module.automatic_optimization
        if not automatic or output is None or loop.automatic_optimization._skip_backward:
            wholes.close()
        return output

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Step, with the optimizer's states on the device."""
        offload = self._parts.offload

        def fetching() -> Any:
            output = closure()  # forward and backward
            offload.load_states(optimizer)
            return output

        output = super().optimizer_step(optimizer, fetching, *args, **kwargs)
        offload.offload_states(optimizer)
        return output

    def _scale_loss(self, loss: Tensor) -> Tensor:
        accumulated = self._module.trainer.accumulate_grad_batches
        loss = loss if accumulated == 1 else loss / accumulated
        scaler = getattr(self.precision_plugin, "scaler", None)
        return loss if scaler is None else scaler.scale(loss)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward and average the gradients; with a pipeline both are done, and only the hooks are called."""
        plugin, module = self.precision_plugin, self._module
        closure_loss = plugin.pre_backward(closure_loss, module)
        if not self._parts.is_cut:
            self._backward(closure_loss, optimizer, *args, **kwargs)
        return plugin.post_backward(closure_loss, module)

    def _backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> None:
        grad_sync, is_last = self._parts.grad_sync, not self._sync_blocked
        grad_sync.backward_begins(0, is_last=is_last)
        self.precision_plugin.backward(closure_loss, self._module, optimizer, *args, **kwargs)
        grad_sync.backward_ends(0, is_last=is_last, frees=True)
        if is_last:
            grad_sync.finish()
        if grad_sync.wholes is not None and self._module.automatic_optimization:
            grad_sync.wholes.close()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, gradients are accumulated on each rank and not yet averaged."""
        self._sync_blocked = True
        try:
            yield
        finally:
            self._sync_blocked = False

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a validation batch."""
        return self._evaluate("validation_step", args, self.precision_plugin.val_step_context)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a test batch."""
        return self._evaluate("test_step", args, self.precision_plugin.test_step_context)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch for prediction."""
        return self._evaluate("predict_step", args, self.precision_plugin.predict_step_context)

    def _evaluate(self, name: str, args: tuple[Any, ...], context: Callable[[], Any]) -> Any:
        evaluation = self._parts.evaluation
        self._parts.batch_start.close()
        with self._parts.grad_sync.step(evaluates=True, is_cut=self._parts.is_cut):
            if evaluation is None:
                with context():
                    return getattr(self._module, name)(*args)
            return evaluation(name, args, step=self._parts.next_evaluation(), context=context)

    def on_validation_start(self) -> None:
        """Evaluate with the first replica's buffers, and the parameters of now."""
        self._parts.grad_sync.broadcast_buffers()

    on_test_start = on_predict_start = on_validation_start

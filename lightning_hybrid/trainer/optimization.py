"""Lightning's automatic optimization for a step that runs forward and backward in one schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from torch.optim import Optimizer

if TYPE_CHECKING:
    from collections import OrderedDict

    from lightning.pytorch import Trainer

__all__ = ["PipelineOptimization", "install", "uninstall"]


class _PipelineClosure(Closure):
    """Zeroes the gradients, runs the step - in which the gradients come to be - and then calls the backward hooks.

    Lightning zeroes gradients *between* step and backward, which would wipe what a schedule has computed.
    """

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Run what an optimizer step needs."""
        if self._zero_grad_fn is not None:
            self._zero_grad_fn()
        result = self._step_fn()
        if self._backward_fn is not None and result.closure_loss is not None:
            self._backward_fn(result.closure_loss)
        return result


class PipelineOptimization(_AutomaticOptimization):
    """Lightning's loop, with gradients zeroed before the step."""

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        return _PipelineClosure(
            step_fn=self._make_step_fn(kwargs),
            backward_fn=self._make_backward_fn(optimizer),
            zero_grad_fn=self._make_zero_grad_fn(batch_idx, optimizer),
        )


def install(trainer: Trainer) -> None:
    """Put our loop in the place of Lightning's; the progress object, which checkpoints know, stays the same."""
    _replace(trainer, PipelineOptimization)


def uninstall(trainer: Trainer) -> None:
    """Put Lightning's loop back."""
    _replace(trainer, _AutomaticOptimization)


def _replace(trainer: Trainer, kind: type[_AutomaticOptimization]) -> None:
    epoch_loop = trainer.fit_loop.epoch_loop
    before = epoch_loop.automatic_optimization
    if type(before) is kind:
        return
    loop = kind(trainer)
    loop.optim_progress = before.optim_progress
    loop._skip_backward = before._skip_backward
    epoch_loop.automatic_optimization = loop

"""Lightning's automatic optimization for a step that runs forward and backward in one schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch import Tensor


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

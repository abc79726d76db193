"""Gradients that are not finite: found before the optimizer steps, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.distributed.dtensor import local_gradient
from lightning_hybrid.distributed.process_group import GroupRef

_MOST = 3  # parameters in one text
SKIPPED = "skipped_steps"


class NonfiniteGuard:
    """Looks at the gradients before an optimizer steps, where no `GradScaler` does.

    ::

        backward, gradients reduced --> norm --> hooks, clipping --> is the norm finite? --> step
                                        `-- with clipping by norm, that one's --'       `-> raise, or no step

    The norm of all gradients of the model is not finite if one of them is not. The ranks that hold the model together
    exchange theirs in one collective, and get the same bits; where gradients are clipped by norm, that norm is taken
    and there is no other collective. Replicas have the same gradients already.

    Whether to step is known on the host, which waits for the device there: an optimizer cannot be told not to step in
    any other way. Only fused ones can (as `GradScaler` does it), and nobody waits: to skip, they get a tensor.

    Args:
        action: ``"raise"`` or ``"skip"``.
        module: The user's module, divided.
        total_norm: The norm of the gradients of parameters over the ranks that hold the model, by its exponent.
        control_group: These ranks, over a backend that takes tensors of the host.

    Attributes:
        skipped: The number of steps that were left out, shape ``()``.
    """

    def __init__(
        self,
        action: str,
        module: LightningModule,
        total_norm: Callable[[list[nn.Parameter], float], Tensor],
        control_group: dist.ProcessGroup,
    ) -> None:
        self._action, self._module, self._total_norm = action, module, total_norm
        self._group = GroupRef(control_group)
        self._clipped: Tensor | None = None
        self.skipped = torch.zeros((), device=module.device)

    def note_norm(self, norm: Tensor) -> None:
        """Gradients were clipped by their norm, which was this."""
        self._clipped = norm

    @contextmanager
    def step(self, optimizer: Optimizer) -> Iterator[None]:
        """Around the step of an optimizer."""
        try:
            yield
        finally:
            vars(optimizer).pop("found_inf", None)

    def __call__(self, hooks_and_clipping: Callable[[], None], optimizer: Optimizer) -> None:
        """Look at the gradients; what is not finite has no step.

        Args:
            hooks_and_clipping: What the Trainer does between backward and the step.
            optimizer: The optimizer that is about to step.

        Raises:
            RuntimeError: If a gradient is not finite, unless such steps are to be skipped; on every rank.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._clipped = None
        norm = None if self._clips_by_norm else self._total_norm(parameters, float("inf"))
        hooks_and_clipping()
        if norm is None:
            norm = self._clipped
            norm = self._total_norm(parameters, float("inf")) if norm is None else norm
        found = (~norm.isfinite()).to(torch.float32)
        if self._action == "skip" and getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = found  # type: ignore[attr-defined]  # its kernel reads it on the device
            self.skipped += found
        elif found.item():
            if self._action == "raise":
                raise RuntimeError(self._text(parameters))
            for parameter in parameters:
                parameter.grad = None  # an optimizer passes over it, and over what it keeps of it
            self.skipped += 1

    @property
    def _clips_by_norm(self) -> bool:
        trainer = self._module.trainer
        return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm in (None, "norm")

    def _text(self, parameters: list[nn.Parameter]) -> str:
        """The same on every rank: what is not finite on any of them."""
        ids = set(map(id, parameters))
        own = []
        for name, parameter in self._module.named_parameters():
            gradient = local_gradient(parameter) if id(parameter) in ids else None
            if gradient is not None and not gradient.isfinite().all():
                own.append(name)
        everyone: list[Any] = [own] * self._group().size()
        if len(everyone) > 1:
            dist.all_gather_object(everyone, own, group=self._group())
        names = list(dict.fromkeys(name for names in everyone for name in names))
        more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        which = f": those of {', '.join(names[:_MOST])}{more}" if names else ", or their norm is too large for a number"
        return (
            f"Gradients of optimizer step {self._module.trainer.global_step} are not finite{which}. Nothing has been"
            " changed by them. `Trainer(detect_anomaly=True)` names the layer where that begins;"
            " `HybridStrategy(on_nonfinite='skip')` leaves such steps out."
        )


class SkippedSteps(Callback):
    """Logs how many steps were left out so far, as ``"skipped_steps"``.

    Args:
        guard: Counts them.
    """

    def __init__(self, guard: NonfiniteGuard) -> None:
        self._guard = guard

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Log; the number is the same on every rank, so nobody is asked for it."""
        type(pl_module).log(pl_module, SKIPPED, self._guard.skipped.clone(), on_step=True, on_epoch=False)

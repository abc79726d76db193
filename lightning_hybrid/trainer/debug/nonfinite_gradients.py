"""Checks for gradients that are not finite: all ranks skip the step or raise an error, or one rank warns.

`HybridStrategy` chooses one :class:`GradientWatch` for a fit, and `Run.install` enters :meth:`GradientWatch.in_steps`::

    a `GradScaler` exists                  NoGradientWatch
    Faults(on_nonfinite="ignore")          NonfiniteWarning
    Faults(on_nonfinite="skip", "raise")   NonfiniteGuard, and the callback SkippedSteps

The check runs between the backward and the optimizer step, because all ranks must skip the same steps, and an optimizer
step cannot be undone.
"""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.data_parallel.grad_clip import find_nonfinite
from lightning_hybrid.distributed.agreement import all_gather_values
from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.distributed.replaced import replaced_entries
from lightning_hybrid.pipeline_parallel.placeholders import absent_gradients
from lightning_hybrid.torch_internals import unscales_in_step
from lightning_hybrid.trainer.lightning_internals import replace_after_closure
from lightning_hybrid.trainer.run_callback import RunCallback

_MOST = 3  # parameters in one message
SKIPPED = "skipped_steps"


class GradientWatch(ABC):
    """A check of the gradients of each step before an optimizer uses them.

    Hooks that read gradients of other stages' parameters get a placeholder instead of ``None``.
    """

    @contextmanager
    def in_steps(self, trainer: Trainer) -> Iterator[None]:
        """While entered, check gradients between each backward and its optimizer step; then call :meth:`finish`."""

        def look(hooks_and_clipping: Callable[[], None], optimizer: Optimizer) -> None:
            self(absent_gradients()(hooks_and_clipping), optimizer)

        try:
            with replace_after_closure(trainer.precision_plugin, look):
                yield
        finally:
            self.finish()

    @abstractmethod
    def __call__(self, hooks_and_clipping: Callable[[], None], optimizer: Optimizer) -> None:
        """Check the gradients, and run the Trainer's hooks and clipping.

        Args:
            hooks_and_clipping: Runs the Trainer's hooks and clipping between the backward and the optimizer step.
            optimizer: The optimizer that is about to step.
        """

    @abstractmethod
    def finish(self) -> None:
        """Report remaining results at the end of a run."""


class NoGradientWatch(GradientWatch):
    """A watch that checks nothing, because a `GradScaler` checks the gradients."""

    def __call__(self, hooks_and_clipping: Callable[[], None], optimizer: Optimizer) -> None:
        """Run the Trainer's hooks and clipping."""
        hooks_and_clipping()

    def finish(self) -> None:
        """Do nothing."""


class NonfiniteGuard(GradientWatch):
    """A watch that skips a step or raises an error if gradients are not finite; without a `GradScaler`.

    ::

        backward, gradients reduced --> norm --> hooks, clipping --> is the norm finite? --> step
                                        `---- or the norm used for clipping ----'       `-> raise, or no step

    The norm of all gradients of the model is not finite if one gradient is not finite. The ranks that hold the model
    compute this norm in one collective, and get the same bits. If gradients are clipped by norm, the norm used for
    clipping is checked, without another collective. Other replicas have equal gradients already.

    The host decides whether to step, so it waits for the device. Only fused optimizers can skip a step on the device,
    where they read the tensor ``found_inf`` as with a `GradScaler`. For these optimizers, the host does not wait.

    Args:
        action: ``"raise"`` or ``"skip"``.
        module: The user's module, after it was parallelized.
        total_norm: Returns the norm of the gradients of parameters over the ranks that hold the model, for an exponent.
        control_group: The ranks that hold the model, as a gloo group for the names in an error: the model group, or
            with ZeRO all ranks.

    Attributes:
        skipped: The number of skipped steps, shape ``()``, on the device.
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
        """Record the norm by which gradients were clipped, so that it is not computed again.

        `HybridStrategy` calls this when it clips, inside the hooks and clipping of :meth:`__call__`.
        """
        self._clipped = norm

    def step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return a context around closure and step of an optimizer, in which the optimizer can read ``found_inf``."""
        return replaced_entries([(vars(optimizer), {"found_inf": None})])

    def __call__(self, hooks_and_clipping: Callable[[], None], optimizer: Optimizer) -> None:
        """Check the gradients; if they are not finite, raise an error or make the optimizer skip the step.

        This is a collective of the ranks that hold the model. To skip a step of an optimizer that is not fused, all its
        gradients are set to ``None``.

        Args:
            hooks_and_clipping: Runs the Trainer's hooks and clipping between the backward and the optimizer step.
            optimizer: The optimizer that is about to step.

        Raises:
            RuntimeError: If a gradient is not finite and the action is ``"raise"``; on every rank.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._clipped = None
        norm = None if self._clips_by_norm else self._total_norm(parameters, float("inf"))
        hooks_and_clipping()
        if norm is None:
            norm = self._clipped
            norm = self._total_norm(parameters, float("inf")) if norm is None else norm
        found = (~norm.isfinite()).to(torch.float32)
        if self._action == "skip" and unscales_in_step(optimizer):
            optimizer.found_inf = found  # type: ignore[attr-defined]  # its kernel reads it on the device
            self.skipped += found
        elif found.item():
            if self._action == "raise":
                raise RuntimeError(self._text(parameters))
            for parameter in parameters:
                parameter.grad = None  # an optimizer skips parameters without a gradient, and their states
            self.skipped += 1

    def finish(self) -> None:
        """Do nothing, because every step was checked before it ran."""

    @property
    def _clips_by_norm(self) -> bool:
        trainer = self._module.trainer
        return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm in (None, "norm")

    def _text(self, parameters: list[nn.Parameter]) -> str:
        """Return the error message; it is the same on every rank, with the names from all ranks."""
        flags = [(owners, found.tolist()) for owners, found in find_nonfinite(parameters)]
        own = _names(self._module, (each for owners, found in flags for each in itertools.compress(owners, found)))
        names = list(dict.fromkeys(name for names in all_gather_values(own, self._group()) for name in names))
        which = f" ({_listed(names)})" if names else ", or their norm overflows"
        return (
            f"Gradients of optimizer step {self._module.trainer.global_step} are not finite{which}. The optimizer has"
            " not used them. To find the layer that first produces such gradients, set `Trainer(detect_anomaly=True)`."
            " To skip such steps, set `HybridStrategy(faults=Faults(on_nonfinite='skip'))`. [LH706]"
        )


class _Found(NamedTuple):
    """The gradients of a step that are not finite.

    Attributes:
        step: The number of the optimizer step.
        parameters: The parameters that have a gradient.
        flags: For each parameter, True if its gradient is not finite; on the host, valid once ``copied`` has happened.
        copied: The event after the copy to the host; ``None`` if the gradients are on the host.
    """

    step: int
    parameters: list[nn.Parameter]
    flags: Tensor
    copied: torch.cuda.Event | None

    @property
    def is_there(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]


class NonfiniteWarning(GradientWatch):
    """A watch that warns once, on one rank, that the optimizer has used gradients that are not finite.

    Neither the host nor another rank waits for the check. The device computes flags, which the host reads after it has
    requested the flags of the next step.

    Args:
        module: The user's module, after it was parallelized.
        pipeline_rank: The pipeline rank of this rank.
        is_first: Returns True if no other rank has warned in this run.
    """

    def __init__(self, module: LightningModule, pipeline_rank: int, is_first: Callable[[], bool]) -> None:
        self._module, self._pipeline_rank, self._is_first = module, pipeline_rank, is_first
        self._found: deque[_Found] = deque()
        self._has_warned = False

    def __call__(self, hooks_and_clipping: Callable[[], None], optimizer: Optimizer) -> None:
        """Check the gradients, before clipping by norm makes all of them NaN, and run the hooks and clipping."""
        if not self._has_warned:
            step, former = self._module.trainer.global_step, len(self._found)
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self._found.extend(_to_host(step, *each) for each in find_nonfinite(parameters))
            self._read(former)
        hooks_and_clipping()

    def finish(self) -> None:
        """Read the flags of the last step."""
        self._read(len(self._found))

    def _read(self, number: int) -> None:
        """Read the flags of the oldest checks, up to a number of checks or the first one that is still being copied."""
        for _ in range(number):
            if self._has_warned or not self._found[0].is_there:
                return
            found = self._found.popleft()
            if found.flags.any():
                self._warn(found)

    def _warn(self, found: _Found) -> None:
        self._has_warned = True
        self._found.clear()
        if not self._is_first():
            return
        names = _names(self._module, itertools.compress(found.parameters, found.flags.tolist()))
        warnings.warn(
            f"Gradients of optimizer step {found.step} are not finite on pipeline rank {self._pipeline_rank}"
            f" ({_listed(names)}). The optimizer has used them. To skip such steps, set"
            " `HybridStrategy(faults=Faults(on_nonfinite='skip'))`; to end the run instead, set `on_nonfinite='raise'`."
            " To find the layer that first produces such gradients, set `Trainer(detect_anomaly=True)`. Gradients of"
            " later steps are not checked.",
            stacklevel=2,
        )


def _to_host(step: int, parameters: list[nn.Parameter], flags: Tensor) -> _Found:
    if flags.device.type != "cuda":
        return _Found(step, parameters, flags, None)
    host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
    host.copy_(flags, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(flags.device))
    return _Found(step, parameters, host, copied)


def _names(module: nn.Module, parameters: Iterable[nn.Parameter]) -> list[str]:
    ids = set(map(id, parameters))
    return [name for name, parameter in module.named_parameters() if id(parameter) in ids]


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:_MOST])}{f' and {len(names) - _MOST} more' if len(names) > _MOST else ''}"


class SkippedSteps(RunCallback):
    """A callback that logs the number of steps skipped so far in this run, as ``"skipped_steps"``.

    Args:
        guard: Counts the skipped steps.
    """

    def __init__(self, guard: NonfiniteGuard) -> None:
        self._guard = guard

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Log the number. It is the same on every rank, so no reduction is needed."""
        type(pl_module).log(pl_module, SKIPPED, self._guard.skipped.clone(), on_step=True, on_epoch=False)

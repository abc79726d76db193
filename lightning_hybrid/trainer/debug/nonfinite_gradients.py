"""Gradients that are not finite: no step or an error, on all ranks alike; or a warning, which nobody waits for."""

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

_MOST = 3  # parameters in one text
SKIPPED = "skipped_steps"


class GradientWatch(ABC):
    """Looks at the gradients of each step before an optimizer uses them.

    Hooks that look at them see those of other stages as absent, and not as ``None``.
    """

    @contextmanager
    def in_steps(self, trainer: Trainer) -> Iterator[None]:
        """While entered, look."""

        def look(hooks_and_clipping: Callable[[], None], optimizer: Optimizer) -> None:
            self(absent_gradients()(hooks_and_clipping), optimizer)

        try:
            with replace_after_closure(trainer.precision_plugin, look):
                yield
        finally:
            self.finish()

    @abstractmethod
    def __call__(self, hooks_and_clipping: Callable[[], None], optimizer: Optimizer) -> None:
        """Look, and do what the Trainer does between backward and the step.

        Args:
            hooks_and_clipping: That.
            optimizer: The optimizer that is about to step.
        """

    @abstractmethod
    def finish(self) -> None:
        """Say what is left to say at the end of a run."""


class NoGradientWatch(GradientWatch):
    """Looks at nothing, where a `GradScaler` does."""

    def __call__(self, hooks_and_clipping: Callable[[], None], optimizer: Optimizer) -> None:
        """Do what the Trainer does between backward and the step."""
        hooks_and_clipping()

    def finish(self) -> None:
        """Say nothing."""


class NonfiniteGuard(GradientWatch):
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

    def step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Let the step of an optimizer read `found_inf` while entered."""
        return replaced_entries([(vars(optimizer), {"found_inf": None})])

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
        if self._action == "skip" and unscales_in_step(optimizer):
            optimizer.found_inf = found  # type: ignore[attr-defined]  # its kernel reads it on the device
            self.skipped += found
        elif found.item():
            if self._action == "raise":
                raise RuntimeError(self._text(parameters))
            for parameter in parameters:
                parameter.grad = None  # an optimizer passes over it, and over what it keeps of it
            self.skipped += 1

    def finish(self) -> None:
        """Say nothing: every step was judged before it was made."""

    @property
    def _clips_by_norm(self) -> bool:
        trainer = self._module.trainer
        return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm in (None, "norm")

    def _text(self, parameters: list[nn.Parameter]) -> str:
        """The same on every rank: what is not finite on any of them."""
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
    """Which gradients of a step are not finite.

    Attributes:
        step: The number of the optimizer step.
        parameters: That have a gradient.
        flags: Of each, on the host once the device has come so far.
        copied: Tells that; ``None`` where the device is the host.
    """

    step: int
    parameters: list[nn.Parameter]
    flags: Tensor
    copied: torch.cuda.Event | None

    @property
    def is_there(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]


class NonfiniteWarning(GradientWatch):
    """Warns, once, that the optimizer has used gradients that are not finite; one rank does, which says where.

    Neither the host nor another rank waits: flags are made on the device, and read after those of the next step have
    been asked for.

    Args:
        module: The user's module, divided.
        pipeline_rank: Of this rank.
        is_first: Whether no other rank has warned in this run.
    """

    def __init__(self, module: LightningModule, pipeline_rank: int, is_first: Callable[[], bool]) -> None:
        self._module, self._pipeline_rank, self._is_first = module, pipeline_rank, is_first
        self._found: deque[_Found] = deque()
        self._has_warned = False

    def __call__(self, hooks_and_clipping: Callable[[], None], optimizer: Optimizer) -> None:
        """Look at the gradients, before clipping makes one number of all of them."""
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
        """Read as many flags, as far as they are there."""
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
    """Logs how many steps were left out so far, as ``"skipped_steps"``.

    Args:
        guard: Counts them.
    """

    def __init__(self, guard: NonfiniteGuard) -> None:
        self._guard = guard

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Log; the number is the same on every rank, so nobody is asked for it."""
        type(pl_module).log(pl_module, SKIPPED, self._guard.skipped.clone(), on_step=True, on_epoch=False)

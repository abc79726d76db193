"""The exit of a rank after an exception: it leaves its process groups first, and prints the cause once per job.

The rank that raised the exception prints the traceback, mostly with only the user's frames. A rank that ends because of
this exception prints one line. If all ranks raise the same error, only the first one prints it, unless the launcher
leaves the other ranks running.

::

    rank 1, which raised the exception                a rank that ends because of it
    [rank1]: Traceback (most recent call last):       [rank0]: RuntimeError: Rank 1 (...), action 1F0, failed: ...
    [rank1]:   File "train.py", line 12, in ...
    [rank1]: ValueError: ...

`World` makes the callback. After an exception, the Trainer calls :meth:`ExceptionCallback.on_exception` first, and then
`HybridStrategy.on_exception`, which calls :meth:`ExceptionCallback.leave` again and :func:`print_shortly`. After an
exception inside a step, `StepContext.guard` has already left the groups.

Without this file, each rank would print its own traceback, and callbacks that save after an exception would wait
forever for ranks that are in another collective.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import lightning
import lightning_utilities
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.distributed.failure import WrongUseError, is_transport
from lightning_hybrid.distributed.watch.failures import Failures
from lightning_hybrid.error_codes.printing import VARIABLE, outlives_the_first, print_once
from lightning_hybrid.tensor_parallel.layouts.operator_errors import explain_operator_error
from lightning_hybrid.trainer.run_callback import RunCallback

_PACKAGES = tuple(Path(str(each.__file__)).parent for each in (lightning, lightning_utilities, torch))
_OWN = f"{Path(__file__).parent.parent}{os.sep}"
_LEFT_OUT = (*(f"{package}{os.sep}" for package in _PACKAGES), _OWN)


class ExceptionCallback(RunCallback):
    """A callback with which a rank leaves its process groups after an exception, before the user's callbacks run.

    Lightning calls callbacks before the strategy, so this callback comes before the user's callbacks. Some of them save
    a checkpoint after an exception. All ranks must take part in saving, but the other ranks may be in a different
    collective, so they would wait forever. After a SIGTERM during `fit`, all ranks stop before the same batch, and a
    checkpoint can be saved.

    Args:
        failures: The record of the first failure of the run.
        abandon: Stops everything that is in progress on this rank.
        place: Returns this rank and its position as text.

    Attributes:
        why_not_saved: The reason why checkpoints cannot be saved, from the exception that ends a run until
            :meth:`close`; otherwise ``None``. It is the text of the strategy's error if code still tries to save.
    """

    def __init__(self, failures: Failures, abandon: Callable[[], None], place: Callable[[], str]) -> None:
        self._failures = failures
        self._abandon, self._place = abandon, place
        self._rank, self._is_alone = dist.get_rank(), dist.get_world_size() == 1
        self.why_not_saved: str | None = None
        self._has_left = False
        self._cause: BaseException | None = None

    def close(self, trainer: Trainer) -> None:
        """Allow callbacks to save again. `World` calls this after the run has ended."""
        self.why_not_saved = None
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if vars(callback).get("on_exception") is _save_nothing:
                del callback.__dict__["on_exception"]

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Prevent callbacks from saving, warn about this, and leave the process groups.

        An error of a DTensor operator is explained first. With one process, or if all ranks stop together, nothing else
        happens.
        """
        explain_operator_error(exception)
        if self._is_alone or stops_together(exception, trainer):
            return
        self.why_not_saved = _why_not(type(exception).__name__)
        saving = [each for each in trainer.checkpoint_callbacks if _saves_on_exception(each)]
        for callback in saving:
            callback.__dict__["on_exception"] = _save_nothing
        if saving:
            rank_zero_warn(f"Not saved: {', '.join(type(each).__name__ for each in saving)}. {self.why_not_saved}")
        self.leave(exception)

    def leave(self, exception: BaseException) -> BaseException | None:
        """Report the exception to the other ranks, and leave every process group without a collective.

        Only the first call does this; later calls return the same result.

        Args:
            exception: The exception on this rank.

        Returns:
            The exception of another rank, if the exception on this rank is only a consequence of it; otherwise
            ``None``.
        """
        if not self._has_left:
            self._has_left = True
            cause = self._failures.leave(exception, self._place(), self._abandon)
            self._cause = cause if is_transport(exception) else None
        return self._cause

    def are_told_elsewhere(self, exception: BaseException) -> bool:
        """Return True if another rank prints the cause of a failure.

        Args:
            exception: The exception that this rank raises.
        """
        error: BaseException | None = exception
        while error is not None:
            if is_transport(error):  # the exception only shows that another rank has left
                return True
            error = error.__cause__
        first = str(self._failures.cause(patience=0.0))
        if first.startswith("Rank "):
            return not first.startswith(f"Rank {self._rank} ")
        return first == str(exception) and not self._failures.is_first


def stops_together(exception: BaseException, trainer: Trainer) -> bool:
    """Return True if all ranks raise this exception before the same batch, so that they can finish together."""
    return isinstance(exception, SIGTERMException) and trainer.state.fn == TrainerFn.FITTING


def _saves_on_exception(callback: Checkpoint) -> bool:
    """Return True if a callback may save a checkpoint after an exception."""
    if isinstance(callback, ModelCheckpoint):
        return bool(callback.save_on_exception)
    return type(callback).on_exception is not Callback.on_exception


def _why_not(kind: str) -> str:
    """Return the reason why a checkpoint cannot be saved after an exception.

    Args:
        kind: The class name of the exception.
    """
    return (
        f"A checkpoint cannot be saved after this {kind}. All ranks must take part in saving, but it is possible that"
        " only some of them raised the exception. Resume from the last checkpoint, such as one saved by"
        " `ModelCheckpoint(every_n_train_steps=...)`. [LH929]"
    )


def _save_nothing(*args: Any) -> None:
    """Do nothing, in place of a callback's `on_exception`."""


# -- what is printed ---------------------------------------------------------------------------------------------------


def print_shortly(
    error: BaseException,
    rank: int,
    *,
    told_elsewhere: bool,
    is_first: bool = False,
    is_terminated: Callable[[], bool] = bool,
) -> None:
    """Install a `sys.excepthook` that prints an error in short form if the error ends the process.

    If another rank prints the same text, the hook waits for the launcher to end this process, and prints the error only
    if the launcher does not do this. A hook of the user is not replaced. With the environment variable :data:`VARIABLE`
    set to ``full``, nothing is replaced.

    Args:
        error: The exception that the Trainer is about to raise.
        rank: The global rank of this process.
        told_elsewhere: True if the error is a consequence of a failure of another rank, or the same error.
        is_first: True if this rank wrote the text of the first failure, so that no other rank prints it.
        is_terminated: Returns True if the launcher has already told this process to end.
    """
    former = sys.excepthook
    is_of_torch = (former.__module__ or "").startswith("torch.")  # this hook prints the rank, too
    is_usual = is_of_torch or former in (sys.__excepthook__, print_once)
    if os.environ.get(VARIABLE) != "full" and is_usual:
        is_repeated = told_elsewhere and not is_first and not str(error).startswith("Rank ")

        def is_left_out() -> bool:
            return is_repeated and (is_terminated() or not outlives_the_first())

        sys.excepthook = partial(_print, former, error, rank, told_elsewhere, is_left_out)


def _print(
    former: Callable[..., Any],
    known: BaseException,
    rank: int,
    told_elsewhere: bool,
    is_left_out: Callable[[], bool],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Print an exception as `sys.excepthook`: in short form if it is the known error, otherwise with the former hook.

    Args:
        former: The former hook.
        known: The error that :func:`print_shortly` received.
        rank: The global rank of this process.
        told_elsewhere: The argument of :func:`print_shortly`.
        is_left_out: Returns True if another rank prints the same text. It may wait for the launcher to end this
            process.
        kind: The class of the exception.
        error: The exception.
        trace: Its traceback.
    """
    if error is not known:
        former(kind, error, trace)
        return
    if is_left_out():
        return
    lines = [f"{kind.__name__}: {error}"] if told_elsewhere else _lines(error)
    text = "".join(lines).rstrip("\n")
    print("\n".join(f"[rank{rank}]: {line}" for line in text.split("\n")), file=sys.stderr)


def _lines(error: BaseException) -> list[str]:
    """Return the lines that Python would print, without most frames of Lightning, torch and this package.

    A last line contains the number of hidden frames. An error about wrong use without frames of the user is only its
    message.
    """
    shown = traceback.TracebackException.from_exception(error)
    if error.__cause__ is not None and str(error.__cause__) == str(error):  # the cause has the user's frames
        assert shown.__cause__ is not None
        shown.stack, shown.__cause__ = shown.__cause__.stack, shown.__cause__.__cause__
    is_refusal = isinstance(error.__cause__ or error, WrongUseError) and shown.__cause__ is None
    if is_refusal and not _users(shown.stack):
        return list(shown.format_exception_only())  # the message is sufficient
    chain: list[traceback.TracebackException | None] = [shown]
    number = 0
    for each in chain:
        if each is not None:
            frames = _shown(each.stack)
            number += len(each.stack) - len(frames)
            each.stack = traceback.StackSummary.from_list(frames)
            chain += [each.__cause__, each.__context__]
    end = f"({number} frames of Lightning, torch and lightning_hybrid are hidden. Set {VARIABLE}=full to show them.)\n"
    return [*shown.format(), *([end] if number else [])]


def _shown(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code, or all if there are none.

    If the user's code has only started the run, as with an error of a scheduler, the frame that raised the error is
    shown too, unless it is in this package.
    """
    users = _users(stack)
    if users and users == stack[: len(users)] and not stack[-1].filename.startswith(_OWN):
        return [*users, *stack[len(users) :][-1:]]
    return users or list(stack)


def _users(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames that are neither in Lightning nor in torch nor in this package."""
    return [frame for frame in stack if not frame.filename.startswith(_LEFT_OUT)]

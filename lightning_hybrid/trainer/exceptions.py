"""The way out after a failure: a rank leaves its groups before a callback can wait for ranks that go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.distributed.failure import FailureStore, is_transport


class ExceptionCallback(Callback):
    """Goes before the callbacks of the user: they hear of an exception earlier than the strategy does.

    Some save a checkpoint then. Every rank has to take part in that, and the others are somewhere else: they would
    meet in a collective that is not the same, and wait. In `fit` all ranks stop for a SIGTERM before the same batch;
    then a checkpoint can be saved.

    Args:
        failures: Where failures are written.
        abandon: Lets go of everything that is under way.
    """

    def __init__(self, failures: FailureStore, abandon: Callable[[], None]) -> None:
        self._failures = failures
        self._abandon = abandon
        self._rank, self._is_alone = dist.get_rank(), dist.get_world_size() == 1
        self._exception: str | None = None  # that ends this run
        self._has_left = False
        self._cause: Exception | None = None

    def close(self, trainer: Trainer) -> None:
        """The run is over: callbacks may save again."""
        self._exception = None
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if vars(callback).get("on_exception") is _save_nothing:
                del callback.__dict__["on_exception"]

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep callbacks from saving, and leave the groups."""
        if self._is_alone or stops_together(exception, trainer):
            return
        self._exception = type(exception).__name__
        saving = [each for each in trainer.checkpoint_callbacks if _saves_on_exception(each)]
        for callback in saving:
            callback.__dict__["on_exception"] = _save_nothing
        if saving:
            rank_zero_warn(
                f"{', '.join(type(each).__name__ for each in saving)} saves nothing. {_WHY_NOT.format(self._exception)}"
            )
        self.leave(exception)

    def check_saving(self) -> None:
        """Whether all ranks may come to save.

        Raises:
            RuntimeError: If this rank is on its way out.
        """
        if self._exception is not None:
            raise RuntimeError(_WHY_NOT.format(self._exception))

    def leave(self, exception: BaseException) -> Exception | None:
        """Tell the other ranks, and leave every group without a collective; once.

        Args:
            exception: What was raised on this rank.

        Returns:
            What was raised on another rank, if this exception only says that it has left.
        """
        if not self._has_left:
            self._has_left = True
            cause = self._failures.leave(exception, f"Rank {self._rank}", self._abandon)
            self._cause = cause if is_transport(exception) else None
        return self._cause


def stops_together(exception: BaseException, trainer: Trainer) -> bool:
    """Whether all ranks get this exception before the same batch, so that they can go on together until the end."""
    return isinstance(exception, SIGTERMException) and trainer.state.fn == TrainerFn.FITTING


def _saves_on_exception(callback: Checkpoint) -> bool:
    if isinstance(callback, ModelCheckpoint):
        return bool(callback.save_on_exception)
    return type(callback).on_exception is not Callback.on_exception


_WHY_NOT = (
    "A checkpoint cannot be saved after this {}. Every rank takes part in saving, and the others may have seen no"
    " exception. Go on from the last checkpoint, such as `ModelCheckpoint(every_n_train_steps=...)` writes."
)


def _save_nothing(*args: Any) -> None:
    """Takes the place of a callback's `on_exception`."""

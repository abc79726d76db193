"""Where in Lightning's loops a checkpoint is written, and how the loops continue from there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

from lightning_hybrid.trainer import lightning_internals as internals


@dataclass
class LoopState:
    """Where the loops are.

    Lightning's own states do not tell a run that ended in the middle of an epoch from the end of the epoch, and what
    was still to be done for a batch is not done after a restart: validation, plateau schedulers, hooks of the epoch's
    end. ::

        kind          written                                        what follows
        "batch"       between two batches, or in one                 the next batch, or that one again
        "batch end"   in `on_train_batch_end`, or in validation      validation if it is due, then the next batch
        "validated"   after the last batch of a validation           plateau schedulers, the next batch
        "epoch end"   in `on_train_epoch_end`                        plateau schedulers, the next epoch
        "epoch cut"   there, if the loader ended before its length   the next epoch
        "epoch"       between two epochs                             the next epoch

    Attributes:
        kind: As above.
        epochs: How many are over.
        batches: How many of the present epoch have been trained with.
    """

    kind: str
    epochs: int
    batches: int

    @classmethod
    def of(cls, trainer: Trainer) -> LoopState:
        """That of a Trainer, during `fit`."""
        loop = trainer.fit_loop.epoch_loop
        epoch: Any = trainer.fit_loop.epoch_progress.current
        batch: Any = loop.batch_progress.current
        is_over = epoch.processed == epoch.ready
        if is_over and not is_epoch_over(trainer):  # ended by `max_steps` or a callback
            return cls("batch", epoch.processed - 1, batch.processed)
        if is_over or epoch.started == epoch.processed:
            kind = "epoch end" if internals.is_last_batch(trainer) else "epoch cut"
            return cls(kind if epoch.completed < epoch.processed else "epoch", epoch.processed, 0)
        val = loop.val_loop.batch_progress
        if trainer.validating and val.is_last_batch and val.current.completed == val.current.ready:
            kind = "validated"
        else:
            kind = "batch end" if trainer.validating or batch.completed < batch.processed else "batch"
        return cls(kind, epoch.processed, batch.processed)

    @property
    def in_epoch(self) -> bool:
        """Whether an epoch goes on after it."""
        return not self.kind.startswith("epoch")

    @property
    def has_pending_logs(self) -> bool:
        """Whether Lightning has not yet noted what was logged."""
        return self.kind in ("batch end", "validated", "epoch end", "epoch cut")

    def fit_loop_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of the fit loop from which Lightning continues here.

        Args:
            state: The state as Lightning saved it.
        """
        loops: dict[str, Any] = copy.deepcopy(dict(state))
        loops["state_dict"].pop("combined_loader", None)  # rank 0's; each rank has its own
        _set_all(loops["epoch_progress"], self.epochs)
        if self.in_epoch:
            for progress in (loops["epoch_progress"]["current"], loops["epoch_progress"]["total"]):
                progress["ready"] += 1
                progress["started"] += 1
            _set_all(loops["epoch_loop.batch_progress"], self.batches)
        return loops

    def is_restored(self, trainer: Trainer) -> bool:
        """Whether the loops have been given the state that :meth:`fit_loop_state` made."""
        fit_loop = trainer.fit_loop
        epoch: Any = fit_loop.epoch_progress.current
        batch: Any = fit_loop.epoch_loop.batch_progress.current
        is_there = epoch.processed == self.epochs and (not self.in_epoch or batch.processed == self.batches)
        return has_begun(trainer) and is_there

    def restarted(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Let the loops continue: enter this when they have been reset and before the first epoch.

        In the middle of an epoch Lightning's way of restarting is taken, up to the first batch. From there on nothing
        is a restart any more.
        """
        fit_loop = trainer.fit_loop
        if not self.in_epoch:
            internals.end_restart(trainer)
            if self.kind == "epoch end":
                fit_loop.epoch_progress.current.completed -= 1  # schedulers count the epoch that is ending
                fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
                fit_loop.epoch_progress.current.completed += 1
            return nullcontext()

        def first_batch(run: Callable[[], None]) -> None:
            internals.end_restart(trainer)
            if self.kind == "batch":
                run()
            else:  # only the end of the batch is left
                internals.skip_next_validation(trainer, skip=self.kind == "validated")

        # Otherwise the first batch would be taken for the first of an epoch, and what has been logged be forgotten.
        internals.set_num_logged_batches(trainer, self.batches)
        return internals.replace_next_batch(trainer, first_batch)


def has_begun(trainer: Trainer) -> bool:
    """Whether an epoch of training has begun."""
    total: Any = trainer.fit_loop.epoch_progress.total
    return bool(total.started)


def is_epoch_over(trainer: Trainer) -> bool:
    """Whether the epoch has had all its batches; otherwise `max_steps` or a callback may have ended the run in it."""
    fetcher = internals.data_fetcher(trainer)
    return internals.is_last_batch(trainer) or (fetcher is not None and fetcher.done)


def _set_all(progress: dict[str, Any], count: int) -> None:
    """Everything has been done this often; the total changes as much as the current value."""
    current, total = progress["current"], progress["total"]
    done = total["ready"] - current["ready"] + count
    current.update(dict.fromkeys(current, count))
    total.update(dict.fromkeys(total, done))

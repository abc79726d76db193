"""A position in Lightning's loops, at which a checkpoint is saved, and from which the loops resume.

`ResumeCallback` records a :class:`LoopState` in each checkpoint of a training run (:meth:`LoopState.of`), corrects the
loop states in a loaded checkpoint (:meth:`LoopState.fit_loop_state`), and then resumes the loops
(:meth:`LoopState.restarted`).
"""

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
    """A position in Lightning's loops.

    Lightning's own loop states do not distinguish a run that ended in the middle of an epoch from the end of the epoch.
    After a restart, Lightning also skips the remaining work of the last batch: validation, plateau schedulers, and
    hooks at the end of an epoch. ::

        kind          saved                                          what follows
        "batch"       between two batches, or in a batch             the next batch, or the same batch again
        "batch end"   in `on_train_batch_end`, or in validation      validation if it is due, then the next batch
        "validated"   after the last batch of a validation           plateau schedulers, the next batch
        "epoch end"   in `on_train_epoch_end`                        plateau schedulers, the next epoch
        "epoch cut"   same, if the loader ended before its length    the next epoch
        "epoch"       between two epochs                             the next epoch

    Attributes:
        kind: One of the kinds above.
        epochs: The number of finished epochs.
        batches: The number of batches of the current epoch that have been trained on.
    """

    kind: str
    epochs: int
    batches: int

    @classmethod
    def of(cls, trainer: Trainer) -> LoopState:
        """Return the position of a Trainer during `fit`."""
        loop = trainer.fit_loop.epoch_loop
        epoch: Any = trainer.fit_loop.epoch_progress.current
        batch: Any = loop.batch_progress.current
        is_over = epoch.processed == epoch.ready
        if is_over and not is_epoch_over(trainer):  # `max_steps` or a callback ended the run
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
        """Return True if the position is inside an epoch, and not between two epochs."""
        return not self.kind.startswith("epoch")

    @property
    def has_pending_logs(self) -> bool:
        """Return True if logged values are not yet in the Trainer's public metrics."""
        return self.kind in ("batch end", "validated", "epoch end", "epoch cut")

    def fit_loop_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of the fit loop with which Lightning resumes at this position.

        Args:
            state: The state that Lightning saved; it is not changed.
        """
        loops: dict[str, Any] = copy.deepcopy(dict(state))
        loops["state_dict"].pop("combined_loader", None)  # it belongs to rank 0; each rank restores its own loaders
        _set_all(loops["epoch_progress"], self.epochs)
        if self.in_epoch:
            for progress in (loops["epoch_progress"]["current"], loops["epoch_progress"]["total"]):
                progress["ready"] += 1
                progress["started"] += 1
            _set_all(loops["epoch_loop.batch_progress"], self.batches)
        return loops

    def is_restored(self, trainer: Trainer) -> bool:
        """Return True if the loops have loaded the state from :meth:`fit_loop_state`."""
        fit_loop = trainer.fit_loop
        epoch: Any = fit_loop.epoch_progress.current
        batch: Any = fit_loop.epoch_loop.batch_progress.current
        is_there = epoch.processed == self.epochs and (not self.in_epoch or batch.processed == self.batches)
        return has_begun(trainer) and is_there

    def restarted(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Prepare the loops to resume; enter the context after Lightning has reset the loops, before the first epoch.

        Calling this method already changes the loops. Between two epochs, it also updates plateau schedulers, if these
        were still due for the finished epoch.

        In the middle of an epoch, Lightning's own restart is used up to the first batch. From the first batch on, the
        loops run as in a run that was not restarted.
        """
        fit_loop = trainer.fit_loop
        if not self.in_epoch:
            internals.end_restart(trainer)
            if self.kind == "epoch end":
                fit_loop.epoch_progress.current.completed -= 1  # schedulers count the epoch that is about to end
                fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
                fit_loop.epoch_progress.current.completed += 1
            return nullcontext()

        def first_batch(run: Callable[[], None]) -> None:
            internals.end_restart(trainer)
            if self.kind == "batch":
                run()
            else:  # the batch itself is done, and only its end remains
                internals.skip_next_validation(trainer, skip=self.kind == "validated")

        # Otherwise Lightning treats the first batch as the first of its epoch, and discards the logged values.
        internals.set_num_logged_batches(trainer, self.batches)
        return internals.replace_next_batch(trainer, first_batch)


def has_begun(trainer: Trainer) -> bool:
    """Return True if the first training epoch has started."""
    total: Any = trainer.fit_loop.epoch_progress.total
    return bool(total.started)


def is_epoch_over(trainer: Trainer) -> bool:
    """Return True if all batches of the epoch are done, False if `max_steps` or a callback may have ended the run."""
    fetcher = internals.data_fetcher(trainer)
    return internals.is_last_batch(trainer) or (fetcher is not None and fetcher.done)


def _set_all(progress: dict[str, Any], count: int) -> None:
    """Set all current counts of a progress to a number, and change the total counts by the same difference."""
    current, total = progress["current"], progress["total"]
    done = total["ready"] - current["ready"] + count
    current.update(dict.fromkeys(current, count))
    total.update(dict.fromkeys(total, done))

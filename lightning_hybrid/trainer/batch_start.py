"""Hooks at the start of a batch draw the same random numbers on every rank of a model group."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hybrid.distributed.random import RandomStreams

__all__ = ["BatchStart"]

_HOOKS = 5  # tells these random numbers from those of steps and transfer hooks


class BatchStart(Callback):
    """Goes before all other callbacks of the Trainer.

    A callback that mixes samples at the start of a batch (mix-up) does so on every rank: on the first stage it changes
    the inputs, on the last one the labels. ::

        on_*_batch_start of this   isolated, seeded --.
        of others, of the module                      | draw
        step, or the epoch's end   <------------------' closed: as if nothing had been drawn

    Args:
        streams: The random streams.
    """

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams
        self._open = ExitStack()

    def close(self) -> None:
        """The hooks are over."""
        self._open.close()

    def _begin(self, *coordinates: int) -> None:
        self.close()  # a hook may have said that its batch is to be skipped
        self._open.enter_context(self._streams.isolated())
        self._streams.seed_user(_HOOKS, *coordinates)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed for this batch: a resumed run draws the same."""
        self._begin(1, trainer.fit_loop.epoch_loop.total_batch_idx)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Seed for this batch."""
        self._begin(0, self._streams.next_number("starts of evaluation batches"))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The epoch may have ended with a hook that skipped the rest of it; what comes now draws outside."""
        self.close()

    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = on_train_epoch_end
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

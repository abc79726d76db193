"""A Trainer that is fitted again and again, and the time of its batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

__all__ = ["Round", "trainer_round"]

Round = Callable[[], float]


class Stopwatch(Callback):
    """Seconds for the batches of one epoch after the first ones.

    Args:
        warm_up: The number of these.
    """

    seconds = 0.0

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start when it is warm."""
        if batch_idx == self._warm_up:
            self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop."""
        self.seconds = time.perf_counter() - self._start


def trainer_round(
    module: LightningModule, loader: DataLoader[Any], batches: int, *, warm_up: int, **arguments: Any
) -> Round:
    """A round is one epoch more; it gives the seconds of a batch.

    Args:
        module: What is trained.
        loader: Its batches, of which the first ones are not timed.
        batches: How many are.
        warm_up: How many are not.
        arguments: Others of the Trainer.
    """
    watch = Stopwatch(warm_up)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[watch],
        max_epochs=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **arguments,
    )

    def run() -> float:
        assert trainer.fit_loop.max_epochs is not None
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, loader)
        return watch.seconds / batches

    return run

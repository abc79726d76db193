"""A Trainer that is fitted again and again, and the time of its batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

__all__ = ["Round", "Stopwatch", "trainer_round"]

Round = Callable[[], float]


class Stopwatch(Callback):
    """Seconds for the batches of one epoch after the first ones.

    Args:
        warm_up: The number of these.

    Attributes:
        seconds: What a clock says.
        cpu_seconds: In which threads of this process computed.
    """

    seconds = cpu_seconds = 0.0

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start when it is warm."""
        if batch_idx == self._warm_up:
            self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop."""
        self.seconds, self.cpu_seconds = time.perf_counter() - self._start, time.process_time() - self._cpu_start


def trainer_round(
    module: LightningModule, loader: DataLoader[Any], batches: int, *, watch: Stopwatch, **arguments: Any
) -> Round:
    """A round is one epoch more; it gives the seconds of a batch.

    Args:
        module: What is trained.
        loader: Its batches, of which the first ones are not timed.
        batches: How many are.
        watch: What times them.
        arguments: Others of the Trainer.
    """
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

"""A Trainer that is fitted again and again, and the time of its batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

__all__ = ["Round", "Stopwatch", "trainer_round"]

Round = Callable[[], float]


class Stopwatch(Callback):
    """Seconds for the batches of one epoch after the first ones.

    A clock is read when the module's device has done its work.

    Args:
        warm_up: The number of batches that are not timed.

    Attributes:
        seconds: Wall-clock time.
        cpu_seconds: Time in which threads of this process computed.
    """

    seconds = cpu_seconds = 0.0

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start after the warm-up."""
        if batch_idx == self._warm_up:
            self._start, self._cpu_start = self._read(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop."""
        wall, cpu = self._read(pl_module)
        self.seconds, self.cpu_seconds = wall - self._start, cpu - self._cpu_start

    def _read(self, module: LightningModule) -> tuple[float, float]:
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()


def trainer_round(
    module: LightningModule,
    loader: DataLoader[Any],
    batches: int,
    *,
    watch: Stopwatch,
    accelerator: str = "cpu",
    **arguments: Any,
) -> Round:
    """Return a function that trains one epoch more and returns the seconds of a batch.

    Args:
        module: The module.
        loader: Its batches; the first ones are not timed.
        batches: The number of timed batches.
        watch: The clock.
        accelerator: As of the Trainer.
        arguments: Others of the Trainer.
    """
    trainer = Trainer(
        accelerator=accelerator,
        callbacks=[watch],
        max_epochs=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"use_distributed_sampler": False, **arguments},
    )

    def run() -> float:
        assert trainer.fit_loop.max_epochs is not None
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, loader)
        return watch.seconds / batches

    return run

"""Ranks that work for long, far apart, while nothing is wrong: python -m tests.nodes.quiet [MINUTES [SECONDS]].

With the usual heartbeat timeout, and 50 ms from one machine to the other, a rank works for 50 s at a time while the
other one waits for it: in training, in validation and while it saves; now it lets other threads run, now it does not,
as a library's C that keeps the lock of the interpreter. None of that may end the run.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.nodes.machines import Machines
from tests.training_jobs import Regression, loader, make_trainer

_DELAY = 0.05  # seconds, one way
_WORKS_OF_EPOCH = 4  # two batches of training, one of validation, and a checkpoint


class Works(Callback):
    """One of the two ranks works for long, at each place.

    Args:
        seconds: So long.
    """

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self._number = 0

    def _work(self, trainer: Trainer, place: str) -> None:
        number, self._number = self._number, self._number + 1
        rank, holds = number % 2, number // 2 % 2
        if trainer.global_rank != rank:
            return
        begin = time.monotonic()
        if holds:
            ctypes.PyDLL(None).sleep(self._seconds)
        else:
            time.sleep(self._seconds)
        how = "holds the lock of the interpreter" if holds else "lets other threads run"
        print(f"{place}: rank {rank} {how} for {time.monotonic() - begin:.1f} s", flush=True)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Training."""
        self._work(trainer, f"epoch {trainer.current_epoch}, training")

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Validation."""
        self._work(trainer, f"epoch {trainer.current_epoch}, validation")

    def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        """Saving."""
        self._work(trainer, f"epoch {trainer.current_epoch}, saving")


def train(folder: str, epochs: str, seconds: str) -> None:
    """What a rank does."""
    os.environ.setdefault("WORLD_SIZE", "2")
    trainer = make_trainer(
        {"pipeline_parallel_size": 2},
        devices=1,
        num_nodes=2,
        callbacks=[Works(int(seconds)), ModelCheckpoint(Path(folder, "checkpoints"))],
        enable_checkpointing=True,
        max_epochs=int(epochs),
        num_sanity_val_steps=0,
    )
    trainer.fit(Regression(), loader(8, 16), loader(8, 8))


def main(minutes: str = "30", seconds: str = "50") -> int:
    """Run; the exit code is the number of ranks that did not end well."""
    epochs = max(1, round(float(minutes) * 60 / _WORKS_OF_EPOCH / int(seconds)))
    begin = time.monotonic()
    with TemporaryDirectory(prefix="quiet-") as folder, Machines(2, Path(folder), _DELAY) as machines:
        started = machines.lightning([__file__, folder, str(epochs), seconds], processes=1)
        texts = [each.communicate()[0] for each in started]
    for text in texts:
        print(text)
    bad = sum(each.returncode != 0 for each in started)
    took = (time.monotonic() - begin) / 60
    print(f"{took:.1f} minutes, {epochs * _WORKS_OF_EPOCH} times {seconds} s of work: {bad} false alarms")
    return bad


if __name__ == "__main__":
    if len(sys.argv) == 4:
        train(*sys.argv[1:])
    else:
        sys.exit(main(*sys.argv[1:]))

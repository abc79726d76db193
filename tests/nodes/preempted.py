"""A run that SLURM preempts, for srun: python preempted.py FOLDER [newest].

It goes on from the checkpoint of its requeueing, or with `newest` from whichever is: that one, or `ModelCheckpoint`'s.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.training_jobs import Regression, loader, make_trainer

LAYOUT = {"pipeline_parallel_size": 2, "num_microbatches": 4}
EPOCHS = 9


class Slow(Callback):
    """Steps, validations and saves that take a while, so that a signal comes in the middle of one.

    Args:
        folder: Where the file ``starts`` says from which steps the run has begun, and ``now`` what it does.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Leave where the run begins."""
        if trainer.is_global_zero:
            with (self._folder / "starts").open("a") as file:
                print(trainer.global_step, file=file)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Take a while."""
        self._take_a_while(trainer, "step")

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Take a while."""
        self._take_a_while(trainer, "validation")

    def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        """Take a while."""
        self._take_a_while(trainer, "save")

    def _take_a_while(self, trainer: Trainer, what: str) -> None:
        if trainer.is_global_zero:
            (self._folder / "now").write_text(f"{what} {trainer.global_step}")
        time.sleep(0.3)


def main(folder: str, takes: str = "") -> None:
    """Train, and leave the weights in a folder."""
    os.environ.setdefault("WORLD_SIZE", os.environ["SLURM_NTASKS"])
    seed_everything(7, verbose=False)
    saver = ModelCheckpoint(Path(folder, "checkpoints"), every_n_train_steps=4, save_last=True, save_on_exception=True)
    trainer = make_trainer(
        LAYOUT,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=2,
        callbacks=[Slow(folder), saver],
        enable_checkpointing=True,
        max_epochs=EPOCHS,
        val_check_interval=3,
    )
    saved = [*Path(folder).glob("hpc_ckpt_*.ckpt"), *Path(folder, "checkpoints").glob("last.ckpt")]
    newest = max(saved, key=lambda path: path.stat().st_mtime) if saved and takes == "newest" else None
    trainer.fit(Regression(dropout=0.1), loader(num_samples=64, shuffle=True), loader(seed=2), ckpt_path=newest)
    trainer.save_checkpoint(Path(folder, "weights.ckpt"), weights_only=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A run that SLURM preempts, for srun: python preempted.py FOLDER. Files there say from which steps it has begun."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything

from tests.training_jobs import Regression, loader, make_trainer

LAYOUT = {"pipeline_parallel_size": 2, "num_microbatches": 4}
EPOCHS = 6


class Slow(Callback):
    """Steps that take a while, so that a signal comes in the middle of the training."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Leave where the run begins."""
        if trainer.is_global_zero:
            (self._folder / f"from-{trainer.global_step}").touch()

    def on_train_batch_end(self, *_: Any) -> None:
        """Take a while."""
        time.sleep(0.3)


def main(folder: Path) -> None:
    """Train, and leave the weights in a folder."""
    os.environ.setdefault("WORLD_SIZE", os.environ["SLURM_NTASKS"])
    seed_everything(7, verbose=False)
    trainer = make_trainer(LAYOUT, devices=2, num_nodes=2, callbacks=[Slow(folder)], max_epochs=EPOCHS)
    trainer.fit(Regression(dropout=0.1), loader(shuffle=True))
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

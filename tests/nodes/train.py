"""A run on several machines, for torchrun: python train.py LAYOUT FOLDER [CHECKPOINTS [DIES_AT]]."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hybrid import Faults, Tuning
from tests.training_jobs import Regression, loader, make_trainer


class Dies(Callback):
    """The last rank is killed before a step, unless it has been restarted."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Keep where the run begins."""
        self.first = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Die."""
        if trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1 and self.first == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main(layout: str, folder: str, checkpoints: str = "", dies_at: str = "-1") -> None:
    """Train, and leave the weights in a folder."""
    arguments = json.loads(layout)
    for name, group in {"faults": Faults, "tuning": Tuning}.items():
        if name in arguments:
            arguments[name] = group(**arguments[name])
    dies = Dies(int(dies_at))
    saver = ModelCheckpoint(checkpoints, every_n_train_steps=1, save_last=True) if checkpoints else None
    devices, num_nodes = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    os.environ.setdefault("WORLD_SIZE", str(devices * num_nodes))
    trainer = make_trainer(
        arguments,
        devices=devices,
        num_nodes=num_nodes,
        callbacks=[dies] if saver is None else [dies, saver],
        enable_checkpointing=saver is not None,
        max_epochs=2,
    )
    trainer.fit(Regression(), loader(), ckpt_path="last" if checkpoints else None)
    trainer.save_checkpoint(Path(folder, "weights.ckpt"), weights_only=True)
    print(f"rank {trainer.global_rank} of {trainer.world_size}: from step {dies.first} to step {trainer.global_step}")


if __name__ == "__main__":
    main(*sys.argv[1:])

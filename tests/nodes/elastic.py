"""A run whose machines may go and come, for torchrun: python elastic.py FOLDER SIZES EPOCHS PACE.

Each rank writes down the samples of its batches, a file for each start. In the folder are the checkpoints, and in the
end the weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.training_jobs import Regression, dataset, loader, make_trainer

NUM_SAMPLES, GLOBAL_BATCH = 48, 16


class Notes(Callback):
    """Writes down the world, the step and the samples of each batch.

    Args:
        folder: Where.
        pace: Seconds that a batch takes at least.
    """

    def __init__(self, folder: Path, pace: float) -> None:
        self.folder, self.pace = folder, pace
        self.numbers = {float(x[0]): number for number, (x, _) in enumerate(dataset(NUM_SAMPLES))}

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Begin a file."""
        self.folder.mkdir(exist_ok=True)
        start = len(list(self.folder.glob(f"rank{trainer.global_rank}-*")))
        self.file = (self.folder / f"rank{trainer.global_rank}-{start}").open("w")
        self.begin = time.time()

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Note a batch."""
        samples = [self.numbers[float(x[0])] for x in batch[0]]
        note = [self.begin, trainer.world_size, trainer.current_epoch, trainer.global_step, samples]
        print(json.dumps(note), file=self.file, flush=True)
        time.sleep(self.pace)


def main(folder: str, layout: str, epochs: str, pace: str) -> None:
    """Train, and leave the weights in a folder."""
    seed_everything(5)
    devices, num_nodes = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    saver = ModelCheckpoint(Path(folder, "checkpoints"), every_n_train_steps=1, save_last=True)
    trainer = make_trainer(
        {**json.loads(layout), "global_batch_size": GLOBAL_BATCH},
        devices=devices,
        num_nodes=num_nodes,
        callbacks=[Notes(Path(folder, "notes"), float(pace)), saver],
        enable_checkpointing=True,
        max_epochs=int(epochs),
    )
    trainer.fit(Regression(), loader(4, NUM_SAMPLES, shuffle=True), ckpt_path="last")
    trainer.save_checkpoint(Path(folder, "weights.ckpt"), weights_only=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

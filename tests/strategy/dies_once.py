"""A run of six steps whose second rank is killed in the fourth, unless it has been restarted; for torchrun."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import HybridStrategy

STEPS, DIES_AT = 6, 3


class Layers(LightningModule):
    """Two layers, one for each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Any loss."""
        return self.body(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), 0.1)


class Dies(Callback):
    """Kills rank 1 once; says where the run began."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the step."""
        self.first = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Die."""
        if trainer.global_step == DIES_AT and trainer.global_rank == 1 and self.first == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train."""
    dies = Dies()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HybridStrategy(pipeline_parallel_size=2, num_microbatches=2),
        callbacks=[dies, ModelCheckpoint(sys.argv[1], every_n_train_steps=1, save_last=True)],
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Layers(), DataLoader(torch.ones(4 * STEPS, 4), 4), ckpt_path="last")
    print(
        f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}, rank {trainer.global_rank}:"
        f" from step {dies.first} to step {trainer.global_step}",
        flush=True,
    )


if __name__ == "__main__":
    main()

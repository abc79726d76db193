"""``python -m tests.faults.soak``: long training with changing shapes; memory, threads and files stay the same."""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_hybrid import HybridStrategy
from tests.pool import Pool

SETTLED = 500  # steps after which nothing grows any more
MOST = 0.01  # by which it may


class Ragged(IterableDataset[Tensor]):
    """Batches of 1 to 16 samples of length 4 to 64, the same on every rank."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        chance = random.Random(0)
        for _ in range(self.count):
            yield torch.rand(chance.randint(1, 16), chance.randint(4, 64), 8)


class Sequence(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.head(self.body(batch)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.head(self.body(batch)).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Meter(Callback):
    """(step, MiB of this process, its threads, its open files), every 250 steps."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, int, int]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step % 250 == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
            threads = len(list(Path("/proc/self/task").iterdir()))
            self.rows.append((trainer.global_step, memory, threads, len(list(Path("/proc/self/fd").iterdir()))))


def train(layout: dict[str, Any], steps: int) -> list[tuple[int, float, int, int]]:
    """What the meter saw on this rank."""
    meter = Meter()
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=HybridStrategy(**layout),
        max_steps=steps,
        val_check_interval=50,
        limit_val_batches=2,
        callbacks=[meter, ModelCheckpoint("soak", every_n_train_steps=250)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=10,
    )
    trainer.fit(Sequence(), DataLoader(Ragged(10**9), batch_size=None), DataLoader(Ragged(4), batch_size=None))
    assert threading.active_count() < 50
    return meter.rows


def main() -> int:
    """Train, print what it took, and say whether something grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--data", type=int, default=1, help="replicas")
    parser.add_argument("--pipeline", type=int, default=2, help="stages")
    arguments = parser.parse_args()
    pool = Pool(arguments.data * arguments.pipeline, lightning=True)
    layout = {"pipeline_parallel_size": arguments.pipeline}
    grown = 0
    for rank, rows in enumerate(pool.run(train, layout, arguments.steps, timeout=3600)):
        for step, memory, threads, files in rows:
            print(f"rank {rank}, step {step}: {memory:.1f} MiB, {threads} threads, {files} files")
        settled = [row for row in rows if row[0] >= SETTLED]
        grown += any(
            row[column] > settled[0][column] * (1 + MOST) for row in settled for column in (1, 2, 3) if settled
        )
    pool.close()
    print("something grew" if grown else f"nothing grew by more than {MOST:.0%} after step {SETTLED}")
    return int(grown > 0)


if __name__ == "__main__":
    sys.exit(main())

"""A run of four replicas, two on each of two machines; torchrun replicas.py STEPS NAME=VALUE ..., of the strategy."""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.training_jobs import make_trainer

WIDTH, LAYERS = 256, 4


class Wide(LightningModule):
    """A module with many parameters and little to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        return F.mse_loss(self.body(batch[0]), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain descent."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def gradient_bytes() -> int:
    """The bytes of all gradients."""
    return sum(4 * parameter.numel() for parameter in Wide().parameters())


def main(steps: int, **layout: int) -> None:
    """Train."""
    trainer = make_trainer(layout, devices=2, num_nodes=2)
    trainer.fit(Wide(), DataLoader(TensorDataset(torch.randn(8 * steps, WIDTH)), 2))


if __name__ == "__main__":
    pairs = (word.split("=") for word in sys.argv[2:])
    main(int(sys.argv[1]), **{name: int(value) for name, value in pairs})

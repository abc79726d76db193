"""A run whose batches are mostly pictures, which only the first stage reads; torchrun pictures.py KIND STEPS."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.training_jobs import make_trainer

SHAPE, BATCH, MICROBATCHES = (3, 64, 64), 64, 4


class Pictures(Dataset[Any]):
    """Pictures with labels."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(SHAPE, generator=torch.Generator().manual_seed(index)), torch.tensor(index % 10)


class Classifier(LightningModule):
    """Sees a picture in patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 16, stride=16)
        self.body = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
        self.head = nn.Linear(128, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        pictures, labels = batch
        return F.cross_entropy(self.head(self.body(self.patches(pictures).flatten(1))), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain descent."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Direct(Classifier):
    """A body that is given the pictures of the batch, and nothing beside it."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        layers = [nn.Linear(128, 128) for _ in range(4)]
        self.body = nn.Sequential(nn.Conv2d(3, 8, 16, stride=16), nn.Flatten(), *layers, nn.Linear(128, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        return F.cross_entropy(self.body(batch[0]), batch[1])


KINDS = {"behind a layer": Classifier, "direct": Direct}
BY_HAND = "direct, by hand"


def train_by_hand(steps: int) -> None:
    """Train :class:`Direct` with a loop that sends activations, their gradients and labels, and nothing else."""
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name != "lo")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    body = Direct().body
    stage = body[:4] if rank == 0 else body[4:]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    samples = BATCH // MICROBATCHES
    for pictures, labels in DataLoader(Pictures(steps * BATCH), BATCH):
        optimizer.zero_grad()
        if rank == 0:
            made = [stage(part) for part in pictures.split(samples)]
            sent = [part.detach() for part in made]
            pairs = zip(sent, labels.split(samples), strict=True)
            waiting = [dist.isend(tensor, 1) for pair in pairs for tensor in pair]
            for part in made:
                gradient = torch.empty_like(part)
                dist.recv(gradient, 1)
                part.backward(gradient)
            for each in waiting:
                each.wait()
        else:
            for _ in range(MICROBATCHES):
                arrived, of_part = torch.empty(samples, 128), torch.empty(samples, dtype=torch.long)
                dist.recv(arrived, 0)
                dist.recv(of_part, 0)
                (F.cross_entropy(stage(arrived.requires_grad_()), of_part) / MICROBATCHES).backward()
                dist.send(arrived.grad, 0)
        optimizer.step()
    dist.destroy_process_group()


def main(kind: str, steps: int) -> None:
    """Train."""
    if kind == BY_HAND:
        train_by_hand(steps)
        return
    layout = {"pipeline_parallel_size": 2, "num_microbatches": MICROBATCHES}
    trainer = make_trainer(layout, devices=1, num_nodes=2)
    trainer.fit(KINDS[kind](), DataLoader(Pictures(steps * BATCH), BATCH))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

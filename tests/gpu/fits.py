"""The fits that the tests for GPUs compare; what runs on ranks is here, by name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridStrategy
from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.trainer.training_step import TrainingStep
from tests.devices import devices_of

PP2: dict[str, Any] = {"pipeline_parallel_size": 2}


class Model(LightningModule):
    """A residual around the body, no dropout, so that the numbers are those of one process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(16, 16)
        self.body = nn.Sequential(
            *[nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 16)) for _ in range(4)]
        )
        self.head = nn.Linear(16, 3)
        self.steps = 0

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        h = self.embed(batch[0])
        return nn.functional.cross_entropy(self.head(h + self.body(h)), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        self.log("number", 0.25, batch_size=len(batch[0]))
        self.steps += 1
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Compiled(Model):
    """Each layer of the body is compiled."""

    def configure_model(self) -> None:
        for layer in self.body:
            layer.compile()


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.values.append(outputs["loss"].detach())  # read at the end: the host shall not wait


def loader(samples: int = 44) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 16, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 8, pin_memory=torch.cuda.is_available())


def fit(
    strategy: Any,
    kind: type[LightningModule] = Model,
    *,
    path: str | None = None,
    resume: str | None = None,
    **how: Any,
) -> dict[str, Any]:
    """Two epochs.

    Args:
        strategy: Of the Trainer.
        kind: Of the module.
        path: Where a checkpoint is saved at the end.
        resume: One to go on from.
        how: Other arguments of the Trainer.
    """
    losses, module = Losses(), kind()
    arguments: dict[str, Any] = {"devices": 1, "max_epochs": 2, "gradient_clip_val": 0.5, **how}
    trainer = Trainer(
        accelerator="gpu",
        strategy=strategy,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(module, loader(), loader(), ckpt_path=resume)
    if path is not None:
        trainer.save_checkpoint(path)
    weights = {name: full_tensor(p.detach()).cpu() for name, p in module.named_parameters() if not p.is_meta}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"losses": [float(value) for value in losses.values], "weights": weights, "metrics": metrics}


def fit_on_ranks(
    settings: dict[str, Any],
    how: dict[str, Any],
    environment: dict[str, str] | None = None,
    *,
    waits: bool = False,
) -> dict[str, Any]:
    """One of several ranks.

    Args:
        settings: Of the strategy.
        how: Of the Trainer.
        environment: What else is set.
        waits: Whether a step may make the host wait for the device.
    """
    os.environ.update(environment or {})
    devices = devices_of("gpu", int(os.environ["WORLD_SIZE"]))
    with nullcontext() if waits else no_waits():
        return fit(HybridStrategy(**settings), **devices, **how)


class Failing(Model):
    """Rank 1 fails in its third step; every rank has to hear of it."""

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.steps >= 2 and os.environ["RANK"] == "1":
            raise ArithmeticError("a fault of rank 1")
        return super().training_step(batch)


@contextmanager
def no_waits(after: int = 3) -> Iterator[list[int]]:
    """Inside, a step in microbatches that makes the host wait for the device is an error, from the ``after``-th on.

    Where a batch runs as a whole the step is Lightning's own, and what it logs makes the host wait.

    Yields:
        The numbers of the steps that were looked at.
    """
    steps: list[int] = []

    def checking(call: Any) -> Any:
        def checked(training_step: Any, *args: Any, **kwargs: Any) -> Any:
            steps.append(len(steps))
            torch.cuda.set_sync_debug_mode("error" if len(steps) > after else "default")
            try:
                return call(training_step, *args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return checked

    with patch.object(TrainingStep, "__call__", checking(TrainingStep.__call__)):
        yield steps


def assert_alike(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=tolerance)
    for name, weight in found["weights"].items():
        torch.testing.assert_close(weight, expected["weights"][name], rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    fit(HybridStrategy(**json.loads(sys.argv[1])), Failing, **devices_of("gpu", int(os.environ["WORLD_SIZE"])))

"""How far the package's code goes: the files that are entered from another one of them, and how often."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

import lightning_hybrid

PACKAGE = str(Path(lightning_hybrid.__file__).parent)


class Chain(LightningModule):
    """Four layers and a head, which the first stage has not; one value is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
        self.head = nn.Linear(6, 1)
        self.double()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.body(x)), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@contextmanager
def counting_entries(entries: Counter[str]) -> Iterator[None]:
    """Inside, on this thread, calls of a file's functions from another file of the package, or from outside of it.

    Args:
        entries: Is given the numbers, by the file's path in the package.
    """

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        file, caller = frame.f_code.co_filename, frame.f_back
        if event != "call" or not file.startswith(PACKAGE):
            return
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename != file:
            entries[file.removeprefix(PACKAGE)] += 1

    sys.setprofile(enter)
    try:
        yield
    finally:
        sys.setprofile(None)

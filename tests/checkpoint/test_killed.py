"""Processes that are killed while they save: the old checkpoint is there, or the new one."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.checkpoint.file_io import FileIO
from lightning_hybrid.checkpoint.storage import atomic
from lightning_hybrid.checkpoint.storage.dcp import DistributedCheckpoint
from lightning_hybrid.checkpoint.storage.remote import is_directory
from tests.pool import Pools, RankError
from tests.training_jobs import PP2, Regression, loader, make_trainer

WIDTH = 200
MOMENTS = 5  # for each form and each way to die


class Big(Regression):
    """Large enough that a kill meets a save, and not what is between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body.append(nn.Sequential(nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)).double())
        self.body.append(nn.Sequential(nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)).double())


def save_until_killed(path: str, sharded: bool, victims: tuple[int, ...], moment: float, exchange: bool) -> None:
    """Save again and again under one name, with all weights equal to the number of the save.

    Args:
        path: The checkpoint.
        sharded: Whether it is a directory.
        victims: The ranks that are killed.
        moment: When, after the second save, in durations of that one.
        exchange: Whether the system can exchange two names at once.
    """
    trainer = make_trainer({**PP2, "save_distributed_checkpoint": sharded}, max_steps=1)
    module = Big()
    trainer.fit(module, loader())
    version = 0
    with mock.patch.object(atomic, "_exchange", atomic._exchange if exchange else lambda *_: False):
        while True:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(version)
            began = time.perf_counter()
            trainer.save_checkpoint(path)
            if version == 1 and trainer.global_rank in victims:
                delay = moment * (time.perf_counter() - began)
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            version += 1


def weights_in(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, all of them read."""
    if not is_directory(path):
        return {name: value.clone() for name, value in FileIO().load_checkpoint(path)["state_dict"].items()}
    directory = DistributedCheckpoint(path)
    directory.check_files()
    found: dict[Any, Tensor] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in directory.entries.items()
        if key[0] == "state_dict" and entry is not None
    }
    directory.read(found)
    return {key[1]: value for key, value in found.items()}


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "victims", [pytest.param((1,), id="one rank", marks=pytest.mark.thorough), pytest.param((0, 1), id="all ranks")]
)
@pytest.mark.parametrize("form", ["file", "directory", "directory without exchange"])
def test_a_kill_leaves_the_old_checkpoint_or_the_new_one(
    pools: Pools, tmp_path: Path, form: str, victims: tuple[int, ...]
) -> None:
    draw = random.Random(f"{form} {victims}")
    versions = []
    for moment in range(MOMENTS):
        path = tmp_path / f"{moment}.ckpt"
        options = (form != "file", victims, moment + draw.random(), form != "directory without exchange")
        with pytest.raises(RankError):
            pools(2, lightning=True).run(save_until_killed, str(path), *options, timeout=60)
        values = {float(value) for weight in weights_in(path).values() for value in weight.unique()}
        assert len(values) == 1, values
        versions.append(values.pop())
    assert len(set(versions)) > 1  # the kills met different saves

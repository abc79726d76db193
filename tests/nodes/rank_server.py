"""Starts the ranks of a machine, one job for each line that it reads: they are forked, for all is imported here.

In the folder of a job are then ``pid-RANK``, ``output-RANK``, ``story-RANK`` with what the rank says in the end, and
``code-RANK`` with its exit status and the moment. Each machine has a disk that is small, and empty when a job begins.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hybrid import Faults
from lightning_hybrid.strategy import launch
from tests.faults.forks import fork, tell
from tests.nodes.node_fault import FULL, HEARTBEAT_TIMEOUT, LAYOUTS, Fault
from tests.training_jobs import Regression, loader, make_trainer

SMALL = 300_000  # bytes of the disk: about eight checkpoints
_PACE = 0.1  # seconds of a batch


@dataclass
class Job:
    """A run of a machine's ranks.

    Attributes:
        folder: Where its files are.
        disk: Of the machine, the small one.
        address: Of the first machine.
        port: Of the store.
        fault: What will happen.
    """

    folder: str
    disk: str
    address: str
    port: int
    fault: Fault

    def dumps(self) -> str:
        """As a line."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, line: str) -> Job:
        """Out of a line."""
        values = json.loads(line)
        return cls(**{**values, "fault": Fault(**values["fault"])})

    @property
    def checkpoints(self) -> Path:
        """Where they are written."""
        return Path(self.disk if self.fault.kind == FULL else self.folder) / "checkpoints"


class Comes(Callback):
    """Says that this rank has come to a place, and lets each batch take a moment.

    Args:
        folder: Where it is said: ``ready-RANK``.
        fault: The place.
    """

    def __init__(self, folder: Path, fault: Fault) -> None:
        self._folder, self._fault = folder, fault
        self._calls = 0

    def come(self, place: str, rank: int) -> None:
        """This is a place."""
        if place == self._fault.place:
            self._calls += 1
            if self._calls == self._fault.time:
                (self._folder / f"ready-{rank}").touch()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Training."""
        self.come("training", trainer.global_rank)
        time.sleep(_PACE)

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Validation."""
        self.come("validation", trainer.global_rank)
        time.sleep(_PACE)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saving; when it was last tried is what a full disk counts from."""
        (self._folder / "saves-at").write_text(str(time.time()))
        self.come("saving", trainer.global_rank)


def train(job: Job, rank: int) -> None:
    """What a rank does."""
    fault, folder = job.fault, Path(job.folder)
    data, pipeline = LAYOUTS[fault.layout]
    comes = Comes(folder, fault)
    try:
        # Who is gone before there is a store is waited for, as one that comes late.
        launch.connect_processes = _telling(launch.connect_processes, partial(comes.come, "set-up", rank))
        saver = ModelCheckpoint(job.checkpoints, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = make_trainer(
            {
                "data_parallel_size": data,
                "pipeline_parallel_size": pipeline,
                "faults": Faults(heartbeat_timeout=timedelta(seconds=HEARTBEAT_TIMEOUT)),
            },
            devices=fault.size // 2,
            num_nodes=2,
            callbacks=[comes, saver],
            enable_checkpointing=True,
            max_epochs=3,  # places of faults are in the first two
            num_sanity_val_steps=0,
            default_root_dir=folder,
        )
        trainer.fit(Regression(), loader(8, 64), loader(8, 32))
        trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    except BaseException as error:
        tell(folder, rank, error)
        raise


def _telling(act: Callable[..., Any], tell: Callable[[], None]) -> Callable[..., Any]:
    def acting(*args: Any, **arguments: Any) -> Any:
        tell()
        return act(*args, **arguments)

    return acting


def _empty(disk: Path, filled: int) -> None:
    """Empty the small disk, and fill some of it."""
    for path in disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (disk / "filled").write_bytes(bytes(filled))


def _run(job: Job, number: int) -> None:
    """Start the ranks of a job, and wait for their ends."""
    fault, folder = job.fault, Path(job.folder)
    own = fault.size // 2
    shared = {"WORLD_SIZE": str(fault.size), "LOCAL_WORLD_SIZE": str(own), "NODE_RANK": str(number - 1)}
    shared |= {"MASTER_ADDR": job.address, "MASTER_PORT": str(job.port), "TORCHELASTIC_RUN_ID": "fault"}
    ranks = {}
    for local, rank in enumerate(sorted(fault.on_machine(number))):
        names = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(number - 1)}
        pid = fork(partial(train, job, rank), folder / f"output-{rank}", **names, **shared)
        (folder / f"pid-{rank}").write_text(str(pid))
        ranks[pid] = rank
    for _ in range(own):
        pid, status = os.wait()
        ended = folder / f"ended-{ranks[pid]}"
        ended.write_text(f"{os.waitstatus_to_exitcode(status)} {time.time()}")
        ended.rename(folder / f"code-{ranks[pid]}")


def main(number: str, disk: str) -> None:
    """Serve a machine.

    Args:
        number: Of the machine.
        disk: Where its small disk is to be.
    """
    small = Path(disk)
    small.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "small", disk], check=True)
    for line in sys.stdin:
        job = Job.loads(line)
        _empty(small, job.fault.filled)
        _run(job, int(number))


if __name__ == "__main__":
    main(*sys.argv[1:])

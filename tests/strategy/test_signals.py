"""SIGTERM and SLURM's signal before a requeue: all ranks stop before the same batch, and a checkpoint can be saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hybrid.distributed.watch.board import Board
from lightning_hybrid.distributed.watch.watcher import THREAD_NAME
from lightning_hybrid.strategy.watch.signals import SignalAgreement
from lightning_hybrid.trainer import lightning_internals
from tests.pool import Pools
from tests.training_jobs import PP2, Regression, assert_same, loader, make_trainer, together, train

QUICK = 10.0  # seconds, on a machine that does other things too
EPOCHS = 20  # if nothing stops them


class Signalled(Regression):
    """Gets a signal at one place of the first batch, or validation batch, of the second epoch.

    Args:
        where: A method of this class, or ``""``.
        ranks: Who gets it.
        number: The signal.
    """

    def __init__(self, where: str = "", ranks: tuple[int, ...] = (), number: int = int(signal.SIGTERM)) -> None:
        super().__init__(dropout=0.2)
        self.where, self.ranks, self.number = where, ranks, number
        self.sent: list[float] = []  # when

    def reach(self, where: str) -> None:
        ready = self.trainer.current_epoch == 1 and not self.sent
        if where == self.where and ready and self.trainer.global_rank in self.ranks:
            self.sent.append(time.time())
            os.kill(os.getpid(), self.number)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.reach("training_step")  # what comes after the body runs on the last stage alone
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.reach("on_train_batch_start")

    def on_validation_start(self) -> None:
        self.reach("on_validation_start")

    def on_validation_end(self) -> None:
        self.reach("on_validation_end")

    def on_train_epoch_end(self) -> None:
        self.reach("on_train_epoch_end")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.reach("on_save_checkpoint")


class Slow(Callback):
    """Batches take their time, so that a note has come before the last one; and a checkpoint is saved now and then."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        time.sleep(0.05)
        if self.path and trainer.global_step % 3 == 0:
            trainer.save_checkpoint(self.path)


def threads() -> int:
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


def stop(
    layout: Mapping[str, Any] | None, directory: str, where: str, ranks: tuple[int, ...]
) -> tuple[str, int, Any, bool, list[float], int]:
    """Train until a signal: what ends the run, at which step, and the exit code that a process would have."""
    trainer = make_trainer(
        layout,
        max_epochs=EPOCHS,
        enable_checkpointing=True,
        callbacks=[Slow(f"{directory}/regular.ckpt"), OnExceptionCheckpoint(directory, "stopped")],
    )
    module = Signalled(where, ranks)
    with pytest.raises(BaseException) as error:  # noqa: PT011
        trainer.fit(module, loader(shuffle=True), loader())
    code = getattr(error.value, "code", "no exit")
    times = [*module.sent, time.time()]
    return type(error.value).__name__, trainer.global_step, code, trainer.received_sigterm, times, threads()


def finish(layout: Mapping[str, Any] | None, directory: str, epochs: int, path: str | None) -> dict[str, Any]:
    return train(Signalled(), layout, loader(shuffle=True), loader(), max_epochs=epochs, ckpt_path=path).weights


class Validated(Callback):
    """Notes the steps after which validation runs."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.steps.append(trainer.global_step)


def validate_by_time(layout: Mapping[str, Any] | None, interval: Any) -> list[int]:
    """Train with clocks of which that of rank 1 is fast, and that of rank 0 jumps before the fourth batch alone."""
    seen = Validated()
    trainer = make_trainer(
        layout,
        max_epochs=2,
        callbacks=[seen],
        val_check_interval=interval,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )

    def now() -> float:
        is_late = trainer.global_rank == 1 or trainer.global_step == 3
        return time.monotonic() + (1000 if is_late else 0)

    with mock.patch.object(lightning_internals, "time", SimpleNamespace(monotonic=now)):
        trainer.fit(Regression(), loader(), loader())
    return seen.steps


@pytest.mark.parametrize("layout", [PP2, {}], ids=["stages", "replicas"])
def test_ranks_validate_when_the_clock_of_the_first_one_says_so(ranks: Pools, layout: dict[str, Any]) -> None:
    for interval in ("00:00:08:00", timedelta(minutes=8)):
        results = ranks(2, lightning=True).run(validate_by_time, layout, interval, timeout=60)
        assert results == [[4], [4]]


PLACES = [
    "training_step",
    "on_train_batch_start",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
]
DP2PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 2}
ZERO = {"zero_stage": 3}


def check_stop(ranks: Pools, size: int, layout: Mapping[str, Any], directory: Path, *arguments: Any) -> None:
    results = ranks(size, lightning=True).run(stop, layout, str(directory), *arguments, timeout=30)
    assert {kind for kind, *_ in results} == {"SIGTERMException"}
    assert len({step for _, step, *_ in results}) == 1
    assert all(received for _, _, _, received, _, _ in results)
    assert {code for _, _, code, *_ in results} == {None}
    assert not any(left for *_, left in results), "no thread stays"
    times = [when for *_, each, _ in results for when in each]
    assert max(times) - min(times) < QUICK


def check_resume(ranks: Pools, size: int, layout: Mapping[str, Any], directory: Path) -> None:
    path = str(directory / "stopped.ckpt")
    epochs = 2 + int(torch.load(path, weights_only=True)["global_step"]) // 5
    pool = ranks(size, lightning=True)
    uninterrupted = together(pool.run(finish, layout, str(directory), epochs, None))
    resumed = together(pool.run(finish, layout, str(directory), epochs, path))
    assert_same(resumed, uninterrupted)


@pytest.mark.rows(68)
@pytest.mark.parametrize("where", ["training_step", "on_validation_start"])
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)], ids=str)
def test_all_ranks_stop_before_the_same_batch_and_a_resumed_run_is_the_uninterrupted_one(
    ranks: Pools, tmp_path: Path, where: str, who: tuple[int, ...]
) -> None:
    """A handler that talked to other ranks waited for ranks that wait for this one."""
    check_stop(ranks, 2, PP2, tmp_path, where, who)
    check_resume(ranks, 2, PP2, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize(("size", "layout"), [(2, PP2), (2, ZERO), (4, DP2PP2)], ids=["pp2", "zero3", "dp2pp2"])
def test_a_signal_at_every_place(
    ranks: Pools, tmp_path: Path, where: str, who: tuple[int, ...], size: int, layout: Mapping[str, Any]
) -> None:
    check_stop(ranks, size, layout, tmp_path, where, who)
    check_resume(ranks, size, layout, tmp_path)


def test_one_process_of_lightning_ends_in_the_same_way(tmp_path: Path) -> None:
    kind, _, code, received, *_ = stop(None, str(tmp_path), "training_step", (0,))
    assert (kind, code, received) == ("SIGTERMException", None, True)
    assert issubclass(SIGTERMException, SystemExit)


class NoStore:
    """Of rank 0, which has ended."""

    def __getattr__(self, name: str) -> Any:
        raise dist.DistNetworkError("Connection reset by peer")


def test_the_watcher_survives_a_store_that_is_gone() -> None:
    mesh = mock.Mock(decision_group=_Group())
    with mock.patch.object(dist, "get_rank", return_value=0):
        signals = SignalAgreement(mesh, Board(NoStore(), rank=0, size=2), lambda: None)
    signals.look()


class _Group:
    """Can be referred to weakly."""


# -- SLURM ------------------------------------------------------------------------------------------------------------


class UnderSlurm(Callback):
    """What Lightning looks at when it decides about the handlers."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        environment = mock.Mock(spec=SLURMEnvironment, auto_requeue=True, requeue_signal=signal.SIGUSR1)
        trainer._accelerator_connector.cluster_environment = environment
        os.environ["SLURM_JOB_ID"] = "7"


def requeue(directory: str, who: tuple[int, ...]) -> tuple[list[Any], int, list[str]]:
    commands: list[Any] = []
    with mock.patch(
        "lightning.pytorch.trainer.connectors.signal_connector.call",
        side_effect=lambda command: commands.append(command) or 0,
    ):
        trainer = make_trainer(PP2, max_epochs=EPOCHS, default_root_dir=directory, callbacks=[UnderSlurm(), Slow("")])
        trainer.fit(Signalled("training_step", who, int(signal.SIGUSR1)), loader(shuffle=True), loader())
    return commands, trainer.current_epoch, sorted(path.name for path in Path(directory).iterdir())


OTHERS = [pytest.param(who, marks=pytest.mark.thorough) for who in ((0,), (0, 1))]


@pytest.mark.rows(68)
@pytest.mark.parametrize("who", [(1,), *OTHERS], ids=str)
def test_a_job_is_requeued_once_with_a_checkpoint_of_all_ranks(
    ranks: Pools, tmp_path: Path, who: tuple[int, ...]
) -> None:
    """Lightning saves in the handler, where the other ranks are anywhere in a step."""
    results = ranks(2, lightning=True).run(requeue, str(tmp_path), who, timeout=60)
    assert [commands for commands, *_ in results] == [[["scontrol", "requeue", "7"]], []]
    assert {epoch for _, epoch, _ in results} == {EPOCHS}, "training goes on until SLURM ends it"
    assert results[0][2] == ["hpc_ckpt_1.ckpt"]
    (tmp_path / "hpc_ckpt_1.ckpt").rename(tmp_path / "stopped.ckpt")
    check_resume(ranks, 2, PP2, tmp_path)

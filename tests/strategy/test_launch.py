"""Starting the processes of a job."""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_hybrid import HybridStrategy
from lightning_hybrid.strategy import launch
from lightning_hybrid.strategy.launch import announce, make_launcher
from lightning_hybrid.strategy.rendezvous import Stores
from tests.strategy import quick_exits


@pytest.mark.parametrize(("num_processes", "num_nodes", "launches"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_several_processes_are_launched(num_processes: int, num_nodes: int, launches: bool) -> None:
    """A launcher of scripts for one process would keep the Trainer out of notebooks, and watch nobody."""
    launcher = make_launcher(HybridStrategy(), LightningEnvironment(), num_processes, num_nodes, "auto")
    assert launcher.is_interactive_compatible != launches
    assert isinstance(launcher, _SubprocessScriptLauncher) == launches


def test_processes_that_are_there_are_not_launched() -> None:
    """The run has what it changes in Lightning before anything of a strategy is called, and only the run."""
    launcher, original = make_launcher(HybridStrategy(), TorchElasticEnvironment(), 4, 1, "auto"), _find_last()
    found = launcher.launch(lambda: (os.getpid(), _find_last()), trainer=None)
    assert found[0] == os.getpid()
    assert found[1] is not original
    assert _find_last() is original


def _find_last() -> Any:
    return ModelCheckpoint._find_last_checkpoints


def test_the_rank_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (rank_zero_only, fabric_rank_zero_only):
        monkeypatch.setattr(function, "rank", 0, raising=False)
    announce(3)
    assert (rank_zero_only.rank, fabric_rank_zero_only.rank) == (3, 3)


def test_groups_are_left_before_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their threads may hold tensors, of which an interpreter that ends does not let go."""
    at_exit: list[Callable[[], Any]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", lambda job: at_exit.remove(job) if job in at_exit else None)
    store = dist.HashStore()
    monkeypatch.setattr(launch, "make_stores", lambda *_: Stores(store, store))
    monkeypatch.setattr(
        launch,
        "connect_processes",
        lambda *_, **__: dist.init_process_group("gloo", store=store, rank=0, world_size=1),
    )
    launch.start_groups(TorchElasticEnvironment(), None, torch.device("cpu"), None)
    (leave,) = at_exit
    assert dist.is_initialized()
    leave()
    assert not dist.is_initialized()
    leave()  # as where a failure has destroyed them


@pytest.mark.thorough
def test_two_hundred_exits_are_quiet() -> None:
    words = [sys.executable, "-W", "ignore", "-m", quick_exits.__name__, "100"]
    found = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def start_child(started_by: str | None, *, is_connected: bool = False) -> tuple[int, int]:
    """A parent and its child, which sleeps for long; the parent has started it as Lightning does, or another did."""
    pids = {"other": os.getpid(), "gone": gone()}
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        own = os.getpid()
        child = os.fork()
        if child == 0:
            os.environ.pop(launch._STARTED_BY, None)
            if started_by is not None:
                os.environ[launch._STARTED_BY] = str(own if started_by == "parent" else pids[started_by])
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            own_number = f"{os.getpid()}\n".encode()
            if started_by == "gone":  # it will not come far
                os.write(write, own_number)
            launch.end_with_parent()
            if is_connected:
                launch.outlive_parent()
            os.write(write, own_number)
            time.sleep(60)
            os._exit(0)
        os.waitpid(child, 0)
        os._exit(0)
    child = int(os.read(read, 100).split()[0])
    os.close(read)
    os.close(write)
    return parent, child


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the children")
@pytest.mark.parametrize(
    ("started_by", "is_connected", "ends"),
    [
        ("parent", False, True),
        ("gone", False, True),  # before this one came so far, such as while it imported
        (None, False, False),
        ("other", False, False),
        ("parent", True, False),
    ],
)
def test_a_child_of_the_launcher_ends_with_it_until_it_is_connected_and_others_do_not(
    started_by: str | None, is_connected: bool, ends: bool
) -> None:
    parent, child = start_child(started_by, is_connected=is_connected)
    watched = os.pidfd_open(child)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    is_over = bool(select.select([watched], [], [], 10.0 if ends else 0.3)[0])
    os.close(watched)
    if not is_over:
        os.kill(child, signal.SIGKILL)
    assert is_over == ends

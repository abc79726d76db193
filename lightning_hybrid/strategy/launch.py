"""The processes of a job, as Lightning starts and names them, and the process group of them all."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities import rank_zero as fabric_rank_zero
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero as pytorch_rank_zero
from torch.distributed.constants import default_pg_timeout

from lightning_hybrid.checkpoint.parts import is_part
from lightning_hybrid.checkpoint.storage.remote import dated
from lightning_hybrid.strategy.rendezvous import Stores, choose_interface, make_stores
from lightning_hybrid.trainer.lightning_internals import (
    connect_processes,
    find_last_remotely,
    in_place_launcher,
    is_interactive,
    multiprocessing_launcher,
    subprocess_launcher,
)

_STARTED_BY = "LIGHTNING_HYBRID_STARTED_BY"  # the process that starts the others of its node
_PR_SET_PDEATHSIG = 1  # of Linux


def make_launcher(
    strategy: ParallelStrategy, environment: ClusterEnvironment, num_processes: int, num_nodes: int, start_method: str
) -> Any:
    """Return what starts the other processes, if there are any and they have not been started, and surrounds each run.

    Args:
        strategy: Whose processes they are.
        environment: The cluster.
        num_processes: On this node.
        num_nodes: The number of nodes.
        start_method: As of `Launch`.
    """
    if environment.creates_processes_externally:
        end_with_parent()
        return in_place_launcher(_around_run)
    if num_processes * num_nodes == 1:
        return in_place_launcher(_around_run)
    if start_method == "auto":
        start_method = "fork" if is_interactive() else "popen"
    if start_method == "popen":
        variables = {_STARTED_BY: str(os.getpid())}
        return subprocess_launcher(environment, num_processes, num_nodes, variables, _around_run)
    return multiprocessing_launcher(strategy, start_method, check_copying, why_parts_stay, _around_run)


def _around_run() -> AbstractContextManager[None]:
    """Return what surrounds a run, its choice of a checkpoint too, which comes before anything of a strategy."""
    return find_last_remotely(dated)


def check_copying(start_method: str, device: torch.device) -> None:
    """Check that worker processes can be copies of this one.

    Args:
        start_method: As of `Launch`.
        device: A device of the worker processes.

    Raises:
        RuntimeError: If this process uses a GPU already.
    """
    if start_method == "fork" and device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "This process already uses CUDA, so it cannot fork the training processes (launch.start_method='fork')."
            " Restart the kernel, and do not use a GPU before the Trainer does. For example, do not call `model.cuda()`"
            " or `torch.cuda.memory_allocated()` before it. `torch.cuda.device_count()` is allowed. Scripts do not have"
            " this limitation. [LH204]"
        )


def why_parts_stay(module: LightningModule) -> str | None:
    """Return why the weights of a module do not come back from a worker process; ``None`` if they do."""
    if not any(map(is_part, (*module.parameters(), *module.buffers()))):
        return None
    return (
        f"The trained weights of {type(module).__name__} were not returned from the training processes, where the"
        " module stays sharded. In this process, the module still has the weights from before the run. Load the trained"
        " weights from a checkpoint: `Model.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)`. [LH209]"
    )


def end_with_parent() -> None:
    """If :func:`make_launcher` of another process is why this one runs, have it get SIGTERM when that one ends.

    Whoever is killed while its children start, or wait for it to connect, would leave them behind. Only Linux does this
    (``prctl``); elsewhere a rank notices when process groups exist. Then :func:`outlive_parent` takes it back: the
    signal would also come when the first process, or the thread in it that started the others, just ends before them.
    """
    parent = os.environ.get(_STARTED_BY)
    if parent is None or sys.platform != "linux":
        return
    if parent == str(os.getppid()):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if parent == str(os.getppid()):
            return
    elif _is_there(int(parent)):  # this process is not its child
        return
    print(f"Process {os.getpid()} exits because its parent process {parent} has exited.", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)


def _is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # it has ended, and whoever started it has not asked for its status yet


def outlive_parent() -> None:
    """Undo :func:`end_with_parent`."""
    if os.environ.get(_STARTED_BY) == str(os.getppid()) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def announce(rank: int) -> None:
    """Tell everything that logs on rank 0 only, which rank this is."""
    for package in (pytorch_rank_zero, fabric_rank_zero):
        package.rank_zero_only.rank = rank


def start_groups(
    environment: ClusterEnvironment,
    backend: str | None,
    device: torch.device,
    timeout: timedelta | None,
    *,
    watch: Callable[[Stores], object] = bool,
) -> str:
    """Make the process group of all processes.

    The random state is left as it is: ranks that run the same program have the same one, which is that of one process.

    Args:
        environment: The cluster.
        backend: nccl on CUDA and gloo elsewhere if ``None``.
        device: The device of this process.
        timeout: Of the group.
        watch: Is called as soon as there is a store.

    Returns:
        The backend.

    Raises:
        ValueError: If the address of the first rank's machine is a name that this machine does not know.
    """
    backend = backend or dist.Backend.default_device_backend_map.get(device.type, "gloo")
    # A group that is bound to a device would open connections at once; through gloo there are none to a device.
    bound = device if device.type == "cuda" and "nccl" in backend else None
    choose_interface(environment.main_address)
    stores = make_stores(environment, timeout or default_pg_timeout)
    watch(stores)
    connect_processes(environment, backend, timeout=timeout, device=bound, store=stores.of_run)
    outlive_parent()
    atexit.unregister(_leave_groups)
    atexit.register(_leave_groups)
    return backend


def _leave_groups() -> None:
    """Before the interpreter ends: a thread of gloo may still hold tensors of a collective that is over.

    It would ask the interpreter to let go of them, and one that ends answers by ending the thread, in the middle of a
    destructor: "terminate called without an active exception", and SIGABRT, at about one exit in 200 on a busy machine.
    A group that is destroyed waits for its threads. (After a failure there are no groups any more.)
    """
    if dist.is_initialized():
        with suppress(Exception):
            dist.destroy_process_group()
        gc.collect()  # what refers to groups in circles

"""The start of a job's processes by Lightning's launchers, and the process group of all processes.

`HybridStrategy._configure_launcher` calls :func:`make_launcher`, and `HybridStrategy.setup_environment` calls
:func:`start_groups` in each process. Lightning's launchers start the processes. Used alone, they leave processes behind
if their parent is killed early, and cannot return the weights of a module that stays sharded.

An *environment* is Lightning's `ClusterEnvironment`, which knows the ranks and the address of the first node. A *store*
is torch's key-value store, through which processes exchange addresses.
"""

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

# The environment variable with the process that starts the other processes of its node.
_STARTED_BY = "LIGHTNING_HYBRID_STARTED_BY"
_PR_SET_PDEATHSIG = 1  # a constant of Linux


def make_launcher(
    strategy: ParallelStrategy, environment: ClusterEnvironment, num_processes: int, num_nodes: int, start_method: str
) -> Any:
    """Return the launcher, which starts the other processes of this node if needed, and enters a context for each run.

    Args:
        strategy: The strategy of the processes.
        environment: The cluster environment.
        num_processes: The number of processes on this node.
        num_nodes: The number of nodes.
        start_method: The argument of `Launch`: ``"auto"``, ``"popen"``, or a method of `multiprocessing`.
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
    """Return the context of a run. It includes the choice of a checkpoint, which precedes all calls of the strategy."""
    return find_last_remotely(dated)


def check_copying(start_method: str, device: torch.device) -> None:
    """Check that worker processes can be forked from this process.

    Args:
        start_method: The method of `multiprocessing`, such as ``"fork"``.
        device: A device of the worker processes.

    Raises:
        RuntimeError: If this process already uses a GPU, and the method is ``"fork"``.
    """
    if start_method == "fork" and device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "This process already uses CUDA, so it cannot fork the training processes (launch.start_method='fork')."
            " Restart the kernel, and do not use a GPU before the Trainer does. For example, do not call `model.cuda()`"
            " or `torch.cuda.memory_allocated()` before it. `torch.cuda.device_count()` is allowed. Scripts do not have"
            " this limitation. [LH204]"
        )


def why_parts_stay(module: LightningModule) -> str | None:
    """Return why the weights of a module are not returned from a worker process; ``None`` if they are returned."""
    if not any(map(is_part, (*module.parameters(), *module.buffers()))):
        return None
    return (
        f"The trained weights of {type(module).__name__} were not returned from the training processes, where the"
        " module stays sharded. In this process, the module still has the weights from before the run. Load the trained"
        " weights from a checkpoint: `Model.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)`. [LH209]"
    )


def end_with_parent() -> None:
    """Make the system send SIGTERM to this process when its parent exits, if :func:`make_launcher` started it there.

    Otherwise, this process would keep running if its parent is killed while it starts processes, or waits for them to
    connect. If the parent has already exited, this process exits at once. This works only on Linux (``prctl``). On
    other systems, a rank notices the loss when process groups exist. From then on, :func:`outlive_parent` undoes this,
    because the signal would also arrive at a normal exit, if the parent, or its thread that started this process, ends
    first.
    """
    parent = os.environ.get(_STARTED_BY)
    if parent is None or sys.platform != "linux":
        return
    if parent == str(os.getppid()):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if parent == str(os.getppid()):
            return
    elif _is_there(int(parent)):  # this process is not a child of that process
        return
    print(f"Process {os.getpid()} exits because its parent process {parent} has exited.", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)


def _is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie has exited, but its parent has not read its status yet


def outlive_parent() -> None:
    """Undo :func:`end_with_parent`."""
    if os.environ.get(_STARTED_BY) == str(os.getppid()) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def announce(rank: int) -> None:
    """Set the rank in the functions of Lightning that log only on rank 0."""
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
    """Create the process group of all processes. Every process must call this.

    This may set the environment variable ``GLOO_SOCKET_IFNAME``, and registers a function that destroys the groups at
    exit. The random state stays the same. Ranks that run the same program have the same random state as a single
    process.

    Args:
        environment: The cluster environment.
        backend: The backend, such as ``"nccl"``; ``None`` for torch's default for the type of the device.
        device: The device of this process.
        timeout: The timeout of the group; ``None`` for torch's default.
        watch: Called with the stores as soon as they exist.

    Returns:
        The backend.

    Raises:
        ValueError: If this node cannot resolve the address of the first node.
        TimeoutError: If rank 0 has not started in time, under torchrun.
    """
    backend = backend or dist.Backend.default_device_backend_map.get(device.type, "gloo")
    # A group that is bound to a device opens connections at once. Gloo does not connect devices.
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
    """Destroy the process groups before the interpreter exits.

    A thread of gloo may still hold tensors of a finished collective. To free them, it would call the interpreter, which
    ends threads when it exits, here in the middle of a destructor: "terminate called without an active exception" and
    SIGABRT, at about one exit in 200 on a busy machine. Destroying a group waits for its threads. After a failure, no
    groups exist.
    """
    if dist.is_initialized():
        with suppress(Exception):
            dist.destroy_process_group()
        gc.collect()  # frees reference cycles that contain groups

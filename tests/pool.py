"""Ranks that stay alive between tests: a multi-process test costs milliseconds instead of seconds.

pytest --fork--> fork server (torch, lightning, the package and the trainings imported once)
   |                 |--fork--> rank 0 --+
   |                 |--fork--> rank 1 --+-- a fresh gloo group (or Lightning's own) for every run
   |                 `--fork--> ...    --+
   `----- one pipe per rank: (function, arguments) down, (result or traceback) up -----'
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

__all__ = ["Pool", "Pools", "RankError"]

DEFAULT_TIMEOUT = 60.0
# How long the other ranks may take to tell their own story after one has failed.
GRACE = 4.0
# A gloo group wakes up a hundred times a second for as long as it lives, and torch's caches and cycles keep groups of
# runs that are over. Ranks are replaced before that costs more than to start them.
RUNS = 10
# The strategy by its own name: the package imports it only when it is used, which would be in every rank.
PRELOAD = [
    "torch.distributed.tensor", "torchmetrics", "lightning.pytorch", "pytest", "lightning_hybrid.strategy.strategy",
    "tests.transparency",
]  # fmt: skip


class RankError(RuntimeError):
    """At least one rank failed; `failures` holds the text (a traceback, stacks, an exit code) of each such rank."""

    def __init__(self, name: str, failures: dict[int, str], size: int) -> None:
        self.failures = failures
        stories = "\n".join(f"---- rank {rank} of {size}\n{text.rstrip()}" for rank, text in sorted(failures.items()))
        super().__init__(f"{name} failed on {len(failures)} of {size} ranks\n{stories}")


class Pools:
    """The pools of a module of tests, by size and kind; started when first asked for."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, bool], Pool] = {}

    def __call__(self, size: int, *, lightning: bool = False) -> Pool:
        """The pool of `size` ranks; with ``lightning=True`` its ranks have no group but torchelastic's variables."""
        key = (size, lightning)
        if key not in self._pools:
            self._pools[key] = Pool(size, lightning=lightning)
        return self._pools[key]

    def close(self) -> None:
        """End every rank."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


class Pool:
    """`size` live processes that run the same function, as ranks of one job.

    Args:
        size: Number of ranks.
        lightning: False: every run finds an initialised gloo default group of exactly these ranks. True: every run
            finds the environment variables that ``torchrun`` would set, and a `Trainer` initialises the group itself.
    """

    def __init__(self, size: int, *, lightning: bool = False) -> None:
        self.size = size
        self.lightning = lightning
        self._directory: Path | None = None
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []
        self._runs = 0

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT) -> list[Any]:
        """``function(*args)`` on every rank.

        Args:
            function: A module-level function (it travels by name).
            args: Picklable arguments, the same on every rank.
            timeout: Seconds after which every rank that has not finished is ended.

        Returns:
            What the function returned, by rank.

        Raises:
            RankError: The function raised, hung or died on a rank. The next run starts with new ranks.
        """
        if self._runs % RUNS == 0:
            self.close()
        self._directory = self._start()
        self._runs += 1
        rendezvous = self._directory / f"rendezvous-{self._runs}"
        message = pickle.dumps((function, args))
        for _, connection in self._ranks:
            connection.send_bytes(pickle.dumps((sys.path, rendezvous, timeout, message)))
        try:
            outcomes = self._collect(timeout)
        except BaseException:  # also Ctrl-C and pytest-timeout: half a run must not meet the next one
            self.close()
            raise
        failures = {rank: text for rank, (succeeded, text) in outcomes.items() if not succeeded}
        if failures or len(outcomes) < self.size:
            self.close()
            raise RankError(getattr(function, "__name__", repr(function)), failures, self.size)
        return [outcomes[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        """End the ranks; the next run starts new ones."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _start(self) -> Path:
        if self._directory is not None:
            return self._directory
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self.size, self.lightning, directory)
            process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        return directory

    def _collect(self, timeout: float) -> dict[int, tuple[bool, Any]]:
        """Outcomes by rank. Ranks end themselves at the timeout; the margin is for those that cannot even do that."""
        outcomes: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout + 5.0
        while len(outcomes) < self.size and (remaining := deadline - time.monotonic()) > 0:
            waiting = {self._ranks[rank][1]: rank for rank in range(self.size) if rank not in outcomes}
            for connection in wait(list(waiting), timeout=remaining):
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                try:
                    outcomes[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    outcomes[rank] = False, self._obituary(rank)
                if not outcomes[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return outcomes

    def _obituary(self, rank: int) -> str:
        """Why a rank is gone: the stacks that it left at its timeout, or else its exit code."""
        assert self._directory is not None
        process = self._ranks[rank][0]
        process.join(5.0)
        stacks = (self._directory / f"stacks-{rank}").read_text()
        code = process.exitcode
        reason = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return stacks if stacks.startswith("Timeout") else f"died ({reason})\n{stacks}"


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _serve(connection: Connection, rank: int, size: int, lightning: bool, directory: Path) -> None:
    """The life of a rank: one run after another until the parent closes the pipe."""
    import torch

    gc.freeze()  # what was imported stays, and need not be looked through again and again
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # what nobody reads is not estimated
    multiprocessing.current_process().daemon = False  # a daemon may not start workers of a DataLoader
    os.chdir(directory)  # what a Trainer leaves behind goes with the pool
    with (directory / f"stacks-{rank}").open("w") as stacks:
        faulthandler.enable(stacks)
        while True:
            try:
                sys.path[:], rendezvous, timeout, message = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            # The rank cuts its own hang, whatever holds it and whether or not the parent still lives.
            faulthandler.dump_traceback_later(timeout, exit=True, file=stacks)
            try:
                with _lightning_job(rank, size, rendezvous) if lightning else _group(rank, size, rendezvous):
                    function, args = pickle.loads(message)
                    outcome = pickle.dumps((True, function(*args)))
            except BaseException:  # a rank survives SystemExit too, and tells
                outcome = pickle.dumps((False, traceback.format_exc()))
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(outcome)


@contextlib.contextmanager
def _group(rank: int, size: int, rendezvous: Path) -> Iterator[None]:
    """A default group of this run's own: no group, key or message of an earlier run is left in it."""
    import torch.distributed as dist

    with _clean_slate():
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
        yield
        # In the parent a result means that everyone is done; here, that nobody still needs this rank's sockets.
        dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def _lightning_job(rank: int, size: int, rendezvous: Path) -> Iterator[None]:
    """What ``torchrun --nproc-per-node=size`` puts into the environment of a rank on a single node."""
    import torch.distributed as dist

    from lightning_hybrid.strategy import launch
    from lightning_hybrid.strategy.rendezvous import Stores

    with _clean_slate():
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            NODE_RANK="0",
            GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=_free_port(),
            TORCHELASTIC_RUN_ID="pool",
        )
        initialize, make_stores, numbers = dist.init_process_group, launch.make_stores, itertools.count()

        def stores_in_file(*_: Any) -> Stores:
            # Every client of a TCPStore looks up its peer's host name, and a slow resolver costs 5 s (in one of
            # 25 connections, measured); a file costs nothing and no two runs compete for a port.
            store = dist.FileStore(f"{rendezvous}-{next(numbers)}", size)
            return Stores(store, store.clone())

        def initialize_by_file(*args: Any, store: dist.Store | None = None, **kwargs: Any) -> None:
            initialize(*args, **{"store": store or stores_in_file().of_run, "rank": rank, "world_size": size, **kwargs})

        dist.init_process_group, launch.make_stores = initialize_by_file, stores_in_file
        try:
            yield
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
        finally:
            dist.init_process_group, launch.make_stores = initialize, make_stores


@contextlib.contextmanager
def _clean_slate() -> Iterator[None]:
    """Seeds set before a run; environment and global flags of torch restored after it."""
    import numpy as np
    import torch

    environment = dict(os.environ)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)

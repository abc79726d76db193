"""Processes on this node that run a function as the ranks of one job, within a time limit.

`cli.check` starts each training with :func:`run_ranks`. ``torchrun`` starts a script and `torch.multiprocessing.spawn`
pickles the function, but here the function refers to the user's objects, which often cannot be pickled, so processes
are forked. The error is about the most likely cause instead of the first failure: if a rank dies, the others fail with
errors of the network.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

# The time in seconds in which other ranks must exit after a failure, and in which a rank must exit at its time limit.
_GRACE = 5.0
_LOG_LINES = 30
_TIMEOUT = "Timeout ("  # the first word of `faulthandler`'s output
_PACKAGE = Path(__file__).parent.parent
#: Lines of these packages are omitted from a traceback with lines of the user's code.
_NOT_THE_USERS = (
    _PACKAGE,
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


class RankError(RuntimeError):
    """Raised if a rank raises an error, dies or exceeds the time limit.

    Args:
        text: Description of the failure.
        is_raised: True if a rank raised an error whose message does not come from this package.

    Attributes:
        is_raised: The value of the argument with the same name.
    """

    def __init__(self, text: str, *, is_raised: bool = False) -> None:
        super().__init__(text)
        self.is_raised = is_raised


class _Kind(IntEnum):
    """The ways in which a rank ends without a result, from the most likely cause to the least likely cause."""

    DIED = 0
    RAISED = 1
    REFUSED = 2  # by this package, whose errors explain on every rank what is wrong or which rank has failed
    ENDED = 3


@dataclass(frozen=True)
class _Failure:
    kind: _Kind
    text: str


def run_ranks(function: Callable[[], Any], world_size: int, *, time_limit: float) -> list[Any]:
    """Run a function in new processes, which are forked from this process.

    Each process has a gloo group of all processes, and the environment variables of ``torchrun``, so that a `Trainer`
    starts no other processes. Their output is shown only if a process dies or is terminated.

    Args:
        function: Any callable, including closures. Its result must support pickling.
        world_size: The number of processes.
        time_limit: The time in seconds after which the processes are terminated.

    Returns:
        The results, by rank.

    Raises:
        RankError: If the function raises an error, if its result cannot be pickled, or if a process dies or exceeds the
            time limit. The message is about the most likely cause: the first :class:`_Kind`, on the lowest rank.
        RuntimeError: If the system cannot fork processes.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise RuntimeError(
            f"This command must fork processes, which {sys.platform} does not support. Use Linux or macOS. [LH205]"
        )
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory(prefix="lightning-hybrid-") as name:
        directory = Path(name)
        arguments = [(function, rank, world_size, directory, time_limit) for rank in range(world_size)]
        ranks = [context.Process(target=_run_rank, args=each) for each in arguments]
        try:
            for process in ranks:
                process.start()
            _wait(ranks, directory, time_limit)
            running = [process.exitcode is None for process in ranks]
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
        outcomes = [_outcome(directory, rank, ranks[rank], is_ended=running[rank]) for rank in range(world_size)]
    failures = [(each.kind, rank, each.text) for rank, each in enumerate(outcomes) if isinstance(each, _Failure)]
    if failures:
        kind, rank, text = min(failures)
        text = text if kind == _Kind.REFUSED else f"Rank {rank} of {world_size} {text}"
        raise RankError(text, is_raised=kind == _Kind.RAISED)
    return outcomes


def _run_rank(function: Callable[[], Any], rank: int, world_size: int, directory: Path, time_limit: float) -> None:
    """Run the function in a process, and write its result or error to a file."""
    gc.freeze()  # the parent's garbage may include groups, and freeing a group waits for threads that were not copied
    log = (directory / f"log-{rank}").open("w")  # open until the process exits
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    sys.stdout = sys.stderr = log
    # This ends the process even if it is blocked, or if the parent has exited.
    faulthandler.dump_traceback_later(time_limit, exit=True, file=log)
    torch.set_num_threads(1)  # the threads of the parent were not copied
    names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size, "MASTER_PORT": 0}
    names["LOCAL_WORLD_SIZE"] = world_size
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="local ranks")
    outcome: Any
    try:
        rendezvous = f"file://{directory / 'rendezvous'}"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
        outcome = function()
    except BaseException as error:
        outcome = _failure(error)
    partial = directory / f"partial-{rank}"
    try:
        torch.save(outcome, partial)
    except Exception as error:
        torch.save(_Failure(_Kind.RAISED, f"returned a result that cannot be pickled: {error}"), partial)
    partial.rename(directory / f"outcome-{rank}")


def _failure(error: BaseException) -> _Failure:
    """Return a raised error: only the message for errors of this package, otherwise also the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, (ValueError, TypeError, RuntimeError)) and Path(frames[-1].filename).is_relative_to(_PACKAGE):
        return _Failure(_Kind.REFUSED, str(error))
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    users = [frame for frame in frames if not any(map(Path(frame.filename).is_relative_to, _NOT_THE_USERS))]
    places = "".join(traceback.format_list(users or frames)).rstrip()
    return _Failure(_Kind.RAISED, f"raised {type(error).__name__}: {error}{notes}\n\n{places}")


def _wait(ranks: Sequence[BaseProcess], directory: Path, time_limit: float) -> None:
    """Wait until all processes have exited, or until the deadline, which is soon after a first failure."""
    deadline = time.monotonic() + time_limit + _GRACE
    waiting = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(waiting), timeout=remaining):
            assert isinstance(sentinel, int)
            rank = waiting.pop(sentinel)
            if isinstance(_outcome(directory, rank, ranks[rank], is_ended=False), _Failure):
                deadline = min(deadline, time.monotonic() + _GRACE)


def _outcome(directory: Path, rank: int, process: BaseProcess, *, is_ended: bool) -> Any:
    """Return the result of a rank, or its failure."""
    file = directory / f"outcome-{rank}"
    if file.exists():
        return torch.load(file, weights_only=False)
    log = directory / f"log-{rank}"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    limit = next((number for number, line in enumerate(lines) if line.startswith(_TIMEOUT)), None)
    if limit is not None:
        stacks = "\n".join(lines[limit + 1 :][:_LOG_LINES])
        return _Failure(_Kind.ENDED, f"took longer than the time limit. Its last calls, most recent first:\n{stacks}")
    tail = "\n".join(lines[-_LOG_LINES:])
    if is_ended:
        return _Failure(_Kind.ENDED, f"was terminated.\n{tail}")
    return _Failure(_Kind.DIED, f"died (exit code {process.exitcode}).\n{tail}")

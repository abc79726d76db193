"""Processes on this machine that run a function as the ranks of one job, and end in time."""

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

# Seconds that other ranks may take to end after one has failed, and a rank to end itself at its limit.
_GRACE = 5.0
_LOG_LINES = 30
_TIMEOUT = "Timeout ("  # as `faulthandler` begins
_PACKAGE = Path(__file__).parent.parent
#: Whose lines are left out where the user's own say where an error was raised.
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
    """How a rank ended without a result. The first of these tells most about the cause: other ranks follow it."""

    DIED = 0
    RAISED = 1
    REFUSED = 2  # by this package, which says on every rank what is wrong or which rank failed
    ENDED = 3


@dataclass(frozen=True)
class _Failure:
    kind: _Kind
    text: str


def run_ranks(function: Callable[[], Any], world_size: int, *, time_limit: float) -> list[Any]:
    """Run a function in new processes, which are copies of this one.

    Each finds a gloo group of them all and the variables that ``torchrun`` sets, so a `Trainer` starts no others. What
    they print is shown only if one of them dies.

    Args:
        function: Any callable, closures too. What it returns is pickled.
        world_size: The number of processes.
        time_limit: Seconds after which they are ended.

    Returns:
        What the function returned, by rank.

    Raises:
        RankError: If it raised, died or hung on a rank; with the text of the first cause.
        RuntimeError: If this system cannot copy a process.
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
    """The life of a rank."""
    gc.freeze()  # garbage of the parent may hold groups, and to free one is to wait for threads that were not copied
    log = (directory / f"log-{rank}").open("w")  # until the process ends
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    sys.stdout = sys.stderr = log
    # It ends itself, whatever holds it and whether or not the parent still lives.
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
    """What was raised: a text is enough where this package says what is wrong, other code needs its place."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, (ValueError, TypeError, RuntimeError)) and Path(frames[-1].filename).is_relative_to(_PACKAGE):
        return _Failure(_Kind.REFUSED, str(error))
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    users = [frame for frame in frames if not any(map(Path(frame.filename).is_relative_to, _NOT_THE_USERS))]
    places = "".join(traceback.format_list(users or frames)).rstrip()
    return _Failure(_Kind.RAISED, f"raised {type(error).__name__}: {error}{notes}\n\n{places}")


def _wait(ranks: Sequence[BaseProcess], directory: Path, time_limit: float) -> None:
    """Until all have ended, or one has failed and the others had time to follow, or the limit."""
    deadline = time.monotonic() + time_limit + _GRACE
    waiting = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(waiting), timeout=remaining):
            assert isinstance(sentinel, int)
            rank = waiting.pop(sentinel)
            if isinstance(_outcome(directory, rank, ranks[rank], is_ended=False), _Failure):
                deadline = min(deadline, time.monotonic() + _GRACE)


def _outcome(directory: Path, rank: int, process: BaseProcess, *, is_ended: bool) -> Any:
    """What a rank left."""
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

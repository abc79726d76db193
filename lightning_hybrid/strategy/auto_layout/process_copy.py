"""A function that runs in a copy of this process, so that it leaves no trace in this one."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import pickle
import select
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import torch

from lightning_hybrid.distributed.process_group import leave_groups_to_parent

_T = TypeVar("_T")
_LENGTH = struct.Struct("Q")
_PR_SET_PDEATHSIG = 1  # of Linux
_CHUNK = 1 << 16  # bytes
_GRACE = 5.0  # seconds after which a copy that nobody ends does it itself


def run_in_copy(function: Callable[[], _T], *, time_limit: float) -> _T:
    """Run a function in a copy of this process, on the host, with one thread, no process group and no output.

    Args:
        function: Any callable, closures too. What it returns is pickled.
        time_limit: Seconds after which the copy is ended.

    Returns:
        What the function returned.

    Raises:
        ValueError, TypeError: As the function raised them.
        TimeoutError: If it took too long.
        RuntimeError: If it raised something else or died, or this system cannot copy a process.
    """
    if not hasattr(os, "fork"):
        raise RuntimeError(f"{sys.platform} cannot copy a process (fork).")
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the copy needs none of the other threads
        pid = os.fork()
    if pid == 0:
        _live(function, writing, time_limit)
    os.close(writing)
    try:
        message = _read(reading, time.monotonic() + time_limit)
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # somebody else has waited for it
            os.waitpid(pid, 0)
    if message is None:
        raise TimeoutError(f"It took longer than {time_limit:.0f} s.")
    if not message:
        raise RuntimeError("The copy of the process died.")
    result, error = pickle.loads(message)
    if error is not None:
        raise error
    value: _T = result
    return value


def _read(file: int, deadline: float) -> bytes | None:
    """The message of the copy: nothing if it died, ``None`` if it took too long."""
    received = b""
    while len(received) < _LENGTH.size or len(received) < _LENGTH.size + _LENGTH.unpack_from(received)[0]:
        if not select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        chunk = os.read(file, _CHUNK)
        if not chunk:
            return b""
        received += chunk
    return received[_LENGTH.size :]


def _live(function: Callable[[], Any], writing: int, time_limit: float) -> NoReturn:
    """The life of the copy."""
    try:
        _settle(time_limit)
        result, error = function(), None
    except (ValueError, TypeError) as raised:
        result, error = None, type(raised)(str(raised)) if type(raised) in (ValueError, TypeError) else _other(raised)
    except BaseException as raised:
        result, error = None, _other(raised)
    try:
        message = pickle.dumps((result, error))
        message = _LENGTH.pack(len(message)) + message
        while message:
            message = message[os.write(writing, message) :]
    finally:
        os._exit(0)  # nothing of the parent is tidied up here


def _other(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__}: {error}")


def _settle(time_limit: float) -> None:
    """Be apart from the parent."""
    gc.freeze()  # garbage of the parent may hold groups, and to free one is to wait for threads that were not copied
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the parent, which ends this one
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 (until the process ends)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a process; a thread that would do it may wait for another
    signal.alarm(math.ceil(time_limit + _GRACE))
    torch.set_num_threads(1)
    vars(torch.cuda)["is_available"] = lambda: False  # a device that the parent has used cannot be used here
    leave_groups_to_parent()

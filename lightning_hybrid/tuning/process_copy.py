"""Functions that run in copies of this process: in parallel, and without side effects in this process.

`choose_layout` runs the whole search in a copy on rank 0 (:func:`run_in_copy`), and `ModuleProfile` records steps in
several copies at a time (:class:`Copies`), one for each arrangement of tensor-parallel ranks. These functions are dry
runs, which change modules, random states and process groups. A thread would share this state, and a process of
`multiprocessing` would have to import and pickle the user's module, whose loaders and closures often cannot be pickled.
A forked copy has all objects, and only the result is pickled.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor

from lightning_hybrid.distributed.process_group import leave_groups_to_parent
from lightning_hybrid.distributed.pytree import Message, encode
from lightning_hybrid.distributed.tensor_bytes import bytes_tensor

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")
_PR_SET_PDEATHSIG = 1  # an option of prctl in Linux
_FOR_PARENT = (signal.SIGTERM, signal.SIGINT)
_GRACE = 5.0  # seconds after the time limit; then, a copy ends itself


def run_in_copy(function: Callable[[], _T], *, time_limit: float) -> _T:
    """Run a function in a copy of this process and wait for it.

    Args:
        function: See :class:`ProcessCopy`.
        time_limit: See :class:`ProcessCopy`.

    Raises:
        ValueError, TypeError, TimeoutError, RuntimeError: See :meth:`ProcessCopy.result`.
        RuntimeError: If this system cannot copy a process.
        OSError: If the system has too little memory for a copy now.
    """
    return ProcessCopy(function, time_limit=time_limit).result()


class ProcessCopy(Generic[_T]):
    """A copy of this process that runs a function on the CPU, with one thread, no process group and no output.

    It starts immediately. The caller must call :meth:`result` or :meth:`end` once. If this process ends, the copy ends
    too: immediately on Linux, and otherwise a few seconds after the time limit.

    Args:
        function: Any callable, such as a closure. The result is pickled.
        time_limit: Seconds after which :meth:`result` raises an error. The copy ends itself soon after.

    Raises:
        RuntimeError: If this system cannot copy a process.
        OSError: If the system has too little memory for a copy now.
    """

    def __init__(self, function: Callable[[], _T], *, time_limit: float) -> None:
        if not hasattr(os, "fork"):
            raise RuntimeError(
                f"To examine layouts, this process must be copied (forked), which {sys.platform} does not support."
                " [LH205]"
            )
        self._time_limit, self._deadline = time_limit, time.monotonic() + time_limit
        self._reading, writing = os.pipe()
        parent = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_PARENT)  # blocked until the copy ignores them
        try:
            with warnings.catch_warnings():
                # Python warns about forks of processes with threads. The copy does not need the other threads.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pid = os.fork()
            if self._pid == 0:
                _run_copy(function, parent, writing, time_limit)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(writing)

    @property
    def is_late(self) -> bool:
        """True after the time limit."""
        return time.monotonic() > self._deadline

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when there is a result, for `select`."""
        return self._reading

    def result(self) -> _T:
        """Wait for the function, return what it returned, and end the copy.

        Raises:
            ValueError, TypeError: If the function raised an error of this type or of a subclass.
            TimeoutError: If the function took too long.
            RuntimeError: If the function raised another error, whose type then begins the text, if the copy ended, or
                if the result cannot be pickled.
        """
        try:
            result, error = Message.receive(self._read).value()
        finally:
            self.end()
        if error is not None:
            raise error
        value: _T = result
        return value

    def _read(self, size: int) -> Tensor:
        """Return the next bytes from the copy."""
        received = b""
        while len(received) < size:
            if not select.select([self._reading], [], [], max(0.0, self._deadline - time.monotonic()))[0]:
                raise TimeoutError(f"The search took longer than {self._time_limit:.0f} s.")
            chunk = os.read(self._reading, size - len(received))
            if not chunk:
                raise RuntimeError("The process that ran the search exited unexpectedly.")
            received += chunk
        return bytes_tensor(received)

    def end(self) -> None:
        """End the copy, and wait for its exit. :meth:`result` calls it. Call it once."""
        os.close(self._reading)
        os.kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # another handler has already waited for it
            os.waitpid(self._pid, 0)


class Copies(Generic[_K, _T]):
    """Functions that run in copies of this process while entered. Copies that still run are ended at the exit.

    Args:
        functions: The functions by key, in the order in which they start.
        most: The number of copies that run at a time.
        time_limit: Seconds after which a copy is ended, and its function counts as unfinished.
    """

    def __init__(self, functions: Mapping[_K, Callable[[], _T]], *, most: int, time_limit: float) -> None:
        self._waiting, self._most, self._time_limit = dict(functions), most, time_limit
        self._running: dict[_K, ProcessCopy[_T]] = {}
        self._results: dict[_K, _T] = {}

    def __enter__(self) -> Copies[_K, _T]:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.clear()
        while self._running:
            self._running.popitem()[1].end()

    def advance(self) -> None:
        """Collect results, and start waiting functions in place of finished ones.

        Call it often, so that no processor waits.
        """
        if self._waiting:
            self._collect(0.0)

    def take(self, key: _K) -> _T | None:
        """Wait for a function and return its result, once.

        Returns:
            The result; ``None`` if the key is unknown, the function failed or took too long, or it could not start. The
            caller then runs the function in this process.
        """
        while key in self._running or key in self._waiting:
            self._collect(1.0)
        return self._results.pop(key, None)

    def _collect(self, seconds: float) -> None:
        """Collect the results that arrive within a number of seconds."""
        ready = select.select(self._running.values(), [], [], seconds)[0]
        for key, copy in list(self._running.items()):
            if copy in ready or copy.is_late:
                del self._running[key]
                with suppress(Exception):  # this process then runs the function, which raises the error again
                    self._results[key] = copy.result()
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._most:
            key = next(iter(self._waiting))
            try:
                self._running[key] = ProcessCopy(self._waiting[key], time_limit=self._time_limit)
            except (RuntimeError, OSError):  # this system cannot copy a process, or has no memory for it now
                self._waiting.clear()
                return
            del self._waiting[key]


def num_processors() -> int:
    """Return the number of processors that this process can use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_copy(function: Callable[[], Any], parent: int, writing: int, time_limit: float) -> NoReturn:
    """Run the function in the copy, send its result or error, and exit."""
    result: Any = None
    error: Exception | None = None
    try:
        _separate(parent, time_limit)
        result = function()
    except (ValueError, TypeError) as raised:
        # A subclass may not have a constructor for its text alone.
        error = (ValueError if isinstance(raised, ValueError) else TypeError)(str(raised))
    except BaseException as raised:
        error = _other(raised)
    try:
        for part in Message.make(encode((result, error))).parts:
            unwritten = part.numpy().data
            while unwritten:
                unwritten = unwritten[os.write(writing, unwritten) :]
    finally:
        os._exit(0)  # without the parent's exit handlers


def _other(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__}: {error}")


def _separate(parent: int, time_limit: float) -> None:
    """Separate the copy from the parent: signals, output, threads, devices and process groups."""
    gc.freeze()  # garbage can contain process groups, and freeing one waits for threads that were not copied
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before that
        os._exit(1)
    for number in _FOR_PARENT:  # the parent handles them, and ends this copy
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_PARENT)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 (open until the process ends)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process even if a thread waits for a lock
    signal.alarm(math.ceil(time_limit + _GRACE))
    torch.set_num_threads(1)
    vars(torch.cuda)["is_available"] = lambda: False  # a copy cannot use a device of its parent
    leave_groups_to_parent()

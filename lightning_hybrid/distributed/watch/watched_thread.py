"""The thread of a run as the watcher sees it: its stack, and the time for which it has not moved.

`StartWatch` makes a :class:`WatchedThread`, and `RankWatch` calls :meth:`WatchedThread.look` at each look, on the
watcher. `Waits` and `Ladder` decide by its attributes if the thread waits for other ranks, computes or sleeps, and
`StallWatch` uses the functions of this file. A flag that code sets around its waits would be simpler, but the user's
code and torch do not set one.

A thread is *still* while it is at the same place in its code and computes nothing.
"""

from __future__ import annotations

import linecache
import os
import platform
import signal
import struct
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_hybrid.distributed.watch.collector import without_collector
from lightning_hybrid.torch_internals import COMPILER_FOLDERS

_TORCH, _PACKAGE = (f"{path}{os.sep}" for path in (Path(dist.__file__).parent, Path(__file__).parents[2]))
_CHECKPOINT = f"{Path(__file__).parents[2] / 'checkpoint'}{os.sep}"
_BACKWARD = str(Path(__file__).parents[2] / "pipeline_parallel" / "stage.py")  # calls autograd
_SLOW = (
    _CHECKPOINT,
    *(str(Path(torch.__file__).parent / name) for name in ("serialization.py", "utils/data/", *COMPILER_FOLDERS)),
)
_LIBRARIES = (_PACKAGE, *{sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
_COLLECTIVES = "distributed_c10d.py"  # the file of torch's collectives and messages
_MOST_COMPUTED = 0.05  # seconds of processor time up to which a thread counts as still
_CLOCK_NANOSLEEP = {"x86_64": 230, "aarch64": 115}.get(platform.machine())  # numbers of the system call
_TIMER_ABSTIME = 1  # the flag of this call for an absolute time
_TIMESPEC = struct.Struct("qq")  # seconds and nanoseconds


#: Held while a stack is read, because a reference to a frame keeps all variables of the call alive.
READING = threading.RLock()  # reentrant, because a signal handler may fork
# After a fork while a stack is read, the lock would stay held, and the collector disabled, in the new process.
os.register_at_fork(before=READING.acquire, after_in_parent=READING.release, after_in_child=READING.release)


class StackCall(NamedTuple):
    """A call on the stack of a thread.

    Attributes:
        code: The code of the function.
        position: (identity of the frame, place in the code). It changes when the call continues.
        ranks: The global ranks of the group, if this is a function of `torch.distributed` and groups were requested.
    """

    code: CodeType
    position: tuple[int, int]
    ranks: list[int] | None

    @property
    def file(self) -> str:
        """The file of the code."""
        return self.code.co_filename

    @property
    def line(self) -> int:
        """The current line. It is computed on demand, because that takes half of the time of a look."""
        place = self.position[1]
        return next((line for begin, end, line in self.code.co_lines() if line and begin <= place < end), 0)

    def __str__(self) -> str:
        """Return the function and the line, for messages."""
        return f"{self.code.co_name} ({Path(self.file).name}:{self.line})"


def read_stack(thread: int, *, groups: bool = False) -> list[StackCall]:
    """Return the calls on the stack of a thread, the innermost first; an empty list if the thread has ended.

    Args:
        thread: The thread's `threading.get_ident`.
        groups: If True, find the groups of functions of `torch.distributed`.
    """
    calls = list[StackCall]()
    # `f_back` makes a frame object for a call of the other thread. In CPython 3.11 this may first collect garbage, and
    # finalizers release the GIL. If the call returns meanwhile, `f_back` reads freed memory.
    with READING, without_collector():
        frame = sys._current_frames().get(thread)
        while frame is not None:
            ranks = _ranks_of(frame) if groups and Path(frame.f_code.co_filename).name == _COLLECTIVES else None
            calls.append(StackCall(frame.f_code, (id(frame), frame.f_lasti), ranks))
            frame = frame.f_back
    return calls


def _ranks_of(frame: FrameType) -> list[int] | None:
    if "group" not in frame.f_code.co_varnames:
        return None
    return sorted(dist.get_process_group_ranks(frame.f_locals.get("group") or dist.group.WORLD))


def may_wait(stack: Sequence[StackCall]) -> bool:
    """Return True if a thread may wait for other ranks: in collectives of torch, or in this package.

    Only the innermost call counts. The package does not wait for other ranks while it reads or writes files, or runs
    the backward of a stage.
    """
    file = stack[0].file if stack else ""
    return file.startswith((_TORCH, _PACKAGE)) and not file.startswith((_CHECKPOINT, _BACKWARD))


def is_slow(stack: Sequence[StackCall]) -> bool:
    """Return True if a thread loads, saves or compiles, which takes time even without computing."""
    return any(each.file.startswith(_SLOW) for each in stack)


def _calls_wait(call: StackCall) -> bool:
    """Return True if a function is named `wait...`, because it polls for messages, or if its line calls `.wait()`."""
    return call.code.co_name.startswith("wait") or ".wait(" in linecache.getline(call.file, call.line)


def seconds_of_sleep(thread: int) -> float:
    """Return the seconds that a thread of this process will sleep unless it is interrupted.

    Python's `time.sleep` (from 3.11) passes the time of the end to the kernel, and the kernel shows the current system
    call of a thread (Linux, ``proc_pid_syscall(5)``). A thread that waits for a device, a lock or a message is in
    another system call.

    Args:
        thread: The thread's `threading.get_native_id`.

    Returns:
        The seconds; 0 if the thread does not sleep, or if the system does not show system calls.
    """
    with suppress(OSError, ValueError, IndexError, struct.error):
        call = _system_call(thread)
        number, clock, flags, address = (int(word, 0) for word in call[:4])
        if number == _CLOCK_NANOSLEEP and clock == time.CLOCK_MONOTONIC and flags == _TIMER_ABSTIME:
            end = _read(address)
            if _system_call(thread) == call:  # so the time that was read belongs to this call
                return max(0.0, end - time.monotonic())
    return 0.0


def _system_call(thread: int) -> list[str]:
    """Return a thread's system call: its number, its arguments and two registers; one word if the thread runs."""
    return Path(f"/proc/self/task/{thread}/syscall").read_text().split()


def _read(address: int) -> float:
    """Return the time at an address, read through a file: the memory may be freed when the thread ends."""
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        seconds, nanoseconds = _TIMESPEC.unpack(os.pread(memory.fileno(), _TIMESPEC.size, address))
    return float(seconds + 1e-9 * nanoseconds)


class WatchedThread:
    """The thread of a run. The watcher calls :meth:`look` repeatedly, which sets the attributes.

    Attributes:
        seconds_still: The seconds for which the thread has been at one place and has computed nothing.
        in_collective: If True, the thread is in a function of `torch.distributed`.
        waits: If True, the thread may wait for other ranks, see :func:`may_wait`.
        awaits: If True, the thread waits in a function of this package for messages or collectives that it started
            before.
    """

    def __init__(self) -> None:
        self.watch_this()

    def watch_this(self) -> None:
        """Watch the calling thread, which begins a run."""
        self._ident, self._native_id = threading.get_ident(), threading.get_native_id()
        self._stack: Sequence[StackCall] = ()
        self._position: object = None
        self._since = self._computed_before = 0.0
        self.seconds_still = 0.0
        self.in_collective = self.waits = self.awaits = False

    @property
    def ident(self) -> int:
        """The thread's `threading.get_ident`."""
        return self._ident

    @property
    def is_saving(self) -> bool:
        """True if a function of `checkpoint` is on the stack, so that a checkpoint is being written or read."""
        return any(each.file.startswith(_CHECKPOINT) for each in self._stack)

    @property
    def is_slow(self) -> bool:
        """True if the thread loads, saves or compiles, see :func:`is_slow`."""
        return is_slow(self._stack)

    def look(self) -> None:
        """Read the stack of the thread."""
        self._stack = stack = read_stack(self._ident)
        if not stack:
            self.watch_nothing()
            return
        self.in_collective = stack[0].file.startswith(_TORCH)
        self.waits = may_wait(stack)
        self.awaits = self.waits and not self.in_collective and _calls_wait(stack[0])
        now, computed = time.monotonic(), self._computed()
        position = stack[0].position
        if position != self._position or computed > self._computed_before + _MOST_COMPUTED:
            self._position, self._since, self._computed_before = position, now, computed
        self.seconds_still = now - self._since

    def watch_nothing(self) -> None:
        """Reset the attributes, because the thread has ended."""
        self._stack, self._position, self.seconds_still = (), None, 0.0
        self.in_collective = self.waits = self.awaits = False

    def _computed(self) -> float:
        """Return the processor time of the thread; always 0 if the system does not report it."""
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        return 0.0 if clock_of is None else time.clock_gettime(clock_of(self._ident))

    def seconds_of_sleep(self) -> float:
        """Return the seconds that the thread will sleep; 0 if it does not sleep, or if they are not known."""
        return seconds_of_sleep(self._native_id)

    def calls(self) -> str:
        """Return the innermost calls of the thread."""
        return " < ".join(map(str, read_stack(self._ident)[:6]))

    def place(self) -> str:
        """Return the place in the user's code that libraries called, such as a hook, or else the innermost calls."""
        stack = read_stack(self._ident)
        own = [index for index, each in enumerate(stack) if not each.file.startswith(_LIBRARIES)]
        called = (index for index in own if len(stack) - index > len([each for each in own if each >= index]))
        index = next(called, None)
        if index is not None:
            return str(stack[index])
        outside = [each for each in stack if not each.file.startswith(_TORCH)]
        return " < ".join(map(str, outside[:3]))

    def interrupt(self) -> bool:
        """Send SIGTERM to this thread, so that its handler runs there, at any line of Python code.

        Returns:
            True if the thread is the main thread and has a handler in Python; otherwise no signal is sent.
        """
        is_main = self._ident == threading.main_thread().ident
        if not is_main or not isinstance(signal.getsignal(signal.SIGTERM), Callable):  # type: ignore[arg-type]
            return False
        signal.pthread_kill(self._ident, signal.SIGTERM)
        return True

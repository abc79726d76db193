"""What the thread of a run is doing, seen from the watcher's: where it is, and whether it moves."""

from __future__ import annotations

import linecache
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_hybrid.distributed.watch.collector import without_collector
from lightning_hybrid.distributed.watch.sleep import seconds_of_sleep

_TORCH, _PACKAGE = (f"{path}{os.sep}" for path in (Path(dist.__file__).parent, Path(__file__).parents[2]))
_CHECKPOINT = f"{Path(__file__).parents[2] / 'checkpoint'}{os.sep}"
_BACKWARD = str(Path(__file__).parents[2] / "pipeline_parallel" / "stage.py")  # autograd computes below it
_SLOW = (
    _CHECKPOINT,
    *(
        str(Path(torch.__file__).parent / name)
        for name in ("serialization.py", "utils/data/", "_dynamo/", "_inductor/")
    ),
)
_LIBRARIES = (_PACKAGE, *{sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
_COLLECTIVES = "distributed_c10d.py"  # the file of torch's functions for ranks that talk to each other
_MOST_COMPUTED = 0.05  # seconds in which it does not compute more than this


#: Held while a stack is read: who has the frame of a call has its variables too, and keeps alive what they refer to.
READING = threading.RLock()  # reentrant: a signal's handler may fork
# A fork in the middle of a reading would leave the lock held, and the collector off, in the new process.
os.register_at_fork(before=READING.acquire, after_in_parent=READING.release, after_in_child=READING.release)


class StackCall(NamedTuple):
    """One of the calls that a thread is in.

    Attributes:
        code: What was called.
        position: Changes when it goes on; the second number is the place in the code.
        ranks: The global ranks of the group, if it is a function of `torch.distributed` and groups were asked for.
    """

    code: CodeType
    position: tuple[int, int]
    ranks: list[int] | None

    @property
    def file(self) -> str:
        """Where its code is."""
        return self.code.co_filename

    @property
    def line(self) -> int:
        """The line that runs; searched for where it is told, as a look at a thread takes half as long without."""
        place = self.position[1]
        return next((line for begin, end, line in self.code.co_lines() if line and begin <= place < end), 0)

    def __str__(self) -> str:
        """For messages."""
        return f"{self.code.co_name} ({Path(self.file).name}:{self.line})"


def read_stack(thread: int, *, groups: bool = False) -> list[StackCall]:
    """The calls that a thread is in, the innermost first; nothing if it is gone.

    Args:
        thread: As `threading.get_ident` names it.
        groups: Whether to ask for the groups of functions of `torch.distributed`.
    """
    calls = list[StackCall]()
    # `f_back` makes a frame object for a call of the other thread. In CPython 3.11 this may first collect garbage, and
    # finalizers release the GIL: the call returns meanwhile, and `f_back` continues in its freed memory.
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
    """Whether a thread is where it may wait for other ranks: in collectives of torch, or in this package.

    Not where the package reads or writes files, or runs the backward of a stage.
    """
    file = stack[0].file if stack else ""
    return file.startswith((_TORCH, _PACKAGE)) and not file.startswith((_CHECKPOINT, _BACKWARD))


def is_slow(stack: Sequence[StackCall]) -> bool:
    """Whether a thread does what takes its time, also if it computes nothing: it loads, saves or compiles."""
    return any(each.file.startswith(_SLOW) for each in stack)


def _calls_wait(call: StackCall) -> bool:
    """Return whether a function polls for messages, which is named `wait...`, or its current line calls `.wait()`."""
    return call.code.co_name.startswith("wait") or ".wait(" in linecache.getline(call.file, call.line)


class WatchedThread:
    """The thread that a run is on. :meth:`look` is called again and again; the rest says what was seen.

    Attributes:
        seconds_still: How long the thread has been at one place and has computed nothing.
        in_collective: Whether it is in one of torch's functions for ranks that talk to each other.
        waits: Whether it may wait for other ranks, as :func:`may_wait` says.
        awaits: Whether it waits in a function of this package for messages or collectives that it started before.
    """

    def __init__(self) -> None:
        self.watch_this()

    def watch_this(self) -> None:
        """Watch the thread that calls, which begins a run."""
        self._ident, self._native_id = threading.get_ident(), threading.get_native_id()
        self._stack: Sequence[StackCall] = ()
        self._position: object = None
        self._since = self._computed_before = 0.0
        self.seconds_still = 0.0
        self.in_collective = self.waits = self.awaits = False

    @property
    def ident(self) -> int:
        """As `threading.get_ident` names it."""
        return self._ident

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(each.file.startswith(_CHECKPOINT) for each in self._stack)

    @property
    def is_slow(self) -> bool:
        """Whether it does what takes its time, as :func:`is_slow` says."""
        return is_slow(self._stack)

    def look(self) -> None:
        """See where the thread is."""
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
        """The thread is gone."""
        self._stack, self._position, self.seconds_still = (), None, 0.0
        self.in_collective = self.waits = self.awaits = False

    def _computed(self) -> float:
        """The seconds that a processor has worked for it; always 0 where the system does not tell."""
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        return 0.0 if clock_of is None else time.clock_gettime(clock_of(self._ident))

    def seconds_of_sleep(self) -> float:
        """How long the thread is going to sleep yet; 0 if it does not, or nobody tells."""
        return seconds_of_sleep(self._native_id)

    def calls(self) -> str:
        """The place where the thread is, and the calls that led there."""
        return " < ".join(map(str, read_stack(self._ident)[:6]))

    def place(self) -> str:
        """The place in the user's code that libraries called, such as a hook; or else the innermost calls."""
        stack = read_stack(self._ident)
        own = [index for index, each in enumerate(stack) if not each.file.startswith(_LIBRARIES)]
        called = (index for index in own if len(stack) - index > len([each for each in own if each >= index]))
        index = next(called, None)
        if index is not None:
            return str(stack[index])
        outside = [each for each in stack if not each.file.startswith(_TORCH)]
        return " < ".join(map(str, outside[:3]))

    def interrupt(self) -> bool:
        """Have the handler of SIGTERM called in this thread, whatever it does in Python; whether there is one."""
        is_main = self._ident == threading.main_thread().ident
        if not is_main or not isinstance(signal.getsignal(signal.SIGTERM), Callable):  # type: ignore[arg-type]
            return False
        signal.pthread_kill(self._ident, signal.SIGTERM)
        return True

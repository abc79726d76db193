"""What the thread of a run is doing, seen from the watcher's: where it is, and whether it moves."""

from __future__ import annotations

import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

_TORCH, _PACKAGE = str(Path(dist.__file__).parent), str(Path(__file__).parents[2])
_SAVING = str(Path(__file__).parents[2] / "checkpoint")
_LOADING = str(Path(torch.__file__).parent / "utils" / "data")
_LIBRARIES = (_PACKAGE, *{sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
_MOST_COMPUTED = 0.05  # seconds in which it does not compute more than this


class WatchedThread:
    """The thread that a run is on. :meth:`look` is called again and again; the rest says what was seen.

    Attributes:
        seconds_still: How long the thread has been at one place and has computed nothing.
        in_collective: Whether it is in one of torch's functions for ranks that talk to each other.
        waits: Whether it is there, or in this package, so that it may wait for other ranks.
        awaits: Whether it waits for what it started before, in a function of this package that is named so.
        is_saving: Whether a checkpoint is being written, which takes its time.
        is_loading: Whether it is in a loader, which may do so too.
    """

    def __init__(self) -> None:
        self.watch_this()

    def watch_this(self) -> None:
        """Watch the thread that calls, which begins a run."""
        self._ident = threading.get_ident()
        self._position: object = None
        self._since = self._computed_before = 0.0
        self.seconds_still = 0.0
        self.in_collective = self.waits = self.awaits = self.is_saving = self.is_loading = False

    @property
    def ident(self) -> int:
        """As `threading.get_ident` names it."""
        return self._ident

    def look(self) -> None:
        """See where the thread is."""
        frame = sys._current_frames().get(self._ident)
        if frame is None:
            self.watch_nothing()
            return
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        self.in_collective = file.startswith(_TORCH)
        self.waits = self.in_collective or file.startswith(_PACKAGE)
        self.awaits = self.waits and not self.in_collective and name.startswith("wait")
        files = [each.f_code.co_filename for each in _frames(frame)]
        self.is_saving = any(each.startswith(_SAVING) for each in files)
        self.is_loading = any(each.startswith(_LOADING) for each in files)
        now, computed = time.monotonic(), self._computed()
        position = id(frame), frame.f_lasti, frame.f_code  # not the frame: its variables refer to groups
        if position != self._position or computed > self._computed_before + _MOST_COMPUTED:
            self._position, self._since, self._computed_before = position, now, computed
        self.seconds_still = now - self._since

    def watch_nothing(self) -> None:
        """The thread is gone."""
        self._position, self.seconds_still = None, 0.0
        self.in_collective = self.waits = self.awaits = self.is_saving = self.is_loading = False

    def _computed(self) -> float:
        """The seconds that a processor has worked for it; always 0 where the system does not tell."""
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        return 0.0 if clock_of is None else time.clock_gettime(clock_of(self._ident))

    def calls(self) -> str:
        """The place where the thread is, and the calls that led there."""
        frame = sys._current_frames().get(self._ident)
        return " < ".join(_place(each) for each, _ in zip(_frames(frame), range(6), strict=False))

    def place(self) -> str:
        """The place in the user's code that libraries called, such as a hook; or else the innermost calls."""
        frames = list(_frames(sys._current_frames().get(self._ident)))
        own = [index for index, each in enumerate(frames) if not each.f_code.co_filename.startswith(_LIBRARIES)]
        called = (index for index in own if len(frames) - index > len([each for each in own if each >= index]))
        index = next(called, None)
        if index is not None:
            return _place(frames[index])
        outside = [each for each in frames if not each.f_code.co_filename.startswith(_TORCH)]
        return " < ".join(map(_place, outside[:3]))

    def interrupt(self) -> bool:
        """Have the handler of SIGTERM called in this thread, whatever it does in Python; whether there is one."""
        is_main = self._ident == threading.main_thread().ident
        if not is_main or not isinstance(signal.getsignal(signal.SIGTERM), Callable):  # type: ignore[arg-type]
            return False
        signal.pthread_kill(self._ident, signal.SIGTERM)
        return True


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"

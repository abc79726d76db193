"""The watcher: a thread that looks at the store of all ranks while the run itself may wait for another rank."""

from __future__ import annotations

import atexit
import os
import select
import signal
import threading
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress

THREAD_NAME, GUARD_NAME = "lightning_hybrid-watcher", "lightning_hybrid-guard"


_LAST_LOOK = 3.0  # seconds for a look that has not ended when the process does

_hearing: set[int] = set()  # files into which this process writes its signals
_threads: set[threading.Thread] = set()  # threads that may still look, though their watcher is closed


def _wait_for_last_looks() -> None:
    """Wait for threads in the store's C++: if the interpreter ended them there, the process would end by SIGABRT."""
    for thread in tuple(_threads):
        if thread is not threading.current_thread():
            thread.join(_LAST_LOOK)


atexit.register(_wait_for_last_looks)


def _detach_after_fork() -> None:
    """Forget the watchers in a process that was forked: its signals are its own."""
    if _hearing:
        signal.set_wakeup_fd(-1)
        _hearing.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_detach_after_fork)


class Watcher:
    """Calls a function every now and then from a thread, and at once when it is woken.

    A signal that has a handler in Python wakes it too. The handler itself runs in the main thread, once that has left
    the C++ code that it waits in; this thread learns of the signal at once.

    Args:
        look: The function, which gets the numbers of the signals that have come. It must not touch the objects of the
            run: a store that waits for a key is locked, so the thread has a clone of its own.
        interval: Seconds between two calls.
        descriptors: Files that wake the thread when they can be read.
        patience: Seconds that a call may take; ``None`` for any time.
        stuck: Another thread calls this, again and again, while a call takes longer.

    Attributes:
        look: As given; another function may take its place while the thread runs.
    """

    def __init__(
        self,
        look: Callable[[Collection[int]], None],
        interval: float = 0.5,
        descriptors: Callable[[], Collection[int]] = tuple,
        patience: float | None = None,
        stuck: Callable[[], object] = bool,
    ) -> None:
        self.look, self._interval, self._descriptors = look, interval, descriptors
        self._patience, self._stuck = patience, stuck
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()  # of the present threads
        self._hears_signals = False
        self._wake_fd = -1
        self._num_looks = 0  # those that have begun, and those that have ended

    def start(self) -> None:
        """Start the thread, if it does not run."""
        if self._thread is not None:
            return
        self._closed = threading.Event()
        read_fd, self._wake_fd = os.pipe()
        os.set_blocking(self._wake_fd, False)
        self._hear_signals()
        if self._patience is not None:
            guarded = self._closed, self._patience
            threading.Thread(target=self._guard, args=guarded, name=GUARD_NAME, daemon=True).start()
        arguments = read_fd, self._closed
        self._thread = threading.Thread(target=self._run, args=arguments, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def _hear_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        former = signal.set_wakeup_fd(self._wake_fd, warn_on_full_buffer=False)
        self._hears_signals = former == -1
        if self._hears_signals:
            _hearing.add(self._wake_fd)
        else:  # an event loop's
            signal.set_wakeup_fd(former)

    def _run(self, read_fd: int, closed: threading.Event) -> None:
        has_failed = False
        while not closed.is_set():
            poll = select.poll()
            for descriptor in (read_fd, *self._descriptors()):
                poll.register(descriptor, select.POLLIN)
            ready = poll.poll(self._interval * 1000)
            woken = os.read(read_fd, 4096) if any(descriptor == read_fd for descriptor, _ in ready) else b""
            if closed.is_set():
                break
            self._num_looks += 1
            try:
                self.look([number for number in woken if number])
            except Exception:  # the next look may succeed, and no other thread looks
                if not has_failed:
                    traceback.print_exc()
                has_failed = True
            self._num_looks += 1
        os.close(read_fd)
        _threads.discard(threading.current_thread())

    def _guard(self, closed: threading.Event, patience: float) -> None:
        """Count how long one look takes: not by the clock, since all threads may have been stopped."""
        seen, count = 0, 0
        while not closed.wait(self._interval):
            count = count + 1 if self._num_looks % 2 and self._num_looks == seen else 0
            seen = self._num_looks
            if count * self._interval > patience:
                self._stuck()

    def wake(self) -> None:
        """Have the function called at once. A signal handler may call this: it takes no lock."""
        if self._wake_fd >= 0:
            with suppress(OSError):  # full: it has been woken
                os.write(self._wake_fd, b"\0")

    def close(self) -> None:
        """End the threads, and wait for the end of the first one unless it is the calling thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        _threads.add(thread)
        self._closed.set()
        if self._hears_signals and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            _hearing.discard(self._wake_fd)
            self._hears_signals = False
        self.wake()
        wake_fd, self._wake_fd = self._wake_fd, -1
        if thread is not threading.current_thread():
            thread.join(2 * self._interval)
        os.close(wake_fd)

"""The watcher: a thread that reads the store of all ranks, even while the thread of the run waits for another rank.

`StartWatch` makes the watcher of a rank, which calls `RankWatch.look`, and in a run `RunWatch`. The thread of the run
cannot do this itself, because it may be blocked in C++ code, and a process for the watch could not see the stack of the
run. The *guard* is a second thread: it acts if a look is blocked, because the store does not respond.
"""

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


_LAST_LOOK = 3.0  # seconds for a look to end when the process exits

_hearing: set[int] = set()  # descriptors to which this process writes its signals
_threads: set[threading.Thread] = set()  # threads that may still look after their watcher was closed


def _wait_for_last_looks() -> None:
    """Wait for threads that run C++ code of the store.

    If the interpreter ended such a thread at exit, the process would end with SIGABRT.
    """
    for thread in tuple(_threads):
        if thread is not threading.current_thread():
            thread.join(_LAST_LOOK)


atexit.register(_wait_for_last_looks)


def _detach_after_fork() -> None:
    """Forget the watchers in a forked process, which handles its own signals."""
    if _hearing:
        signal.set_wakeup_fd(-1)
        _hearing.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_detach_after_fork)


class Watcher:
    """A thread that calls a function at intervals, and immediately when it is woken.

    A signal with a handler in Python also wakes the thread. The handler runs in the main thread, but only after the
    main thread has left the C++ code in which it waits. The watcher gets the signal immediately.

    Args:
        look: The function. It receives the numbers of the signals since the last call. It must not use objects of the
            run. For example, a client of the store is locked while it waits for a key, so the watcher has its own
            client.
        interval: The seconds between two calls.
        descriptors: Returns file descriptors that wake the thread when they are readable.
        patience: The seconds that a call may take; ``None`` for no limit.
        stuck: Another thread (the guard) calls this at each interval while a call takes longer than `patience`.

    Attributes:
        look: The function. It may be replaced while the thread runs.
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
        self._closed = threading.Event()  # set when the current threads must end
        self._hears_signals = False
        self._wake_fd = -1
        self._num_looks = 0  # grows when a look begins and when it ends

    def start(self) -> None:
        """Start the thread, and the guard if there is a `patience`, unless they are running.

        On the main thread, this process then also writes its signals to the watcher (`signal.set_wakeup_fd`), unless an
        event loop does so.
        """
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
        else:  # the descriptor of an event loop
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
            except Exception:  # the next look may succeed, and no other thread would look
                if not has_failed:
                    traceback.print_exc()
                has_failed = True
            self._num_looks += 1
        os.close(read_fd)
        _threads.discard(threading.current_thread())

    def _guard(self, closed: threading.Event, patience: float) -> None:
        """Call `stuck` while one look takes too long.

        Intervals are counted instead of reading the clock, because all threads of the process may have been stopped.
        """
        seen, count = 0, 0
        while not closed.wait(self._interval):
            count = count + 1 if self._num_looks % 2 and self._num_looks == seen else 0
            seen = self._num_looks
            if count * self._interval > patience:
                self._stuck()

    def wake(self) -> None:
        """Wake the thread. A signal handler may call this, because it takes no lock."""
        if self._wake_fd >= 0:
            with suppress(OSError):  # the pipe is full, so the thread has been woken
                os.write(self._wake_fd, b"\0")

    def close(self) -> None:
        """End the threads. Wait for the watcher's thread for two intervals, unless it is the calling thread."""
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

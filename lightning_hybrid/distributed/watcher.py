"""A thread beside a run: it looks at the store of all ranks while the run itself may wait for another rank."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress

THREAD_NAME = "lightning_hybrid-watcher"


class Watcher:
    """Calls a function every now and then from a thread, and at once when it is woken.

    Args:
        look: What is called. It must not touch what the run uses: a store that waits for a key is locked, so the
            thread has a clone of its own.
        interval: Seconds between two calls.
    """

    def __init__(self, look: Callable[[], None], interval: float = 1.0) -> None:
        self._look, self._interval = look, interval
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._wake_fd = -1

    def start(self) -> None:
        """Start the thread, if it does not run."""
        if self._thread is not None:
            return
        self._is_closed = False
        read_fd, self._wake_fd = os.pipe()
        os.set_blocking(self._wake_fd, False)
        self._thread = threading.Thread(target=self._run, args=(read_fd,), name=THREAD_NAME, daemon=True)
        self._thread.start()

    def _run(self, read_fd: int) -> None:
        while not self._is_closed:
            if select.select([read_fd], [], [], self._interval)[0]:
                os.read(read_fd, 4096)
            if not self._is_closed:
                self._look()
        os.close(read_fd)

    def wake(self) -> None:
        """Have the function called at once. A signal handler may do this: it takes no lock."""
        if self._wake_fd >= 0:
            with suppress(OSError):  # full: it has been woken
                os.write(self._wake_fd, b"\0")

    def close(self) -> None:
        """End the thread, and wait for its end unless it is the one that calls."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._is_closed = True
        self.wake()
        wake_fd, self._wake_fd = self._wake_fd, -1
        if thread is not threading.current_thread():
            thread.join(self._interval)
        os.close(wake_fd)

"""Python's garbage collector, which threads of a run disable temporarily.

`watched_thread` disables the collector while it reads the stack of another thread, because garbage collection there can
crash the process (CPython 3.11). `pipeline_parallel.frame` disables it while it traces a step. Both may do so at the
same time, so a plain `gc.disable` and `gc.enable` are not sufficient.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.RLock()  # reentrant, because a signal handler may interrupt the main thread here
_WERE_ON = list[bool]()  # for each entered context, True if the collector was enabled


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable garbage collection in all threads while entered.

    Contexts of several threads may overlap. The collector is enabled again when the last context ends, if it was
    enabled before the first one.
    """
    with _LOCK:
        _WERE_ON.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _LOCK:
            if _WERE_ON.pop():
                gc.enable()

"""The garbage collector, which threads of a run switch off for a while."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.RLock()  # reentrant: a signal's handler runs wherever the main thread is
_WERE_ON = list[bool]()  # for each context that is entered: whether the collector was on. The first one restores it.


@contextmanager
def without_collector() -> Iterator[None]:
    """Collect no garbage while a thread is inside, in any thread.

    Contexts of several threads may overlap: the collector is on again when the last one ends, if it was on before.
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

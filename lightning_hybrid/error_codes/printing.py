"""Errors that all processes of a node have before they are connected: one process prints them."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import TracebackType

from lightning_hybrid.error_codes.entry import CODE

VARIABLE = "LIGHTNING_HYBRID_TRACEBACK"  # "full" prints what Python prints
PATIENCE = 30.0  # seconds in which a launcher ends the other processes after the first one that fails


def is_printed_here() -> bool:
    """Return whether this process prints an error that all processes of its node have before they are connected.

    The first process of the node does. The others wait for their end: the launcher ends them when the first has ended.
    One that is not ended prints its error too, so that no error is lost which only some processes have.
    """
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0) == 0 or outlives_the_first()


def outlives_the_first() -> bool:
    """Wait for the end of this process after another one has printed an error; return whether none comes."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # of the launcher
    deadline, parent = time.monotonic() + PATIENCE, os.getppid()
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.02)
    return os.getppid() == parent


def print_once_per_node() -> None:
    """Have one process of a node print errors with a code, before the ranks are connected and know who prints them."""
    if sys.excepthook is sys.__excepthook__ and os.environ.get(VARIABLE) != "full":
        sys.excepthook = print_once


def print_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Take the place of `sys.excepthook`: print an error, one with a code in one process of the node."""
    if not CODE.search(str(error)) or is_printed_here():
        sys.__excepthook__(kind, error, trace)

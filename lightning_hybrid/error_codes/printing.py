"""Errors that all processes of a node raise before they are connected: only one process prints them."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import TracebackType

from lightning_hybrid.error_codes.entry import CODE

VARIABLE = "LIGHTNING_HYBRID_TRACEBACK"  # "full" prints the traceback of every process
PATIENCE = 30.0  # seconds that a launcher may take to end the other processes after the first failure


def is_printed_here() -> bool:
    """Return whether this process prints an error that all processes of its node raise before they are connected.

    The first process of the node prints the error. The others wait until the launcher ends them, which happens when
    the first process has ended. A process that is not ended prints its error too, so that an error that only some
    processes raise is not lost.
    """
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0) == 0 or outlives_the_first()


def outlives_the_first() -> bool:
    """Wait for the launcher to end this process after another process has failed; return whether it does not."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # sent by the launcher
    deadline, parent = time.monotonic() + PATIENCE, os.getppid()
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.02)
    return os.getppid() == parent


def print_once_per_node() -> None:
    """Let one process of each node print errors with a code until the ranks are connected and can choose a rank."""
    if sys.excepthook is sys.__excepthook__ and os.environ.get(VARIABLE) != "full":
        sys.excepthook = print_once


def print_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Replace `sys.excepthook`: print an error, but an error with a code only in one process of the node."""
    if not CODE.search(str(error)) or is_printed_here():
        sys.__excepthook__(kind, error, trace)

"""Errors that all ranks raise, errors that only say that another rank has failed, and leaving the process groups."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable

import torch.distributed as dist

from lightning_hybrid.distributed.process_group import abort_groups, has_nccl

_DEADLINE = 10.0  # seconds in which NCCL has let go of its communicators


class WrongUseError(ValueError):
    """The user's code does what cannot work in a pipeline. Becomes a `ValueError` of this text on every rank."""


class PeerFailedError(RuntimeError):
    """Another rank has failed, and has said so in the place of what this one waited for."""


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, which Python prints below its text, and other ranks see too.

    Before Python 3.11, which brought notes, it is added to the text itself if that is a plain one.

    Args:
        error: As it was raised.
        note: The note.
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif len(error.args) == 1 and str(error) == error.args[0]:
        error.args = (f"{error}\n{note}",)
    else:
        error.__dict__["__notes__"] = [*notes_of(error), note]


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an exception."""
    return list(getattr(error, "__notes__", ()))


def close_groups(error: BaseException | None = None, *, end: Callable[[int], object] = os._exit) -> None:
    """Leave every process group without a collective, so that peers that wait for this rank fail at once.

    A gloo group closes its connections when nothing refers to it any more: the package holds groups by weak references,
    and pending work must have been abandoned before.

    NCCL's groups are aborted: to destroy them would be to wait for what peers that are gone never send. Should even
    that not come back, the process ends; so what went wrong is printed first.

    Args:
        error: What is being raised: the local variables of the calls that it came through refer to groups and to work.
        end: Ends the process.
    """
    text = f"{type(error).__name__}: {error}" if error is not None else "another rank has left the run"
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    with contextlib.suppress(Exception):
        if has_nccl():
            print_error(f"[rank {dist.get_rank()}] {text}\nThis rank now aborts its process groups.")
            deadline = threading.Timer(_DEADLINE, end, (1,))
            deadline.daemon = True
            deadline.start()
            try:
                abort_groups()
            finally:
                deadline.cancel()
        dist.destroy_process_group()
    gc.collect()


def print_error(text: str) -> None:
    """Print where errors go, if that is still open: what launched the ranks may have ended."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def is_transport(error: BaseException) -> bool:
    """Whether an error only says that another rank has left."""
    if isinstance(error, (dist.DistError, PeerFailedError)):
        return True
    return isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL" in str(error))

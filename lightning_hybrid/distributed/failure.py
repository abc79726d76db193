"""Errors that all ranks raise, errors that report the failure of another rank, and the closing of process groups.

`distributed.watch.failures` decides when a rank leaves a run, and calls :func:`close_groups`;
`strategy.watch.start_watch` also calls it for NCCL, to wake a rank that waits. The other functions describe errors for
these two, and for code that raises or handles errors on all ranks.
"""

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

_DEADLINE = 10.0  # seconds for NCCL to abort its communicators; then the process ends


class WrongUseError(ValueError):
    """An error about the user's code, model or calls that cannot work in parallel: a pipeline, shards, or a dry run.

    Other ranks raise a `ValueError` with the same text. `trainer.exceptions` prints the text without the package's own
    stack if no code of the user is in the stack.
    """


class PeerFailedError(RuntimeError):
    """An error that another rank has sent instead of the data that this rank waits for."""


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception. Python prints the note below the text, and other ranks get it too.

    Before Python 3.11, exceptions have no notes. There the note is appended to the text if the text is the only
    argument of the exception; otherwise :func:`notes_of` returns it, but Python does not print it.

    Args:
        error: The exception that was raised.
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
    """Close every process group without a collective, so that waiting peers fail at once.

    A gloo group closes its connections when no reference to it is left. Therefore the package holds only weak
    references to groups, and the caller must drop pending work before.

    NCCL groups are aborted, because destroying them would wait for messages that a failed peer never sends. If the
    abort does not return in time, the process ends. So the error is printed before the abort.

    This rank cannot use torch's groups afterwards.

    Args:
        error: The exception that is being raised; ``None`` if another rank has left the run. The frames of its
            traceback are cleared, because their local variables refer to groups and pending work.
        end: Ends the process with an exit code, if NCCL does not abort within :data:`_DEADLINE` seconds.
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
    """Print a text to stderr, unless stderr is closed: the launcher of the ranks may have ended."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def is_transport(error: BaseException) -> bool:
    """Return True if an error only reports that another rank has failed or left."""
    if isinstance(error, (dist.DistError, PeerFailedError)):
        return True
    return isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL" in str(error))

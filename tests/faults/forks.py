"""Ranks that are forked from a process that has imported everything, as if each was an interpreter of its own."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def fork(act: Callable[[], object], output: Path, **environment: str) -> int:
    """Start a process, in a session of its own.

    Args:
        act: What it does.
        output: Where it writes what it prints.
        environment: Variables, beside those of this process.

    Returns:
        Its number.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        _redirect(output)
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        act()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for worker in multiprocessing.active_children():  # as an interpreter ends them
            worker.terminate()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # a full disk also refuses the output; without this, the rank would run the code of its parent
            os._exit(code)


def _redirect(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def tell(directory: Path, rank: int, error: BaseException) -> None:
    """Write down with what a rank has ended; the first that it tells is what counts."""
    story = directory / f"story-{rank}"
    if not story.exists():
        story.write_text(f"{type(error).__name__}: {error}")


def told(directory: Path, rank: int, output: Path) -> str:
    """What a rank has said in the end: what it has told, or printed where its process was ended."""
    story = directory / f"story-{rank}"
    text = story.read_text() if story.exists() else ""
    if not text and output.exists():
        said = re.findall(rf"^\[rank {rank}\] (.*)$", output.read_text(errors="replace"), re.MULTILINE)
        text = "".join(said[-1:])
    return text

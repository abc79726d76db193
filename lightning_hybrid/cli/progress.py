"""Progress bars of commands, on the error stream."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import DownloadColumn, MofNCompleteColumn, Progress, TransferSpeedColumn

_SECONDS_BETWEEN_LINES = 15.0


@contextmanager
def byte_progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """While this is entered, a bar for files that are written stands in the terminal; where nobody watches is none.

    Args:
        name: What stands before the bar.

    Returns:
        What is called with the bytes that were just written, and with those that there are.
    """
    console = Console(stderr=True)
    columns = *Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, advance=done, total=total)


@contextmanager
def count_progress(name: str) -> Iterator[Callable[[str, int, int], None]]:
    """While this is entered, a bar for things that are counted stands in the terminal; elsewhere a line now and then.

    Args:
        name: What stands before the bar at first.

    Returns:
        What is called with the new text before the bar, how many are done, and how many there are.
    """
    console = Console(stderr=True)
    is_watched = console.is_terminal
    columns = *Progress.get_default_columns(), MofNCompleteColumn()
    said = time.monotonic()

    def update(text: str, done: int, total: int) -> None:
        nonlocal said
        if is_watched:
            bar.update(task, description=text, completed=done, total=total)
        elif time.monotonic() - said > _SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            print(f"{text}: {done} of {total}", file=sys.stderr, flush=True)

    with Progress(*columns, console=console, transient=True, disable=not is_watched) as bar:
        task = bar.add_task(name, total=None)
        yield update

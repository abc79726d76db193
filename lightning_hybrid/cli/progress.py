"""Progress bars of commands, on stderr.

The output on stdout can be piped meanwhile. The commands ``consolidate`` and ``export`` show bytes; ``suggest``,
``plan``, ``memory`` and ``check --dry`` show counts. A bar disappears when its context ends.
"""

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
    """Show a progress bar for bytes inside the context, if stderr is a terminal.

    Args:
        name: The text before the bar.

    Yields:
        A function that receives the number of bytes that were just read or written, and the total number of bytes.
    """
    console = Console(stderr=True)
    columns = *Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, advance=done, total=total)


@contextmanager
def count_progress(name: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar for a count inside the context.

    If stderr is not a terminal, updates print a line, at most one every 15 seconds.

    Args:
        name: The first text before the bar.

    Yields:
        A function that receives the new text, the number of finished items, and the total number of items.
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

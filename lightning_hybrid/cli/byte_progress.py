"""A progress bar for files that are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn


@contextmanager
def byte_progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """While this is entered, a bar stands in the terminal; where nobody watches there is none.

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

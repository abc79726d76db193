"""Printing of lines in the terminal of a run, above progress bars instead of inside them.

::

    Epoch 0:  20%|██        | 4/20 [00:01<00:04]      a bar of tqdm is cleared and drawn again
    Epoch 0 ━━━━━━ 4/20 0:00:01                       a live bar of rich has replaced `sys.stderr`

`Run.install` enters :func:`lines_beside_bars` for the whole run. Lightning's log handlers would write to the original
`sys.stderr`, in the middle of a bar.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from tqdm import tqdm

from lightning_hybrid.distributed.mesh import Mesh

_LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric")
_SYNC_ADVICE = "It is recommended to use `self.log("


class _BesideBars:
    """A stream that writes to the current `sys.stderr`, and clears progress bars while it writes."""

    def write(self, text: str) -> int:
        with tqdm.external_write_mode(file=sys.stderr):
            return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


@contextmanager
def lines_beside_bars(mesh: Mesh) -> Iterator[None]:
    """Print warnings and log messages of Lightning and this package on separate lines inside the context.

    Two kinds of warnings are suppressed. Deprecation warnings are printed only by the first rank, because all ranks run
    the same program. Lightning's advice to log with ``sync_dist=True`` is wrong if there is one replica, because then
    the values are equal on all ranks.

    Args:
        mesh: The mesh.
    """
    show, stream = warnings.showwarning, _BesideBars()

    def show_beside_bars(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if issubclass(category, (DeprecationWarning, FutureWarning)) and not mesh.is_first:
            return
        if mesh.num_replicas == 1 and str(message).startswith(_SYNC_ADVICE):
            return
        with tqdm.external_write_mode(file=sys.stderr):
            show(message, category, *args, **kwargs)

    with ExitStack() as undo:
        for handler in _console_handlers():
            undo.callback(handler.setStream, handler.stream)
            handler.setStream(stream)  # type: ignore[arg-type]
        warnings.showwarning = show_beside_bars
        undo.callback(setattr, warnings, "showwarning", show)
        yield


def _console_handlers() -> list[logging.StreamHandler[TextIO]]:
    """Return Lightning's handlers that write to the terminal. Handlers of other classes belong to the user."""
    handlers = [handler for name in _LOGGERS for handler in logging.getLogger(name).handlers]
    return [each for each in handlers if type(each) is logging.StreamHandler and each.stream is sys.__stderr__]

"""The callbacks that the strategy adds to those of the user, for the length of a run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from typing_extensions import Self


class RunCallback(Callback):
    """A callback that belongs to one run: it holds its process groups, and so a copy of it is the callback itself.

    Users copy `trainer.callbacks` to compare their states later.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

"""The base class of callbacks that the strategy adds to a run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from typing_extensions import Self


class RunCallback(Callback):
    """A callback of one run. Copying returns the callback itself, because its process groups cannot be copied.

    Users deep-copy `trainer.callbacks`, for example to compare their states later.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

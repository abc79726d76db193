"""The base class of callbacks that the strategy adds to a run.

`add_callbacks` of `strategy/patches.py` puts them before the user's callbacks when a run starts, and `remove_callbacks`
removes them when the run ends.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from typing_extensions import Self


class RunCallback(Callback):
    """A callback that the Trainer has only during runs. A deep copy of it is the callback itself.

    Users deep-copy `trainer.callbacks`, for example to compare their states later. Process groups, to which these
    callbacks refer, cannot be copied.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

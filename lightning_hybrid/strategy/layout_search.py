"""The interface of the layout search, which `lightning_hybrid.tuning` implements.

`HybridStrategy.setup_environment` calls it if arguments are open. It is an interface of its own, because `tuning`
imports the strategy, see :func:`load_choose_layout`.

A *layout* is a value for each argument that determines how the model is split over the ranks. An argument is *open* if
the user leaves its value to the search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision

from lightning_hybrid.axes import Sizes
from lightning_hybrid.config import Settings


@dataclass(frozen=True)
class ChosenLayout:
    """The result of a layout search.

    Attributes:
        sizes: The number of ranks along each axis.
        arguments: The values of the open arguments that are not sizes, by name.
    """

    sizes: Sizes
    arguments: Mapping[str, Any]


class ChooseLayout(Protocol):
    """A function that chooses the values of open arguments.

    The user has left these arguments to the search, for example by ``"auto"``; see `Settings.searched`.
    """

    def __call__(
        self,
        config: Settings,
        sizes: Mapping[str, Any],
        module: LightningModule,
        device: torch.device,
        precision: Precision,
        num_nodes: int,
    ) -> ChosenLayout:
        """Choose the open arguments, the same on every rank, and log the choice.

        Every rank calls it once, before the device mesh is created.

        Args:
            config: The arguments of `HybridStrategy`, with provisional values of the open ones.
            sizes: The sizes that the user set, by the labels of the axes. A size is a number, or open: a list of
                numbers or ``"auto"``.
            module: The user's module, which has not been parallelized.
            device: The device of this rank.
            precision: The precision plugin.
            num_nodes: The number of nodes.

        Raises:
            ValueError: If no layout fits, or the module's step cannot run on fake tensors; on every rank.
        """


def load_choose_layout() -> ChooseLayout:
    """Import the layout search, and return it."""
    # The search runs training steps on fake tensors, so `tuning` imports the strategy. Therefore the strategy must not
    # import `tuning`, not even inside a function (`tests/test_architecture.py`). A run with a fixed layout does not
    # need it. Only here, and only if an argument is open, the module is loaded by its name.
    choose: ChooseLayout = import_module("lightning_hybrid.tuning.choice").choose_layout
    return choose

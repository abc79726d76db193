"""The interface of the layout search, which `lightning_hybrid.tuning` implements."""

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
        arguments: The values of all other open arguments, by name.
    """

    sizes: Sizes
    arguments: Mapping[str, Any]


class ChooseLayout(Protocol):
    """A function that chooses the values of open arguments."""

    def __call__(
        self,
        config: Settings,
        sizes: Mapping[str, Any],
        module: LightningModule,
        device: torch.device,
        precision: Precision,
        num_nodes: int,
    ) -> ChosenLayout:
        """Choose the open arguments, the same on every rank, and log the choice. Every rank calls it.

        Args:
            config: The arguments of `HybridStrategy`, with provisional values of the open ones.
            sizes: The sizes that the user set, by the labels of the axes. They are numbers if no size is open.
            module: The user's module, which has not been parallelized.
            device: The device of this rank.
            precision: The precision plugin.
            num_nodes: The number of nodes.

        Raises:
            ValueError: If no layout fits, or the module's step cannot run on fake tensors; on every rank.
        """


def load_choose_layout() -> ChooseLayout:
    """Import the layout search, and return it."""
    # The search runs training steps on fake tensors, so it needs the strategy and almost everything below it. It is an
    # application of the core, and the core must not import it: a run with a fixed layout needs none of it. An import
    # statement would make the strategy depend on it, even inside a function. Only here, and only if an argument is
    # open, the module is loaded by its name.
    choose: ChooseLayout = import_module("lightning_hybrid.tuning.choice").choose_layout
    return choose

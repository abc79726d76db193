"""The interface of the modes in which code around the layers is traced, runs one stage's part, or runs in lockstep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


class StepMode(TorchFunctionMode, ABC):
    """A mode that gets every call of the code around the layers: of torch's functions, of units and of leaf modules.

    Attributes:
        is_answering: True while a call of a function is answered, in which torch follows nothing.
    """

    is_answering = False

    @abstractmethod
    def call_unit(self, index: int, unit: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call of a unit.

        Args:
            index: The position of the unit.
            unit: Its `forward`.
            args: The arguments of the call.
            kwargs: The keyword arguments of the call.
        """

    @abstractmethod
    def call_module(self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call of a module around the layers that is one call, because ranks share its parameters.

        Args:
            name: The dotted name of the module.
            module: The module.
            forward: Its `forward`.
            args: The arguments of the call.
            kwargs: The keyword arguments of the call.
        """

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the mode while entered: code that runs is not part of the step."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

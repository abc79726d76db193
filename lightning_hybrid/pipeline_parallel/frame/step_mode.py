"""The interface of the modes that receive the calls of code around the units: to trace, run or synchronize a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


class StepMode(TorchFunctionMode, ABC):
    """A mode that receives each call of the code around the units: of torch functions, units and leaf modules.

    Subclasses are :class:`Discovery`, which traces a step, :class:`Running`, which runs the part of one stage, and
    :class:`Lockstep`.

    Attributes:
        is_answering: True while the mode handles a call of a function; torch then sends no further calls to the mode.
    """

    is_answering = False

    @abstractmethod
    def call_unit(self, index: int, unit: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call of a unit, and return its result.

        Args:
            index: The position of the unit.
            unit: The `forward` of the unit.
            args: The arguments of the call.
            kwargs: The keyword arguments of the call.
        """

    @abstractmethod
    def call_module(self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call of a leaf module, and return its result.

        A leaf module is a module around the layers whose parameters are sharded over tensor-parallel ranks. It is
        handled as a single call.

        Args:
            name: The dotted name of the module.
            module: The module.
            forward: The `forward` of the module.
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

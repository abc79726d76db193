"""The interface of the modes that receive the calls of code around the units: to trace, run or synchronize a step.

A *unit* is a module that runs on exactly one stage, such as a pipelined layer. All other code of the step and of the
model is code *around* the units, and runs on every stage. :class:`FrameCut` enters one mode around each run of the
user's step. A function mode is called above autograd, so a call that a stage does not make leaves no autograd graph. A
dispatch mode is called below autograd, and would also receive a call for each operator inside a function.
"""

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
    :class:`Lockstep`, which runs a step on all stages at once.

    Attributes:
        is_answering: True while the mode handles a call of a function; torch then sends no further calls to the mode.
            :meth:`FrameCut.unfollowed` reads it.
    """

    is_answering = False

    @abstractmethod
    def call_unit(self, index: int, unit: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call of a unit, and return its result.

        Args:
            index: The position of the unit in the list of units.
            unit: The `forward` of the unit; for a pinned module, a function that also takes the parameters and buffers,
                see :func:`call_pinned`.
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
        """Leave the mode while entered, for code that is not part of the step, or whose calls must not be handled."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

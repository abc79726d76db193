"""Modes that route calls of torch functions and operators through a function of the caller.

Code that must see or replace the calls of a step enters such a mode: tracing (`pipeline_parallel.frame`), dry runs
(`tuning`), trials of layers (`tensor_parallel`) and rehearsals (`trainer.losses`). A torch *function* is a call of
Python, such as `F.linear`, before autograd. An *operator* is a call of C++ below autograd, such as `aten.addmm`. With
these classes, a caller needs a function instead of a subclass for each mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from lightning_hybrid.torch_internals import TorchDispatchMode

#: Receives a torch function or operator, its arguments and its keyword arguments, and returns the result of the call.
Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class FunctionMode(TorchFunctionMode):
    """A mode that passes each call of a torch function to another function while entered.

    The other function makes calls of its own directly, not through the mode.

    Args:
        call: The other function.
    """

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass a call to the other function."""
        return self._call(func, args, kwargs or {})


if TorchDispatchMode is None:  # only an `nn.Sequential` can be split, and operations are not counted
    OperatorMode: Any = None
else:

    class OperatorMode(TorchDispatchMode):  # type: ignore[no-redef, misc]
        """A mode that passes each call of a torch operator, below autograd, to another function while entered.

        Args:
            call: The other function.
        """

        def __init__(self, call: Call) -> None:
            super().__init__()
            self._call = call

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Pass a call to the other function."""
            return self._call(func, args, kwargs or {})

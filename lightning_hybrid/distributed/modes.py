"""Modes that route calls of torch functions and operators through a function of the caller."""

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
        """Pass a call on."""
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
            """Pass a call on."""
            return self._call(func, args, kwargs or {})

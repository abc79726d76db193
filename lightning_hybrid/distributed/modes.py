"""Functions and operators of torch that are called through another function, while a mode is entered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from lightning_hybrid.torch_internals import TorchDispatchMode

#: Makes a call: gets a function or an operator of torch, its arguments and its keyword arguments, and returns a result.
Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class FunctionMode(TorchFunctionMode):
    """Calls functions of torch through another function while entered, which itself calls them directly.

    Args:
        call: Makes the calls.
    """

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a call."""
        return self._call(func, args, kwargs or {})


if TorchDispatchMode is None:  # then nothing is divided but a plain chain, and nothing is counted
    OperatorMode: Any = None
else:

    class OperatorMode(TorchDispatchMode):  # type: ignore[no-redef, misc]
        """Calls operators of torch, below autograd, through another function while entered.

        Args:
            call: Makes the calls.
        """

        def __init__(self, call: Call) -> None:
            super().__init__()
            self._call = call

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Make a call."""
            return self._call(func, args, kwargs or {})

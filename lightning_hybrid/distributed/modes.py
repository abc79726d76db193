"""Functions and operators of torch that are called through another function, while a mode is entered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch.overrides import TorchFunctionMode

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


TorchDispatchMode: Any
OperatorMode: Any
#: Lets calls pass by all modes of operators while entered.
without_modes: Any
try:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as without_modes

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

except ImportError:  # then nothing is divided but a plain chain, and nothing is counted
    TorchDispatchMode, OperatorMode, without_modes = None, None, nullcontext

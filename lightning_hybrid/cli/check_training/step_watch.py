"""Where a step computes in float32, and where it draws random numbers."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class StepWatch(TorchFunctionMode):
    """Finds the first call that makes a narrower tensor of one in float64, and the first that draws random numbers.

    Attributes:
        float32: The file and line of the one; ``None`` if there was none.
        draws: Likewise of the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.float32: str | None = None
        self.draws: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.default_generator.get_state()
        result = func(*args, **(kwargs or {}))
        if self.draws is None and not torch.equal(torch.default_generator.get_state(), before):
            self.draws = f"at {_caller()}"
        is_narrow = isinstance(result, Tensor) and result.dtype in _NARROW
        if self.float32 is None and is_narrow and any(getattr(each, "dtype", None) == torch.float64 for each in args):
            self.float32 = _caller()
        return result


def _caller() -> str:
    """The line that called a function of torch."""
    inside = {str(Path(torch.__file__).parent), __file__}
    frames = (frame for frame in reversed(traceback.extract_stack()) if not frame.filename.startswith(tuple(inside)))
    frame = next(frames)
    return f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"

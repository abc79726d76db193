"""Where a step computes in float32, and where it draws random numbers."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.distributed import modes

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class StepWatch:
    """Finds the first call that makes a narrower tensor of one in float64, and the first that draws random numbers.

    Calls are looked at in a :class:`~lightning_hybrid.distributed.modes.FunctionMode` with it.

    Attributes:
        float32: The file and line of the one; ``None`` if there was none.
        draws: Likewise of the other.
    """

    def __init__(self) -> None:
        self.float32: str | None = None
        self.draws: str | None = None

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a call, and look at it."""
        before = torch.default_generator.get_state()
        result = func(*args, **kwargs)
        if self.draws is None and not torch.equal(torch.default_generator.get_state(), before):
            self.draws = f"at {_caller()}"
        is_narrow = isinstance(result, Tensor) and result.dtype in _NARROW
        if self.float32 is None and is_narrow and any(getattr(each, "dtype", None) == torch.float64 for each in args):
            self.float32 = _caller()
        return result


def _caller() -> str:
    """The line that called a function of torch."""
    inside = {str(Path(torch.__file__).parent), modes.__file__, __file__}
    frames = (frame for frame in reversed(traceback.extract_stack()) if not frame.filename.startswith(tuple(inside)))
    frame = next(frames)
    return f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"

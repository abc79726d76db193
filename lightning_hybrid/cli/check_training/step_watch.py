"""Detection of float32 computations and random numbers in a step.

In a check, the run in one process watches its first batch. A float32 computation in a float64 training explains
differences of about 1e-7, and a random number explains any difference; both need the line of the user's code that
causes them, so calls are watched instead of results.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.distributed import modes

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class StepWatch:
    """A search for the first call that returns a narrower dtype for a float64 tensor, and the first random call.

    It is called for each torch function inside a :class:`~lightning_hybrid.distributed.modes.FunctionMode`. It sees
    random numbers from torch's default generator of the CPU.

    Attributes:
        float32: The file and line of the first narrowing call; ``None`` if there was none.
        draws: ``"at "``, and the file and line of the first random call; ``None`` if there was none.
    """

    def __init__(self) -> None:
        self.float32: str | None = None
        self.draws: str | None = None

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and check its result and the random state."""
        before = torch.default_generator.get_state()
        result = func(*args, **kwargs)
        if self.draws is None and not torch.equal(torch.default_generator.get_state(), before):
            self.draws = f"at {_caller()}"
        is_narrow = isinstance(result, Tensor) and result.dtype in _NARROW
        if self.float32 is None and is_narrow and any(getattr(each, "dtype", None) == torch.float64 for each in args):
            self.float32 = _caller()
        return result


def _caller() -> str:
    """Return the line of the user's code that called a function of torch."""
    inside = {str(Path(torch.__file__).parent), modes.__file__, __file__}
    frames = (frame for frame in reversed(traceback.extract_stack()) if not frame.filename.startswith(tuple(inside)))
    frame = next(frames)
    return f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"

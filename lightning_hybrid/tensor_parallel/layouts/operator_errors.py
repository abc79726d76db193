"""Explanations of errors about operators that cannot compute with DTensors: operator, layouts and remedy.

The code of a module runs on DTensors if the plan gives layouts to its parameters, or if it calls `strategy.distribute`.
torch supports only some operators, and its errors name neither the layouts nor the plan. `StepContext.guard` (through
`shape_errors`) and the callback of `trainer.exceptions`, for code outside steps, call :func:`explain_operator_error` on
the rank that raised the error.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType

import torch
from torch.distributed.tensor import DTensor

from lightning_hybrid.tensor_parallel.layouts.layout import layout_text

#: Phrases of torch for an operator without a sharding strategy, for an operator without one because its shapes depend
#: on values, and for a call with plain tensors and DTensors.
_NO_STRATEGY = re.compile(r"Operator (\S+) does not have a sharding strategy|^(aten\S+)\s+Sharding propagation failed")
_MIXED = re.compile(r"(\S+) got mixed torch\.Tensor and DTensor")
_PLAIN = (
    "Compute with plain tensors at this point: `x.full_tensor()` returns the full tensor on each rank, `x.to_local()`"
    " returns the local shard, and `strategy.distribute(result, layout)` shards the result. If tensor_parallel_plan"
    " shards parameters of this module, for example with 'S(0)', replicate them with 'B'."
)
_ALIKE = (
    "Distribute the plain tensors over the same axes too, for example with `strategy.distribute(x, 'B')`, or convert"
    " the DTensors to plain tensors with `x.full_tensor()`."
)
_TORCH = str(Path(torch.__file__).parent)


def explain_operator_error(error: BaseException) -> bool:
    """Add the layouts of the operands and the remedy to an error of torch about an operator on DTensors.

    Args:
        error: The error, whose text is changed in the first call only.

    Returns:
        True if the error is about an operator on DTensors.
    """
    before = str(error)
    unknown, mixed = _NO_STRATEGY.search(before), _MIXED.search(before)
    if not isinstance(error, RuntimeError) or not (unknown or mixed):  # a NotImplementedError is a RuntimeError
        return False
    if _PLAIN in before or _ALIKE in before:
        return True
    layouts = " and ".join(dict.fromkeys(map(layout_text, _operands(error.__traceback__))))
    here = f" (here: {layouts})" if layouts else ""
    if unknown:
        name = unknown[1] or unknown[2]
        text = f"Torch has no rule to compute {name} on DTensors{here}. {_PLAIN} [LH525]"
    else:
        assert mixed is not None
        text = f"{mixed[1]} received both DTensors{here} and plain tensors. {_ALIKE} [LH526]"
    error.args = (f"{before.rstrip()}\n{text}", *error.args[1:])
    return True


def _operands(traceback: TracebackType | None) -> list[DTensor]:
    """Return the DTensors in the innermost frame of an error that has any, up to the first frame outside torch."""
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        values = list(frame.f_locals.values())
        values += [each for value in values if isinstance(value, (list, tuple)) for each in value]
        found = [value for value in values if isinstance(value, DTensor)]
        if found or not frame.f_code.co_filename.startswith(_TORCH):
            return found
    return []

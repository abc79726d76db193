"""Detection of steps that return ``None``, in the code of `training_step` before it runs.

`TrainingStep` calls :func:`may_return_none` when a run begins. Only the last stage sees that a step returns ``None``,
but the other stages must know before the first batch that messages between stages can be empty.
"""

from __future__ import annotations

import dis
import inspect
from types import FunctionType
from typing import Any

from lightning.pytorch import LightningModule


def may_return_none(kind: type[Any]) -> bool:
    """Return True if the `training_step` of a class has a ``return None`` statement, or an end without a value.

    A ``None`` that comes from a called function or from a variable is not found.

    Args:
        kind: The class of the user's module.
    """
    steps = [vars(base).get("training_step") for base in kind.__mro__ if base is not LightningModule]
    return any(_returns_none(inspect.unwrap(step)) for step in steps if step is not None)


def _returns_none(function: Any) -> bool:
    if not isinstance(function, FunctionType):
        return False
    before = None
    for instruction in dis.get_instructions(function):
        is_constant = before is not None and before.opname == "LOAD_CONST" and before.argval is None
        if instruction.opname == "RETURN_CONST" and instruction.argval is None:  # in Python 3.12 and 3.13
            return True
        if instruction.opname == "RETURN_VALUE" and is_constant:
            return True
        before = instruction
    return False

"""Errors about shapes in code between divided layers: which entry of the plan is missing."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any

from torch import nn

from lightning_hybrid.distributed.module_names import pattern_of
from lightning_hybrid.tensor_parallel.layers import (
    ColumnParallelLinear,
    DividedNumbers,
    NarrowInput,
    ParallelLayer,
    reads_width,
)

#: How torch, and Python of what `split` gives, say that shapes do not go together.
_ABOUT_SHAPES = re.compile(
    r"is invalid for input of size|shapes cannot be multiplied|must match the size of tensor|size mismatch"
    r"|Given normalized_shape|The expanded size|shape mismatch|incompatible (shapes|dimensions)|values to unpack"
)
_MOST = 4  # names in a text


def explain_shape_error(error: Exception, module: nn.Module) -> None:
    """Add to an error of torch about shapes which entry of the plan may be missing, where layers are divided.

    The forward that it comes from has divided layers in it, and computes with what they return: with a part of the
    heads, where the code knows how many there are in all, or in a layer that expects all features::

        q, k, v: colwise    a half each --> view(..., num_heads, ...)    lacks: attention: divide:num_heads
        qkv: colwise        a half each --> split(x.shape[-1])           lacks: attention: narrow_input:qkv
        up: colwise         a half      --> down                         lacks: down: rowwise

    Args:
        error: As it was raised; its text is changed.
        module: The user's module.
    """
    if not (isinstance(error, (RuntimeError, ValueError)) and _ABOUT_SHAPES.search(str(error))):
        return
    modules = _forwards(error.__traceback__)
    number = next((n for n in reversed(range(len(modules))) if _computes_with_shards(modules[n])), None)
    if number is None:
        return
    holder, inner = modules[number], modules[number + 1 :]
    names = {id(part): name for name, part in module.named_modules()}
    below = _divided_in(holder)
    children = set(map(id, holder.children()))
    divided = [layer for layer in below if id(layer) in children] or below
    numbers = [name for name, value in vars(holder).items() if _may_count(value, below[0])]
    numbers = list(holder.divided) if isinstance(holder, DividedNumbers) else numbers
    if inner and isinstance(inner[0], nn.Linear):
        missing = f"{pattern_of(names.get(id(inner[0]), '?'))!r}: 'rowwise'"
    elif numbers and not inner:
        narrow = f" + narrow_input:{','.join(_takers(holder))}" if reads_width(holder) and _takers(holder) else ""
        missing = f"{pattern_of(names.get(id(holder), '?'))!r}: 'divide:{','.join(numbers[:_MOST])}{narrow}'"
    else:
        missing = f"{pattern_of(names.get(id(divided[-1]), '?'))!r}: 'colwise_gather_output'"
    listed = ", ".join(repr(names.get(id(layer), "?")) for layer in divided[:_MOST])
    listed += " and others" if len(divided) > _MOST else ""
    text = (
        f"{error}\nThis is in {(names.get(id(holder)) or type(holder).__name__)!r}, in which tensor_parallel_plan"
        f" divides {listed}: a rank has a part of what such layers return, unless their style makes it whole. If the"
        f" plan lacks an entry, it may be {missing}."
    )
    error.args = (text, *error.args[1:])


def _forwards(traceback: TracebackType | None) -> list[nn.Module]:
    """The modules whose forward an error came through, from the outermost to the innermost."""
    found: list[nn.Module] = []
    while traceback is not None:
        frame = traceback.tb_frame
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module) and all(module is not each for each in found):
            found.append(module)
        traceback = traceback.tb_next
    return found


def _computes_with_shards(module: nn.Module) -> bool:
    """Whether divided layers are below it; one that is divided itself may still lack that its input is narrowed."""
    layer: Any = module
    if isinstance(layer, ParallelLayer):
        return isinstance(layer, DividedNumbers) and not isinstance(layer, NarrowInput) and reads_width(module)
    return bool(_divided_in(module))


def _divided_in(module: nn.Module) -> list[ParallelLayer]:
    """The divided layers below a module."""
    return [part for part in module.modules() if isinstance(part, ParallelLayer) and part is not module]


def _takers(module: nn.Module) -> list[str]:
    """The layers that take its input and give shards."""
    return [name for name, part in module.named_modules() if isinstance(part, ColumnParallelLinear)]


def _may_count(value: object, layer: ParallelLayer) -> bool:
    """Whether an attribute may be the number of something that ranks share, such as heads."""
    size = layer.tensor_group.size
    return isinstance(value, int) and not isinstance(value, bool) and value >= size and value % size == 0

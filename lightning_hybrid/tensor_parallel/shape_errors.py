"""Explanations of shape errors in the code around parallel layers: the entry that the plan may lack.

If a user's plan shards a layer but not the code around it, torch raises an error such as "shape '[2, 8, 4, 16]' is
invalid for input of size 512", which does not mention tensor parallelism. `StepContext.guard` calls
:func:`explain_shape_error` with each error of a step, on the rank that raised it. A check before the run is not
possible, because only the code of `forward` determines the shapes.

Terms: a *column-wise* layer returns a shard of its output features, and a *row-wise* layer takes a shard of its input
features. The *holder* is the innermost module whose `forward` raised the error and that contains parallel layers. A
tensor is *whole* if it has all features, and a *part* if it has one rank's shard of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, Literal

from torch import nn

from lightning_hybrid.distributed.module_names import pattern_of
from lightning_hybrid.tensor_parallel.auto_plan.blocks import ROW_NAMES
from lightning_hybrid.tensor_parallel.auto_plan.forward_code import (
    READ_WIDTHS_BEHIND,
    InputUse,
    attributes_read,
    input_use,
)
from lightning_hybrid.tensor_parallel.auto_plan.heads import count_heads, undivided_heads
from lightning_hybrid.tensor_parallel.layers import (
    ColumnParallelLinear,
    DividedNumbers,
    NarrowInput,
    ParallelLayer,
    RowParallelLinear,
)
from lightning_hybrid.tensor_parallel.layouts.operator_errors import explain_operator_error

#: Phrases of torch, and of Python about the result of `split`, for shapes that do not match.
_ABOUT_SHAPES = re.compile(
    r"is invalid for input of size|shapes cannot be multiplied|must match the size of tensor|size mismatch"
    r"|Given normalized_shape|The expanded size|shape mismatch|incompatible (shapes|dimensions)|values to unpack"
)
_MOST = 4  # names in a message
#: Names of integer attributes of one head, which are the same on all ranks.
_PER_HEAD = re.compile(r"head_?(dim|size|width)|(dim|size|width|d)_?head|^d_?[hkqv]$|^hd$")
#: The tensor that does not match: a rank's shard of the features, a full tensor, or one of each.
_Misfit = Literal["part", "whole", "both"]


def explain_shape_error(error: Exception, module: nn.Module) -> None:
    """Add the plan entry that may be missing to the text of a shape error of torch. Other errors are not changed.

    An error about an operator on DTensors is explained by :func:`explain_operator_error`.

    The `forward` that raised the error contains parallel layers, and computes with their outputs. The outputs have a
    rank's heads, but the code knows the number of all heads, or passes the outputs to a layer that expects all
    features::

        q, k, v: colwise    1/T each --> view(..., num_heads, ...)    lacks: attention: divide:num_heads
        qkv: colwise        1/T each --> split(x.shape[-1])           lacks: attention: narrow_input:qkv
        up: colwise         1/T      --> down                         lacks: down: rowwise
        gate: colwise       1/T      --> gate(x) * up(x)              lacks: up: colwise

    Args:
        error: The error, whose text is changed.
        module: The user's module, for the names of its submodules.
    """
    if explain_operator_error(error):
        return
    if not (isinstance(error, (RuntimeError, ValueError)) and _ABOUT_SHAPES.search(str(error))):
        return
    modules = _forwards(error.__traceback__)
    number = next((n for n in reversed(range(len(modules))) if _divided_in(modules[n])), None)
    if number is None:
        return
    holder, called = modules[number], next(iter(modules[number + 1 :]), None)
    names = {id(part): name for name, part in module.named_modules()}
    below = _divided_in(holder)
    children = set(map(id, holder.children()))
    divided = [layer for layer in below if id(layer) in children] or below
    listed = ", ".join(repr(names.get(id(layer), "?")) for layer in divided[:_MOST])
    listed += " and other layers" if len(divided) > _MOST else ""
    text = (
        f"{error}\nThis error occurred in {(names.get(id(holder)) or type(holder).__name__)!r}, where"
        f" tensor_parallel_plan shards {listed}. Each rank has only a shard of the outputs of these layers, unless"
        " their style gathers the outputs."
    )
    group = below[0].tensor_group
    if hint := group.shape_hint():
        error.args = (text + hint, *error.args[1:])
        return
    place = _Place(holder, called, names, _misfit(str(error), group.size))
    narrow = next((each for each in reversed(modules[: number + 1]) if isinstance(each, NarrowInput)), None)
    is_at_fault = narrow is not None and _input_use(narrow).is_used_otherwise
    if narrow is not None:
        text += _about_narrow_input(narrow, pattern_of(names.get(id(narrow), "?")))
    missing = {} if is_at_fault else place.missing_entries()
    if missing:
        entries = " and ".join(f"{name!r}: {style!r}" for name, style in missing.items())
        text += f" The plan may lack the {'entries' if len(missing) > 1 else 'entry'} {entries}."
    if narrow is None and place.reads_whole_width and not isinstance(called, nn.Linear):
        text += (
            " The code reads the full width of its input, and also uses the input outside sharded layers,"
            f" so the style 'narrow_input' would be wrong. To fix this, {READ_WIDTHS_BEHIND}."
        )
    error.args = (text, *error.args[1:])


def _about_narrow_input(module: NarrowInput, pattern: str) -> str:
    """Return the rules for the code of a module with the style `narrow_input`."""
    takers = ",".join(module.takers)
    return (
        f" The plan contains {pattern!r}: 'narrow_input:{takers}', so this code receives an input that has the width of"
        " a shard and contains only NaNs. This code may only read the shape of the input and pass the input to"
        f" {takers}. If the code uses the input in another way, such as in a norm or a residual connection, remove"
        f" 'narrow_input' from the plan, and {READ_WIDTHS_BEHIND}."
    )


@dataclass(frozen=True)
class _Place:
    """The place where a shape does not match.

    Attributes:
        holder: The innermost module with parallel layers in it whose `forward` raised the error.
        called: The module that this `forward` called; ``None`` if its own code raised the error.
        names: The names of all modules, by their `id()`.
        misfit: The kind of tensor that does not match, as :data:`_Misfit`; ``None`` if it is unknown.
    """

    holder: nn.Module
    called: nn.Module | None
    names: dict[int, str]
    misfit: _Misfit | None

    @cached_property
    def columns(self) -> list[Any]:
        """The column-wise layers inside the holder whose outputs are not gathered."""
        return [each for each in _columns(self.holder).values() if not each.gather_output]

    @property
    def own_columns(self) -> list[Any]:
        """The layers in `columns` that are children of the holder, so that its code has their outputs."""
        children = set(map(id, self.holder.children()))
        return [layer for layer in self.columns if id(layer) in children]

    @property
    def reads_whole_width(self) -> bool:
        """True if the code applies the full width of its input to a shard, and `narrow_input` would be wrong."""
        use = _input_use(self.holder)
        return self.misfit != "whole" and bool(self.own_columns) and use.reads_width and not use.can_be_narrow

    def missing_entries(self) -> dict[str, str]:
        """Return the entries that the plan may lack, or may have with another style: styles by pattern of names."""
        called: Any = self.called
        if isinstance(called, nn.Linear):
            return self._around(called)
        if self.misfit in ("whole", "both"):
            alike = {_features(column) for column in self.columns}
            makers = [layer for layer in self._whole_layers() if _features(layer) in alike]
            if makers:
                return self._entries(makers, "colwise")
        around = self._around_the_code() if self.misfit != "whole" else {}
        if around or (called is None and self.reads_whole_width):
            return around
        return self._entries(self.own_columns[-1:], "colwise_gather_output")

    def _around(self, called: Any) -> dict[str, str]:
        """Return the entries for a linear layer whose input does not match."""
        is_row = isinstance(called, RowParallelLinear)
        if self.misfit == "part" and not is_row:
            return self._entries([called], "rowwise")
        if self.misfit == "whole" and is_row:
            makers = [layer for layer in self._whole_layers() if _features(layer)[1] == _features(called)[0]]
            return self._entries(makers or [called], "colwise" if makers else "rowwise_split_input")
        return {}

    def _around_the_code(self) -> dict[str, str]:
        """Return the entries for code that computes with numbers of all heads, or with the full input width."""
        holder: Any = self.holder
        divided = holder.divided if isinstance(holder, DividedNumbers) else ()
        numbers = [name for name in self._numbers() if name not in divided]
        use = _input_use(holder)
        is_to_narrow = use.can_be_narrow and not isinstance(holder, NarrowInput)
        styles = [f"divide:{','.join((*divided, *numbers)[:_MOST])}"] if divided or numbers else []
        styles += [f"narrow_input:{','.join(use.takers)}"] if is_to_narrow else []
        return self._entries([holder], " + ".join(styles)) if numbers or is_to_narrow else {}

    def _numbers(self) -> list[str]:
        """Return the integer attributes to divide: numbers of heads, and widths of more than one head."""
        if not self.columns:
            return []
        size = self.columns[0].tensor_group.size
        heads, read = count_heads(self.holder), attributes_read(self.holder)
        if self.called is not None:
            return [*undivided_heads(self.holder)]
        widths = {
            _features(layer)[0 if isinstance(layer, RowParallelLinear) else 1] for layer in _divided_in(self.holder)
        }
        found = [
            name
            for name, value in vars(self.holder).items()
            if type(value) is int and value >= size and value % size == 0 and not _PER_HEAD.search(name)
            if name in heads or not heads or value in widths
            if read is None or name in read
        ]
        return sorted(found, key=lambda name: name not in heads)

    def _whole_layers(self) -> Iterator[nn.Module]:
        """Yield unsharded linear layers next to parallel layers, except output layers of a block."""
        owners = {name.rpartition(".")[0] for name, part in self._parts() if isinstance(part, ParallelLayer)}
        for name, part in self._parts():
            owner, _, leaf = name.rpartition(".")
            is_linear = isinstance(part, nn.Linear) and not isinstance(part, ParallelLayer)
            if is_linear and owner in owners and leaf not in ROW_NAMES:
                yield part

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, part) for name, part in self.holder.named_modules() if name)

    def _entries(self, layers: Iterable[nn.Module], style: str) -> dict[str, str]:
        return {pattern_of(self.names.get(id(layer), "?")): style for layer in layers}


def _misfit(text: str, size: int) -> _Misfit | None:
    """Return the kind of tensor that an error is about, or ``None``.

    It is known if one size in the text is `size` times another one, or if too few values were unpacked.

    Args:
        text: The text of the error.
        size: The number of tensor-parallel ranks.
    """
    found: tuple[int, int] | None = None
    if match := re.search(r"shape '\[([-\d, ]+)\]' is invalid for input of size (\d+)", text):
        wanted = [int(number) for number in match[1].split(",")]
        found = None if -1 in wanted else (int(match[2]), math.prod(wanted))
    elif match := re.search(r"\(\d+x(\d+) and (\d+)x\d+\)", text):
        found = int(match[1]), int(match[2])
    elif match := re.search(r"normalized_shape=\[(?:.*, )?(\d+)\].*size ?\[(?:.*, )?(\d+)\]", text):
        found = int(match[2]), int(match[1])
    elif match := re.search(r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\)", text):
        one, other = sorted(map(int, match.groups()))
        return "both" if one * size == other else None
    elif "not enough values to unpack" in text:
        return "part"
    if found is None:
        return None
    given, expected = found
    return "part" if given * size == expected else "whole" if given == expected * size else None


def _forwards(traceback: TracebackType | None) -> list[nn.Module]:
    """Return the modules whose `forward` an error came through, from the outermost to the innermost."""
    found: list[nn.Module] = []
    while traceback is not None:
        frame = traceback.tb_frame
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module) and all(module is not each for each in found):
            found.append(module)
        traceback = traceback.tb_next
    return found


def _divided_in(module: nn.Module) -> list[ParallelLayer]:
    """Return the parallel layers below a module."""
    return [part for part in module.modules() if isinstance(part, ParallelLayer) and part is not module]


def _columns(module: nn.Module) -> dict[str, Any]:
    """Return the column-wise layers in a module, by path."""
    return {name: part for name, part in module.named_modules() if isinstance(part, ColumnParallelLinear)}


def _input_use(module: nn.Module) -> InputUse:
    return input_use(module, [*_columns(module)])


def _features(layer: Any) -> tuple[int, int]:
    """Return the numbers of input and output features of a full linear layer."""
    return getattr(layer, "in_features", 0), getattr(layer, "out_features", 0)

"""Errors about shapes in code between divided layers: which entry of the plan is missing."""

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

#: How torch, and Python of what `split` gives, say that shapes do not go together.
_ABOUT_SHAPES = re.compile(
    r"is invalid for input of size|shapes cannot be multiplied|must match the size of tensor|size mismatch"
    r"|Given normalized_shape|The expanded size|shape mismatch|incompatible (shapes|dimensions)|values to unpack"
)
_MOST = 4  # names in a text
#: Integers of one head, which are the same on all ranks.
_PER_HEAD = re.compile(r"head_?(dim|size|width)|(dim|size|width|d)_?head|^d_?[hkqv]$|^hd$")
#: Which tensor does not go with the rest: one with a rank's part of the features, a whole one, or one of each.
_Misfit = Literal["part", "whole", "both"]


def explain_shape_error(error: Exception, module: nn.Module) -> None:
    """Add to an error of torch about shapes which entry of the plan may be missing, where layers are divided.

    One about operators on tensors in layouts is explained as :func:`explain_operator_error` does it.

    The forward that it comes from has divided layers in it, and computes with what they return: with a part of the
    heads, where the code knows how many there are in all, or in a layer that expects all features::

        q, k, v: colwise    a half each --> view(..., num_heads, ...)    lacks: attention: divide:num_heads
        qkv: colwise        a half each --> split(x.shape[-1])           lacks: attention: narrow_input:qkv
        up: colwise         a half      --> down                         lacks: down: rowwise
        gate: colwise       a half      --> gate(x) * up(x)              lacks: up: colwise

    Args:
        error: As it was raised; its text is changed.
        module: The user's module.
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
    """What a module with this style may do with its input."""
    takers = ",".join(module.takers)
    return (
        f" The plan contains {pattern!r}: 'narrow_input:{takers}', so this code receives an input that has the width of"
        " a shard and contains only NaNs. This code may only read the shape of the input and pass the input to"
        f" {takers}. If the code uses the input in another way, such as in a norm or a residual connection, remove"
        f" 'narrow_input' from the plan, and {READ_WIDTHS_BEHIND}."
    )


@dataclass(frozen=True)
class _Place:
    """Where a shape does not fit.

    Attributes:
        holder: The module in whose `forward` it is.
        called: The module that this calls there; ``None`` if it is in its own code.
        names: The names of all modules, by their identities.
        misfit: What does not fit; ``None`` if that is not known.
    """

    holder: nn.Module
    called: nn.Module | None
    names: dict[int, str]
    misfit: _Misfit | None

    @cached_property
    def columns(self) -> list[Any]:
        """The layers below that return a part."""
        return [each for each in _columns(self.holder).values() if not each.gather_output]

    @property
    def own_columns(self) -> list[Any]:
        """Those that the code of the module itself has the outputs of."""
        children = set(map(id, self.holder.children()))
        return [layer for layer in self.columns if id(layer) in children]

    @property
    def reads_whole_width(self) -> bool:
        """Whether the code takes the width of a whole input for that of a part, and the input cannot be narrowed."""
        use = _input_use(self.holder)
        return self.misfit != "whole" and bool(self.own_columns) and use.reads_width and not use.can_be_narrow

    def missing_entries(self) -> dict[str, str]:
        """What the plan may lack, or have another style for; nothing that it has."""
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
        """For a linear layer whose input does not fit."""
        is_row = isinstance(called, RowParallelLinear)
        if self.misfit == "part" and not is_row:
            return self._entries([called], "rowwise")
        if self.misfit == "whole" and is_row:
            makers = [layer for layer in self._whole_layers() if _features(layer)[1] == _features(called)[0]]
            return self._entries(makers or [called], "colwise" if makers else "rowwise_split_input")
        return {}

    def _around_the_code(self) -> dict[str, str]:
        """For code that computes with numbers of all heads, or with the width of a whole input."""
        holder: Any = self.holder
        divided = holder.divided if isinstance(holder, DividedNumbers) else ()
        numbers = [name for name in self._numbers() if name not in divided]
        use = _input_use(holder)
        is_to_narrow = use.can_be_narrow and not isinstance(holder, NarrowInput)
        styles = [f"divide:{','.join((*divided, *numbers)[:_MOST])}"] if divided or numbers else []
        styles += [f"narrow_input:{','.join(use.takers)}"] if is_to_narrow else []
        return self._entries([holder], " + ".join(styles)) if numbers or is_to_narrow else {}

    def _numbers(self) -> list[str]:
        """The integer attributes that may have to be divided: of heads, and of widths; not those of one head."""
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
        """Linear layers beside divided ones that are whole, and are not such as lead out of a block."""
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
    """What an error says that does not fit, where one number is as many times another as there are ranks."""
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
    """The modules whose forward an error came through, from the outermost to the innermost."""
    found: list[nn.Module] = []
    while traceback is not None:
        frame = traceback.tb_frame
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module) and all(module is not each for each in found):
            found.append(module)
        traceback = traceback.tb_next
    return found


def _divided_in(module: nn.Module) -> list[ParallelLayer]:
    """The divided layers below a module."""
    return [part for part in module.modules() if isinstance(part, ParallelLayer) and part is not module]


def _columns(module: nn.Module) -> dict[str, Any]:
    """The layers below that are divided by their output features."""
    return {name: part for name, part in module.named_modules() if isinstance(part, ColumnParallelLinear)}


def _input_use(module: nn.Module) -> InputUse:
    return input_use(module, [*_columns(module)])


def _features(layer: Any) -> tuple[int, int]:
    """Of the input and of the output of a whole linear layer."""
    return getattr(layer, "in_features", 0), getattr(layer, "out_features", 0)

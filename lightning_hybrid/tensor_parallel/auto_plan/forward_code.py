"""What the code of a block reads, and what it does with its input: seen in its source, without running it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_hybrid.tensor_parallel.layers import original_class

#: What to do where the width of the input is read, and the input cannot be narrowed; as the rest of a sentence.
READ_WIDTHS_BEHIND = (
    "read widths in `forward` from the outputs of the sharded layers (`.view(b, t, self.num_heads, -1)`,"
    " `.reshape(b, t, -1)`, `.flatten(2)`), or move the attention into a separate module"
)
#: What can be asked of an input that has the width of a shard, and no values.
_HARMLESS = {"shape", "size", "dim", "ndim", "device", "dtype", "is_cuda", "new_zeros", "new_ones", "new_full"}


@dataclass(frozen=True)
class InputUse:
    """What a `forward` does with its first argument.

    Attributes:
        reads_width: Whether it uses how wide that is, as by ``B, N, C = x.shape``.
        takers: Which of some layers it gives the input itself.
        is_used_otherwise: Whether it does more with it, such as a norm or a residual; so it is taken to be where the
            code cannot be seen.
    """

    reads_width: bool = False
    takers: tuple[str, ...] = ()
    is_used_otherwise: bool = True

    @property
    def can_be_narrow(self) -> bool:
        """Whether the code reads a width that `NarrowInput` can make that of a shard."""
        return self.reads_width and bool(self.takers) and not self.is_used_otherwise


def forward_source(module: nn.Module) -> str:
    """The code of a module's class; nothing where it has no source."""
    return source_of(original_class(module).forward)


def input_use(module: nn.Module, layers: Collection[str]) -> InputUse:
    """What the `forward` of a module does with its input.

    Args:
        module: The module; parallel or not.
        layers: The paths of the layers below it whose output features are divided.
    """
    function = parse_source(forward_source(module))
    if not isinstance(function, ast.FunctionDef):
        return InputUse()
    arguments = [each.arg for each in (*function.args.posonlyargs, *function.args.args)][1:]
    return _Reader(function, layers).read(arguments[0]) if arguments else InputUse()


def attributes_read(module: nn.Module) -> frozenset[str] | None:
    """The attributes of itself that the code of a module uses, but to make it; ``None`` where it has no source."""
    found: set[str] = set()
    for kind in original_class(module).__mro__:
        if kind is nn.Module:
            break
        tree = parse_source(source_of(kind))
        if not isinstance(tree, ast.ClassDef):
            return None
        for method in tree.body:
            if isinstance(method, ast.FunctionDef) and method.name != "__init__":
                paths = (_path(node) for node in ast.walk(method) if isinstance(node, ast.Attribute))
                found.update(path.partition(".")[0] for path in paths if path)
    return frozenset(found)


def source_of(code: Any) -> str:
    """The text of a class or a function; nothing where it has none, as what was typed in."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return ""


def parse_source(source: str) -> ast.stmt | None:
    """The first statement of a text that may be indented; ``None`` if there is none."""
    try:
        return next(iter(ast.parse(textwrap.dedent(source)).body), None)
    except SyntaxError:
        return None


def _path(node: ast.AST) -> str | None:
    """``a.b`` of ``self.a.b``."""
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return node.attr
        owner = _path(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


class _Reader:
    """Goes through the statements of a `forward`."""

    def __init__(self, function: ast.FunctionDef, layers: Collection[str]) -> None:
        self._function, self._layers = function, layers
        self._parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        self._loops = dict(self._variables())

    def read(self, name: str) -> InputUse:
        """What is done with the argument of this name, until another value has the name."""
        whole, is_input = {name}, True
        reads_width = is_used_otherwise = False
        takers: set[str] = set()
        for statement in self._function.body:
            reads_width = reads_width or any(self._reads_width(node, whole) for node in ast.walk(statement))
            for node in ast.walk(statement):
                if is_input and isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                    called = self._layers_called_with(node)
                    takers |= called
                    is_used_otherwise = is_used_otherwise or not (called or self._is_harmless(node))
            assigned = _assigned(statement)
            if assigned is not None and self._stays_whole(statement, whole):
                whole.add(assigned)
            else:
                whole.discard(assigned or "")
            is_input = is_input and assigned != name
        return InputUse(reads_width, tuple(each for each in self._layers if each in takers), is_used_otherwise)

    def _variables(self) -> Iterator[tuple[str, set[str]]]:
        """Variables that stand for one after another of the module's layers, and which these are."""
        for node in ast.walk(self._function):
            if isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.target, ast.Name):
                paths = [_path(each) for each in getattr(node.iter, "elts", ())]
                if paths and None not in paths:
                    yield node.target.id, {path for path in paths if path is not None}

    def _called(self, call: ast.Call) -> set[str]:
        """The paths of what is called."""
        if isinstance(call.func, ast.Name):
            return self._loops.get(call.func.id, set())
        path = _path(call.func)
        return set() if path is None else {path}

    def _layers_called_with(self, node: ast.Name) -> set[str]:
        call = self._parents[node]
        if isinstance(call, ast.Call) and call.args and call.args[0] is node:
            called = self._called(call)
            return called if called <= {*self._layers} else set()
        return set()

    def _is_harmless(self, node: ast.Name) -> bool:
        """Whether only its shape or its kind is asked for."""
        parent = self._parents[node]
        if isinstance(parent, ast.Call):
            return isinstance(parent.func, ast.Name) and parent.func.id == "len"
        return isinstance(parent, ast.Attribute) and parent.attr in _HARMLESS

    def _reads_width(self, node: ast.AST, whole: Collection[str]) -> bool:
        """Whether the width of one of these is taken here, and used."""
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and _is_shape(node.value, whole):
            *others, last = node.targets[0].elts
            has_three = len(others) == 2 or any(isinstance(each, ast.Starred) for each in others)
            return has_three and isinstance(last, ast.Name) and self._is_loaded(last.id)
        if isinstance(node, ast.Subscript) and _is_shape(node.value, whole):
            return ast.unparse(node.slice) == "-1"
        return isinstance(node, ast.Call) and _is_size(node, whole) and [*map(ast.unparse, node.args)] == ["-1"]

    def _is_loaded(self, name: str) -> bool:
        loads = (node for node in ast.walk(self._function) if isinstance(node, ast.Name))
        return any(node.id == name and isinstance(node.ctx, ast.Load) for node in loads)

    def _stays_whole(self, statement: ast.stmt, whole: Collection[str]) -> bool:
        """Whether what is assigned is as wide as the input: what a layer that is not divided makes of it."""
        value = getattr(statement, "value", None)
        if not isinstance(value, ast.Call) or _path(value.func) is None or self._called(value) & {*self._layers}:
            return False
        return any(_is_named(each, whole) for each in value.args)


def _assigned(statement: ast.stmt) -> str | None:
    """The one name that a statement assigns to."""
    targets = statement.targets if isinstance(statement, ast.Assign) else ()
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None


def _is_shape(node: ast.expr, names: Collection[str]) -> bool:
    """Whether this is ``x.shape`` or ``x.size()`` of one of these names."""
    if isinstance(node, ast.Call):
        return _is_size(node, names) and not node.args
    return isinstance(node, ast.Attribute) and node.attr == "shape" and _is_named(node.value, names)


def _is_size(call: ast.Call, names: Collection[str]) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "size" and _is_named(call.func.value, names)


def _is_named(node: ast.expr, names: Collection[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names

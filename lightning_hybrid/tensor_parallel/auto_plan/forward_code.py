"""Analysis of a block's source: the attributes that it reads, and the uses of its input.

`blocks` and `heads` call it while an automatic plan is made, and `shape_errors` after an error, to tell the user which
entries of a plan fit. It is only advice, so the analysis of the syntax tree may miss unusual code. `straight_code`, on
which results depend, fails on code that it does not know, and uses only the functions that read sources.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_hybrid.tensor_parallel.layers import original_class

#: Advice, as the end of a sentence, for code that reads the full width of its input and cannot use `narrow_input`.
READ_WIDTHS_BEHIND = (
    "read widths in `forward` from the outputs of the sharded layers (`.view(b, t, self.num_heads, -1)`,"
    " `.reshape(b, t, -1)`, `.flatten(2)`), or move the attention into a separate module"
)
#: Attributes that code may read from an input with the width of a shard and no values.
_HARMLESS = {"shape", "size", "dim", "ndim", "device", "dtype", "is_cuda", "new_zeros", "new_ones", "new_full"}


@dataclass(frozen=True)
class InputUse:
    """The uses of the first argument of a `forward`.

    Attributes:
        reads_width: True if the code uses the width of the argument, as in ``B, N, C = x.shape``.
        takers: The layers, out of some given layers, that receive the argument itself.
        is_used_otherwise: True if the argument has other uses, such as a norm or a residual connection, or if the
            source is not available.
    """

    reads_width: bool = False
    takers: tuple[str, ...] = ()
    is_used_otherwise: bool = True

    @property
    def can_be_narrow(self) -> bool:
        """True if the code reads a width that `NarrowInput` can replace by the width of a shard."""
        return self.reads_width and bool(self.takers) and not self.is_used_otherwise


def forward_source(module: nn.Module) -> str:
    """Return the source of a module's `forward`; ``""`` if it is not available."""
    return source_of(original_class(module).forward)


def input_use(module: nn.Module, layers: Collection[str]) -> InputUse:
    """Return how the `forward` of a module uses its input, the first argument.

    Args:
        module: The module; it may be parallel.
        layers: The paths of the layers below it whose output features are sharded.

    Returns:
        The uses. If the source is not available, the input counts as used otherwise.
    """
    function = parse_source(forward_source(module))
    if not isinstance(function, ast.FunctionDef):
        return InputUse()
    arguments = [each.arg for each in (*function.args.posonlyargs, *function.args.args)][1:]
    return _Reader(function, layers).read(arguments[0]) if arguments else InputUse()


def attributes_read(module: nn.Module) -> frozenset[str] | None:
    """Return the attributes of `self` that the code of a module reads, except in `__init__`.

    Returns:
        The names; ``None`` if the source is not available.
    """
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
    """Return the source of a class or function; ``""`` if it is not available, as in an interactive session."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return ""


def parse_source(source: str) -> ast.stmt | None:
    """Return the first statement of a source that may be indented; ``None`` if there is none."""
    try:
        return next(iter(ast.parse(textwrap.dedent(source)).body), None)
    except SyntaxError:
        return None


def _path(node: ast.AST) -> str | None:
    """Return ``a.b`` for ``self.a.b``."""
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return node.attr
        owner = _path(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


class _Reader:
    """An analysis of the statements of a `forward`.

    Args:
        function: The syntax tree of the `forward`.
        layers: The paths of the layers whose output features are sharded.
    """

    def __init__(self, function: ast.FunctionDef, layers: Collection[str]) -> None:
        self._function, self._layers = function, layers
        self._parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        self._loops = dict(self._variables())

    def read(self, name: str) -> InputUse:
        """Return the uses of an argument, until another value is assigned to its name.

        The width also counts as read from a value that an unsharded layer has computed from the argument.
        """
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
        """Yield loop variables that iterate over layers of the module, each with the paths of the layers."""
        for node in ast.walk(self._function):
            if isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.target, ast.Name):
                paths = [_path(each) for each in getattr(node.iter, "elts", ())]
                if paths and None not in paths:
                    yield node.target.id, {path for path in paths if path is not None}

    def _called(self, call: ast.Call) -> set[str]:
        """Return the paths of the layers that a call calls."""
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
        """Return True if only the shape or type of the argument is read."""
        parent = self._parents[node]
        if isinstance(parent, ast.Call):
            return isinstance(parent.func, ast.Name) and parent.func.id == "len"
        return isinstance(parent, ast.Attribute) and parent.attr in _HARMLESS

    def _reads_width(self, node: ast.AST, whole: Collection[str]) -> bool:
        """Return True if the code reads and uses the width of one of these names here."""
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
        """Return True if an unsharded layer computes the assigned value from the input, so it has the full width."""
        value = getattr(statement, "value", None)
        if not isinstance(value, ast.Call) or _path(value.func) is None or self._called(value) & {*self._layers}:
            return False
        return any(_is_named(each, whole) for each in value.args)


def _assigned(statement: ast.stmt) -> str | None:
    """Return the name that a statement assigns to, if it assigns to one name."""
    targets = statement.targets if isinstance(statement, ast.Assign) else ()
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None


def _is_shape(node: ast.expr, names: Collection[str]) -> bool:
    """Return True for ``x.shape`` or ``x.size()``, where ``x`` is one of these names."""
    if isinstance(node, ast.Call):
        return _is_size(node, names) and not node.args
    return isinstance(node, ast.Attribute) and node.attr == "shape" and _is_named(node.value, names)


def _is_size(call: ast.Call, names: Collection[str]) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "size" and _is_named(call.func.value, names)


def _is_named(node: ast.expr, names: Collection[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names

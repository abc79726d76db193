"""A proof from its source that a block does the same computation in every call.

A trial shows what the code does in a few calls. Code without branches, data-dependent loops and state from earlier
calls does the same in all calls; such code is *straight* here. Only branches on `self.training` are allowed, because a
trial runs both. Unknown syntax, names and attributes count as not straight. So the proof can fail for harmless code;
the user then gets the reason, and a plan to copy.

`trial` calls :func:`not_straight_reason` for a block whose code is not known (`known_code`), after the block has given
the right results in a trial.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.tensor_parallel.auto_plan.forward_code import parse_source, source_of
from lightning_hybrid.tensor_parallel.auto_plan.known_code import is_known_class
from lightning_hybrid.tensor_parallel.auto_plan.operations import OPERATIONS
from lightning_hybrid.torch_internals import CALL_METHOD

_BUILTINS = {"int", "float", "len", "tuple", "list", "range", "min", "max", "abs"}
_MODULES = (torch, torch.nn, torch.nn.functional, math)
_NUMBERS = (bool, int, float, str, type(None), torch.dtype)
#: Methods of a class that can make reading an attribute, or calling a module, do anything.
_MAGIC = {"__call__", CALL_METHOD, "__getattr__", "__getattribute__", "__setattr__"}
#: Nodes of the syntax tree that neither branch nor store anything.
_PLAIN = (
    *(ast.Expr, ast.Return, ast.Pass, ast.Constant, ast.Tuple, ast.List, ast.Starred, ast.Subscript, ast.Slice),
    *(ast.BinOp, ast.UnaryOp, ast.keyword, ast.operator, ast.USub, ast.expr_context),
)
#: Nodes of an assignment target that assign only local names.
_TARGETS = (ast.Name, ast.Tuple, ast.Starred, ast.expr_context)


class _NotStraightError(Exception):
    """Raised at code that can behave differently in another call."""


def not_straight_reason(block: nn.Module) -> str | None:
    """Return the reason why a block may behave differently in another call, as the end of a sentence; else ``None``.

    Args:
        block: The block, with a single input. Code of known packages is not analyzed.
    """
    try:
        names = [*inspect.signature(block.forward).parameters]
        if len(names) != 1:
            return f"takes {', '.join(map(repr, names)) or 'no arguments'} instead of a single input"
        for part in block.modules():
            if not is_known_class(type(part)):
                _Reader(part).read_module()
    except _NotStraightError as found:
        return str(found)
    return None


class _Reader:
    """An analysis of the code of one module, and of the functions and methods that it calls.

    Both methods raise `_NotStraightError`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: set[Any] = set()

    def read_module(self) -> None:
        kind = type(self._module)
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            if not is_known_class(base) and (magic := sorted(_MAGIC & vars(base).keys())):
                raise _NotStraightError(f"defines {magic[0]!r}")
        self.read(kind.forward)

    def read(self, function: Any) -> None:
        """Raise an error if a Python function can behave differently in another call."""
        if function in self._seen or _is_torchs(function):
            return
        self._seen.add(function)
        tree = parse_source(source_of(function))
        if not isinstance(tree, ast.FunctionDef) or tree.decorator_list or function.__closure__:
            raise _NotStraightError(f"calls {function.__name__!r}, whose code cannot be read")
        _FunctionReader(self, self._module, function, tree).read()


class _FunctionReader:
    """An analysis of the code of one function.

    Args:
        owner: The analysis of the module, which also reads the functions that this function calls.
        module: The module whose `forward` calls the function, for the values of attributes of `self`.
        function: The function.
        tree: Its syntax tree.
    """

    def __init__(self, owner: _Reader, module: nn.Module, function: Any, tree: ast.FunctionDef) -> None:
        self._owner, self._module, self._tree = owner, module, tree
        self._globals = function.__globals__
        self._first_line = function.__code__.co_firstlineno
        args = tree.args
        named = [each.arg for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
        self._is_method = named[:1] == ["self"]
        self._locals = {*named[self._is_method :]}
        self._locals |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and _is_stored(node)}

    def read(self) -> None:
        for statement in self._tree.body:
            self._visit(statement)

    def _fail(self, node: ast.AST) -> Any:
        line = self._first_line + getattr(node, "lineno", 1) - 1
        text = ast.unparse(node).splitlines()[0]
        raise _NotStraightError(f"can behave differently in another call (`{text[:60]}` in line {line} of its file)")

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            self._assign(node)
        elif isinstance(node, (ast.If, ast.IfExp)):
            if not _is_training(node.test):
                self._fail(node.test)
            branches = (*node.body, *node.orelse) if isinstance(node, ast.If) else (node.body, node.orelse)
            for branch in branches:
                self._visit(branch)
        elif isinstance(node, (ast.GeneratorExp, ast.ListComp)):
            self._comprehension(node)
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            self._value(node)
        elif isinstance(node, _PLAIN):
            for child in ast.iter_child_nodes(node):
                self._visit(child)
        else:
            self._fail(node)

    def _assign(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if not all(isinstance(each, _TARGETS) for each in ast.walk(target)):
                self._fail(node)
        if node.value is not None:
            self._visit(node.value)

    def _comprehension(self, node: ast.GeneratorExp | ast.ListComp) -> None:
        """Check a comprehension over values that are written in the code, such as projections."""
        first = node.generators[0]
        is_plain = isinstance(first.target, ast.Name) and isinstance(first.iter, (ast.Tuple, ast.List, ast.Name))
        if len(node.generators) != 1 or first.ifs or first.is_async or not is_plain:
            self._fail(node)
        self._visit(first.iter)
        self._visit(node.elt)

    def _call(self, node: ast.Call) -> None:
        for argument in (*node.args, *node.keywords):
            self._visit(argument)
        function = node.func
        if isinstance(function, ast.Name) and function.id in self._locals:
            return  # a local name is a value, a module or an operation, and was checked at its assignment
        if isinstance(function, ast.Attribute) and self._is_of_value(function):
            self._visit(function.value)
            if function.attr not in OPERATIONS:
                self._fail(node)
            return
        found = self._find(function)
        if isinstance(found, FunctionType) and not _is_torchs(found):
            self._owner.read(found)
        elif not _is_callable(found):
            self._fail(node)

    def _value(self, node: ast.Name | ast.Attribute) -> None:
        """Check a value that is read but not called."""
        if isinstance(node, ast.Name) and (node.id in self._locals or _is_stored(node)):
            return
        if isinstance(node, ast.Attribute) and self._is_of_value(node):
            self._visit(node.value)
            if node.attr not in OPERATIONS:
                self._fail(node)
            return
        found = self._find(node)
        is_value = isinstance(found, (*_NUMBERS, Tensor, nn.Module)) or _is_callable(found)
        if not (is_value or (isinstance(found, tuple) and all(isinstance(each, _NUMBERS) for each in found))):
            self._fail(node)

    def _is_of_value(self, node: ast.Attribute) -> bool:
        """Return True if an expression is an attribute or a method of a computed value."""
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or root.id in self._locals:
            return True
        return isinstance(self._find(node.value), Tensor)

    def _find(self, node: ast.expr) -> Any:
        """Return the object to which a name of the module or a global name refers, without running code."""
        if isinstance(node, ast.Name):
            if node.id == "self" and self._is_method:
                return self._module
            if node.id in self._globals:
                return self._globals[node.id]
            return getattr(builtins, node.id, None) if node.id in _BUILTINS else self._fail(node)
        if not isinstance(node, ast.Attribute):
            return self._fail(node)
        owner = self._find(node.value)
        if isinstance(owner, nn.Module):
            return self._attribute(owner, node)
        if isinstance(owner, ModuleType) and owner in _MODULES:
            return getattr(owner, node.attr, None)
        return self._fail(node)

    def _attribute(self, owner: nn.Module, node: ast.Attribute) -> Any:
        for held in (vars(owner), owner._parameters, owner._modules, owner._buffers):
            if node.attr in held:
                return held[node.attr]
        found = inspect.getattr_static(type(owner), node.attr, None)
        if isinstance(found, FunctionType) and owner is not self._module:
            return self._fail(node)  # a method of another module, of which only `forward` is analyzed
        return found if isinstance(found, (FunctionType, *_NUMBERS)) else self._fail(node)


def _is_stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _is_training(node: ast.expr) -> bool:
    """Return True if an expression is ``self.training`` or its negation. A trial runs both branches."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _is_training(node.operand)
    return ast.unparse(node) == "self.training"


def _is_torchs(function: Any) -> bool:
    return str(getattr(function, "__module__", None) or "").partition(".")[0] == "torch"


def _is_callable(found: Any) -> bool:
    """Return True if an object may be called: a module, which is analyzed separately, or a known operation."""
    if isinstance(found, nn.Module):
        return True
    name = getattr(found, "__name__", "")
    if found is getattr(builtins, name, None):
        return name in _BUILTINS
    if found is getattr(math, name, None):
        return True
    owners = (torch, torch.nn.functional)
    return name in OPERATIONS and any(found is getattr(owner, name, None) for owner in owners)

"""Find private names of torch, Lightning and torchmetrics in a package, outside the files that may use them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_hybrid.trainer.lightning_internals import STRATEGY_MEMBERS

#: The files that may use private names, and the libraries whose names these are.
LIGHTNINGS, TORCHS = "trainer/lightning_internals.py", "torch_internals.py"
REGISTERS = {LIGHTNINGS: ("lightning", "lightning_utilities", "torchmetrics"), TORCHS: ("torch",)}

#: Private names of torch that all subclasses of `nn.Module` share, and use.
TABLES = {
    "_buffers": "buffers of one layer under all their names; `named_buffers` leaves shared ones out",
    "_modules": "children of one layer under all their names; `named_children` leaves shared ones out",
    "_parameters": "parameters of one layer under all their names; `named_parameters` leaves shared ones out",
}
#: Names of attributes that are not private to a library.
OTHERS = {
    "_current_frames": "the documented function of `sys` that says where every thread is",
    "_exit": "the documented function of `os` that ends a process at once",
    "_fields": "the public name of the fields of named tuples",
    "_getframe": "the documented function of `sys` that says who calls",
    "_replace": "the public name of the method of named tuples",
    "_shared_input": "a mark of this package on tensors",
    "_tp_plan": "the plan that a model of transformers has of itself; its public name may be another thing elsewhere",
}
_BY_STRING = {"getattr", "setattr", "hasattr", "delattr"}
_OF_DICTS = {"get", "pop", "setdefault"}


def violations(root: Path) -> list[str]:
    """Return the private names of these libraries that a package uses, as ``file:line: text``.

    A name is taken for theirs if it begins with one underscore and is imported from them; if it is an attribute of
    another object than ``self`` and the same file defines none of that name; or if it is an attribute of ``self`` that
    no file of the package defines, and so is inherited. Members of Lightning's strategies are listed in the register.
    An attribute that is named by a string is an attribute. Of torch, three more are found: attributes of ``self`` that
    objects of torch have too, unless the same file defines them; strings that are names of torch; and methods that
    override private ones of torch.

    Args:
        root: The folder of the package.
    """
    trees = {path: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    defined = {path: set(_defined(tree)) for path, tree in trees.items()}
    anywhere = set().union(*defined.values())
    found = []
    for path, tree in trees.items():
        name = path.relative_to(root).as_posix()
        complaints = list(_imports(name, tree))
        if name not in REGISTERS:
            known = defined[path] | OTHERS.keys() | TABLES.keys()
            inherited = known | STRATEGY_MEMBERS.keys() | (anywhere - names_of_torch())
            used = list(attributes(tree))
            for node, owner, attribute in used:
                if attribute not in (inherited if owner in ("self", "cls", "super()") else known):
                    complaints.append((node.lineno, f"{owner}.{attribute} is private; {_where(attribute)}"))
            by_string = {(node.lineno, attribute) for node, _, attribute in used}
            strings = [each for each in _strings(tree, known) if each not in by_string]
            complaints += [(line, f"{text!r} is private; {_where(text)}") for line, text in strings]
        if name != TORCHS:
            complaints += [(line, f"{text} is private; {_where(text)}") for line, text in _overrides(tree)]
        found += [f"{path.relative_to(root.parent)}:{line}: {text}" for line, text in sorted(set(complaints))]
    return found


def _where(name: str) -> str:
    is_torchs = any(part in names_of_torch() or part == "torch" for part in re.split("[.:]+", name))
    return f"use {TORCHS}" if is_torchs else f"write a function in {LIGHTNINGS}, or in {TORCHS} if it is torch's"


@cache
def names_of_torch() -> frozenset[str]:
    """Return the private names of objects and modules of torch that a package may deal with."""
    layer = nn.Linear(1, 1)
    objects = (
        layer,
        torch.optim.SGD(layer.parameters()),
        GradScaler("cpu"),
        DataLoader([0]),
        torch.ops.aten.mm.default,
    )
    types = (Tensor, DTensor, DeviceMesh, torch.UntypedStorage, nn.LSTM, nn.TransformerEncoderLayer)
    modules = ("torch", "torch.autograd", "torch.autograd.graph", "torch.distributed.distributed_c10d", "torch._C")
    found = [name for owner in (*objects, *types, *map(import_module, modules)) for name in dir(owner)]
    found += [re.split("::|[.]", name)[1] for name in torch._C._dispatch_get_all_op_names()]
    return frozenset(filter(_is_private, found)) - OTHERS.keys()


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _imports(file: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in (module + alias.name for alias in node.names):
            library, *parts = name.split(".")
            for register, libraries in REGISTERS.items():
                if file != register and library in libraries and any(map(_is_private, parts)):
                    yield node.lineno, f"private import {name}; use {register}"


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names of functions, arguments, classes, fields, and attributes that are assigned to ``self``; class variables."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _text(node.value) in _OWN:
            yield node.attr
        elif isinstance(node, ast.Assign) and any(_text(target) == "__slots__" for target in node.targets):
            yield from (str(text.value) for text in ast.walk(node.value) if isinstance(text, ast.Constant))


def attributes(tree: ast.Module) -> Iterator[tuple[ast.expr, str, str]]:
    """Yield the private attributes that are used: the node, the object and the name."""
    for node in ast.walk(tree):
        found: tuple[ast.expr, ast.expr | None] | None = None
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield node, _text(node.value), node.attr
        elif isinstance(node, ast.Call):
            function, arguments = node.func, node.args
            if isinstance(function, ast.Name) and function.id in _BY_STRING and len(arguments) > 1:
                found = arguments[0], arguments[1]
            elif isinstance(function, ast.Attribute) and function.attr in _OF_DICTS and arguments:
                owner = _owner_of_dict(function.value)
                found = None if owner is None else (owner, arguments[0])
            elif _text(function).split(".")[-1] == "attrgetter" and arguments:
                found = function, arguments[0]
        elif isinstance(node, ast.Subscript):
            owner = _owner_of_dict(node.value)
            found = None if owner is None else (owner, node.slice)
        if found is not None and isinstance(found[1], ast.Constant) and isinstance(found[1].value, str):
            names = filter(_is_private, found[1].value.split("."))
            yield from ((found[0], _text(found[0]), name) for name in names)


def _strings(tree: ast.Module, known: set[str]) -> Iterator[tuple[int, str]]:
    """Strings that are private names of torch, such as ``"_version"``, or paths to them, such as ``"torch._C"``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.:]+", node.value):
            parts = re.split(r"[.:]+", node.value)
            is_path = parts[0] == "torch" and any(map(_is_private, parts))
            if is_path or any(part in names_of_torch() and part not in known for part in parts):
                yield node.lineno, node.value


def _overrides(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Methods that override a private one of a class of torch."""
    paths = dict(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            inherited = {name for base in node.bases for name in dir(_from_torch(_text(base), paths))}
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and _is_private(each.name) and each.name in inherited:
                    yield each.lineno, each.name


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names that a file has by importing them, with their paths."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((each.asname or each.name, each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)


def _from_torch(text: str, paths: dict[str, str]) -> Any:
    """Return the object of torch that a base class in a source is; ``None`` if it is not torch's."""
    first, _, rest = text.partition(".")
    module, *names = f"{paths.get(first, '')}.{rest}".rstrip(".").split(".")
    found: Any = torch if module == "torch" else None
    for name in names:
        found = getattr(found, name, None)
    return found


def _owner_of_dict(node: ast.expr) -> ast.expr | None:
    """``x`` of ``vars(x)`` and ``x.__dict__``."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return node.value
    if isinstance(node, ast.Call) and _text(node.func) == "vars" and node.args:
        return node.args[0]
    return None


_OWN = ("self", "cls")


def _text(node: ast.expr) -> str:
    return ast.unparse(node)

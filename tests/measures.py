"""Counts of mechanisms in the package: how many places one idea has. ``python -m tests.measures`` prints the table.

``--list NAME`` prints what a row counts. Counts are found in the syntax trees, not in comments or docstrings.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_hybrid"

#: Words that ask which kind of step a run has: the whole model, a chain, or a traced frame.
STEP_KINDS = {"is_cut", "is_chain", "is_followed", "is_plain", "body_cut", "cut"}

#: Names that begin with an underscore, and are documented by Python.
DOCUMENTED = {"_replace", "_asdict", "_fields", "_exit"}


class Measure(NamedTuple):
    """A row of the table.

    Attributes:
        asked: The greatest count that is wanted.
        found: Makes the counted things, as text.
    """

    asked: int
    found: Callable[[], Iterator[str]]


@cache
def trees(folder: Path = PACKAGE) -> dict[str, ast.Module]:
    """Return the syntax tree of each file, by its path from `folder`."""
    return {str(path.relative_to(folder)): ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


@cache
def nodes(path: str) -> list[ast.AST]:
    """Return all nodes of a file of the package except for docstrings."""
    tree = trees()[path]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and _has_text(node)}
    return [node for node in ast.walk(tree) if id(node) not in docstrings]


def _has_text(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return bool(node.body) and ast.get_docstring(node, clean=False) is not None


def names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node has: of a variable, an attribute, an argument or a text."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
        yield node.arg
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def files_with(is_counted: Callable[[ast.AST], bool], *, outside: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the files of the package that have a node, without those in some folders."""
    for path in trees():
        if not path.startswith(outside) and any(map(is_counted, nodes(path))):
            yield path


def named(*words: str) -> Callable[[ast.AST], bool]:
    """Return a function that tells whether a node has one of these names."""
    return lambda node: any(name in words for name in names(node))


def matching(pattern: str) -> Callable[[ast.AST], bool]:
    """Return a function that tells whether a name of a node matches."""
    compiled = re.compile(pattern)
    return lambda node: any(compiled.search(name) for name in names(node))


def compares_kinds(node: ast.AST) -> bool:
    """Return whether a node compares with a kind of action, or looks one up."""
    operands = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
    operands += node.keys if isinstance(node, ast.Dict) else []
    return any(
        isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "Kind"
        for operand in operands
        if operand is not None
        for each in ast.walk(operand)
    )


def places_stages(node: ast.AST) -> bool:
    """Return whether a node computes the rank of a stage, or the stages of a rank."""
    text = ast.unparse(node) if isinstance(node, (ast.BinOp, ast.Call, ast.Slice)) else ""
    return bool(
        re.search(r"stages?\b.*\) % [\w.]*(?:num_ranks|size)\b|stage % [\w.]*(?:num_ranks|size)\b", text)
        or re.fullmatch(r"range\([\w.]*rank, [^,]*, [\w.]*num_ranks\)", text)
        or re.search(r"stage // [\w.]*num_ranks", text)
    )


def asks_for_kind_of_step() -> Iterator[str]:
    """Yield each place that asks which kind of step a run has."""
    for path in trees():
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and node.attr in STEP_KINDS and isinstance(node.ctx, ast.Load):
                yield f"{path}:{node.lineno} {ast.unparse(node)}"
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in STEP_KINDS:
                yield f"{path}:{node.lineno} {ast.unparse(node.func)}(...)"
            elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "chain":
                yield f"{path}:{node.lineno} {ast.unparse(node)}"


def classes_of(base: str) -> Iterator[str]:
    """Yield the classes with a base class of this name, which may be imported by another name."""
    for path in trees():
        imports = (each for node in nodes(path) if isinstance(node, ast.ImportFrom) for each in node.names)
        known = {base, *(each.asname for each in imports if each.name == base and each.asname)}
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                bases = {name for each in node.bases for part in ast.walk(each) for name in names(part)}
                if bases & known:
                    yield f"{path}:{node.lineno} {node.name}"


def calls_of(pattern: str, *, outside: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the files that call functions of these names."""
    compiled = re.compile(pattern)
    return files_with(
        lambda node: isinstance(node, ast.Call) and bool(compiled.search(ast.unparse(node.func))), outside=outside
    )


def wraps_forward(node: ast.AST) -> bool:
    """Return whether a node replaces the forward, or the class, of a module."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
        return len(node.args) > 1 and isinstance(node.args[1], ast.Constant) and node.args[1].value == "forward"
    texts = [ast.unparse(target) for target in targets]
    return any(re.search(r"\.(?:forward|__class__)$|\['forward'\]$", text) for text in texts)


def restores_module(node: ast.AST) -> bool:
    """Return whether a node is a context that changes parameters, buffers or attributes of a module and back."""
    if not isinstance(node, ast.FunctionDef) or "contextmanager" not in map(ast.unparse, node.decorator_list):
        return False
    finals = [line for each in ast.walk(node) if isinstance(each, ast.Try) for line in each.finalbody]
    text = "\n".join(map(ast.unparse, finals))
    return bool(re.search(r"_parameters|_buffers|vars\(|__dict__|setattr|load_state_dict|_modules", text))


@cache
def own_privates() -> frozenset[str]:
    """Return the private names of the package: functions, classes, variables and attributes that torch has not too."""
    found: set[str] = set()
    for node in (each for tree in trees().values() for each in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return frozenset(name for name in found if re.match(r"_[^_]", name)) - {*dir(nn.Module()), *dir(Tensor)}


def private_accesses() -> Iterator[str]:
    """Yield each access of tests to a private attribute of the package, and each import of a private name.

    Privates of torch, of Lightning and of the tests themselves do not count.
    """
    for path, tree in trees(ROOT / "tests").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in own_privates() - DOCUMENTED:
                if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                    yield f"{path}:{node.lineno} {ast.unparse(node)}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_hybrid"):
                yield from (f"{path}:{node.lineno} {each.name}" for each in node.names if re.match(r"_[^_]", each.name))


def lines() -> Iterator[str]:
    """Yield all lines of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield from path.read_text().splitlines()


_CONTEXT = ("tensor_parallel/context_parallel/",)
_CORE = ("pipeline_parallel/schedules/",)

MEASURES = {
    "files that name context_parallel_size": Measure(
        6, lambda: files_with(named("context_parallel_size"), outside=_CONTEXT)
    ),
    'files that name "cp"': Measure(2, lambda: files_with(named("cp"), outside=_CONTEXT)),
    "files that name the grid": Measure(
        4, lambda: files_with(matching(r"(?i)\bgrid|_grid|Grid"), outside=("tensor_parallel/grid/",))
    ),
    "files that compare kinds of actions": Measure(1, lambda: files_with(compares_kinds, outside=_CORE)),
    "files that place stages on ranks": Measure(0, lambda: files_with(places_stages, outside=_CORE)),
    "tests of the kind of step": Measure(10, asks_for_kind_of_step),
    "function modes": Measure(4, lambda: classes_of("TorchFunctionMode")),
    "dispatch modes": Measure(3, lambda: classes_of("TorchDispatchMode")),
    "files that make a fake-tensor mode": Measure(1, lambda: calls_of(r"\bFake(?:Tensor)?Mode$")),
    "files that wrap a forward": Measure(1, lambda: files_with(wraps_forward)),
    "contexts that change a module and restore it": Measure(
        1,
        lambda: (f"{path}:{node.lineno}" for path in trees() for node in nodes(path) if restores_module(node)),  # type: ignore[attr-defined]
    ),
    "files that encode messages": Measure(
        2, lambda: calls_of(r"\b(?:pickle|json|struct)\.(?:dumps|pack)$", outside=("cli/", "checkpoint/"))
    ),
    "files that write to a store": Measure(1, lambda: calls_of(r"store\.(?:set|add|compare_set|append)$")),
    "files that start a thread": Measure(
        2, lambda: calls_of(r"(?:^|\.)Thread$", outside=("checkpoint/", "distributed/messages/"))
    ),
    "private attributes of the package in tests": Measure(100, private_accesses),
    "lines of the package": Measure(40_000, lines),
}


def main() -> None:
    """Print the table, or what a row counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--list", metavar="NAME", choices=MEASURES, help="print what a row counts")
    options = parser.parse_args()
    if options.list:
        print(*MEASURES[options.list].found(), sep="\n")
        return
    for name, measure in MEASURES.items():
        print(f"{name:<46}{sum(1 for _ in measure.found()):>8,}   at most {measure.asked:,}")


if __name__ == "__main__":
    main()

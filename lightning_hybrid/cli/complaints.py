"""Errors of the configuration parser in one line: the wrong name, and the name that was probably meant."""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from lightning_hybrid.cli.parser import did_you_mean
from lightning_hybrid.config import group_of_parts

_CLASS = re.compile(r"^( *)- Problem with given class_path '([^']+)':\n((?:\1 +[^- \n].*\n?)+)", re.MULTILINE)
_UNKNOWN_PART = re.compile(r"(?:Group '|unrecognized arguments: --)(\w+)(?:' does not accept option '|\.)(\w+)")
_NAMED = re.compile(r"^ *- Problem with given class_path", re.MULTILINE)


def in_words(message: str, known: str) -> str:
    """A complaint about a configuration; as it is where nothing better can be said.

    Args:
        message: The complaint of jsonargparse, which lists for each type why a value is none of it.
        known: The help of the parser, which names all its options.
    """
    key = re.search(r'Parser key "([\w.]+)"', message)
    classes = [(found[2], _joined(found[3])) for found in _CLASS.finditer(message)]
    if key and classes and len(classes) == len(_NAMED.findall(message)):
        return "; ".join(f"{key[1]}: {_of_class(path, problem)}" for path, problem in classes)
    unknown = re.search(r"(?:does not accept option|Option) '([\w.]+)'(?: is not accepted)?", message)
    return message + _meant(unknown[1], re.findall(r"--([\w.-]+)", known)) if unknown else message


def _joined(text: str) -> str:
    """Lines that go deeper and deeper, such as those of an option's own complaint, in one."""
    return " ".join(re.sub(r'^Parser key "([\w.]+)":$', r"\1:", line.strip()) for line in text.splitlines())


def _of_class(path: str, problem: str) -> str:
    """Return the error of a class in the configuration, or of its options."""
    if option := re.fullmatch(r"Option '([\w.]+)' is not accepted", problem):
        parameters = _options(path)
        names, groups = list(parameters), group_of_parts(parameters)
        meant = did_you_mean(option[1], names) or f". It has {', '.join(names)}"
        if group := groups.get(option[1]):
            meant = f"; it is a part of `{group}`: {group}.{option[1]}"
        return f"{path} has no option {option[1]!r}{meant}"
    if option := _UNKNOWN_PART.match(problem):
        parts = [part for part, group in group_of_parts(_options(path)).items() if group == option[1]]
        return f"{path} has no option '{option[1]}.{option[2]}'{did_you_mean(option[2], parts)}"
    if attribute := re.fullmatch(r"module '([\w.]+)' has no attribute '(\w+)'", problem):
        return f"there is no {path}: {problem}{did_you_mean(attribute[2], _names(attribute[1]))}"
    if module := re.fullmatch(r"No module named '([\w.]+)'", problem):
        owner, _, name = module[1].rpartition(".")
        return f"there is no {path}: {problem}{did_you_mean(name, _names(owner))}"
    return f"{path}: {problem}"


def _meant(option: str, known: list[str]) -> str:
    """The option that may be meant by one of a configuration, or else the part of it that may be."""
    first = option.partition(".")[0]
    heads = {each.partition(".")[0] for each in known}
    return did_you_mean(option, known) or ("" if first in heads else did_you_mean(first, heads))


def _options(path: str) -> dict[str, Parameter]:
    """Return the arguments of a class and of its base classes."""
    owner, _, name = path.rpartition(".")
    kind: Any = getattr(import_module(owner), name)
    found: dict[str, Parameter] = {}
    for base in kind.__mro__[:-1]:
        parameters = signature(base.__init__).parameters.values() if "__init__" in vars(base) else ()
        named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        found |= {each.name: each for each in named if each.name not in ("self", *found)}
        if parameters and not any(each.kind == each.VAR_KEYWORD for each in parameters):
            break  # it takes nothing else
    return found


def _names(owner: str) -> Iterator[str]:
    """Return the classes and submodules of a module; without a name, the modules in the working directory."""
    module: Any = import_module(owner) if owner else None
    yield from (name for name, value in vars(module).items() if isinstance(value, type)) if module else ()
    folders = getattr(module, "__path__", ()) if module else [str(Path.cwd())]
    yield from (each.name for each in pkgutil.iter_modules(folders))
    yield from (name for name in sys.modules if "." not in name) if not module else ()

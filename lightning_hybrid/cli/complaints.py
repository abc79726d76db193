"""Errors of the configuration parser in one line: the wrong name, and the name that was probably meant.

`HybridCLIParser` and `HybridCLI` call these functions when a configuration cannot be parsed, or when its classes cannot
be created. The messages of jsonargparse are correct, but list every type that a value could have had, in dozens of
lines. They have no structure except their text, so this file matches their forms with regular expressions, and leaves
unknown forms as they are.
"""

from __future__ import annotations

import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from lightning_hybrid.cli.parser import did_you_mean
from lightning_hybrid.config import group_of_parts
from lightning_hybrid.distributed.failure import add_note
from lightning_hybrid.error_codes.entry import CODE

_CLASS = re.compile(r"^( *)- Problem with given class_path '([^']+)':\n((?:\1  .*\n?)+)", re.MULTILINE)
_UNKNOWN_PART = re.compile(r"(?:Group '|unrecognized arguments: --)(\w+)(?:' does not accept option '|\.)(\w+)")
_KEY = re.compile(r'^Parser key "([\w.]+)":\s*')
_TYPE = re.compile(r"^Expected an? (.+?)\. Got value: (.*)", re.DOTALL)
_CREATED = re.compile(r"^Does not validate .*Given value: Namespace\(class_path='([^']+)'", re.DOTALL)
_TYPES = re.compile(r"^Does not validate .*?Subtypes: \[(.*)\]\s+Errors:.*Given value: (.*)", re.DOTALL)


def in_words(message: str, known: str) -> str:
    """Return an error about a configuration as one line, or unchanged if its form is unknown.

    Args:
        message: The error of jsonargparse, which lists for each type why a value does not match it.
        known: The help of the parser, which contains all its options.
    """
    unknown = re.search(r"(?:does not accept option|Option) '([\w.]+)'(?: is not accepted)?", message)
    if unknown and not _CLASS.search(message):
        return message + _meant(unknown[1], re.findall(r"--([\w.-]+)", known))
    return _of_key("", message)


def with_path(message: str, keys: Iterable[str]) -> str | None:
    """Return an error of this package with the path of its argument; ``None`` if it is another error.

    Args:
        message: The error. jsonargparse may have put it into its list of types that do not match.
        keys: The paths of arguments. An error of this package begins with the name of its argument; if no path ends
            with this name, the error is returned without a path.

    Example:
        >>> with_path("steps must be at least 1, got 0. [LH103]", ["check.steps"])
        'check.steps: steps must be at least 1, got 0. [LH103]'
    """
    own = re.search(rf"(?:^|\n\s*- )((?:(?!\n\s*- ).)*{CODE.pattern})", message, re.DOTALL)
    if own is None:
        return None
    name = re.split(r"\W", own[1].lstrip("`"), maxsplit=1)[0]
    return ": ".join([*[key for key in keys if key.endswith(f".{name}")][:1], own[1]])


def constructor_error(error: BaseException) -> BaseException:
    """Return the error that a class of the configuration raised when it was created, with a note that names the class.

    Args:
        error: The error that the parser received. If jsonargparse has wrapped another error, the wrapped error is used.
    """
    while error.__cause__ is not None and (found := _CREATED.search(str(error))):
        error = error.__cause__
        add_note(error, f"This error was raised when {found[1]} was created from the configuration.")
    return error


def _of_key(path: str, text: str) -> str:
    """Return the error about a value, or about a value inside it, as one line with its path.

    Args:
        path: The path of the value, unless the text names a value inside it.
        text: The error of jsonargparse, with all lines that are indented below it.
    """
    text = text.strip()
    if key := _KEY.match(text):
        path, text = ".".join(filter(None, (path, key[1]))), text[key.end() :]
    if classes := _CLASS.findall(text):
        return "; ".join(_of_class(path, name, textwrap.dedent(problem).strip()) for _, name, problem in classes)
    if found := _TYPE.match(text) or _TYPES.match(text):
        choices = _as_choices(found[1])
        text = f"must be {'one of ' * (', ' in choices)}{choices}; got {found[2].strip()}."
    return f"{path}: {text}" if path else text


def _as_choices(types: str) -> str:
    """Return types in the notation of YAML.

    Example:
        >>> _as_choices("<class 'int'>, list[int], typing.Literal['auto'], <class 'NoneType'>")
        "int, list[int], 'auto', null"
    """
    types = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", types)
    return re.sub(r"typing\.Literal\[(.*?)\]", r"\1", types).replace("NoneType", "null")


def _of_class(key: str, path: str, problem: str) -> str:
    """Return the error about a class in the configuration, or about its options."""
    if option := re.fullmatch(r"Option '([\w.]+)' is not accepted", problem):
        parameters = _options(path)
        names, groups = list(parameters), group_of_parts(parameters)
        meant = did_you_mean(option[1], names) or f". Its options are {', '.join(names)}"
        if group := groups.get(option[1]):
            meant = f"; it belongs to `{group}`: use {group}.{option[1]}"
        return f"{key}: {path} has no option {option[1]!r}{meant}"
    if option := _UNKNOWN_PART.match(problem):
        parts = [part for part, group in group_of_parts(_options(path)).items() if group == option[1]]
        return f"{key}: {path} has no option '{option[1]}.{option[2]}'{did_you_mean(option[2], parts)}"
    if attribute := re.fullmatch(r"module '([\w.]+)' has no attribute '(\w+)'", problem):
        return f"{key}: cannot import {path}: {problem}{did_you_mean(attribute[2], _names(attribute[1]))}"
    if module := re.fullmatch(r"No module named '([\w.]+)'", problem):
        owner, _, name = module[1].rpartition(".")
        return f"{key}: cannot import {path}: {problem}{did_you_mean(name, _names(owner))}"
    return _of_key(f"{key}.init_args", problem) if _KEY.match(problem) else f"{key}: {path}: {problem}"


def _meant(option: str, known: list[str]) -> str:
    """Return the option that the user probably meant, or otherwise the similar first part of an option."""
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
            break  # the class accepts no other arguments
    return found


def _names(owner: str) -> Iterator[str]:
    """Yield the classes and submodules of a module; without a name, the modules in the working directory."""
    module: Any = import_module(owner) if owner else None
    yield from (name for name, value in vars(module).items() if isinstance(value, type)) if module else ()
    folders = getattr(module, "__path__", ()) if module else [str(Path.cwd())]
    yield from (each.name for each in pkgutil.iter_modules(folders))
    yield from (name for name in sys.modules if "." not in name) if not module else ()

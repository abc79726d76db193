"""Dotted names of modules and parameters: patterns, and names alike but for a number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import chain

from torch import Tensor, nn


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by all their names."""
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))


def join_names(prefix: str, name: str) -> str:
    """The dotted name of what a module has under a name; the root module's own is empty."""
    return f"{prefix}.{name}" if prefix else name


def name_matches(name: str, pattern: str) -> bool:
    """Whether a dotted name is what a pattern says, where ``*`` stands for anything between two dots.

    Example:
        >>> name_matches("body.3.mlp", "body.*.mlp"), name_matches("body.3.mlp", "body.*")
        (True, False)
    """
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def pattern_of(name: str) -> str:
    """The pattern of a dotted name and of all that differ from it in numbers only.

    Example:
        >>> pattern_of("body.3.mlp.0")
        'body.*.mlp.*'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def fold_numbered(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows that begin with a dotted name: those that differ only in its first number become one, with their count.

    Example:
        >>> fold_numbered([("body.0.weight", "8x8"), ("body.1.weight", "8x8"), ("head.weight", "1x8")])
        [('body.*.weight (2)', '8x8'), ('head.weight', '1x8')]
    """
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        parts = row[0].split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            parts[number] = "*"
        groups.setdefault((".".join(parts), *row[1:]), []).append(row)
    return [
        members[0] if len(members) == 1 else (f"{pattern} ({len(members)})", *rest)
        for (pattern, *rest), members in groups.items()
    ]

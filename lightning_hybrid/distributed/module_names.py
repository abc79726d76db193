"""Dotted names of modules and parameters: joining, patterns, and names that differ only in a number.

Plans, checkpoints, tables and messages name modules and parameters in this way, as `named_parameters` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import chain

from torch import Tensor, nn


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters, then the buffers, of a module by name; a tied tensor appears under each of its names."""
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))


def join_names(prefix: str, name: str) -> str:
    """Return the dotted name of a module's child or tensor.

    Args:
        prefix: The name of the module; empty for the root module.
        name: The name within the module; not empty.
    """
    return f"{prefix}.{name}" if prefix else name


def name_matches(name: str, pattern: str) -> bool:
    """Return True if a dotted name matches a pattern, in which ``*`` matches any text without a dot.

    Example:
        >>> name_matches("body.3.mlp", "body.*.mlp"), name_matches("body.3.mlp", "body.*")
        (True, False)
    """
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def pattern_of(name: str) -> str:
    """Return the pattern of a dotted name, which also matches all names that differ from it only in numbers.

    Example:
        >>> pattern_of("body.3.mlp.0")
        'body.*.mlp.*'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def fold_numbered(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merge table rows that differ only in the first number of their name into one row with their count.

    Args:
        rows: Table rows, each of which begins with a dotted name.

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

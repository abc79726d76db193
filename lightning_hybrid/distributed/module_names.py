"""Dotted names of modules and parameters: patterns."""

from __future__ import annotations

from fnmatch import fnmatchcase

__all__ = ["name_matches"]


def name_matches(name: str, pattern: str) -> bool:
    """Whether a dotted name is what a pattern says, where ``*`` stands for anything between two dots.

    Example:
        >>> name_matches("body.3.mlp", "body.*.mlp"), name_matches("body.3.mlp", "body.*")
        (True, False)
    """
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))

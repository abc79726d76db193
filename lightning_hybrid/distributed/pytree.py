"""Nested containers of values, taken apart and put together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["LEAF", "TreePath", "TreeSpec", "flatten", "flatten_with_path", "map_leaves", "unflatten"]

#: Keys and indices from the root of a tree.
TreePath = tuple[Any, ...]


class TreeSpec(NamedTuple):
    """The shape of a tree without its leaves; hashable, comparable and picklable, and all of that at the speed of C.

    Two specs are equal when trees of one can be put together with the leaves of the other.

    Attributes:
        kind: The container's class, or ``None`` for a leaf.
        names: What names the children in that container: keys of a mapping, fields of a dataclass; nothing for
            sequences.
        children: The specs of the children.
        num_leaves: Of the whole tree.
    """

    kind: type | None
    names: tuple[Any, ...]
    children: tuple[TreeSpec, ...]
    num_leaves: int

    @classmethod
    def of(cls, kind: type, names: tuple[Any, ...], children: tuple[TreeSpec, ...]) -> TreeSpec:
        """The spec of a container."""
        return cls(kind, names, children, sum([child.num_leaves for child in children]))

    def __repr__(self) -> str:
        """For messages: ``*`` is a leaf."""
        if self.kind is None:
            return "*"
        parts = ", ".join(
            f"{name}: {child!r}" if self.names else repr(child)
            for name, child in zip(self.names or self.children, self.children, strict=True)
        )
        return f"{self.kind.__name__}({parts})"


#: The spec of a single value.
LEAF = TreeSpec(None, (), (), 1)


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Take a tree apart.

    Containers are mappings, lists, tuples (named ones too) and dataclass instances; everything else is a leaf, also
    ``None``, strings and tensors.

    Args:
        tree: Any value.

    Returns:
        The leaves from left to right, and the spec with which :func:`unflatten` puts them together.

    Example:
        >>> flatten({"x": 1, "y": (2, None)})
        ([1, 2, None], dict(x: *, y: tuple(*, *)))
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves)


def _flatten(tree: Any, leaves: list[Any]) -> TreeSpec:
    names: tuple[Any, ...]
    if isinstance(tree, (list, tuple)):
        names, values = (), tuple(tree)
    elif isinstance(tree, Mapping):
        names, values = tuple(tree), tuple(tree.values())
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = tuple(field.name for field in dataclasses.fields(tree))
        values = tuple(getattr(tree, name) for name in names)
    else:
        leaves.append(tree)
        return LEAF
    return TreeSpec.of(type(tree), names, tuple([_flatten(value, leaves) for value in values]))


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """Put a tree together; the inverse of :func:`flatten`.

    Args:
        leaves: As many leaves as ``spec.num_leaves``.
        spec: The shape of the tree.

    Raises:
        ValueError: If the number of leaves is not that of the spec.
    """
    if len(leaves) != spec.num_leaves:
        raise ValueError(f"A tree of the shape {spec!r} has {spec.num_leaves} leaves, got {len(leaves)}.")
    return leaves[0] if spec.kind is None else _unflatten(iter(leaves), spec)


def _unflatten(leaves: Any, spec: TreeSpec) -> Any:
    kind = spec.kind
    if kind is None:
        return next(leaves)
    values = [_unflatten(leaves, child) for child in spec.children]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*values)
    if issubclass(kind, (list, tuple)):
        return kind(values)
    if issubclass(kind, Mapping):
        return _mapping(kind, dict(zip(spec.names, values, strict=True)))
    # Not through ``__init__``: it may compute, check or refuse fields.
    instance = object.__new__(kind)
    for name, value in zip(spec.names, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


def _mapping(kind: type, items: dict[Any, Any]) -> Any:
    if kind is dict:
        return items
    try:
        return kind(items)
    except TypeError:  # such as defaultdict, whose first argument is something else
        mapping = kind()
        mapping.update(items)
        return mapping


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with ``function`` applied to each leaf."""
    leaves, spec = flatten(tree)
    return unflatten([function(leaf) for leaf in leaves], spec)


def flatten_with_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[TreePath, Any]]:
    """The leaves of a tree of dicts, lists and tuples, each with the path from the root to it.

    Other containers are leaves, unlike in :func:`flatten`: each step of a path is a ``tree[key]``, and a mapping that
    is no dict may compute its values, or refuse to.

    Args:
        tree: Any value.
        is_leaf: Says which dicts, lists and tuples are leaves.

    Example:
        >>> flatten_with_path({"x": 1, "y": (2, None)})
        [(('x',), 1), (('y', 0), 2), (('y', 1), None)]
    """
    if not isinstance(tree, (dict, list, tuple)) or (is_leaf is not None and is_leaf(tree)):
        return [((), tree)]
    children = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return [((key, *path), leaf) for key, child in children for path, leaf in flatten_with_path(child, is_leaf)]

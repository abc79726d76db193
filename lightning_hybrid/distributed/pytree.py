"""Nested containers of values, taken apart and put together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["TreeSpec", "flatten", "map_leaves", "unflatten"]


class TreeSpec:
    """The shape of a tree without its leaves; hashable, comparable and picklable.

    Args:
        kind: The container's class, or ``None`` for a leaf.
        names: What names the children in that container: keys of a mapping, fields of a dataclass; nothing for
            sequences.
        children: The specs of the children.
    """

    __slots__ = ("_hash", "children", "kind", "names", "num_leaves")

    def __init__(self, kind: type | None, names: tuple[Any, ...] = (), children: tuple[TreeSpec, ...] = ()) -> None:
        self.kind = kind
        self.names = names
        self.children = children
        self.num_leaves: int = 1 if kind is None else sum(child.num_leaves for child in children)
        self._hash = hash((kind, names, children))

    def __eq__(self, other: object) -> bool:
        """Two specs are equal when trees of one can be put together with the leaves of the other."""
        if self is other:
            return True
        return (
            isinstance(other, TreeSpec)
            and self._hash == other._hash
            and self.kind is other.kind
            and self.names == other.names
            and self.children == other.children
        )

    def __hash__(self) -> int:
        """Computed once: specs are looked up at every microbatch."""
        return self._hash

    def __reduce__(self) -> tuple[type[TreeSpec], tuple[Any, ...]]:
        """The hash is left out: hashes of strings and classes differ between processes."""
        return TreeSpec, (self.kind, self.names, self.children)

    def __repr__(self) -> str:
        """For messages: ``*`` is a leaf."""
        if self.kind is None:
            return "*"
        parts = ", ".join(
            f"{name}: {child!r}" if self.names else repr(child)
            for name, child in zip(self.names or self.children, self.children, strict=True)
        )
        return f"{self.kind.__name__}({parts})"


_LEAF = TreeSpec(None)


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
        return _LEAF
    return TreeSpec(type(tree), names, tuple([_flatten(value, leaves) for value in values]))


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

"""Where something is in a tree of dicts, lists and tuples: keys and indices from the root."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

__all__ = ["TreePath", "leaves", "replaced", "tree_of", "value_at", "without"]

#: Keys and indices from the root.
TreePath = tuple[Any, ...]


def leaves(tree: Any, place: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    """Everything that is no dict, list or tuple, with its place."""
    if not isinstance(tree, (dict, list, tuple)):
        yield place, tree
    for key, child in _children(tree):
        yield from leaves(child, (*place, key))


def value_at(tree: Any, place: TreePath) -> Any:
    """What is at this place, or nothing."""
    for key in place:
        tree = dict(_children(tree)).get(key)
    return tree


def replaced(tree: Any, values: Mapping[TreePath, Any], place: TreePath = ()) -> Any:
    """The tree with other values at some places; it stays as it is, and parts without changes are shared."""
    if place in values:
        return values[place]
    if not isinstance(tree, (dict, list, tuple)):
        return tree
    children = {key: replaced(child, values, (*place, key)) for key, child in _children(tree)}
    if all(children[key] is child for key, child in _children(tree)):
        return tree
    if isinstance(tree, tuple):
        return type(tree)(*children.values()) if hasattr(tree, "_fields") else tuple(children.values())
    new = copy.copy(tree)
    for key, child in children.items():
        new[key] = child
    return new


def without(tree: dict[str, Any], places: Collection[TreePath]) -> dict[str, Any]:
    """A tree of dicts without what is at some places; it stays as it is."""
    new = dict(tree)
    for place in places:
        node = new
        for key in place[:-1]:
            node[key] = dict(node[key])
            node = node[key]
        node.pop(place[-1], None)
    return new


def tree_of(values: Mapping[TreePath, Any]) -> Any:
    """The tree of values with their places; containers whose keys are 0, 1, 2 ... are lists."""
    if set(values) == {()}:
        return values[()]
    children: dict[Any, dict[TreePath, Any]] = {}
    for place, value in values.items():
        children.setdefault(place[0], {})[place[1:]] = value
    if all(isinstance(key, int) for key in children):
        return [tree_of(children[key]) for key in sorted(children)]
    return {key: tree_of(child) for key, child in children.items()}


def _children(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, dict):
        return list(tree.items())
    return list(enumerate(tree)) if isinstance(tree, (list, tuple)) else []

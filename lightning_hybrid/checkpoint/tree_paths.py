"""Values at paths of a tree of dicts, lists and tuples: found, replaced, inserted, left out."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from lightning_hybrid.distributed.pytree import TreePath, children_by_key, flatten_with_path


def value_at(tree: Any, path: TreePath) -> Any:
    """What is at this path, or nothing."""
    for key in path:
        tree = (children_by_key(tree) or {}).get(key)
    return tree


def replaced(tree: Any, values: Mapping[TreePath, Any], path: TreePath = ()) -> Any:
    """The tree with other values at some paths; it stays as it is, and parts without changes are shared."""
    if path in values:
        return values[path]
    old = children_by_key(tree) or {}
    children = {key: replaced(child, values, (*path, key)) for key, child in old.items()}
    if all(children[key] is child for key, child in old.items()):
        return tree
    if isinstance(tree, tuple):
        return type(tree)(*children.values()) if hasattr(tree, "_fields") else tuple(children.values())
    new = copy.copy(tree)
    for key, child in children.items():
        new[key] = child
    return new


def cloned(tree: Any) -> Any:
    """The tree with tensors of its own: those of a file that is mapped change with the file."""
    return replaced(tree, {path: leaf.clone() for path, leaf in flatten_with_path(tree) if isinstance(leaf, Tensor)})


def without(tree: dict[str, Any], paths: Collection[TreePath]) -> dict[str, Any]:
    """A tree of dicts without what is at some paths; it stays as it is."""
    new = dict(tree)
    for path in paths:
        node = new
        for key in path[:-1]:
            node[key] = dict(node[key])
            node = node[key]
        node.pop(path[-1], None)
    return new


def insert(tree: dict[str, Any], values: Mapping[TreePath, Any], names: Mapping[str, str]) -> None:
    """Put values at their paths into a tree of dicts.

    Args:
        tree: The tree, which is changed.
        values: By path.
        names: All names of the model's tensors, and what each is stored as: whatever holds a stored one gets it under
            all its names.
    """
    tables: dict[TreePath, dict[Any, Any]] = {}
    for path, value in values.items():
        tables.setdefault(path[:-1], {})[path[-1]] = value
    for parent, table in tables.items():
        node = tree
        for key in parent:
            node = node.setdefault(key, {})
        node.update({name: table[stored] for name, stored in names.items() if stored in table} | table)


def tree_of(values: Mapping[TreePath, Any]) -> Any:
    """The tree of values with their paths; containers whose keys are 0, 1, 2 ... are lists."""
    if set(values) == {()}:
        return values[()]
    children: dict[Any, dict[TreePath, Any]] = {}
    for path, value in values.items():
        children.setdefault(path[0], {})[path[1:]] = value
    if all(isinstance(key, int) for key in children):
        return [tree_of(children[key]) for key in sorted(children)]
    return {key: tree_of(child) for key, child in children.items()}

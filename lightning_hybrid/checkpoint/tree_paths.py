"""Functions that find, replace, insert and remove values at paths in a tree of dicts, lists and tuples.

The checkpoint formats (:mod:`~.full`, :mod:`~.sharded`, :mod:`~.file_io`) and `consolidate` use them, because callbacks
and modules may save tensors of the model anywhere in a checkpoint. A *path* is a tuple of keys, attribute names and
indices. torch's `pytree` is not used, because it has no function that replaces only some leaves.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from lightning_hybrid.distributed.pytree import TreePath, children_by_key, flatten_with_path


def value_at(tree: Any, path: TreePath) -> Any:
    """Return the value at this path; ``None`` if there is none."""
    for key in path:
        tree = (children_by_key(tree) or {}).get(key)
    return tree


def replaced(tree: Any, values: Mapping[TreePath, Any], path: TreePath = ()) -> Any:
    """Return a tree with new values at some paths. The old tree is not changed, and the trees share unchanged parts."""
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
    """Return a tree with copies of its tensors, because tensors that are mapped from a file change with the file."""
    return replaced(tree, {path: leaf.clone() for path, leaf in flatten_with_path(tree) if isinstance(leaf, Tensor)})


def without(tree: dict[str, Any], paths: Collection[TreePath]) -> dict[str, Any]:
    """Return a tree of dicts without the values at some paths. The old tree is not changed."""
    new = dict(tree)
    for path in paths:
        node = new
        for key in path[:-1]:
            node[key] = dict(node[key])
            node = node[key]
        node.pop(path[-1], None)
    return new


def insert(tree: dict[str, Any], values: Mapping[TreePath, Any], names: Mapping[str, str]) -> None:
    """Insert values at their paths into a tree of dicts.

    Args:
        tree: The tree, which is changed.
        values: The values by path.
        names: The stored name of each name of the model's tensors. A dict that receives a stored name receives the
            value under all names of the tensor.
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
    """Return the tree with these values at their paths. A container whose keys are all integers becomes a list."""
    if set(values) == {()}:
        return values[()]
    children: dict[Any, dict[TreePath, Any]] = {}
    for path, value in values.items():
        children.setdefault(path[0], {})[path[1:]] = value
    if all(isinstance(key, int) for key in children):
        return [tree_of(children[key]) for key in sorted(children)]
    return {key: tree_of(child) for key, child in children.items()}

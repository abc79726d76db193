"""A checkpoint is completed: callbacks put into it what they know of the model, which on one rank is a part."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_hybrid.checkpoint import WholeCheckpoint
from lightning_hybrid.shards import full

__all__ = ["check_values", "fill", "join_shards", "name_whole_groups"]

#: Where something is in a tree of dicts, lists and tuples: keys and indices from the root.
_Path = tuple[Any, ...]


def fill(checkpoint: dict[str, Any], whole: WholeCheckpoint) -> dict[str, Any]:
    """Callbacks save copies of the model, such as averages; a checkpoint gets all of each.

    In a copy on global rank 0 layers of other stages are without values. The checkpoints of the other ranks, which are
    not written, have the same things in the same places, and these values::

        rank 0   state_dict: {embed: 0.1, body.0: 0.2, body.1: meta}  <--.
        rank 1   state_dict: {embed: 0.1, body.0: meta, body.1: 0.3}  ---' what is missing at ("state_dict", "body.1")

    Args:
        checkpoint: As the Trainer made it, on every rank; it stays as it is, and so does what callbacks keep.
        whole: Knows which rank has what.

    Returns:
        The checkpoint, filled on global rank 0.
    """
    missing = whole.from_rank_zero([path for path, leaf in _leaves(checkpoint) if _is_empty(leaf)])
    if not missing:
        return checkpoint
    tied = whole.first_names()
    mine = {path: _at(checkpoint, path) for path in missing if path[-1] not in tied}
    mine = {path: value for path, value in mine.items() if isinstance(value, Tensor) and not _is_empty(value)}
    for place in {path[:-1] for path in missing}:  # state dicts, or part of them
        table = _at(checkpoint, place)
        named = {name: value for name, value in table.items() if name in tied} if isinstance(table, dict) else {}
        mine.update({(*place, name): value for name, value in whole.part(named).items()})
    found = whole.on_rank_zero(mine)
    for path in missing if found else []:
        first = (*path[:-1], tied.get(path[-1], path[-1]))
        if first in found:
            found[path] = found[first]
    return _replaced(checkpoint, found) if found else checkpoint


def join_shards(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Callbacks save what is divided over the tensor-parallel ranks; a checkpoint gets all of it, on every rank.

    Args:
        checkpoint: As the Trainer made it; the ranks that share layers have the same things in the same places.

    Returns:
        The checkpoint, with whole tensors.
    """
    found: dict[_Path, Any] = {path: full(leaf) for path, leaf in _leaves(checkpoint) if isinstance(leaf, DTensor)}
    return _replaced(checkpoint, found) if found else checkpoint


def check_values(checkpoint: dict[str, Any]) -> None:
    """Nothing that has no values is written.

    Raises:
        ValueError: If something is.
    """
    empty = [".".join(map(str, path)) for path, leaf in _leaves(checkpoint) if _is_empty(leaf)]
    if empty:
        raise ValueError(
            f"The checkpoint has tensors on the meta device, which have no values: {', '.join(empty[:5])}"
            f"{', ...' if len(empty) > 5 else ''}. Layers of other stages have none on rank 0; what other ranks save in"
            " the same place would be taken. Let `state_dict` and `on_save_checkpoint` of callbacks and of the module"
            " save the same keys on every rank."
        )


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _children(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, dict):
        return list(tree.items())
    return list(enumerate(tree)) if isinstance(tree, (list, tuple)) else []


def _leaves(tree: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    if not isinstance(tree, (dict, list, tuple)):
        yield path, tree
    for key, child in _children(tree):
        yield from _leaves(child, (*path, key))


def _at(tree: Any, path: _Path) -> Any:
    """What is at this place, or nothing: the checkpoints of other ranks may be without it."""
    for key in path:
        tree = dict(_children(tree)).get(key)
    return tree


def _replaced(tree: Any, values: dict[_Path, Any], path: _Path = ()) -> Any:
    if not isinstance(tree, (dict, list, tuple)):
        return values.get(path, tree)
    children = {key: _replaced(child, values, (*path, key)) for key, child in _children(tree)}
    if all(children[key] is child for key, child in _children(tree)):
        return tree
    if isinstance(tree, tuple):
        return type(tree)(*children.values()) if hasattr(tree, "_fields") else tuple(children.values())
    new = copy.copy(tree)
    for key, child in children.items():
        new[key] = child
    return new


def name_whole_groups(checkpoint: dict[str, Any], trainer: Trainer, whole: WholeCheckpoint) -> dict[str, Any]:
    """Finetuning keeps the optimizer's groups by the names of their parameters; a checkpoint gets all of these.

    Args:
        checkpoint: As the Trainer made it; it stays as it is, and so does what callbacks keep.
        trainer: The Trainer.
        whole: Knows the groups of the undivided optimizers.

    Returns:
        The checkpoint with whole groups.
    """
    states = dict(checkpoint.get("callbacks", {}))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        state = states.get(callback.state_key)
        if isinstance(callback, BaseFinetuning) and isinstance(state, dict) and _GROUPS in state:
            kept = {
                number: [
                    {**group, **names}
                    for group, names in zip(groups, whole.group_names(trainer.optimizers[number]), strict=False)
                ]
                for number, groups in state[_GROUPS].items()
            }
            states[callback.state_key] = {**state, _GROUPS: kept}
    return {**checkpoint, "callbacks": states} if states else checkpoint


_GROUPS = "internal_optimizer_metadata"

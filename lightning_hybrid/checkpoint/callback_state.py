"""A checkpoint is completed: callbacks put into it what they know of the model, which on one rank is a part."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_hybrid.checkpoint.full import FullCheckpoint
from lightning_hybrid.checkpoint.optimizer_state import OptimizerStates
from lightning_hybrid.checkpoint.ownership import Ownership
from lightning_hybrid.checkpoint.tree_paths import leaves, replaced, value_at

__all__ = ["check_values", "gather_callback_tensors", "name_whole_groups"]


def gather_callback_tensors(checkpoint: dict[str, Any], ownership: Ownership, whole: FullCheckpoint) -> dict[str, Any]:
    """Callbacks save copies of the model, such as averages; a checkpoint gets all of each.

    In a copy on global rank 0 layers of other stages are without values, and layers shared by several ranks are there
    in part. The checkpoints of the other ranks, which are not written, have the same things in the same places, and
    these values::

        rank 0   state_dict: {embed: 0.1, body.0: 0.2, body.1: meta}  <--.
        rank 1   state_dict: {embed: 0.1, body.0: meta, body.1: 0.3}  ---' what is missing at ("state_dict", "body.1")

    Args:
        checkpoint: As the Trainer made it, on every rank; it stays as it is, and so does what callbacks keep.
        ownership: Knows whose values count.
        whole: Collects them.

    Returns:
        The checkpoint, filled on global rank 0.
    """
    missing = whole.from_rank_zero([place for place, leaf in leaves(checkpoint) if _is_part(leaf)])
    if not missing:
        return checkpoint
    tied = ownership.first_names()
    mine = {place: value_at(checkpoint, place) for place in missing if place[-1] not in tied}
    mine = {place: value for place, value in mine.items() if isinstance(value, Tensor) and not value.is_meta}
    for root in dict.fromkeys(place[:-1] for place in missing):  # state dicts, or part of them
        table = value_at(checkpoint, root)
        named = {name: value for name, value in table.items() if name in tied} if isinstance(table, dict) else {}
        mine.update({(*root, name): value for name, value in ownership.part(named).items()})
    found = whole.on_rank_zero(mine)
    for place in missing if found else []:
        first = (*place[:-1], tied.get(place[-1], place[-1]))
        if first in found:
            found[place] = found[first]
    return replaced(checkpoint, found) if found else checkpoint


def check_values(checkpoint: dict[str, Any]) -> None:
    """Nothing that has no values is written.

    Raises:
        ValueError: If something is.
    """
    parts = (place for place, leaf in leaves(checkpoint) if isinstance(leaf, Tensor) and leaf.is_meta)
    empty = [".".join(map(str, place)) for place in parts]
    if empty:
        raise ValueError(
            f"The checkpoint has tensors on the meta device, which have no values: {', '.join(empty[:5])}"
            f"{', ...' if len(empty) > 5 else ''}. Layers of other stages have none on rank 0; what other ranks save in"
            " the same place would be taken. Let `state_dict` and `on_save_checkpoint` of callbacks and of the module"
            " save the same keys on every rank."
        )


def _is_part(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_meta or isinstance(value, DTensor))


def name_whole_groups(checkpoint: dict[str, Any], trainer: Trainer, optimizers: OptimizerStates) -> dict[str, Any]:
    """Finetuning keeps the optimizer's groups by the names of their parameters; a checkpoint gets all of these.

    Args:
        checkpoint: As the Trainer made it; it stays as it is, and so does what callbacks keep.
        trainer: The Trainer.
        optimizers: Knows the groups of the undivided optimizers.

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
                    for group, names in zip(groups, optimizers.group_names(trainer.optimizers[number]), strict=False)
                ]
                for number, groups in state[_GROUPS].items()
            }
            states[callback.state_key] = {**state, _GROUPS: kept}
    return {**checkpoint, "callbacks": states} if states else checkpoint


_GROUPS = "internal_optimizer_metadata"

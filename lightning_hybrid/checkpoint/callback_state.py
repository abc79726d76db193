"""What callbacks put into a checkpoint: of copies of the model, one rank has only a part."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_hybrid.checkpoint.full import FullCheckpoint
from lightning_hybrid.checkpoint.optimizer_state import OptimizerStates
from lightning_hybrid.checkpoint.ownership import Ownership
from lightning_hybrid.checkpoint.tree_paths import replaced, value_at
from lightning_hybrid.distributed.pytree import flatten_with_path

_GROUPS = "internal_optimizer_metadata"  # where `BaseFinetuning` keeps them


def gather_callback_tensors(checkpoint: dict[str, Any], ownership: Ownership, full: FullCheckpoint) -> dict[str, Any]:
    """Callbacks save copies of the model, such as averages; a checkpoint gets all of each.

    In a copy on global rank 0 layers of other stages are without values, and of layers shared by several ranks it has
    a shard. The checkpoints of the other ranks, which are not written, have the same keys, and these values::

        rank 0   state_dict: {embed: 0.1, body.0: 0.2, body.1: meta}  <--.
        rank 1   state_dict: {embed: 0.1, body.0: meta, body.1: 0.3}  ---' what is missing at ("state_dict", "body.1")

    Args:
        checkpoint: As the Trainer made it, on every rank; it stays as it is, and so does what callbacks have.
        ownership: Knows which rank's values count.
        full: Gathers them.

    Returns:
        The checkpoint, filled on global rank 0.
    """
    missing = full.broadcast([path for path, leaf in flatten_with_path(checkpoint) if _is_incomplete(leaf)])
    if not missing:
        return checkpoint
    tied = ownership.first_names()
    local = {path: value_at(checkpoint, path) for path in missing if path[-1] not in tied}
    local = {path: value for path, value in local.items() if isinstance(value, Tensor) and not value.is_meta}
    for root in dict.fromkeys(path[:-1] for path in missing):  # state dicts, or part of them
        table = value_at(checkpoint, root)
        named = {name: value for name, value in table.items() if name in tied} if isinstance(table, dict) else {}
        local.update({(*root, name): value for name, value in ownership.part(named).items()})
    found = full.gather(local)
    for path in missing if found else []:
        first = (*path[:-1], tied.get(path[-1], path[-1]))
        if first in found:
            found[path] = found[first]
    return replaced(checkpoint, found) if found else checkpoint


def check_values(checkpoint: dict[str, Any]) -> None:
    """Nothing that has no values is written.

    Raises:
        ValueError: If something is.
    """
    leaves = flatten_with_path(checkpoint)
    empty = [".".join(map(str, path)) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.is_meta]
    if empty:
        raise ValueError(
            f"The checkpoint has tensors on the meta device, which have no values: {', '.join(empty[:5])}"
            f"{', ...' if len(empty) > 5 else ''}. Layers of other stages have none on rank 0; what other ranks save in"
            " the same place would be taken. Let `state_dict` and `on_save_checkpoint` of callbacks and of the module"
            " save the same keys on every rank."
        )


def _is_incomplete(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_meta or isinstance(value, DTensor))


def full_finetuning_groups(checkpoint: dict[str, Any], trainer: Trainer, optimizers: OptimizerStates) -> dict[str, Any]:
    """Finetuning saves the optimizer's groups by the names of their parameters; a checkpoint gets all of these.

    Args:
        checkpoint: As the Trainer made it; it stays as it is, and so does what callbacks have.
        trainer: The Trainer.
        optimizers: Knows the groups of the undivided optimizers.

    Returns:
        The checkpoint with full groups.
    """
    states = dict(checkpoint.get("callbacks", {}))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        state = states.get(callback.state_key)
        if isinstance(callback, BaseFinetuning) and isinstance(state, dict) and _GROUPS in state:
            full = {
                number: [
                    {**group, **names}
                    for group, names in zip(groups, optimizers.group_names(trainer.optimizers[number]), strict=False)
                ]
                for number, groups in state[_GROUPS].items()
            }
            states[callback.state_key] = {**state, _GROUPS: full}
    return {**checkpoint, "callbacks": states} if states else checkpoint

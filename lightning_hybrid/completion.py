"""A checkpoint is completed: callbacks put into it what they know of the model, which on one rank is a part."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_hybrid.checkpoint import WholeCheckpoint

__all__ = ["name_whole_groups"]


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

"""Batch norm whose statistics are those of all replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from lightning_hybrid.distributed.process_group import GroupRef

_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def synchronize_batch_norm(module: nn.Module, group: ProcessGroup) -> Callable[[], None]:
    """Put torch's `SyncBatchNorm` in the place of every batch norm; parameters and buffers stay the same.

    The replicas of a stage run the same layers in the same order, so their collectives meet.

    Args:
        module: The whole module; changed in place.
        group: The replicas.

    Returns:
        A function that puts the user's layers back.
    """
    reference = GroupRef(group)
    replaced = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, _BatchNorm)
    ]
    for parent, name, layer in replaced:
        setattr(parent, name, _Synchronized(layer, reference))

    def undo() -> None:
        for parent, name, layer in replaced:
            layer.training = getattr(parent, name).training
            setattr(parent, name, layer)
        replaced.clear()

    return undo


class _Synchronized(nn.SyncBatchNorm):
    """`SyncBatchNorm` over a group, with the parameters and buffers of another layer: their dictionaries are shared."""

    def __init__(self, layer: _BatchNorm, group: GroupRef) -> None:
        super().__init__(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        self._parameters, self._buffers = layer._parameters, layer._buffers
        self.training = layer.training
        self._group = group

    @property
    def process_group(self) -> ProcessGroup | None:
        """The replicas; torch's layer looks here."""
        return self._group() if self._group.is_alive else None

    @process_group.setter
    def process_group(self, group: Any) -> None:
        """Torch's layer sets it to ``None`` when it is made."""

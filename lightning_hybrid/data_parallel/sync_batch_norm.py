"""Batch norm with statistics over all replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from lightning_hybrid.distributed.process_group import GroupRef

_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def synchronize_batch_norm(module: nn.Module, group: ProcessGroup) -> Callable[[], None]:
    """Replace every batch norm by torch's `SyncBatchNorm`. The parameters and buffers stay the same.

    The replicas of a stage run the same layers in the same order, so their collectives match.

    Args:
        module: The user's module, which is changed in place.
        group: The replicas.

    Returns:
        A function that restores the user's layers.
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
    """A `SyncBatchNorm` over a group that shares the parameter and buffer dictionaries of another layer."""

    def __init__(self, layer: _BatchNorm, group: GroupRef) -> None:
        super().__init__(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        self._parameters, self._buffers = layer._parameters, layer._buffers
        self.training = layer.training
        self._group = group

    @property
    def process_group(self) -> ProcessGroup | None:
        """Return the replicas, for torch's layer."""
        return self._group() if self._group.is_alive else None

    @process_group.setter
    def process_group(self, group: Any) -> None:
        """Ignore the value; torch's constructor sets ``None``."""

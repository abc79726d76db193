"""Batch norm with statistics over all replicas.

`GradientSync` calls :func:`synchronize_batch_norm` at the start of a run with `Trainer(sync_batchnorm=True)` and
several replicas, and undoes it at the end. torch's `convert_sync_batchnorm` is not used, because it cannot be undone,
and its layers keep a strong reference to the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from lightning_hybrid.distributed.process_group import GroupRef

_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def synchronize_batch_norm(module: nn.Module, group: ProcessGroup) -> Callable[[], None]:
    """Replace every batch norm inside a module by torch's `SyncBatchNorm`. The parameters and buffers stay the same.

    In training, each forward of such a layer is a collective of the replicas. The replicas of a stage run the same
    layers in the same order, so their collectives match.

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
        for name, child in parent._modules.items()  # `named_children` omits the second name of a layer
        if isinstance(child, _BatchNorm)
    ]
    synchronized = {layer: _Synchronized(layer, reference) for _, _, layer in replaced}
    for parent, name, layer in replaced:
        setattr(parent, name, synchronized[layer])

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
        """The replicas, for torch's layer; ``None`` after the group has been destroyed."""
        return self._group() if self._group.is_alive else None

    @process_group.setter
    def process_group(self, group: Any) -> None:
        """Ignore the value; torch's constructor sets ``None``."""

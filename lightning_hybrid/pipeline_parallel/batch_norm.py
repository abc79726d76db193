"""Batch norm in microbatches: how many of them it stands, and what is said of its statistics."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """The layers that take the mean and the variance of what they are given; those of other stages too."""
    return [layer for layer in module.modules() if isinstance(layer, _BATCH_NORMS)]


def limit_microbatches(num_microbatches: int, batch_size: int | None, layers: Sequence[nn.Module]) -> int:
    """The number of microbatches that leaves each of them two samples, where batch norm takes their statistics.

    Args:
        num_microbatches: The usual number.
        batch_size: The number of samples of the batch; ``None`` if it does not say.
        layers: The batch norms of the module.
    """
    if batch_size is None or not any(layer.training for layer in layers):
        return num_microbatches
    return max(1, min(num_microbatches, batch_size // 2))


def batch_norm_text(layers: Sequence[nn.Module], counts: Sequence[int], num_replicas: int) -> str | None:
    """What batch norm sees of a batch that is split, and what to do about it; ``None`` if it sees all of it.

    Args:
        layers: The batch norms of the module.
        counts: The number of samples of each microbatch.
        num_replicas: The data-parallel size.
    """
    number = sum(layer.training for layer in layers)
    if len(counts) == 1 or number == 0:
        return None
    synchronized = all(isinstance(layer, nn.SyncBatchNorm) for layer in layers)
    replicas = f" on each of {num_replicas} replicas" if synchronized and num_replicas > 1 else ""
    synchronize = (
        "" if synchronized or num_replicas == 1 else " Trainer(sync_batchnorm=True) for statistics over all replicas,"
    )
    samples = f"{min(counts)} sample{'s' if min(counts) > 1 else ''}"
    return (
        f"{number} BatchNorm layer{'s compute' if number > 1 else ' computes'} statistics over microbatches of"
        f" {samples}{replicas}, not over the full batch of {sum(counts)}. Statistics over few samples are noisy. Use"
        f" larger batches,{synchronize} GroupNorm, or num_microbatches=1 for statistics over the full batch."
    )

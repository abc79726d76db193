"""Batch norm in microbatches: a limit on the number of microbatches, and the warning about statistics.

Batch norm computes statistics over a microbatch, not over the full batch, so results depend on the number of
microbatches. With a single sample, torch may raise an error. If `num_microbatches` is ``"auto"``, the training step
limits the number for each batch, and it warns once. The log message about the batch size and dry runs compute the same
limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the batch-norm layers of a module, including layers of other stages."""
    return [layer for layer in module.modules() if isinstance(layer, _BATCH_NORMS)]


def limit_microbatches(num_microbatches: int, batch_size: int | None, layers: Sequence[nn.Module]) -> int:
    """Return the number of microbatches, reduced so that batch norm has at least two samples in each microbatch.

    Args:
        num_microbatches: The requested number.
        batch_size: The number of samples in the batch; ``None`` if unknown. Then the number is not reduced.
        layers: The batch-norm layers of the module. If none of them is in training mode, the number is not reduced.
    """
    if batch_size is None or not any(layer.training for layer in layers):
        return num_microbatches
    return max(1, min(num_microbatches, batch_size // 2))


def batch_norm_text(layers: Sequence[nn.Module], counts: Sequence[int], num_replicas: int) -> str | None:
    """Return the warning that batch norm computes statistics over microbatches.

    Args:
        layers: The batch-norm layers of the module.
        counts: The number of samples in each microbatch.
        num_replicas: The data-parallel size.

    Returns:
        The warning; ``None`` if the batch is not split or no batch-norm layer is in training mode.
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

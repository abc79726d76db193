"""Outputs of `training_step` for the microbatches of a batch, merged as if the step had run once.

`TrainingStep` calls :func:`merge_outputs` on the last stage before the result is sent to all ranks. Hooks such as
`on_train_batch_end` receive the merged output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hybrid.distributed.pytree import LEAF, TreeSpec, map_leaves, unflatten
from lightning_hybrid.trainer.results.logging import weighted_mean


def merge_outputs(outputs: Sequence[Any], counts: Sequence[int], loss: Tensor) -> Any:
    """Merge the outputs of the user's `training_step` for all microbatches.

    Args:
        outputs: For each microbatch with a loss, a loss tensor, or a dictionary with ``"loss"`` and other entries.
        counts: The number of samples of each of these microbatches.
        loss: The loss of the whole batch, shape ``()``.

    Returns:
        The loss, or the dictionary. Tensors, arrays and lists whose length is the number of samples are concatenated.
        Other floating-point tensors, arrays and numbers are averaged, weighted by samples. Containers are merged entry
        by entry. For everything else, the value of the first microbatch is used. Entries of the dictionary that not
        every microbatch has are dropped. Tensors have no graph.
    """
    if isinstance(outputs[0], Tensor):
        return loss
    extras = [{key: value for key, value in output.items() if key != "loss"} for output in outputs]
    names = [name for name in extras[0] if all(name in extra for extra in extras)]
    return {"loss": loss, **{name: _merge_extra([extra[name] for extra in extras], counts) for name in names}}


def _merge_extra(values: list[Any], counts: Sequence[int]) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return map_leaves(_detached, first)
    if isinstance(first, (Tensor, np.ndarray)):
        return _merge_arrays([_detached(value) for value in values], counts)
    if isinstance(first, (float, np.floating)):
        weights = counts if any(counts) else [1] * len(values)
        return type(first)(sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights))
    if isinstance(first, list) and [len(value) for value in values] == list(counts):
        return [map_leaves(_detached, entry) for value in values for entry in value]
    if isinstance(first, dict) and all(value.keys() == first.keys() for value in values):
        return {key: _merge_extra([value[key] for value in values], counts) for key in first}
    if isinstance(first, (list, tuple)) and all(len(value) == len(first) for value in values):
        entries = [_merge_extra(list(column), counts) for column in zip(*values, strict=True)]
        return unflatten(entries, TreeSpec.of(type(first), (), (LEAF,) * len(entries)))
    return map_leaves(_detached, first)


def _merge_arrays(values: list[Any], counts: Sequence[int]) -> Any:
    """Merge tensors or NumPy arrays."""
    first = values[0]
    is_tensor = isinstance(first, Tensor)
    if first.ndim > 0 and [len(value) for value in values if value.ndim > 0] == list(counts):
        return torch.cat(values) if is_tensor else np.concatenate(values)
    is_floating = first.is_floating_point() if is_tensor else np.issubdtype(first.dtype, np.floating)
    if not is_floating or any(value.shape != first.shape for value in values):
        return first
    if is_tensor:
        return weighted_mean(values, counts)
    return np.average(values, axis=0, weights=counts if any(counts) else None).astype(first.dtype)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf

"""Layers that compute with this rank's shard of their weights: plain tensors in, plain tensors out.

A layer of the user's becomes one of these in place: its class changes, and nothing else does. So names, hooks, ties and
`isinstance` stay as they are, and callbacks may copy it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hybrid.distributed.dtensor import shard_of
from lightning_hybrid.distributed.random import own_numbers
from lightning_hybrid.tensor_parallel.mappings import (
    TensorGroup,
    copy_to_tp,
    gather_from_sp,
    gather_from_tp,
    reduce_from_tp,
    reduce_scatter_to_sp,
    scatter_to_tp,
)
from lightning_hybrid.tensor_parallel.vocab_parallel import VocabParallelLogits

__all__ = [
    "ColumnLinear",
    "OnShards",
    "ParallelLayer",
    "RowLinear",
    "SequenceGathered",
    "SequenceRegion",
    "VocabularyEmbedding",
    "VocabularyHead",
    "parallelize_layer",
    "restore_layer",
]


class ParallelLayer:
    """What all of these layers know.

    Attributes:
        tensor_group: The ranks that share the layer.
        sequence_dim: The dimension of an activation along which sequences are divided outside of the layer; ``None`` if
            activations are replicated there.
    """

    tensor_group: TensorGroup
    sequence_dim: int | None

    def enter(self, x: Tensor) -> Tensor:
        """What comes in, whole, about to be used with a shard of the weights."""
        if self.sequence_dim is None:
            return copy_to_tp(x, self.tensor_group)
        return gather_from_sp(x, self.sequence_dim, self.tensor_group)

    def leave(self, x: Tensor) -> Tensor:
        """What goes out: the sum over the ranks."""
        if self.sequence_dim is None:
            return reduce_from_tp(x, self.tensor_group)
        return reduce_scatter_to_sp(x, self.sequence_dim, self.tensor_group)


def parallelize_layer(layer: nn.Module, kind: type, **attributes: Any) -> None:
    """Turn a layer into a parallel one.

    Args:
        layer: The layer; changed in place.
        kind: A mixin class of this module.
        attributes: What the mixin needs.
    """
    if not isinstance(layer, kind):
        layer.__class__ = _mixed(kind, type(layer))
    vars(layer).setdefault(_ADDED, set()).update(attributes)
    vars(layer).update(attributes)


def restore_layer(layer: nn.Module) -> None:
    """Turn a parallel layer into what it was."""
    while type(layer) in _MIXED.values():
        layer.__class__ = type(layer).__bases__[1]
    for attribute in vars(layer).pop(_ADDED, ()):
        vars(layer).pop(attribute, None)


_ADDED = "_added_by_sharing"  # where a layer remembers the attributes that it has got
_MIXED: dict[tuple[type, type], type] = {}


def _mixed(kind: type, base: type) -> type:
    if (kind, base) not in _MIXED:
        _MIXED[kind, base] = type(base.__name__, (kind, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    return _MIXED[kind, base]


class ColumnLinear(ParallelLayer):
    """A linear layer that makes this rank's share of the output features.

    Attributes:
        gathers_output: Whether the shares are joined.
    """

    weight: Tensor
    bias: Tensor | None
    gathers_output: bool
    enters: bool

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in_features)`` to ``(..., out_features / T)``."""
        if self.enters:
            x = self.enter(x)
        y = F.linear(x, shard_of(self.weight), shard_of(self.bias))
        return gather_from_tp(y, -1, self.tensor_group) if self.gathers_output else y


class RowLinear(ParallelLayer):
    """A linear layer that takes this rank's share of the input features; the results are summed.

    Attributes:
        splits_input: Whether the input is whole.
    """

    weight: Tensor
    bias: Tensor | None
    splits_input: bool

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in_features / T)`` to ``(..., out_features)``."""
        if self.splits_input:
            x = scatter_to_tp(x, -1, self.tensor_group)
        y = self.leave(F.linear(x, shard_of(self.weight)))
        return y if self.bias is None else y + self.bias


class VocabularyEmbedding(ParallelLayer):
    """An embedding that holds this rank's share of the rows."""

    weight: Tensor
    padding_idx: int | None

    def forward(self, indices: Tensor) -> Tensor:
        """Indices of any shape to ``(..., embedding_dim)``: rows of other ranks are zero here, then all are summed."""
        weight = shard_of(self.weight)
        if (
            type(indices) is Tensor
            and indices.device.type == "cpu"
            and ((indices < 0) | (indices >= len(self.weight))).any()
        ):
            raise IndexError(f"an index is out of range: the embedding has {len(self.weight)} rows")
        first = self.tensor_group.rank * len(weight)
        local = indices - first
        elsewhere = (local < 0) | (local >= len(weight))
        padding = None if self.padding_idx is None else self.padding_idx - first
        own_padding = padding if padding is not None and 0 <= padding < len(weight) else None
        found = F.embedding(local.masked_fill(elsewhere, 0), weight, own_padding)
        return reduce_from_tp(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tensor_group)


class VocabularyHead(ParallelLayer):
    """A linear layer to the vocabulary: its output is never joined unless somebody needs it whole."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in_features)`` to `VocabParallelLogits` of shape ``(..., out_features)``."""
        y = F.linear(self.enter(x), shard_of(self.weight), shard_of(self.bias))
        return VocabParallelLogits.of(y, self.tensor_group)


class OnShards(ParallelLayer):
    """A layer that works on shards: its random numbers are this rank's own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer does."""
        forward: Callable[..., Any] = super().forward  # type: ignore[misc]
        if not getattr(self, "training", False) or getattr(self, "p", 1.0) == 0.0:
            return forward(*args, **kwargs)
        with own_numbers(self.tensor_group.rank, _device_of(args)):
            return forward(*args, **kwargs)


class SequenceRegion(ParallelLayer):
    """A layer inside of which sequences are divided.

    Attributes:
        splits: Whether the input is whole, and is divided here; else the layer before has left it divided.
        gathers: Whether the output is made whole.
    """

    splits: bool
    gathers: bool

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer does, on a share of the sequence."""
        assert self.sequence_dim is not None
        if self.splits:
            x = scatter_to_tp(x, self.sequence_dim, self.tensor_group)
        y = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return gather_from_tp(y, self.sequence_dim, self.tensor_group) if self.gathers else y


class SequenceGathered(ParallelLayer):
    """A layer inside of a region whose sequence is made whole before it; its row-wise layers divide it again."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer does, on whole sequences."""
        return super().forward(self.enter(x), *args, **kwargs)  # type: ignore[misc]


def _device_of(args: tuple[Any, ...]) -> torch.device:
    return next((arg.device for arg in args if isinstance(arg, Tensor)), torch.device("cpu"))

"""Torch's fused inference of transformer layers reads weights directly, and these are shards while they are shared."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_hybrid.tensor_parallel.layers import ParallelLayer

__all__ = ["leave_fast_paths", "take_fast_paths"]

_BEFORE = "_before_sharing"  # where a layer remembers what it was set to


def leave_fast_paths(module: nn.Module) -> None:
    """Switch it off in layers that are shared, and in what holds them."""
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            if isinstance(layer.self_attn, ParallelLayer) or isinstance(layer.linear1, ParallelLayer):
                _set(layer, "activation_relu_or_gelu", 0)
        elif isinstance(layer, nn.TransformerEncoder):
            _set(layer, "use_nested_tensor", False)


def take_fast_paths(module: nn.Module) -> None:
    """Switch it on again where it was."""
    for layer in module.modules():
        vars(layer).update(vars(layer).pop(_BEFORE, {}))


def _set(layer: nn.Module, attribute: str, value: Any) -> None:
    vars(layer).setdefault(_BEFORE, {attribute: getattr(layer, attribute)})
    setattr(layer, attribute, value)

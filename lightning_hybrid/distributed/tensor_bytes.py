"""Tensors as they travel: their bytes, and copies on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The numbers of a tensor as a flat uint8 tensor, for no backend knows every dtype.

    It shares memory with a contiguous tensor whose conjugation and sign are resolved; another one is copied.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def to_host(leaf: Any) -> Any:
    """A tensor as a copy on the host, without a graph and with memory of its own; anything else as it is."""
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf

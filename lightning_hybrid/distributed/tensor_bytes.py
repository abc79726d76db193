"""Tensors as they travel: their bytes, and copies on the host and from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The numbers of a tensor as a flat uint8 tensor, for no backend knows every dtype.

    It shares memory with a contiguous tensor whose conjugation and sign are resolved; another one is copied.
    """
    resolved = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not `view(-1)`, which leaves a tensor of one element its stride, and bytes have none but 1.
    return resolved.as_strided((resolved.numel(),), (1,)).view(torch.uint8)


def pinned(leaf: Any) -> Any:
    """A tensor of the host in page-locked memory, from which it moves while the host goes on; others as they are."""
    on_host = isinstance(leaf, Tensor) and leaf.device.type == "cpu"
    return leaf.pin_memory() if on_host and not leaf.is_pinned() else leaf


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; the host does not wait for a CUDA device to take it."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return pinned(tensor).to(device, non_blocking=True)  # type: ignore[no-any-return]


def to_host(leaf: Any) -> Any:
    """A tensor as a copy on the host, without a graph and with memory of its own; anything else as it is."""
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def tell_autograd(written: Any) -> None:
    """Count a new version of tensors that a collective has written, which it does not do itself.

    Args:
        written: A tensor, or a list of some; anything else is left alone.
    """
    for tensor in written if isinstance(written, list) else [written]:
        if isinstance(tensor, Tensor) and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def bytes_tensor(payload: bytes) -> Tensor:
    """Bytes on the host, shape (number of them)."""
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)

"""Tensors as bytes for messages, and copies between the host and a device.

Messages, broadcasts and checkpoints send tensors as bytes, because no communication backend supports every dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as a flat uint8 tensor, because no communication backend supports every dtype.

    The result shares memory with a contiguous tensor without a lazy conjugation or negation. Other tensors are copied.
    """
    resolved = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # `view(-1)` would keep the stride of a tensor with one element, but viewing as bytes needs a stride of 1.
    return resolved.as_strided((resolved.numel(),), (1,)).view(torch.uint8)


def pinned(leaf: Any) -> Any:
    """Return a tensor of the host in page-locked memory, so that a copy to a device does not block the host.

    Any other value, and a tensor that is in page-locked memory, is returned unchanged.
    """
    on_host = isinstance(leaf, Tensor) and leaf.device.type == "cpu"
    return leaf.pin_memory() if on_host and not leaf.is_pinned() else leaf


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. The host does not wait for the copy to a CUDA device."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return pinned(tensor).to(device, non_blocking=True)  # type: ignore[no-any-return]


def to_host(leaf: Any) -> Any:
    """Return a copy of a tensor on the host, without a graph and with its own memory; return other values unchanged."""
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def tell_autograd(written: Any) -> None:
    """Increase the version of tensors that a collective has written, because collectives do not do that themselves.

    Without this, autograd would not detect that a backward needs the old values.

    Args:
        written: A tensor, or a list of tensors; any other value is ignored.
    """
    for tensor in written if isinstance(written, list) else [written]:
        if isinstance(tensor, Tensor) and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def bytes_tensor(payload: bytes) -> Tensor:
    """Return a copy of bytes as a uint8 tensor on the host, shape ``(number of bytes,)``."""
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)

"""Broadcast of many tensors from one rank of a group to all its ranks.

`GradientSync` calls it at the start of a run (parameters and buffers), and for floating-point buffers before each
training batch and each evaluation. ZeRO calls it before it shards a parameter. `dist.broadcast` takes one tensor, so a
model would need a collective for each of thousands of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_hybrid.distributed.tensor_bytes import as_bytes

CHUNK_BYTES = 25 * 2**20  # of tensors that are sent together


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: ProcessGroup, source: int = 0) -> None:
    """Set tensors to the values of one rank, in place. Every rank of the group must call this.

    Small tensors are sent together, so a model needs only a few collectives, and 25 MiB of extra memory. Tensors on the
    meta device have no values and are skipped.

    Args:
        tensors: Dense tensors of any dtypes (including bool and integers) and shapes. Every rank of the group passes
            the same tensors in the same order.
        group: The ranks.
        source: The rank *in the group* with the values.
    """
    if group.size() == 1:
        return
    for chunk in _chunks(tensor.detach() for tensor in tensors if not tensor.is_meta and tensor.numel() > 0):
        in_place = len(chunk) == 1 and chunk[0].is_contiguous() and not chunk[0].is_conj()
        flat = chunk[0] if in_place else torch.cat([tensor.reshape(-1) for tensor in chunk])
        dist.broadcast(as_bytes(flat), group=group, group_src=source)
        if not in_place and group.rank() != source:
            for tensor, values in zip(chunk, torch.split(flat, [tensor.numel() for tensor in chunk]), strict=True):
                tensor.copy_(values.view(tensor.shape))


def _chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors with one dtype and device, each of at most ``CHUNK_BYTES`` or with a single tensor."""
    chunks: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        if kind in chunks and sizes[kind] + size > CHUNK_BYTES:
            yield chunks.pop(kind)
        if kind not in chunks:
            chunks[kind], sizes[kind] = [], 0
        chunks[kind].append(tensor)
        sizes[kind] += size
    yield from chunks.values()

"""The chunks of a tensor on a rank: rectangles, each with its offset in the full tensor.

The planners in `storage.dcp` and `storage.dcp_writer` call :func:`local_chunks` for each tensor that they read or
write. torch's own planner takes one rectangle per DTensor, but the shard of a fused query-key-value projection (a
*packed* projection) has several.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from lightning_hybrid.distributed.dtensor import to_local


def local_chunks(tensor: Tensor) -> Iterator[tuple[torch.Size, Tensor]]:
    """Yield the chunks of a tensor that are on this rank.

    A plain tensor is one chunk. The shard of a packed projection, whose blocks are sharded separately, has one chunk
    for each block::

        rows       q q q q k k k k v v v v
        rank 1         q q     k k     v v      three chunks, at rows 2, 6 and 10

    Args:
        tensor: A plain tensor, or a tensor that is sharded over any mesh; any shape.

    Yields:
        The offset of each chunk in the full tensor, and a view of the chunk. A rank with an empty shard has no chunk.
    """
    if not isinstance(tensor, DTensor):
        yield torch.Size([0] * tensor.dim()), tensor.detach()
        return
    local, mesh = to_local(tensor).detach(), tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank must be in the mesh of the tensor"
    runs = _runs_of(tensor.shape, tensor.placements, tuple(coordinate), mesh.shape)
    for rectangle in itertools.product(*runs):
        view = local
        for dim, (_, begin, length) in enumerate(rectangle):
            view = view.narrow(dim, begin, length)
        yield torch.Size([first for first, _, _ in rectangle]), view


@lru_cache(maxsize=4096)  # many layers are alike, and optimizer states have the shapes of their parameters
def _runs_of(
    shape: torch.Size, placements: tuple[Placement, ...], coordinate: tuple[int, ...], sizes: tuple[int, ...]
) -> list[list[tuple[int, int, int]]]:
    """Return the runs of a shard in each dimension; see :func:`_runs`. A run is a range of adjacent indices.

    The outermost axis of the mesh shards first. `chunk` splits uneven sizes like torch's sharding.
    """
    # For each sharded dimension, the indices in the full tensor of the shard's entries, in the shard's order.
    indices: dict[int, Tensor] = {}
    for placement, rank, size in zip(placements, coordinate, sizes, strict=True):
        dim = getattr(placement, "dim", None)  # a replicated placement has none
        if dim is not None:
            blocks = indices.get(dim, torch.arange(shape[dim])).chunk(getattr(placement, "split_factor", 1))
            shards = [block.chunk(size) for block in blocks]
            indices[dim] = torch.cat([shard[rank] if rank < len(shard) else shard[0][:0] for shard in shards])
    return [_runs(indices[dim]) if dim in indices else [(0, 0, size)] for dim, size in enumerate(shape)]


def _runs(indices: Tensor) -> list[tuple[int, int, int]]:
    """Return runs that are adjacent in the full tensor and in the shard: (first index there, first here, length)."""
    if indices.numel() == 0:
        return []
    breaks = ((indices[1:] - indices[:-1]) != 1).nonzero().flatten() + 1
    begins = [0, *breaks.tolist()]
    ends = [*begins[1:], indices.numel()]
    return [(int(indices[begin]), begin, end - begin) for begin, end in zip(begins, ends, strict=True)]

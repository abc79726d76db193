"""What a rank holds of a tensor: chunks, which are rectangles, each with its offset in the full tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from lightning_hybrid.distributed.dtensor import to_local


def local_chunks(tensor: Tensor) -> Iterator[tuple[torch.Size, Tensor]]:
    """The chunks of a tensor that live on this rank.

    A plain tensor is one. The shard of a packed projection, whose blocks are sharded one by one, falls into as many as
    there are blocks::

        rows       q q q q k k k k v v v v
        rank 1         q q     k k     v v      three chunks, at rows 2, 6 and 10

    Args:
        tensor: Of any shape; plain, or sharded over any mesh.

    Yields:
        The offset of each chunk in the full tensor, and a view of it.
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


@lru_cache(maxsize=4096)  # layers are alike, and each parameter has states of its own shape
def _runs_of(
    shape: torch.Size, placements: tuple[Placement, ...], coordinate: tuple[int, ...], sizes: tuple[int, ...]
) -> list[list[tuple[int, int, int]]]:
    """For each dimension the runs of a shard; see :func:`_runs`.

    Of the mesh's axes the outermost shards first; `chunk` is how torch shards what cannot be divided evenly.
    """
    indices: dict[int, Tensor] = {}  # in the full tensor, of what the shard has in each sharded dimension, in its order
    for placement, rank, size in zip(placements, coordinate, sizes, strict=True):
        dim = getattr(placement, "dim", None)  # a replica has none
        if dim is not None:
            blocks = indices.get(dim, torch.arange(shape[dim])).chunk(getattr(placement, "split_factor", 1))
            shards = [block.chunk(size) for block in blocks]
            indices[dim] = torch.cat([shard[rank] if rank < len(shard) else shard[0][:0] for shard in shards])
    return [_runs(indices[dim]) if dim in indices else [(0, 0, size)] for dim, size in enumerate(shape)]


def _runs(indices: Tensor) -> list[tuple[int, int, int]]:
    """Neighbours in the full tensor that are neighbours in the shard: (first index there, first here, length)."""
    if indices.numel() == 0:
        return []
    breaks = ((indices[1:] - indices[:-1]) != 1).nonzero().flatten() + 1
    begins = [0, *breaks.tolist()]
    ends = [*begins[1:], indices.numel()]
    return [(int(indices[begin]), begin, end - begin) for begin, end in zip(begins, ends, strict=True)]

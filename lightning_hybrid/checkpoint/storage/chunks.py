"""What a rank holds of a tensor: rectangles, each with its place in the whole tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

__all__ = ["local_chunks"]


def local_chunks(tensor: Tensor) -> Iterator[tuple[torch.Size, Tensor]]:
    """The rectangles of a tensor that live here.

    A plain tensor is one. The shard of a packed projection, whose blocks are each divided, falls into as many as there
    are blocks::

        rows       q q q q k k k k v v v v
        rank 1         q q     k k     v v      three pieces, at rows 2, 6 and 10

    Args:
        tensor: Of any shape; plain, or divided over any mesh.

    Yields:
        The offset of each piece in the whole tensor, and a view of it.
    """
    if not isinstance(tensor, DTensor):
        yield torch.Size([0] * tensor.dim()), tensor.detach()
        return
    with torch.no_grad():
        local = tensor.to_local()
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is in the mesh"
    runs = _runs_of(tensor.shape, tensor.placements, tuple(coordinate), mesh.shape)
    for rectangle in itertools.product(*runs):
        view = local.detach()
        for dim, (_, begin, length) in enumerate(rectangle):
            view = view.narrow(dim, begin, length)
        yield torch.Size([first for first, _, _ in rectangle]), view


@lru_cache(maxsize=4096)  # layers are alike, and each parameter has states of its own shape
def _runs_of(
    shape: torch.Size, placements: tuple[Placement, ...], coordinate: tuple[int, ...], sizes: tuple[int, ...]
) -> list[list[tuple[int, int, int]]]:
    """For each dimension the runs of what is here of a tensor; see :func:`_runs`."""
    divided = _indices(shape, placements, coordinate, sizes)
    return [_runs(divided[dim]) if dim in divided else [(0, 0, size)] for dim, size in enumerate(shape)]


def _indices(
    shape: torch.Size, placements: tuple[Placement, ...], coordinate: tuple[int, ...], sizes: tuple[int, ...]
) -> dict[int, Tensor]:
    """For each divided dimension the places in the whole tensor of what is here, in the order in which it is here.

    Of the mesh's axes the outermost divides first; `chunk` is how torch divides what cannot be divided evenly.
    """
    indices: dict[int, Tensor] = {}
    for placement, place, size in zip(placements, coordinate, sizes, strict=True):
        dim = getattr(placement, "dim", None)  # a replica has none
        if dim is None:
            continue
        blocks = indices.get(dim, torch.arange(shape[dim])).chunk(getattr(placement, "split_factor", 1))
        shares = [block.chunk(size) for block in blocks]
        indices[dim] = torch.cat([share[place] if place < len(share) else share[0][:0] for share in shares])
    return indices


def _runs(indices: Tensor) -> list[tuple[int, int, int]]:
    """Neighbours in the whole tensor that are neighbours here: (first place there, first place here, length)."""
    if indices.numel() == 0:
        return []
    breaks = ((indices[1:] - indices[:-1]) != 1).nonzero().flatten() + 1
    begins = [0, *breaks.tolist()]
    ends = [*begins[1:], indices.numel()]
    return [(int(indices[begin]), begin, end - begin) for begin, end in zip(begins, ends, strict=True)]

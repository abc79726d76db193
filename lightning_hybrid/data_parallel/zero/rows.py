"""The rows of a tensor, divided over replicas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RowShards"]


@dataclass(frozen=True)
class RowShards:
    """Each rank has equally many rows of a tensor, but the last ones may have fewer, or none.

    ::

        7 rows over 4 ranks     0 1 | 2 3 | 4 5 | 6 -     as if there were 8: a rank's share is as large as any other's

    Rows lie along the first dimension that has more than one of them, so those of one rank are neighbours in memory.

    Attributes:
        shape: The shape of the tensor.
        dim: The dimension.
        num_ranks: The number of replicas.
    """

    shape: torch.Size
    dim: int
    num_ranks: int

    @classmethod
    def of(cls, shape: torch.Size, num_ranks: int) -> RowShards | None:
        """The rows of a tensor of this shape; ``None`` if there are not two of them."""
        dim = next((dim for dim, size in enumerate(shape) if size != 1), None)
        return None if dim is None or shape[dim] == 0 else cls(shape, dim, num_ranks)

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return self.shape.numel()

    @property
    def per_rank(self) -> int:
        """Rows of a full share, as `torch.chunk` divides."""
        return -(-self.shape[self.dim] // self.num_ranks)

    @property
    def share(self) -> int:
        """Elements of a full share."""
        return self.per_rank * (self.numel // self.shape[self.dim])

    def shape_of(self, rank: int) -> torch.Size:
        """The shape of what one rank has."""
        size = self.shape[self.dim]
        begin = min(rank * self.per_rank, size)
        sizes = list(self.shape)
        sizes[self.dim] = min(begin + self.per_rank, size) - begin
        return torch.Size(sizes)

    def part(self, flat: Tensor, rank: int) -> Tensor:
        """What one rank has, as a view into all shares one after the other.

        Args:
            flat: Of ``num_ranks * share`` elements.
            rank: The rank.
        """
        shape = self.shape_of(rank)
        return flat.narrow(0, rank * self.share, shape.numel()).view(shape)

    def whole(self, flat: Tensor) -> Tensor:
        """The tensor, as a view into all shares one after the other."""
        return flat.narrow(0, 0, self.numel).view(self.shape)

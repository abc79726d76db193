"""Where a sequence is in a tensor, and how it is divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.tensor_parallel.context_parallel.mappings import Shares, all_gather_shares, scatter_to_cp


class SequenceLayout(NamedTuple):
    """The dimension along which a sequence goes, by itself or together with others.

    ::

        (batch, sequence, classes)      dim 1
        (batch * sequence, classes)     dim 0, outer = batch: the sequences one after the other
        (sequence * batch, classes)     dim 0, inner = batch: all samples of the first position, of the second, ...

    Attributes:
        dim: The dimension.
        shares: How the sequence is divided.
        outer: How many sequences there are along it.
        inner: How many entries each position has in each of them.
    """

    dim: int
    shares: Shares
    outer: int = 1
    inner: int = 1

    @property
    def size(self) -> int:
        """The size of the dimension, of the whole sequence."""
        return self.outer * self.shares.total * self.inner

    def is_same(self, other: SequenceLayout) -> bool:
        """Whether these are the same entries of a tensor of the same shape."""
        return self._replace(shares=other.shares) == other and self.shares.is_same(other.shares)

    def at(self, dim: int) -> SequenceLayout:
        """The same along another dimension."""
        return self._replace(dim=dim)

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """The shape of the whole, of that of a share."""
        return [*shape[: self.dim], self.size, *shape[self.dim + 1 :]]

    def own(self, x: Tensor) -> Tensor:
        """This rank's share, of a tensor that every rank has."""
        return self._split(x, self.shares.total, lambda x, dim, shares: shares.own(x, dim))

    def scatter(self, x: Tensor) -> Tensor:
        """The same for autograd."""
        return self._split(x, self.shares.total, scatter_to_cp)

    def gather(self, share: Tensor) -> Tensor:
        """The whole, of the shares of all ranks: a collective; not for autograd."""
        return self._split(share, self.shares.length, all_gather_shares)

    def _split(self, x: Tensor, length: int, function: Callable[[Tensor, int, Shares], Tensor]) -> Tensor:
        """Apply a function to a tensor in which the sequence has a dimension of its own."""
        if self.outer == self.inner == 1:
            return function(x, self.dim, self.shares)
        split: Tensor = x.unflatten(self.dim, (self.outer, length, self.inner))  # type: ignore[no-untyped-call]
        return function(split, self.dim + 1, self.shares).flatten(self.dim, self.dim + 2)

    def reshaped(self, shape: torch.Size, new: torch.Size) -> SequenceLayout | None:
        """Where the sequence is once a tensor has another shape of as many entries.

        Args:
            shape: The shape of the whole.
            new: The other one.

        Returns:
            The layout; ``None`` if the sequence lies across several dimensions.
        """
        before = shape[: self.dim].numel() * self.outer
        for dim, size in enumerate(new if new.numel() > 0 else ()):
            outer, rest = divmod(before, new[:dim].numel())
            if rest == 0 and size % (outer * self.shares.total) == 0:
                return SequenceLayout(dim, self.shares, outer, size // (outer * self.shares.total))
        return None

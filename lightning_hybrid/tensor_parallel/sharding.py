"""The division of a dimension of a tensor over ranks: of the positions of a sequence, or of classes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.distributed.process_group import SizedGroupRef, all_gather_single


class Shares:
    """The share of each rank in the positions of a dimension: consecutive ones, or two pieces.

    With two pieces each rank has as much to do where a mask is causal::

        positions     0 1 2 3 4 5 6 7
        consecutive   0 0 1 1 2 2 3 3     the rank of each
        balanced      0 1 2 3 3 2 1 0

    Args:
        total: The number of positions, for example the length of a sequence.
        group: The ranks.
        balanced: True if each rank has two pieces.

    Attributes:
        pieces: The first position and the length of each piece of each rank.
        lengths: The length of the share of each rank.
        length: The length of this rank's share.
    """

    __slots__ = ("balanced", "group", "length", "lengths", "pieces", "total")

    def __init__(self, total: int, group: SizedGroupRef, *, balanced: bool) -> None:
        self.total, self.group, self.balanced = total, group, balanced
        number = group.size * (2 if balanced else 1)
        each, rest = divmod(total, number)
        sizes = [each + (at < rest) for at in range(number)]
        pieces = list(zip(accumulate(sizes, initial=0), sizes, strict=False))
        pairs = zip(pieces[: group.size], reversed(pieces), strict=False)
        self.pieces = [[first, second] if balanced else [first] for first, second in pairs]
        self.lengths = [sum(length for _, length in of_rank) for of_rank in self.pieces]
        self.length = self.lengths[group.rank]

    def is_same(self, other: Shares) -> bool:
        """Return whether another dimension is divided at the same positions."""
        return self.total == other.total and self.pieces == other.pieces

    def narrowed(self, start: int, length: int) -> tuple[Shares, int]:
        """Return the shares of consecutive positions: each rank keeps those that it has of them.

        Args:
            start: The first of them.
            length: Their number.

        Returns:
            Their shares, which may have other lengths, and where this rank's begins in its present share.
        """

        def overlap(first: int, size: int) -> tuple[int, int]:
            begin, end = max(first, start), min(first + size, start + length)
            return min(begin - start, length), max(end - begin, 0)

        made = copy.copy(self)
        made.total = length
        made.pieces = [[overlap(*piece) for piece in of_rank] for of_rank in self.pieces]
        made.lengths = [sum(size for _, size in of_rank) for of_rank in made.pieces]
        made.length = made.lengths[self.group.rank]
        before = sum(min(max(start - first, 0), size) for first, size in self.pieces[self.group.rank])
        return made, before

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's share of a tensor; a view if its positions are consecutive."""
        return self.of_rank(x, dim, self.group.rank)

    def of_rank(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Return a rank's share of a tensor."""
        parts = [x.narrow(dim, start, length) for start, length in self.pieces[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def in_order(self, shares: Sequence[Tensor]) -> Tensor:
        """Return the whole along the first dimension, from the shares of all ranks."""
        parts: list[tuple[int, Tensor]] = []
        for share, of_rank in zip(shares, self.pieces, strict=True):
            offset = 0
            for start, length in of_rank:
                parts.append((start, share[offset : offset + length]))
                offset += length
        return torch.cat([part for _, part in sorted(parts, key=itemgetter(0))])


class Sharding(NamedTuple):
    """The dimension that is divided, which holds the divided positions alone or together with others.

    ::

        (batch, sequence, classes)      dim 1
        (batch * sequence, classes)     dim 0, outer = batch: the sequences one after the other
        (sequence * batch, classes)     dim 0, inner = batch: all samples of the first position, of the second, ...

    Attributes:
        dim: The dimension.
        shares: How its positions are divided.
        outer: How many sequences there are along it.
        inner: How many entries each position has in each of them.
    """

    dim: int
    shares: Shares
    outer: int = 1
    inner: int = 1

    @property
    def size(self) -> int:
        """The size of the dimension in the whole tensor."""
        return self.outer * self.shares.total * self.inner

    @property
    def is_simple(self) -> bool:
        """True if the dimension holds nothing but the divided positions."""
        return self.outer == self.inner == 1

    def is_same(self, other: Sharding) -> bool:
        """Return whether another one gives each rank the same entries of a tensor of the same shape."""
        return self._replace(shares=other.shares) == other and self.shares.is_same(other.shares)

    def at(self, dim: int) -> Sharding:
        """Return the same along another dimension."""
        return self._replace(dim=dim)

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the whole, from that of a share."""
        return [*shape[: self.dim], self.size, *shape[self.dim + 1 :]]

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's share of a tensor that every rank has."""
        return self.split(x, lambda x, dim, shares: shares.own(x, dim))

    def gather(self, share: Tensor) -> Tensor:
        """Return the whole from the shares of all ranks: a collective; not for autograd."""
        return self._apply(share, self.shares.length, all_gather_shares)

    def split(self, x: Tensor, function: Callable[[Tensor, int, Shares], Tensor]) -> Tensor:
        """Return what a function makes of a whole tensor, the dimension of its positions, and their shares."""
        return self._apply(x, self.shares.total, function)

    def _apply(self, x: Tensor, length: int, function: Callable[[Tensor, int, Shares], Tensor]) -> Tensor:
        if self.is_simple:
            return function(x, self.dim, self.shares)
        split: Tensor = x.unflatten(self.dim, (self.outer, length, self.inner))  # type: ignore[no-untyped-call]
        return function(split, self.dim + 1, self.shares).flatten(self.dim, self.dim + 2)

    def reshaped(self, shape: torch.Size, new: torch.Size) -> Sharding | None:
        """Return where the positions are once a tensor has another shape of as many entries.

        Args:
            shape: The shape of the whole.
            new: The other one.

        Returns:
            The sharding; ``None`` if the positions lie across several dimensions.
        """
        before = shape[: self.dim].numel() * self.outer
        for dim, size in enumerate(new if new.numel() > 0 else ()):
            outer, rest = divmod(before, new[:dim].numel())
            if rest == 0 and size % (outer * self.shares.total) == 0:
                return Sharding(dim, self.shares, outer, size // (outer * self.shares.total))
        return None


def all_gather_shares(x: Tensor, dim: int, shares: Shares) -> Tensor:
    """All-gather along a dimension; not for autograd."""
    group, lengths = shares.group, shares.lengths
    longest = max(lengths)
    own = padded(x.movedim(dim, 0), longest)
    gathered = own.new_empty(longest * group.size, *own.shape[1:])
    all_gather_single(gathered, own, group=group())
    if shares.balanced or min(lengths) != longest:
        gathered = shares.in_order(torch.split(gathered, longest))
    return gathered.movedim(0, dim).contiguous()


def padded(x: Tensor, length: int) -> Tensor:
    """Return a contiguous tensor with as many rows as the longest share has."""
    if len(x) == length:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(length - len(x), *x.shape[1:])])

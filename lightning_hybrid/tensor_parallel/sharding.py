"""The sharding of one dimension of a tensor, such as the positions of a sequence or the classes of logits.

:class:`Shares` has the positions of each rank, and :class:`Sharding` the dimension of a tensor that holds them. Sharded
activations (`sharded_activation`), the logits of `vocab_parallel` and all of `context_parallel` use both. DTensor's
`Shard` cannot describe these shards: it knows no pieces in another order, no slices, and no dimension that holds
several sequences. In names, "share" means shard: the part of a tensor that one rank has.
"""

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
    """The positions of a dimension that each rank has: one consecutive piece, or two pieces.

    If the positions cannot be divided evenly, some pieces are one position longer. With two pieces, all ranks have
    about the same amount of work under a causal mask::

        position      0 1 2 3 4 5 6 7
        consecutive   0 0 1 1 2 2 3 3     rank of each position
        balanced      0 1 2 3 3 2 1 0

    Args:
        total: The number of positions, for example the length of a sequence.
        group: The ranks.
        balanced: True if each rank has two pieces, one from each half of the dimension.

    Attributes:
        pieces: For each rank, its pieces; each piece is its first position and its length.
        lengths: The number of positions of each rank.
        length: The number of positions of this rank.
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
        """Return True if another dimension is divided at the same positions."""
        return self.total == other.total and self.pieces == other.pieces

    def narrowed(self, start: int, length: int) -> tuple[Shares, int]:
        """Return the sharding of a slice of the dimension, in which each rank keeps its own positions.

        Args:
            start: The first position of the slice.
            length: The number of positions in the slice.

        Returns:
            The shares of the slice, whose lengths can differ, and the index in this rank's present shard where its
            shard of the slice begins.
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
        """Return this rank's shard of a full tensor. If the positions are consecutive, the shard is a view."""
        return self.of_rank(x, dim, self.group.rank)

    def of_rank(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Return a rank's shard of a full tensor."""
        parts = [x.narrow(dim, start, length) for start, length in self.pieces[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def in_order(self, shares: Sequence[Tensor]) -> Tensor:
        """Return the full tensor from the shards of all ranks, along the first dimension.

        Args:
            shares: The shards in the order of the ranks. They may be longer, with padding at the end.
        """
        parts: list[tuple[int, Tensor]] = []
        for share, of_rank in zip(shares, self.pieces, strict=True):
            offset = 0
            for start, length in of_rank:
                parts.append((start, share[offset : offset + length]))
                offset += length
        return torch.cat([part for _, part in sorted(parts, key=itemgetter(0))])


class Sharding(NamedTuple):
    """A sharded dimension, which holds the divided positions alone or together with other entries.

    ::

        (batch, sequence, classes)      dim 1
        (batch * sequence, classes)     dim 0, outer = batch: one sequence after the other
        (sequence * batch, classes)     dim 0, inner = batch: all samples of the first position, of the second, ...

    Attributes:
        dim: The dimension.
        shares: The positions of each rank.
        outer: The number of sequences along the dimension. Each rank has its positions of every sequence.
        inner: The number of entries of each position in each sequence.
    """

    dim: int
    shares: Shares
    outer: int = 1
    inner: int = 1

    @property
    def size(self) -> int:
        """The size of the dimension in the full tensor."""
        return self.outer * self.shares.total * self.inner

    @property
    def is_simple(self) -> bool:
        """True if the dimension holds only the divided positions."""
        return self.outer == self.inner == 1

    def is_same(self, other: Sharding) -> bool:
        """Return True if another sharding gives each rank the same entries of a tensor of the same shape."""
        return self._replace(shares=other.shares) == other and self.shares.is_same(other.shares)

    def at(self, dim: int) -> Sharding:
        """Return the same sharding along another dimension."""
        return self._replace(dim=dim)

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the full tensor for the shape of a shard."""
        return [*shape[: self.dim], self.size, *shape[self.dim + 1 :]]

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's shard of a replicated tensor."""
        return self.split(x, lambda x, dim, shares: shares.own(x, dim))

    def gather(self, share: Tensor) -> Tensor:
        """Return the full tensor from the shards of all ranks. This is a collective, and has no gradient."""
        return self._apply(share, self.shares.length, all_gather_shares)

    def split(self, x: Tensor, function: Callable[[Tensor, int, Shares], Tensor]) -> Tensor:
        """Apply a function that splits a full tensor, such as :meth:`Shares.own` or `scatter_to_cp`.

        Args:
            x: The full tensor.
            function: Receives the tensor, a dimension that holds only the divided positions, and the shares. Returns
                the shard.
        """
        return self._apply(x, self.shares.total, function)

    def _apply(self, x: Tensor, length: int, function: Callable[[Tensor, int, Shares], Tensor]) -> Tensor:
        if self.is_simple:
            return function(x, self.dim, self.shares)
        split: Tensor = x.unflatten(self.dim, (self.outer, length, self.inner))  # type: ignore[no-untyped-call]
        return function(split, self.dim + 1, self.shares).flatten(self.dim, self.dim + 2)

    def reshaped(self, shape: torch.Size, new: torch.Size) -> Sharding | None:
        """Return the sharding after the full tensor is reshaped.

        Args:
            shape: The shape of the full tensor.
            new: The new shape, with the same number of entries.

        Returns:
            The sharding; ``None`` if the positions are spread over several dimensions.
        """
        before = shape[: self.dim].numel() * self.outer
        for dim, size in enumerate(new if new.numel() > 0 else ()):
            outer, rest = divmod(before, new[:dim].numel())
            if rest == 0 and size % (outer * self.shares.total) == 0:
                return Sharding(dim, self.shares, outer, size // (outer * self.shares.total))
        return None


def all_gather_shares(x: Tensor, dim: int, shares: Shares) -> Tensor:
    """All-gather shards along a dimension, and return the full tensor. It has no gradient.

    Shards of different lengths are padded for the collective.
    """
    group, lengths = shares.group, shares.lengths
    longest = max(lengths)
    own = padded(x.movedim(dim, 0), longest)
    gathered = own.new_empty(longest * group.size, *own.shape[1:])
    all_gather_single(gathered, own, group=group())
    if shares.balanced or min(lengths) != longest:
        gathered = shares.in_order(torch.split(gathered, longest))
    return gathered.movedim(0, dim).contiguous()


def padded(x: Tensor, length: int) -> Tensor:
    """Return a contiguous tensor, padded with zero rows (entries of the first dimension) to a length."""
    if len(x) == length:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(length - len(x), *x.shape[1:])])

"""Collectives over the ranks that share a sequence, which autograd knows.

Around the layers every rank has whole sequences, and the gradient of the whole loss for them; in the layers a rank has
its share. Gradients of parameters are averaged over these ranks, as they are over replicas: so it does not matter
whether a parameter is used in the layers, around them or in both. What flows backward in the layers is for that reason
`size` times the gradient of the share::

                       forward                     backward
    scatter_to_cp      slice                       all-gather, / size      whole sequence -> share
    shard              all-gather, when read       slice, * size           share -> whole sequence
    reduce_from_cp     all-reduce                  * size                  sums over shares -> over the sequence
    copy_to_cp         -                           all-reduce, / size      whole -> used with every rank's share
    gather_keys        all-gather                  reduce-scatter          share -> whole, for every rank's queries
    to_heads           all-to-all                  all-to-all              share, all heads -> whole, some heads
    to_sequence        all-to-all                  all-to-all              the inverse

Shares may differ in length, by a position or two. Ring attention sends blocks from rank to rank itself (`ring`).
As in tensor parallelism, gradients that torch makes as DTensors, where a user's code computes with a sharded parameter,
become plain ones here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.process_group import SizedGroupRef, all_gather_single, reduce_scatter_single


class ContextGroup(SizedGroupRef):
    """The ranks that share each sequence."""

    __slots__ = ()


class Shares:
    """How a sequence is divided: consecutive positions for each rank, or two pieces for each.

    With two pieces each rank has as much to do where a mask is causal::

        positions     0 1 2 3 4 5 6 7
        consecutive   0 0 1 1 2 2 3 3     the rank of each
        balanced      0 1 2 3 3 2 1 0

    Args:
        total: The length of the sequence.
        group: The ranks.
        balanced: Whether there are two pieces for each rank.

    Attributes:
        pieces: Of each rank, the first position and the length.
        lengths: Of the share of each rank.
        length: The length of this rank's share.
    """

    __slots__ = ("balanced", "group", "length", "lengths", "pieces", "total")

    def __init__(self, total: int, group: ContextGroup, *, balanced: bool) -> None:
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
        """Whether another sequence is divided at the same positions."""
        return self.total == other.total and self.pieces == other.pieces

    def narrowed(self, start: int, length: int) -> tuple[Shares, int]:
        """The shares of consecutive positions of the sequence: each rank keeps those that it has of them.

        Args:
            start: The first of them.
            length: Their number.

        Returns:
            Their shares, which may have other lengths, and where this rank's begins in its share of the sequence.
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
        """This rank's share of a tensor; of consecutive positions a view."""
        return self.of_rank(x, dim, self.group.rank)

    def of_rank(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """A rank's share of a tensor."""
        parts = [x.narrow(dim, start, length) for start, length in self.pieces[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def in_order(self, shares: Sequence[Tensor]) -> Tensor:
        """The whole sequence, of the shares of all ranks, along the first dimension."""
        parts: list[tuple[int, Tensor]] = []
        for share, of_rank in zip(shares, self.pieces, strict=True):
            offset = 0
            for start, length in of_rank:
                parts.append((start, share[offset : offset + length]))
                offset += length
        return torch.cat([part for _, part in sorted(parts, key=itemgetter(0))])


def scatter_to_cp(x: Tensor, dim: int, shares: Shares) -> Tensor:
    """This rank's share of a sequence that every rank has."""
    return _Scatter.apply(x, dim, shares)  # type: ignore[no-untyped-call, no-any-return]


def copy_to_cp(x: Tensor, group: ContextGroup) -> Tensor:
    """What every rank has whole, about to be used with its share of a sequence."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _Copy.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_keys(x: Tensor, dim: int, shares: Shares) -> Tensor:
    """Keys or values of the whole sequence, about to be used by every rank's queries."""
    return _GatherKeys.apply(x, dim, shares)  # type: ignore[no-untyped-call, no-any-return]


def reduce_from_cp(x: Tensor, group: ContextGroup) -> Tensor:
    """The sum over the ranks of what each has made of its share."""
    return _Reduce.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]


def to_heads(x: Tensor, shares: Shares) -> Tensor:
    """All heads of this rank's positions for all positions of this rank's heads.

    Args:
        x: Of shape (batch, heads, length of the share, features).
        shares: How the sequence is divided.

    Returns:
        Of shape (batch, heads / ranks, length of the sequence, features).
    """
    return _AllToAll.apply(x, shares, True)  # type: ignore[no-untyped-call, no-any-return]


def to_sequence(x: Tensor, shares: Shares) -> Tensor:
    """The inverse of :func:`to_heads`."""
    return _AllToAll.apply(x, shares, False)  # type: ignore[no-untyped-call, no-any-return]


def all_gather_shares(x: Tensor, dim: int, shares: Shares) -> Tensor:
    """All-gather along a dimension; not for autograd."""
    group, lengths = shares.group, shares.lengths
    longest = max(lengths)
    own = _padded(x.movedim(dim, 0), longest)
    gathered = own.new_empty(longest * group.size, *own.shape[1:])
    all_gather_single(gathered, own, group=group())
    if shares.balanced or min(lengths) != longest:
        gathered = shares.in_order(torch.split(gathered, longest))
    return gathered.movedim(0, dim).contiguous()


def _reduce_scatter_shares(x: Tensor, dim: int, shares: Shares) -> Tensor:
    group, lengths = shares.group, shares.lengths
    longest, first = max(lengths), x.movedim(dim, 0)
    partial = torch.cat([_padded(shares.of_rank(first, 0, rank), longest) for rank in range(group.size)])
    share = partial.new_empty(longest, *partial.shape[1:])
    reduce_scatter_single(share, partial, group=group())
    return share[: shares.length].movedim(0, dim).contiguous()


def _padded(x: Tensor, length: int) -> Tensor:
    """With as many rows as the longest share has."""
    if len(x) == length:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(length - len(x), *x.shape[1:])])


def _exchange(x: Tensor, shares: Shares, *, to_heads: bool) -> Tensor:
    """All-to-all between shares of the sequence and shares of the heads, along dimensions 2 and 1."""
    group, lengths = shares.group, shares.lengths
    batch, features = x.shape[0], x.shape[3]
    heads = x.shape[1] // group.size if to_heads else x.shape[1]
    of_rank = [batch * heads * length * features for length in lengths]
    alike = [batch * heads * shares.length * features] * group.size
    if to_heads:
        sent = x.reshape(batch, group.size, heads, *x.shape[2:]).movedim(1, 0).contiguous().view(-1)
        received = sent.new_empty(sum(of_rank))
        dist.all_to_all_single(received, sent, of_rank, alike, group=group())
        pieces = zip(torch.split(received, of_rank), lengths, strict=True)
        return torch.cat([piece.view(batch, heads, length, features) for piece, length in pieces], 2)
    sent = torch.cat(
        [piece.reshape(-1) for piece in torch.split(x, lengths, 2)]
    ).contiguous()  # one piece may be expanded
    received = sent.new_empty(sum(alike))
    dist.all_to_all_single(received, sent, alike, of_rank, group=group())
    pieces_of_heads = received.view(group.size, batch, heads, shares.length, features)
    return pieces_of_heads.movedim(0, 1).flatten(1, 2)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, shares: Shares) -> Tensor:
        ctx.dim, ctx.shares = dim, shares
        return shares.own(x, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_shares(full_tensor(gradient), ctx.dim, ctx.shares).div_(ctx.shares.group.size), None, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ContextGroup) -> Tensor:
        ctx.group = group
        return x.detach()  # not a view for autograd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = full_tensor(gradient).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group())
        return total.div_(ctx.group.size), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ContextGroup) -> Tensor:
        ctx.size = group.size
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group())
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return full_tensor(gradient) * ctx.size, None


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, shares: Shares) -> Tensor:
        ctx.dim, ctx.shares = dim, shares
        return all_gather_shares(x, dim, shares)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter_shares(full_tensor(gradient), ctx.dim, ctx.shares), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Shares, to_heads: bool) -> Tensor:
        ctx.shares, ctx.to_heads = shares, to_heads
        return _exchange(x, shares, to_heads=to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _exchange(full_tensor(gradient), ctx.shares, to_heads=not ctx.to_heads), None, None

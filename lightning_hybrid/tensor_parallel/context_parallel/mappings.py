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

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.process_group import SizedGroupRef, reduce_scatter_single
from lightning_hybrid.tensor_parallel.sharding import Shares, all_gather_shares, padded


class ContextGroup(SizedGroupRef):
    """The ranks that share each sequence."""

    __slots__ = ()


def scatter_to_cp(x: Tensor, dim: int, shares: Shares) -> Tensor:
    """This rank's share of a sequence that every rank has."""
    return _Scatter.apply(x, dim, shares)  # type: ignore[no-untyped-call, no-any-return]


def copy_to_cp(x: Tensor, group: SizedGroupRef) -> Tensor:
    """What every rank has whole, about to be used with its share of a sequence."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _Copy.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_keys(x: Tensor, dim: int, shares: Shares) -> Tensor:
    """Keys or values of the whole sequence, about to be used by every rank's queries."""
    return _GatherKeys.apply(x, dim, shares)  # type: ignore[no-untyped-call, no-any-return]


def reduce_from_cp(x: Tensor, group: SizedGroupRef) -> Tensor:
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


def _reduce_scatter_shares(x: Tensor, dim: int, shares: Shares) -> Tensor:
    group, lengths = shares.group, shares.lengths
    longest, first = max(lengths), x.movedim(dim, 0)
    partial = torch.cat([padded(shares.of_rank(first, 0, rank), longest) for rank in range(group.size)])
    share = partial.new_empty(longest, *partial.shape[1:])
    reduce_scatter_single(share, partial, group=group())
    return share[: shares.length].movedim(0, dim).contiguous()


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
    def forward(ctx: Any, x: Tensor, group: SizedGroupRef) -> Tensor:
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
    def forward(ctx: Any, x: Tensor, group: SizedGroupRef) -> Tensor:
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

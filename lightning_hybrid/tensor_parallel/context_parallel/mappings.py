"""Collectives over the context-parallel ranks, with their gradients.

`division` and `hooks` call them at the border of a layer, `attention` inside it, and `sharded_sequence` and
`cross_entropy` after it. All ranks must call each function together, and run its backward together.

Around the layers, every rank has full sequences, and the gradient of the full loss with respect to them. Inside the
layers, each rank has its sequence shard. Gradients of parameters are averaged over these ranks, as over replicas, so it
does not matter whether a parameter is used in the layers, around them or in both. Therefore, gradients inside the
layers are `size` times the gradients of the shard::

                       forward                     backward
    scatter_to_cp      slice                       all-gather, / size      full sequence -> shard
    ShardedSequence    all-gather, when read       slice, * size           shard -> full sequence
    reduce_from_cp     all-reduce                  * size                  sums over shards -> over the sequence
    copy_to_cp         -                           all-reduce, / size      full -> input of every rank's shard
    gather_keys        all-gather                  reduce-scatter          shard -> full, for every rank's queries
    to_heads           all-to-all                  all-to-all              shard, all heads -> full, some heads
    to_sequence        all-to-all                  all-to-all              the inverse of to_heads

Shards can differ in length by one or two positions. Ring attention sends blocks between the ranks itself (`ring`). If
the user's code computes with a sharded parameter directly, torch produces gradients that are DTensors. The functions
here convert them to plain tensors, as in tensor parallelism.
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
    """The ranks over which each sequence is sharded."""

    __slots__ = ()


def scatter_to_cp(x: Tensor, dim: int, shares: Shares) -> Tensor:
    """Return this rank's shard of a sequence that every rank has."""
    return _Scatter.apply(x, dim, shares)  # type: ignore[no-untyped-call, no-any-return]


def copy_to_cp(x: Tensor, group: SizedGroupRef) -> Tensor:
    """Return a replicated tensor as input of a computation with every rank's sequence shard.

    Without a gradient, it is returned unchanged.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _Copy.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_keys(x: Tensor, dim: int, shares: Shares) -> Tensor:
    """Return the keys or values of the full sequence, for this rank's queries. `x` is this rank's shard."""
    return _GatherKeys.apply(x, dim, shares)  # type: ignore[no-untyped-call, no-any-return]


def reduce_from_cp(x: Tensor, group: SizedGroupRef) -> Tensor:
    """Return the sum over the ranks of values that each rank computed from its shard."""
    return _Reduce.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]


def to_heads(x: Tensor, shares: Shares) -> Tensor:
    """Exchange all heads of this rank's positions for all positions of this rank's heads.

    Args:
        x: Shape (batch, heads, length of the shard, features).
        shares: The positions of each rank.

    Returns:
        Shape (batch, heads / ranks, length of the sequence, features).
    """
    return _AllToAll.apply(x, shares, True)  # type: ignore[no-untyped-call, no-any-return]


def to_sequence(x: Tensor, shares: Shares) -> Tensor:
    """Exchange back: invert :func:`to_heads`."""
    return _AllToAll.apply(x, shares, False)  # type: ignore[no-untyped-call, no-any-return]


def _reduce_scatter_shares(x: Tensor, dim: int, shares: Shares) -> Tensor:
    group, lengths = shares.group, shares.lengths
    longest, first = max(lengths), x.movedim(dim, 0)
    partial = torch.cat([padded(shares.of_rank(first, 0, rank), longest) for rank in range(group.size)])
    share = partial.new_empty(longest, *partial.shape[1:])
    reduce_scatter_single(share, partial, group=group())
    return share[: shares.length].movedim(0, dim).contiguous()


def _exchange(x: Tensor, shares: Shares, *, to_heads: bool) -> Tensor:
    """Exchange shards of the sequence (dimension 2) and shards of the heads (dimension 1) in an all-to-all."""
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
    ).contiguous()  # a single piece may be an expanded tensor
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
        return x.detach()  # autograd must not treat the result as a view

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

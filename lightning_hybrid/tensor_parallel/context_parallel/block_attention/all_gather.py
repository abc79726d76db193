"""Causal attention from a shard's queries to gathered keys, in blocks, on CPUs.

`attention.Region` calls :func:`causal_attention` for ``context_parallel="all_gather"`` if torch has a fused kernel for
the CPU. There, torch would create a mask of all scores for queries that are not at the first positions. Other devices
use `causal_lower_right`. The keys are gathered before, so nothing is communicated here::

    keys              before the piece     of the piece itself
    a piece           all are visible      as in one process       no mask is created, and no hidden score is computed

Llama Team, "The Llama 3 Herd of Models", 2024, https://arxiv.org/abs/2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.tensor_parallel.context_parallel.block_attention.block_attention import (
    Block,
    find_kernel,
    for_kernels,
    merge,
    precise,
    without_autocast,
)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[tuple[int, int]], scale: float) -> Tensor:
    """Compute attention in which no query sees a later key.

    Args:
        q: Shape (batch, heads, length of the shard, features).
        k: Shape (batch, heads, length of the sequence, features); it may have fewer heads.
        v: Shape (batch, heads, length of the sequence, features); it may have fewer heads.
        pieces: The first position and the length of each piece of the queries.
        scale: The factor of the scores.

    Returns:
        The output for the queries, in the shape of `q` with the features of `v`.
    """
    q, k, v = for_kernels(q, k, v)
    with without_autocast(q.device.type):
        return _CausalAttention.apply(q, k, v, pieces, scale)  # type: ignore[no-untyped-call, no-any-return]


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[tuple[int, int]], scale: float) -> Tensor:
        dtype = precise(q.dtype)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
        logsumexp = q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
        ctx.pieces, ctx.scale, ctx.kernel = pieces, scale, find_kernel(q, v, None, 0.0)
        for queries, keys, is_causal in _blocks(pieces):
            block = Block(q[:, :, queries], k[:, :, keys], v[:, :, keys], None, is_causal, scale)
            merge(out[:, :, queries], logsumexp[:, :, queries], *ctx.kernel.forward(block))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        gradient, dtype = full_tensor(gradient), precise(q.dtype)
        sums = [each.new_zeros(each.shape, dtype=dtype) for each in (q, k, v)]
        for queries, keys, is_causal in _blocks(ctx.pieces):
            block = Block(q[:, :, queries], k[:, :, keys], v[:, :, keys], None, is_causal, ctx.scale)
            of_out = gradient[:, :, queries], out[:, :, queries], logsumexp[:, :, queries]
            with without_autocast(q.device.type):
                found = ctx.kernel.backward(block, *of_out)
            for total, summand, places in zip(sums, found[:3], (queries, keys, keys), strict=True):
                total[:, :, places].add_(summand)
        of_q, of_k, of_v = (total.to(q.dtype) for total in sums)
        return of_q, of_k, of_v, None, None


def _blocks(pieces: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, slice, bool]]:
    """Yield pairs of queries and visible keys of a shard, and True if they have the same positions."""
    offset = 0
    for start, length in pieces:
        queries = slice(offset, offset + length)
        if start and length:
            yield queries, slice(start), False
        if length:
            yield queries, slice(start, start + length), True
        offset += length

r"""Ring attention: blocks of keys and values are sent from rank to rank, and each rank's queries see them one by one.

::

    step        0       1       2       3
    rank 0      k0      k3      k2      k1        the next block is received while this block is computed;
    rank 1      k1      k0      k3      k2        the outputs are merged block by block
    rank 2      k2      k1      k0      k3
    rank 3      k3      k2      k1      k0

`attention.Region` calls :func:`ring_attention` in each attention of a layer for ``context_parallel="ring"``. A rank
stores the keys of two ranks at a time, and not of all ranks as with ``"all_gather"``.

In backward, blocks are sent around once more, together with the gradients of their keys and values, which return to
their rank at the end. Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context",
2023, https://arxiv.org/abs/2310.01889.

If a mask is causal, and each rank has one piece from the beginning of the sequence and one from its end, a rank needs
half of the scores with another rank's keys: either all queries see the first piece of the keys, or the second piece of
the queries sees all keys::

    keys             own      of a lower rank       of a higher rank
                    1   2          1   2                 1   2
    queries 1       \   .          #   .                 .   .
    queries 2       #   \          #   .                 #   #
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import irecv, isend  # torch's own functions, even if a step replaces `dist.isend`

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.random import derive_seed
from lightning_hybrid.tensor_parallel.context_parallel.block_attention.block_attention import (
    Block,
    bounded,
    cast_by_autocast,
    find_kernel,
    for_kernels,
    merge,
    precise,
    without_autocast,
)
from lightning_hybrid.tensor_parallel.sharding import Shares


class Ring(NamedTuple):
    """The arguments of a call of ring attention, except its tensors.

    Attributes:
        shares: The positions of each rank.
        is_causal: True if a query sees no later key.
        scale: The factor of the scores.
        dropout: The fraction of the weights that is dropped.
        seed: The seed of dropout, which is used again in backward.
    """

    shares: Shares
    is_causal: bool
    scale: float
    dropout: float
    seed: int

    def seen(self, rank: int) -> tuple[slice, slice]:
        """Return the slices of this rank's queries and of a rank's keys between which scores are needed, if any."""
        ours, theirs = self.shares.pieces[self.shares.group.rank], self.shares.pieces[rank]
        if not self.is_causal or rank == self.shares.group.rank:
            return slice(None), slice(None)
        before = sum(length for start, length in ours if start < theirs[0][0])
        return slice(before, None), slice(sum(length for start, length in theirs if start < ours[-1][0]))

    def block(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rank: int) -> Block | None:
        """Return the block of this rank's queries and a rank's keys; ``None`` if the queries see none of them."""
        queries, keys = self.seen(rank)
        q, k, v = q[:, :, queries], k[:, :, keys], v[:, :, keys]
        if not q.shape[2] or not k.shape[2]:
            return None
        is_causal = self.is_causal and rank == self.shares.group.rank
        return Block(q, k, v, mask, is_causal, self.scale, self.dropout, derive_seed(self.seed, rank))

    def part(self, mask: Tensor, rank: int) -> Tensor:
        """Return the part of a full mask for this rank's queries and a rank's keys. Dimensions of size 1 are kept."""
        total = self.shares.total
        if mask.ndim > 1 and mask.shape[-2] == total:
            mask = self.shares.own(mask, -2)
        return self.shares.of_rank(mask, -1, rank) if mask.shape[-1] == total else mask

    @torch.enable_grad()
    def whole_gradient(self, mask: Tensor, of_part: Tensor, rank: int) -> Tensor:
        """Return the gradient of a full mask from the gradient of a part."""
        whole = torch.zeros_like(mask, dtype=of_part.dtype).requires_grad_()
        return torch.autograd.grad(self.part(whole, rank), whole, of_part)[0]

    def rotate(self, block: Tensor, step: int) -> tuple[Tensor, list[dist.Work]]:
        """Start to send a block to the next rank, and to receive the block of the previous rank.

        All ranks must call it. The block must not change before the works are done.

        Args:
            block: Shape (..., length of its shard, features).
            step: The number of times that the block has been sent before.

        Returns:
            The tensor that receives the block, and the works that fill it.
        """
        group, size, rank = self.shares.group(), self.shares.group.size, self.shares.group.rank
        length = self.shares.lengths[(rank - step - 1) % size]
        arriving = block.new_empty(*block.shape[:-2], length, block.shape[-1])
        following, before = (rank + 1) % size, (rank - 1) % size
        operations = [
            dist.P2POp(isend, block, group=group, group_peer=following),
            dist.P2POp(irecv, arriving, group=group, group_peer=before),
        ]
        return arriving, dist.batch_isend_irecv(operations)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring) -> Tensor:
    """Compute attention from this rank's queries to the keys of all ranks. All ranks must call it.

    Args:
        q: Shape (batch, heads, length of the shard, features).
        k: Shape (batch, heads, length of the shard, features). With fewer heads than `q`, each head serves a group of
            them.
        v: Shape (batch, heads, length of the shard, features), with as many heads as `k`.
        mask: The mask of the full sequence: boolean (True for visible keys), or added to the scores; or ``None``.
        ring: The other arguments.

    Returns:
        The output for this rank's queries, in the shape of `q` with the features of `v`.
    """
    q, k, v, mask = cast_by_autocast(q, k, v, mask)
    q, k, v = for_kernels(q, k, v)
    with without_autocast(q.device.type):
        return _RingAttention.apply(q, k, v, mask, ring)  # type: ignore[no-untyped-call, no-any-return]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring) -> Tensor:
        group, dtype = ring.shares.group, precise(q.dtype)
        ctx.ring, ctx.kernel = ring, find_kernel(q, v, mask, ring.dropout, learns_mask=ctx.needs_input_grad[3])
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
        logsumexp = q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
        packed = _packed(k, v)
        for step in range(group.size):
            arriving, works = ring.rotate(packed, step) if step < group.size - 1 else (packed, [])
            rank = (group.rank - step) % group.size
            part = None if mask is None else bounded(ring.part(mask, rank))
            block = ring.block(q, *_unpacked(packed, k.shape[3]), part, rank)
            if block is not None:
                queries, _ = ring.seen(rank)
                merge(out[:, :, queries], logsumexp[:, :, queries], *ctx.kernel.forward(block))
            _wait(works)
            packed = arriving
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, logsumexp.masked_fill_(logsumexp == float("-inf"), float("inf")))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        q, k, v, mask, out, logsumexp = ctx.saved_tensors
        ring: Ring = ctx.ring
        gradient, group, dtype = full_tensor(gradient), ring.shares.group, precise(q.dtype)
        of_q = q.new_zeros(q.shape, dtype=dtype)
        of_mask = mask.new_zeros(mask.shape, dtype=dtype) if ctx.needs_input_grad[3] else None
        packed = _packed(k, v)
        of_packed, of_arriving, of_works = packed, packed, list[dist.Work]()
        for step in range(group.size):
            arriving, works = ring.rotate(packed, step) if step < group.size - 1 else (packed, [])
            rank = (group.rank - step) % group.size
            part = None if mask is None else bounded(ring.part(mask, rank))
            block = ring.block(q, *_unpacked(packed, k.shape[3]), part, rank)
            own = packed.new_zeros(packed.shape, dtype=dtype)
            if block is not None:
                queries, keys = ring.seen(rank)
                of_out = gradient[:, :, queries], out[:, :, queries], logsumexp[:, :, queries]
                with without_autocast(q.device.type):
                    found = ctx.kernel.backward(block, *of_out)
                of_q[:, :, queries].add_(found.q)
                for sums, summand in zip(_unpacked(own, k.shape[3]), (found.k, found.v), strict=True):
                    sums[:, :, keys].add_(summand)
                if of_mask is not None:
                    of_mask.add_(ring.whole_gradient(mask, found.mask, rank))
            # The gradients that other ranks have computed for these keys are sent with them, and return to their rank
            # at the end.
            _wait(of_works)
            of_packed = own.add_(of_arriving) if step else own
            of_arriving, of_works = ring.rotate(of_packed, step)
            _wait(works)
            packed = arriving
        _wait(of_works)
        of_k, of_v = _unpacked(of_arriving, k.shape[3])
        of_mask = None if of_mask is None else of_mask.to(mask.dtype)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_mask, None


def _packed(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k, v], -1).contiguous()


def _unpacked(block: Tensor, features: int) -> tuple[Tensor, Tensor]:
    return block[..., :features], block[..., features:]


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()

"""Ring attention: blocks of keys and values pass from rank to rank, and the queries of each meet them one by one.

::

    step        0       1       2       3
    rank 0      k0      k3      k2      k1        the next block is on its way while this one is computed with;
    rank 1      k1      k0      k3      k2        softmax runs along: its maximum and sum are corrected block by block
    rank 2      k2      k1      k0      k3
    rank 3      k3      k2      k1      k0

Backward goes round once more, and the gradients of keys and values travel with these until they are at home. Liu,
Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023,
https://arxiv.org/abs/2310.01889; each block is computed as in Dao, "FlashAttention-2", 2023,
https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import irecv, isend  # those of torch, whatever takes their places in a step

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.random import derive_seed
from lightning_hybrid.tensor_parallel.context_parallel.mappings import Shares

_ROWS = 1024  # positions of a block, so that its scores take little memory


class _Block(NamedTuple):
    """Consecutive positions of a share: where they are in it, where in the sequence, and how many."""

    offset: int
    start: int
    length: int

    def of(self, share: Tensor) -> Tensor:
        return share.narrow(2, self.offset, self.length)


class Ring(NamedTuple):
    """What a call of ring attention knows beside its tensors.

    Attributes:
        shares: How the sequence is divided.
        is_causal: Whether a query sees no key behind it.
        scale: Of the scores.
        dropout: The share of the weights that is dropped.
        seed: What is dropped depends on it, and is the same again in backward.
    """

    shares: Shares
    is_causal: bool
    scale: float
    dropout: float
    seed: int

    def blocks(self, rank: int) -> list[_Block]:
        """The blocks of a rank's share."""
        found, offset = [], 0
        for start, length in self.shares.pieces[rank]:
            for begin in range(0, length, _ROWS):
                found.append(_Block(offset + begin, start + begin, min(_ROWS, length - begin)))
            offset += length
        return found

    def pairs(self, rank: int) -> Iterator[tuple[_Block, _Block]]:
        """The blocks of this rank's queries, each with those of another one's keys that it sees."""
        for queries in self.blocks(self.shares.group.rank):
            for keys in self.blocks(rank):
                if not self.is_causal or keys.start < queries.start + queries.length:
                    yield queries, keys

    def scores(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: _Block, keys: _Block) -> Tensor:
        """Of a block; of keys that a query does not see minus infinity."""
        scores = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            part = _part(mask, queries, keys, self.shares.total)
            scores = scores.masked_fill(~part, float("-inf")) if part.dtype == torch.bool else scores + part
        if self.is_causal and keys.start + keys.length > queries.start + 1:
            rows = torch.arange(queries.start, queries.start + queries.length, device=q.device)
            columns = torch.arange(keys.start, keys.start + keys.length, device=q.device)
            scores = scores.masked_fill(columns > rows[:, None], float("-inf"))
        return scores

    def kept(self, scores: Tensor, queries: _Block, keys: _Block) -> Tensor | None:
        """What dropout multiplies the weights of a block by."""
        if not self.dropout:
            return None
        generator = torch.Generator(scores.device)
        generator.manual_seed(derive_seed(self.seed, queries.start, keys.start) >> 1)
        drawn = torch.rand(scores.shape, generator=generator, device=scores.device)
        return (drawn >= self.dropout).to(scores.dtype).div_(1 - self.dropout)

    def rotate(self, block: Tensor, step: int) -> tuple[Tensor, list[dist.Work]]:
        """Send a block to the next rank, and receive that of the one before.

        Args:
            block: Of the shape (..., length of the share that it is of, features).
            step: How often the block has been sent before.

        Returns:
            What arrives, once the works are done.
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
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        q: Of shape (batch, heads, length of the share, features).
        k: Likewise; there may be fewer heads, of which each is one of a group.
        v: Likewise.
        mask: For the whole sequence: boolean, or what is added to the scores.
        ring: The rest.
    """
    return _RingAttention.apply(q, k, v, mask, ring)  # type: ignore[no-untyped-call, no-any-return]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring) -> Tensor:
        dtype = _precise(q.dtype)
        group, heads = ring.shares.group, q.shape[1]
        shape = *q.shape[:3], 1
        highest, total = q.new_full(shape, float("-inf"), dtype=dtype), q.new_zeros(shape, dtype=dtype)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
        block = _packed(k, v)
        for step in range(group.size):
            arriving, works = ring.rotate(block, step) if step < group.size - 1 else (block, [])
            keys, values = _unpacked(block, k.shape[3])
            for ours, theirs in ring.pairs((group.rank - step) % group.size):
                scores = ring.scores(ours.of(q).to(dtype), _grouped(theirs.of(keys), heads, dtype), mask, ours, theirs)
                before, sums, sofar = ours.of(highest), ours.of(total), ours.of(out)
                now = torch.maximum(before, scores.amax(-1, keepdim=True))
                finite = now.masked_fill(now == float("-inf"), 0.0)  # a query that has seen no key yet
                weights, correction = (scores - finite).exp(), (before - finite).exp()
                sums.mul_(correction).add_(weights.sum(-1, keepdim=True))
                kept = ring.kept(scores, ours, theirs)
                weights = weights if kept is None else weights * kept
                sofar.mul_(correction).add_(weights @ _grouped(theirs.of(values), heads, dtype))
                before.copy_(now)
            _wait(works)
            block = arriving
        sees_none = total == 0
        out = (out / total.masked_fill(sees_none, 1.0)).to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, mask, out, (highest + total.log()).masked_fill(sees_none, float("inf")))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        q, k, v, mask, out, logsumexp = ctx.saved_tensors
        ring: Ring = ctx.ring
        gradient = full_tensor(gradient)
        dtype, group, heads = _precise(q.dtype), ring.shares.group, q.shape[1]
        inner = (gradient.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
        of_q = q.new_zeros(q.shape, dtype=dtype)
        of_mask = mask.new_zeros(mask.shape, dtype=dtype) if ctx.needs_input_grad[3] else None
        block, of_block = _packed(k, v), _packed(k, v).to(dtype).zero_()
        for step in range(group.size):
            arriving, works = ring.rotate(block, step) if step < group.size - 1 else (block, [])
            keys, values = _unpacked(block, k.shape[3])
            of_keys, of_values = _unpacked(of_block, k.shape[3])
            for ours, theirs in ring.pairs((group.rank - step) % group.size):
                query, key = ours.of(q).to(dtype), _grouped(theirs.of(keys), heads, dtype)
                value, of_out = _grouped(theirs.of(values), heads, dtype), ours.of(gradient).to(dtype)
                scores = ring.scores(query, key, mask, ours, theirs)
                weights, of_weights = (scores - ours.of(logsumexp)).exp(), of_out @ value.transpose(-2, -1)
                kept = ring.kept(scores, ours, theirs)
                if kept is not None:
                    of_weights = of_weights * kept
                of_scores = weights * (of_weights - ours.of(inner))
                weights = weights if kept is None else weights * kept
                theirs.of(of_values).add_(_summed(weights.transpose(-2, -1) @ of_out, of_values.shape[1]))
                theirs.of(of_keys).add_(_summed(of_scores.transpose(-2, -1) @ query, of_keys.shape[1]) * ring.scale)
                ours.of(of_q).add_(of_scores @ key * ring.scale)
                if of_mask is not None:
                    part = _part(of_mask, ours, theirs, ring.shares.total)
                    part.add_(of_scores.sum_to_size(_with_ndim(part, 4).shape).view_as(part))
            _wait(works)
            # What is summed up for these keys follows them, and at last comes home.
            of_arriving, works = ring.rotate(of_block, step)
            _wait(works)
            block, of_block = arriving, of_arriving
        of_k, of_v = _unpacked(of_block, k.shape[3])
        of_mask = None if of_mask is None else of_mask.to(mask.dtype)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_mask, None


def _precise(dtype: torch.dtype) -> torch.dtype:
    """In which sums are taken."""
    return torch.promote_types(dtype, torch.float32)


def _packed(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k, v], -1).contiguous()


def _unpacked(block: Tensor, features: int) -> tuple[Tensor, Tensor]:
    return block[..., :features], block[..., features:]


def _grouped(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Keys or values, one head for each of the queries."""
    x = x.to(dtype)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _summed(x: Tensor, heads: int) -> Tensor:
    """The inverse for gradients."""
    return x if x.shape[1] == heads else x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(2)


def _part(mask: Tensor, queries: _Block, keys: _Block, total: int) -> Tensor:
    """What a mask has for a block."""
    if mask.ndim > 1 and mask.shape[-2] == total:
        mask = mask.narrow(-2, queries.start, queries.length)
    return mask.narrow(-1, keys.start, keys.length) if mask.shape[-1] == total else mask


def _with_ndim(x: Tensor, ndim: int) -> Tensor:
    return x.view(*(1,) * (ndim - x.ndim), *x.shape)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()

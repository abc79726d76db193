"""Attention to some of the keys, and how it is merged with attention to others.

::

    forward      out = softmax(scores) v, logsumexp = log(sum(exp(scores)))        of the keys of one block
    merge        each out with the weight exp(logsumexp)                           of the keys of both
    backward     softmax(scores) = exp(scores - logsumexp), of all blocks          exact, block by block

Torch's fused kernels compute a block without keeping its scores. They have no public names in torch, so one is taken
where it is there and agrees with products of matrices, which compute what no kernel does. Dao, "FlashAttention-2",
2023, https://arxiv.org/abs/2307.08691; merged blocks: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers
for Near-Infinite Context", 2023, https://arxiv.org/abs/2310.01889.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.random import derive_seed
from lightning_hybrid.torch_internals import (
    flash_attention,
    flash_attention_backward,
    flash_attention_for_cpu,
    flash_attention_for_cpu_backward,
)

_ROWS = 1024  # queries and keys whose scores are products at a time, so that these take little memory
_NONE_SEEN = float("-inf")  # the logsumexp of a query that sees no key
_LEAST = -1e4  # what is added to a score; less changes no weight, and would swallow the number of keys in a logsumexp


class Block(NamedTuple):
    """Queries that meet keys.

    Attributes:
        q: Of shape (batch, heads, queries, features).
        k: Of shape (batch, heads, keys, features); there may be fewer heads, of which each is one of a group.
        v: Likewise.
        mask: Of these queries and keys: boolean, or what is added to the scores.
        is_causal: Whether a query sees no key behind it; there are as many keys as queries then.
        scale: Of the scores.
        dropout: The share of the weights that is dropped.
        seed: What is dropped depends on it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    dropout: float = 0.0
    seed: int = 0


class Gradients(NamedTuple):
    """Of a block; that of its mask where products compute it, and it is one that is added."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None


class Kernel(Protocol):
    """Computes blocks."""

    @staticmethod
    def forward(block: Block) -> tuple[Tensor, Tensor]:
        """Attention to the keys of a block.

        Args:
            block: The block.

        Returns:
            What is mixed of the values, of shape (batch, heads, queries, features), and the logsumexp of the scores
            in float32 at least, of shape (batch, heads, queries): minus infinity for queries that see no key.
        """

    @staticmethod
    def backward(block: Block, gradient: Tensor, out: Tensor, logsumexp: Tensor) -> Gradients:
        """The gradients of a block.

        Args:
            block: The block.
            gradient: For what all blocks of these queries have given together.
            out: What they have given.
            logsumexp: Likewise, in float32 at least; infinity for queries that see no key in any of them.
        """


def find_kernel(
    q: Tensor, v: Tensor, mask: Tensor | None, dropout: float, *, learns_mask: bool = False
) -> type[Kernel]:
    """The kernel for blocks of these.

    Args:
        q: Queries.
        v: Values.
        mask: As of a block.
        dropout: Likewise.
        learns_mask: Whether a mask needs a gradient.
    """
    fused = _FUSED.get(q.device.type)
    if fused is None or dropout or learns_mask or (mask is not None and fused is not CpuKernel):
        return Products
    # The user's choice, which torch's attention on a CPU heeds too.
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return Products
    if type(q) not in (Tensor, nn.Parameter):  # it has no numbers to compare
        return fused
    return fused if _agrees(fused, q.device, q.dtype, q.shape[-1], v.shape[-1]) else Products


def for_kernels(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values as kernels take for granted: of one batch size, and with features side by side."""
    batch = max(each.shape[0] for each in tensors)
    alike = (each if each.shape[0] == batch else each.expand(batch, -1, -1, -1) for each in tensors)
    return tuple(each if each.stride(-1) == 1 else each.contiguous() for each in alike)


def bounded(mask: Tensor) -> Tensor:
    """A mask whose numbers may be the least of their dtype, as those of padding are, with others in their place."""
    if mask.dtype == torch.bool:
        return mask
    return mask.clamp(min=_LEAST).masked_fill_(mask == _NONE_SEEN, _NONE_SEEN)


def merge(out: Tensor, logsumexp: Tensor, other: Tensor, of_other: Tensor) -> None:
    """Add attention to other keys to that to some, in place.

    Args:
        out: Of the former, zeros at first, of shape (batch, heads, queries, features).
        logsumexp: Likewise, minus infinity at first, of shape (batch, heads, queries).
        other: Of the latter.
        of_other: Likewise.
    """
    weight = (of_other - logsumexp).sigmoid_().masked_fill_(of_other == _NONE_SEEN, 0.0)
    out.lerp_(other.to(out.dtype), weight[..., None])
    logsumexp.copy_(torch.logaddexp(logsumexp, of_other))


def cast_by_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Tensors that autocast casts for torch's attention, in its dtype; other values as they are."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    are_cast = (isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 for x in tensors)
    return tuple(x.to(dtype) if is_cast else x for x, is_cast in zip(tensors, are_cast, strict=True))


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Inside, products have the dtype of what is multiplied, on devices of a kind."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def precise(dtype: torch.dtype) -> torch.dtype:
    """In which sums are taken."""
    return torch.promote_types(dtype, torch.float32)


class Products:
    """Products of matrices, of `_ROWS` queries and keys at a time: for all blocks, on all devices."""

    @staticmethod
    def forward(block: Block) -> tuple[Tensor, Tensor]:
        """See :meth:`Kernel.forward`; in float32 at least."""
        q, v, dtype = block.q, block.v, precise(block.q.dtype)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
        logsumexp = q.new_full(q.shape[:3], _NONE_SEEN, dtype=dtype)
        for rows, columns in _tiles(block):
            scores = _scores(block, rows, columns)
            of_tile = scores.logsumexp(-1)
            weights = (scores - of_tile.masked_fill(of_tile == _NONE_SEEN, 0.0)[..., None]).exp_()
            kept = _kept(block, weights, rows, columns)
            mixed = (weights if kept is None else weights * kept) @ _grouped(v[:, :, columns], q.shape[1], dtype)
            merge(out[:, :, rows], logsumexp[:, :, rows], mixed, of_tile)
        return out, logsumexp

    @staticmethod
    def backward(block: Block, gradient: Tensor, out: Tensor, logsumexp: Tensor) -> Gradients:
        """See :meth:`Kernel.backward`; in float32 at least."""
        q, k, v, mask = block[:4]
        dtype, heads, groups = precise(q.dtype), q.shape[1], k.shape[1]
        of_q, of_k, of_v = (each.new_zeros(each.shape, dtype=dtype) for each in (q, k, v))
        of_mask = None if mask is None or mask.dtype == torch.bool else mask.new_zeros(mask.shape, dtype=dtype)
        inner = (gradient.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
        for rows, columns in _tiles(block):
            query, key = q[:, :, rows].to(dtype), _grouped(k[:, :, columns], heads, dtype)
            of_out, value = gradient[:, :, rows].to(dtype), _grouped(v[:, :, columns], heads, dtype)
            weights = _scores(block, rows, columns).sub_(logsumexp[:, :, rows, None]).exp_()
            of_weights = of_out @ value.transpose(-2, -1)
            kept = _kept(block, weights, rows, columns)
            if kept is not None:
                of_weights.mul_(kept)
            of_scores = of_weights.sub_(inner[:, :, rows]).mul_(weights)
            weights = weights if kept is None else weights.mul_(kept)
            of_v[:, :, columns].add_(_summed(weights.transpose(-2, -1) @ of_out, groups))
            of_k[:, :, columns].add_(_summed(of_scores.transpose(-2, -1) @ query, groups), alpha=block.scale)
            of_q[:, :, rows].add_(of_scores @ key, alpha=block.scale)
            if of_mask is not None:
                part = _part(of_mask, rows, columns)
                part.add_(of_scores.sum_to_size(part.shape))
        return Gradients(of_q, of_k, of_v, of_mask)


class CpuKernel:
    """Torch's fused kernel on the CPU: without dropout, and without a gradient for the mask."""

    @staticmethod
    def forward(block: Block) -> tuple[Tensor, Tensor]:
        """See :meth:`Kernel.forward`."""
        q, k, v = block[:3]
        mask = _added(block.mask, precise(q.dtype))
        out, logsumexp = flash_attention_for_cpu(q, k, v, 0.0, block.is_causal, attn_mask=mask, scale=block.scale)
        if mask is not None:  # it says 0 of a query that sees no key
            logsumexp = logsumexp.masked_fill((mask == _NONE_SEEN).all(-1), _NONE_SEEN)
        return out, logsumexp

    @staticmethod
    def backward(block: Block, gradient: Tensor, out: Tensor, logsumexp: Tensor) -> Gradients:
        """See :meth:`Kernel.backward`."""
        q, k, v = block[:3]
        of_q, of_k, of_v = flash_attention_for_cpu_backward(
            gradient, q, k, v, out, logsumexp, 0.0, block.is_causal,
            attn_mask=_added(block.mask, precise(q.dtype)), scale=block.scale,
        )  # fmt: skip
        return Gradients(of_q, of_k, of_v)


class CudaKernel:
    """Torch's FlashAttention on CUDA devices: of half precision, without dropout and masks."""

    @staticmethod
    def forward(block: Block) -> tuple[Tensor, Tensor]:
        """See :meth:`Kernel.forward`."""
        result = flash_attention(*block[:3], 0.0, block.is_causal, scale=block.scale)
        return result[0], result[1]

    @staticmethod
    def backward(block: Block, gradient: Tensor, out: Tensor, logsumexp: Tensor) -> Gradients:
        """See :meth:`Kernel.backward`."""
        q, k, v = block[:3]
        undrawn = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of random numbers: without dropout
        of_q, of_k, of_v = flash_attention_backward(
            gradient, q, k, v, out, logsumexp.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, block.is_causal,
            undrawn, undrawn, scale=block.scale,
        )  # fmt: skip
        return Gradients(of_q, of_k, of_v)


_FUSED: dict[str, type[Kernel]] = {"cpu": CpuKernel, "cuda": CudaKernel}


@lru_cache
@torch.no_grad()
def _agrees(kernel: type[Kernel], device: torch.device, dtype: torch.dtype, of_keys: int, of_values: int) -> bool:
    """Whether a kernel is there, takes such tensors, and gives what products give, tried with a few positions."""

    def drawn(heads: int, features: int, phase: int) -> Tensor:
        numbers = torch.arange(heads * 8 * features, dtype=torch.float64, device=device).add_(phase).mul_(1.7).sin_()
        return numbers.view(1, heads, 8, features).to(dtype)

    q, k, v, gradient = drawn(4, of_keys, 1), drawn(2, of_keys, 2), drawn(2, of_values, 3), drawn(4, of_values, 4)
    blocks = [Block(q, k, v, None, is_causal, 0.5) for is_causal in (False, True)]
    with without_autocast(device.type):
        return all(_agrees_on(kernel, block, gradient) for block in blocks)


def _agrees_on(kernel: type[Kernel], block: Block, gradient: Tensor) -> bool:
    """Whether it gives for a block what products give, with other keys beside it in backward."""
    out, logsumexp = Products.forward(block)
    of_all = out.to(block.q.dtype), logsumexp + 0.5
    try:
        found = *kernel.forward(block), *kernel.backward(block, gradient, *of_all)[:3]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    expected = out, logsumexp, *Products.backward(block, gradient, *of_all)[:3]
    tolerance = torch.finfo(block.q.dtype).eps ** 0.5
    return all(
        mine.shape == other.shape and torch.allclose(mine.to(other.dtype), other, tolerance, tolerance)
        for mine, other in zip(found, expected, strict=True)
    )


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask to be added to scores, of four dimensions."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, _NONE_SEEN)
    return mask.to(dtype).view(*(1,) * (4 - mask.ndim), *mask.shape)


def _tiles(block: Block) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the scores, as many as are computed at a time; none of them behind all queries."""
    length, keys = block.q.shape[2], block.k.shape[2]
    for row in range(0, length, _ROWS):
        rows = slice(row, min(row + _ROWS, length))
        for column in range(0, rows.stop if block.is_causal else keys, _ROWS):
            yield rows, slice(column, min(column + _ROWS, keys))


def _scores(block: Block, rows: slice, columns: slice) -> Tensor:
    """Of a tile; of keys that a query does not see minus infinity."""
    dtype = precise(block.q.dtype)
    keys = _grouped(block.k[:, :, columns], block.q.shape[1], dtype)
    scores = (block.q[:, :, rows].to(dtype) @ keys.transpose(-2, -1)).mul_(block.scale)
    if block.mask is not None:
        part = _part(block.mask, rows, columns)
        scores = scores.masked_fill_(~part, _NONE_SEEN) if part.dtype == torch.bool else scores.add_(part)
    if block.is_causal and columns.stop > rows.start + 1:
        behind = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores.masked_fill_(behind.triu_(rows.start - columns.start + 1), _NONE_SEEN)
    return scores


def _part(mask: Tensor, rows: slice, columns: slice) -> Tensor:
    """What a mask has for a tile, of four dimensions: a view."""
    mask = mask.view(*(1,) * (4 - mask.ndim), *mask.shape)
    mask = mask if mask.shape[-2] == 1 else mask[..., rows, :]
    return mask if mask.shape[-1] == 1 else mask[..., columns]


def _kept(block: Block, weights: Tensor, rows: slice, columns: slice) -> Tensor | None:
    """What dropout multiplies the weights of a tile by."""
    if not block.dropout:
        return None
    generator = torch.Generator(weights.device)
    generator.manual_seed(derive_seed(block.seed, rows.start, columns.start) >> 1)
    drawn = torch.rand(weights.shape, generator=generator, device=weights.device)
    return (drawn >= block.dropout).to(weights.dtype).div_(1 - block.dropout)


def _grouped(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Keys or values, one head for each of the queries."""
    x = x.to(dtype)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _summed(x: Tensor, heads: int) -> Tensor:
    """The inverse for gradients."""
    return x if x.shape[1] == heads else x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(2)

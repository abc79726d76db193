"""Attention to a block of keys, and the merge with attention to other blocks.

`ring` and `all_gather` compute attention block by block, because a rank does not have all keys at once, or must not
store all scores. `F.scaled_dot_product_attention` does not return the logsumexp, which a merge needs::

    forward      out = softmax(scores) v, logsumexp = log(sum(exp(scores)))        for the keys of one block
    merge        each out with the weight exp(logsumexp)                           for the keys of both blocks
    backward     softmax(scores) = exp(scores - logsumexp) over all blocks         exact, block by block

Torch's fused kernels compute a block without storing its scores. They have no public names in torch, so a kernel is
used only if it exists and agrees with matrix products. Matrix products compute the blocks that no kernel supports. Dao,
"FlashAttention-2", 2023, https://arxiv.org/abs/2307.08691; merged blocks: Liu, Zaharia, Abbeel, "Ring Attention with
Blockwise Transformers for Near-Infinite Context", 2023, https://arxiv.org/abs/2310.01889.
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

_ROWS = 1024  # queries and keys whose scores are computed at a time, which limits the memory
_NONE_SEEN = float("-inf")  # the logsumexp of a query that sees no key
_LEAST = -1e4  # least value added to a score; lower values change no weight, but make a logsumexp inexact


class Block(NamedTuple):
    """Queries and keys between which attention is computed.

    Attributes:
        q: Shape (batch, heads, queries, features).
        k: Shape (batch, heads, keys, features). With fewer heads than the queries, each head serves a group of them.
        v: Shape (batch, heads, keys, features), with as many heads as `k`.
        mask: The mask of these queries and keys, broadcast to (batch, heads, queries, keys): boolean (True for visible
            keys), or added to the scores; ``None`` without a mask.
        is_causal: True if a query sees no later key. There are then as many keys as queries.
        scale: The factor of the scores.
        dropout: The fraction of the weights that is dropped.
        seed: The seed of dropout. The same seed in backward drops the same weights.
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
    """The gradients of a block. Only `Products` computes the gradient of a mask, if the mask is added to the scores.

    Otherwise the gradient of the mask is ``None``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None


class Kernel(Protocol):
    """The interface of an implementation of blocks."""

    @staticmethod
    def forward(block: Block) -> tuple[Tensor, Tensor]:
        """Compute attention to the keys of a block.

        Args:
            block: The block.

        Returns:
            The weighted values, of shape (batch, heads, queries, features), and the logsumexp of the scores in at least
            float32, of shape (batch, heads, queries). The logsumexp of a query that sees no key is minus infinity.
        """

    @staticmethod
    def backward(block: Block, gradient: Tensor, out: Tensor, logsumexp: Tensor) -> Gradients:
        """Compute the gradients of a block.

        Args:
            block: The block.
            gradient: The gradient for the merged output of all blocks of these queries.
            out: The merged output.
            logsumexp: The merged logsumexp, in at least float32; infinity for queries that see no key in any block.

        Returns:
            The gradients of this block, to be added to the gradients of other blocks.
        """


def find_kernel(
    q: Tensor, v: Tensor, mask: Tensor | None, dropout: float, *, learns_mask: bool = False
) -> type[Kernel]:
    """Return the kernel for blocks with these tensors.

    A fused kernel is compared with `Products` at the first call for each device, dtype and number of features.

    Args:
        q: The queries.
        v: The values.
        mask: The mask, as in a block.
        dropout: The dropout, as in a block.
        learns_mask: True if the mask needs a gradient.
    """
    fused = _FUSED.get(q.device.type)
    if fused is None or dropout or learns_mask or (mask is not None and fused is not CpuKernel):
        return Products
    # torch's attention on the CPU respects this setting of the user too.
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return Products
    if type(q) not in (Tensor, nn.Parameter):  # it has no values to compare
        return fused
    return fused if _agrees(fused, q.device, q.dtype, q.shape[-1], v.shape[-1]) else Products


def for_kernels(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values as kernels require them: with one batch size, and with contiguous features."""
    batch = max(each.shape[0] for each in tensors)
    alike = (each if each.shape[0] == batch else each.expand(batch, -1, -1, -1) for each in tensors)
    return tuple(each if each.stride(-1) == 1 else each.contiguous() for each in alike)


def bounded(mask: Tensor) -> Tensor:
    """Clamp a numeric mask to `_LEAST`, because padding may have the lowest value of its dtype. Keep minus infinity.

    Boolean masks are returned unchanged.
    """
    if mask.dtype == torch.bool:
        return mask
    return mask.clamp(min=_LEAST).masked_fill_(mask == _NONE_SEEN, _NONE_SEEN)


def merge(out: Tensor, logsumexp: Tensor, other: Tensor, of_other: Tensor) -> None:
    """Merge attention to other keys into the attention to some keys, in place.

    Args:
        out: The output for some keys, initially zero, of shape (batch, heads, queries, features).
        logsumexp: The logsumexp for some keys, initially minus infinity, of shape (batch, heads, queries).
        other: The output for the other keys.
        of_other: The logsumexp for the other keys.
    """
    weight = (of_other - logsumexp).sigmoid_().masked_fill_(of_other == _NONE_SEEN, 0.0)
    out.lerp_(other.to(out.dtype), weight[..., None])
    logsumexp.copy_(torch.logaddexp(logsumexp, of_other))


def cast_by_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast the tensors that autocast casts for torch's attention. Other values are returned unchanged."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    are_cast = (isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 for x in tensors)
    return tuple(x.to(dtype) if is_cast else x for x, is_cast in zip(tensors, are_cast, strict=True))


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Disable autocast for devices of a kind inside the context."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def precise(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are computed."""
    return torch.promote_types(dtype, torch.float32)


class Products:
    """Matrix products of `_ROWS` queries and keys at a time, for all blocks and devices."""

    @staticmethod
    def forward(block: Block) -> tuple[Tensor, Tensor]:
        """Compute :meth:`Kernel.forward` in at least float32."""
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
        """Compute :meth:`Kernel.backward` in at least float32."""
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
    """Torch's fused kernel on the CPU, without dropout and without a gradient for the mask."""

    @staticmethod
    def forward(block: Block) -> tuple[Tensor, Tensor]:
        """Compute :meth:`Kernel.forward`."""
        q, k, v = block[:3]
        mask = _added(block.mask, precise(q.dtype))
        out, logsumexp = flash_attention_for_cpu(q, k, v, 0.0, block.is_causal, attn_mask=mask, scale=block.scale)
        if mask is not None:  # the kernel returns 0 for a query that sees no key
            logsumexp = logsumexp.masked_fill((mask == _NONE_SEEN).all(-1), _NONE_SEEN)
        return out, logsumexp

    @staticmethod
    def backward(block: Block, gradient: Tensor, out: Tensor, logsumexp: Tensor) -> Gradients:
        """Compute :meth:`Kernel.backward`."""
        q, k, v = block[:3]
        of_q, of_k, of_v = flash_attention_for_cpu_backward(
            gradient, q, k, v, out, logsumexp, 0.0, block.is_causal,
            attn_mask=_added(block.mask, precise(q.dtype)), scale=block.scale,
        )  # fmt: skip
        return Gradients(of_q, of_k, of_v)


class CudaKernel:
    """Torch's FlashAttention on CUDA devices, for half precision, without dropout and masks."""

    @staticmethod
    def forward(block: Block) -> tuple[Tensor, Tensor]:
        """Compute :meth:`Kernel.forward`."""
        result = flash_attention(*block[:3], 0.0, block.is_causal, scale=block.scale)
        return result[0], result[1]

    @staticmethod
    def backward(block: Block, gradient: Tensor, out: Tensor, logsumexp: Tensor) -> Gradients:
        """Compute :meth:`Kernel.backward`."""
        q, k, v = block[:3]
        undrawn = torch.empty(2, dtype=torch.uint64, device=q.device)  # random state, unused without dropout
        of_q, of_k, of_v = flash_attention_backward(
            gradient, q, k, v, out, logsumexp.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, block.is_causal,
            undrawn, undrawn, scale=block.scale,
        )  # fmt: skip
        return Gradients(of_q, of_k, of_v)


_FUSED: dict[str, type[Kernel]] = {"cpu": CpuKernel, "cuda": CudaKernel}


@lru_cache
@torch.no_grad()
def _agrees(kernel: type[Kernel], device: torch.device, dtype: torch.dtype, of_keys: int, of_values: int) -> bool:
    """Return True if a kernel exists, accepts such tensors, and agrees with `Products` for a few positions."""

    def drawn(heads: int, features: int, phase: int) -> Tensor:
        numbers = torch.arange(heads * 8 * features, dtype=torch.float64, device=device).add_(phase).mul_(1.7).sin_()
        return numbers.view(1, heads, 8, features).to(dtype)

    q, k, v, gradient = drawn(4, of_keys, 1), drawn(2, of_keys, 2), drawn(2, of_values, 3), drawn(4, of_values, 4)
    blocks = [Block(q, k, v, None, is_causal, 0.5) for is_causal in (False, True)]
    with without_autocast(device.type):
        return all(_agrees_on(kernel, block, gradient) for block in blocks)


def _agrees_on(kernel: type[Kernel], block: Block, gradient: Tensor) -> bool:
    """Return True if a kernel agrees with `Products` for a block. In backward, the queries also see other keys."""
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
    """Return a mask that is added to scores, with four dimensions."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, _NONE_SEEN)
    return mask.to(dtype).view(*(1,) * (4 - mask.ndim), *mask.shape)


def _tiles(block: Block) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of tiles of the scores, without tiles that a causal mask hides."""
    length, keys = block.q.shape[2], block.k.shape[2]
    for row in range(0, length, _ROWS):
        rows = slice(row, min(row + _ROWS, length))
        for column in range(0, rows.stop if block.is_causal else keys, _ROWS):
            yield rows, slice(column, min(column + _ROWS, keys))


def _scores(block: Block, rows: slice, columns: slice) -> Tensor:
    """Return the scores of a tile; minus infinity for hidden keys."""
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
    """Return the part of a mask for a tile, as a view with four dimensions."""
    mask = mask.view(*(1,) * (4 - mask.ndim), *mask.shape)
    mask = mask if mask.shape[-2] == 1 else mask[..., rows, :]
    return mask if mask.shape[-1] == 1 else mask[..., columns]


def _kept(block: Block, weights: Tensor, rows: slice, columns: slice) -> Tensor | None:
    """Return the factors by which dropout multiplies the weights of a tile; ``None`` without dropout."""
    if not block.dropout:
        return None
    generator = torch.Generator(weights.device)
    generator.manual_seed(derive_seed(block.seed, rows.start, columns.start) >> 1)
    drawn = torch.rand(weights.shape, generator=generator, device=weights.device)
    return (drawn >= block.dropout).to(weights.dtype).div_(1 - block.dropout)


def _grouped(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Repeat the heads of keys or values so that there is one for each head of the queries."""
    x = x.to(dtype)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _summed(x: Tensor, heads: int) -> Tensor:
    """Sum gradients over the heads that :func:`_grouped` repeated."""
    return x if x.shape[1] == heads else x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(2)

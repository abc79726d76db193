"""A column-parallel linear layer that computes its weight gradient while its input gradient is reduced.

:class:`~.layers.ColumnParallelLinear` and :class:`~.layers.VocabParallelHead` call :func:`column_linear` in each
forward. `F.linear` after :func:`~.mappings.gather_input` gives the same values, but one autograd node then computes
both gradients, and the collective for the input gradient starts only after this node.

Autograd runs nodes that are ready in the reverse order of their creation. Therefore, the gradients of input and weight
are computed in two nodes. The nodes are created in such an order that the weight gradient is computed between the start
and the end of the collective::

    forward     x -- 1 wait -- 3 start --- 4 linear -- y
                W ------ 2 weight ------------'

    backward    4 linear   computes the input gradient
                3 start    starts the all-reduce        =======.   (sequence parallel: the reduce-scatter)
                2 weight   computes the weight gradient        |
                1 wait     <==================================='

If several layers have the same input, they share the collective, which overlaps with the weight gradient of the layer
that was called first. The results are bitwise equal to `F.linear` after :func:`~.mappings.gather_input` with autograd:
the same products of the same operands, and one sum over the ranks.

Megatron-LM does this in one node (`linear_with_grad_accumulation_and_async_communication`), without sharing the
collective between layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.process_group import reduce_scatter_single
from lightning_hybrid.tensor_parallel import mappings

#: The number of multiplications, by device type, from which overlap is worth the extra nodes: a product that keeps a
#: GPU busy for longer than the host needs. For a sequence shard, only multiplications for its own positions count. On
#: CPUs nothing overlaps, because gloo copies bytes on the cores that multiply (`benchmarks/tensor_parallel`: 0.93 to
#: 1.11 of the throughput, with one core per rank).
OVERLAP_FROM = {"cuda": 2**30}


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: mappings.TensorGroup, sequence_dim: int | None
) -> Tensor:
    """Map ``(..., in_features)`` to ``(..., out_features / T)`` on T ranks.

    All ranks must call it. A sequence shard is all-gathered, so the result has the full sequence. The backward
    all-reduces the gradient of a replicated input, and reduce-scatters the gradient of a sequence shard.

    Args:
        x: The replicated input, or this rank's sequence shard.
        weight: This rank's shard, ``(out_features / T, in_features)``.
        bias: This rank's shard, ``(out_features / T,)``, or ``None``.
        group: The tensor-parallel ranks.
        sequence_dim: The dimension along which sequences are sharded; ``None`` if `x` is replicated.
    """
    if not _overlaps(x, weight):
        return F.linear(mappings.gather_input(x, sequence_dim, group), weight, bias)
    low = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    pending = _Pending()
    gathered = mappings.shared_input(x, sequence_dim)
    waited = _Wait.apply(x, pending) if gathered is None else None  # type: ignore[no-untyped-call]
    deferred = _Weight.apply(_cast(weight, low), pending)  # type: ignore[no-untyped-call]
    if gathered is None:
        gathered = _Start.apply(waited, sequence_dim, group, pending)  # type: ignore[no-untyped-call]
        mappings.share_input(x, sequence_dim, gathered)
    arguments = _cast(gathered, low), deferred, None if bias is None else _cast(bias, low), pending
    return _Linear.apply(*arguments)  # type: ignore[no-untyped-call, no-any-return]


def _overlaps(x: Tensor, weight: Tensor) -> bool:
    """Return True if both gradients are needed and overlap is worth the extra nodes.

    Ranks may decide differently, because both paths call the same collectives in the same order.
    """
    least = OVERLAP_FROM.get(x.device.type)
    return (
        least is not None
        and x.numel() * weight.shape[0] >= least
        and x.dim() > 1
        and torch.is_grad_enabled()
        and x.requires_grad
        and weight.requires_grad
    )


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast a tensor as autocast does, which leaves float64 unchanged."""
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)


class _Pending:
    """Values that the nodes of one call of :func:`column_linear` pass to each other in backward.

    Attributes:
        work: The running collective for the input gradient; ``None`` if it is not running, or if an earlier layer with
            the same input starts it and waits for it.
        operands: The output gradient ``(N, out_features / T)`` and the input ``(N, in_features)``, from which the
            weight gradient is computed; ``None`` before `_Linear` has run in backward, and after `_Weight` has run.
    """

    __slots__ = ("operands", "work")

    def __init__(self) -> None:
        self.work: dist.Work | None = None
        self.operands: tuple[Tensor, Tensor] | None = None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: _Pending) -> Tensor:
        ctx.pending = pending
        return x.detach()  # autograd must not treat the result as a view

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        work, ctx.pending.work = ctx.pending.work, None
        work.wait()
        return gradient, None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, pending: _Pending) -> Tensor:
        ctx.pending, ctx.is_transposed = pending, not weight.is_contiguous()
        return weight.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        operands, ctx.pending.operands = ctx.pending.operands, None
        return weight_gradient(*operands, is_transposed=ctx.is_transposed), None


def weight_gradient(gradient: Tensor, x: Tensor, *, is_transposed: bool) -> Tensor:
    """Multiply ``(N, out)`` and ``(N, in)`` to ``(out, in)``, in the same order as autograd, for bitwise equality.

    Args:
        gradient: The gradient of the output.
        x: The input.
        is_transposed: True if the weight is a transposed view of its parameter, as in GPT-2's `Conv1D`.
    """
    return x.t().mm(gradient).t() if is_transposed else gradient.t().mm(x)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int | None, group: mappings.TensorGroup, pending: _Pending) -> Tensor:
        ctx.dim, ctx.group, ctx.pending = dim, group, pending
        return x.detach() if dim is None else mappings.all_gather_along(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        gradient, group = full_tensor(gradient), ctx.group()
        if ctx.dim is None:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            ctx.pending.work = dist.all_reduce(gradient, group=group, async_op=True)
            return gradient, None, None, None
        partial = gradient.movedim(ctx.dim, 0).contiguous()
        shard = partial.new_empty(partial.shape[0] // ctx.group.size, *partial.shape[1:])
        ctx.pending.work = reduce_scatter_single(shard, partial, group=group, async_op=True)
        return shard.movedim(0, ctx.dim), None, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pending: _Pending) -> Tensor:
        ctx.pending, ctx.has_bias = pending, bias is not None
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        flat = full_tensor(gradient).reshape(-1, weight.shape[0])
        ctx.pending.operands = flat, x.reshape(-1, x.shape[-1])
        # A placeholder for the weight gradient, which `_Weight` computes. It is never read and takes no memory.
        placeholder = weight.new_zeros(()).expand(weight.shape)
        return flat.mm(weight).view(x.shape), placeholder, flat.sum(0) if ctx.has_bias else None, None

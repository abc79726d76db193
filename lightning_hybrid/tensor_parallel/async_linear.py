"""A column-parallel linear layer: the gradient of its input is reduced while the gradient of its weight is computed.

Autograd runs what is ready in the reverse order in which it was made. So the gradients of input and weight are two
nodes, made in an order that puts the one between the begin and the end of the collective::

    forward     x -- 1 wait -- 3 start --- 4 linear -- y
                W ------ 2 weight ------------'

    backward    4 linear   gradient of the input
                3 start    the all-reduce begins    =======.       (sequence parallel: the reduce-scatter)
                2 weight   gradient of the weight          |
                1 wait     <==============================='

Where several layers take one input, they share the collective, and the first of them computes beside it. The numbers
are those of `F.linear` between :func:`~.mappings.copy_to_tp` and autograd, to the bit: the same products of the same
operands, and one sum over the ranks.

Megatron-LM does the same in one node (`linear_with_grad_accumulation_and_async_communication`), for layers that share
their input with none.
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

#: Multiplications from which a product is worth more than the nodes that it takes, by the type of the device: what
#: keeps a GPU busy for longer than the host. On CPUs nothing overlaps: gloo moves bytes on the cores that multiply
#: (`benchmarks/tensor_parallel`: between 0.93 and 1.11 of the throughput, where each rank has one core).
OVERLAP_FROM = {"cuda": 2**30}


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: mappings.TensorGroup, sequence_dim: int | None
) -> Tensor:
    """``(..., in_features)`` to ``(..., out_features / T)``.

    Args:
        x: Replicated, or this rank's shard of the sequence.
        weight: This rank's shard, ``(out_features / T, in_features)``.
        bias: Likewise.
        group: The ranks.
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
    """Whether both gradients are wanted, and are worth it. Ranks may differ: the collectives are the same."""
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
    """As autocast does it: double stays."""
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)


class _Pending:
    """What one backward hands from node to node: the collective under way, and what the weight's gradient is made of.

    The weight's node may be that of one layer, and the collective that of another one with the same input.
    """

    __slots__ = ("operands", "work")

    def __init__(self) -> None:
        self.work: dist.Work | None = None
        self.operands: tuple[Tensor, Tensor] | None = None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: _Pending) -> Tensor:
        ctx.pending = pending
        return x.detach()  # not a view for autograd

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
    """``(N, out)`` and ``(N, in)`` to ``(out, in)``, as autograd multiplies them for this order of memory."""
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
        # In the place of the weight's gradient, which `_Weight` makes: nothing reads it, and it takes no memory.
        placeholder = weight.new_zeros(()).expand(weight.shape)
        return flat.mm(weight).view(x.shape), placeholder, flat.sum(0) if ctx.has_bias else None, None

"""Collectives over the tensor-parallel ranks that autograd knows.

Between parallel layers an activation is *replicated*: every rank has all of it, and the gradient of the whole loss for
it. Inside of them a rank computes with its shard of the weights; what flows backward out of there is its part of a sum.
The functions here lead from one kind to the other (the conjugate pairs of Shoeybi et al., "Megatron-LM", 2019,
https://arxiv.org/abs/1909.08053, and, for sequences, Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, https://arxiv.org/abs/2205.05198)::

                            forward          backward
    copy_to_tp              -                all-reduce        replicated            -> used by every rank's shard
    reduce_from_tp          all-reduce       -                 partial sums          -> replicated
    gather_from_tp          all-gather       slice             shards                -> replicated
    scatter_to_tp           slice            all-gather        replicated            -> shards
    gather_from_sp          all-gather       reduce-scatter    shards of a sequence  -> used by every rank's shard
    reduce_scatter_to_sp    reduce-scatter   all-gather        partial sums          -> shards of a sequence

In Megatron-LM they are `copy_to_`, `reduce_from_`, `gather_from_` and `scatter_to_tensor_model_parallel_region`,
`gather_from_sequence_parallel_region` and `reduce_scatter_to_sequence_parallel_region`.

Where a user's code computes with a sharded parameter itself, torch makes gradients that are DTensors; they become plain
ones here.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.process_group import SizedGroupRef, all_gather_single, reduce_scatter_single
from lightning_hybrid.torch_internals import is_view, version_counter


class TensorGroup(SizedGroupRef):
    """The ranks that share each layer."""

    __slots__ = ()

    @property
    def feature_parts(self) -> int:
        """Into how many parts features, and heads, are divided between two layers."""
        return self.size

    def weight_copies(self, group: ProcessGroup) -> int:
        """Return how many ranks have each weight that is gathered in a group; 0 if the group gathers activations."""
        return 0

    def shape_hint(self) -> str:
        """Return a hint for errors about the shapes of activations, if their batch dimension is sharded too."""
        return ""

    def local_chunk(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that every rank has, as a view."""
        return x.chunk(self.size, dim)[self.rank]

    def local_indices(self, indices: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Indices into this rank's shard of `length` entries, and a mask of those that point into other ranks' shards.

        Where the mask is ``True``, the index is 0.
        """
        local = indices - self.rank * length
        elsewhere = (local < 0) | (local >= length)
        return local.masked_fill(elsewhere, 0), elsewhere


def copy_to_tp(x: Tensor, group: TensorGroup) -> Tensor:
    """A replicated tensor, about to be used by every rank's shard; its gradient is summed over the ranks.

    Several layers that take one tensor (the projections of an attention, say) share one all-reduce.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    copied = shared_input(x, None)
    if copied is None:
        copied = _CopyToTP.apply(x, group)  # type: ignore[no-untyped-call]
        share_input(x, None, copied)
    return copied


def reduce_from_tp(x: Tensor, group: TensorGroup) -> Tensor:
    """The sum over the ranks; changes `x`, which must be the fresh result of an operation."""
    return _ReduceFromTP.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_from_tp(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """The shards of all ranks, concatenated along a dimension."""
    return _AllGather.apply(x, dim, group, False)  # type: ignore[no-untyped-call, no-any-return]


def scatter_to_tp(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """This rank's shard of a replicated tensor.

    Raises:
        ValueError: If the dimension cannot be divided by the number of ranks.
    """
    if x.shape[dim] % group.size:
        raise ValueError(
            f"A sequence of length {x.shape[dim]} (dimension {dim} of an activation of shape {tuple(x.shape)}) cannot"
            f" be sharded over tensor_parallel_size={group.size} ranks. Pad the sequence to a multiple of"
            f" {group.size}, or use sequence_parallel=False. [LH516]"
        )
    return _ScatterToTP.apply(x, dim, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_from_sp(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """The shards of all ranks, about to be used by every rank's shard of a layer; their gradient is reduce-scattered.

    As in :func:`copy_to_tp`, several layers that take one tensor share the collectives.
    """
    gathered = shared_input(x, dim)
    if gathered is None:
        gathered = _AllGather.apply(x, dim, group, True)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() and x.requires_grad:
            share_input(x, dim, gathered)
    return gathered


def gather_input(x: Tensor, sequence_dim: int | None, group: TensorGroup) -> Tensor:
    """The full input, about to be used with a shard of the weights: replicated, or sharded along a sequence."""
    return copy_to_tp(x, group) if sequence_dim is None else gather_from_sp(x, sequence_dim, group)


def shared_input(x: Tensor, how: Hashable) -> Tensor | None:
    """What another layer made of the same input in the same way, if it did."""
    cached: tuple[int, Hashable, Tensor] | None = getattr(x, "_shared_input", None)
    return cached[2] if cached is not None and cached[:2] == (version_counter(x), how) else None


def share_input(x: Tensor, how: Hashable, made: Tensor) -> None:
    """Let other layers that take the same input use what was made of it; the input of all must be no leaf."""
    if not x.is_leaf:
        x._shared_input = version_counter(x), how, made  # type: ignore[attr-defined]


def reduce_scatter_to_sp(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """This rank's shard, along a dimension, of the sum over the ranks.

    It uses up `x`, which must be the fresh result of an operation.
    """
    return _ReduceScatterToSP.apply(x, dim, group)  # type: ignore[no-untyped-call, no-any-return]


def all_reduce_max(x: Tensor, group: TensorGroup) -> Tensor:
    """The largest value of all ranks, element by element, in place; not for autograd."""
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group())
    return x


def all_gather_along(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """All-gather along any dimension."""
    shard = x.movedim(dim, 0).contiguous()
    gathered = shard.new_empty(shard.shape[0] * group.size, *shard.shape[1:])
    all_gather_single(gathered, shard, group=group())
    return gathered.movedim(0, dim).contiguous()


def reduce_scatter_along(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """Reduce-scatter along any dimension."""
    partial = x.movedim(dim, 0).contiguous()
    shard = partial.new_empty(partial.shape[0] // group.size, *partial.shape[1:])
    reduce_scatter_single(shard, partial, group=group())
    return shard.movedim(0, dim)


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.detach()  # not a view for autograd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = full_tensor(gradient).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group())
        return gradient, None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        if is_view(x) or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        else:
            ctx.mark_dirty(x)
        dist.all_reduce(x, group=group())
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return full_tensor(gradient), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: TensorGroup, reduces_gradient: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.reduces_gradient = dim, group, reduces_gradient
        return all_gather_along(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = full_tensor(gradient)
        if ctx.reduces_gradient:
            return reduce_scatter_along(gradient, ctx.dim, ctx.group), None, None, None
        return ctx.group.local_chunk(gradient, ctx.dim), None, None, None


class _ScatterToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: TensorGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return group.local_chunk(x, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_along(full_tensor(gradient), ctx.dim, ctx.group), None, None


class _ReduceScatterToSP(_ScatterToTP):  # what flows backward is the same
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: TensorGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        shard = reduce_scatter_along(x, dim, group)
        x.untyped_storage().resize_(0)  # nobody needs it any more, and recomputation need not keep it
        return shard

"""Collectives over the tensor-parallel ranks, with their gradients.

Parallel layers (`layers`, `attention`, `grid`) and losses over sharded classes call them in forward. All ranks of the
group must call each function together, and run its backward together. torch's own differentiable collectives have other
gradients: they count the loss once for each rank.

Between parallel layers an activation is *replicated*: every rank has the full activation, and the gradient of the full
loss with respect to it. In regions of sequence parallelism, it is a sequence shard instead. Inside parallel layers, a
rank computes with its shard of the weights, and its gradients are summands of a sum over the ranks. The functions here
convert between these states. They are the conjugate pairs of Shoeybi et al., "Megatron-LM", 2019,
https://arxiv.org/abs/1909.08053, and, for sequences, of Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, https://arxiv.org/abs/2205.05198::

                            forward          backward
    copy_to_tp              -                all-reduce        replicated        -> input of every rank's shard
    reduce_from_tp          all-reduce       -                 partial sums      -> replicated
    gather_from_tp          all-gather       slice             shards            -> replicated
    scatter_to_tp           slice            all-gather        replicated        -> shards
    gather_from_sp          all-gather       reduce-scatter    sequence shards   -> input of every rank's shard
    reduce_scatter_to_sp    reduce-scatter   all-gather        partial sums      -> sequence shards

In Megatron-LM they are `copy_to_`, `reduce_from_`, `gather_from_` and `scatter_to_tensor_model_parallel_region`,
`gather_from_sequence_parallel_region` and `reduce_scatter_to_sequence_parallel_region`.

If the user's code computes with a sharded parameter directly, torch produces gradients that are DTensors. The functions
here convert them to plain tensors.
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
    """The ranks that compute each tensor-parallel layer together.

    The methods describe ranks in a line. The subclass `grid.blocks.Grid` describes squares and cubes.
    """

    __slots__ = ()

    @property
    def feature_parts(self) -> int:
        """The number of parts into which features, and heads, are divided between two layers."""
        return self.size

    def weight_copies(self, group: ProcessGroup) -> int:
        """Return how many ranks have each weight that is gathered in a group.

        Only the estimate of messages (`tuning.dry_run`) calls it.

        Args:
            group: A group of tensor-parallel ranks.

        Returns:
            The number of ranks; 0 if the group gathers activations, as in a line.
        """
        return 0

    def shape_hint(self) -> str:
        """Return a hint for shape errors if the batch dimension of activations is sharded too, else ``""``."""
        return ""

    def local_chunk(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's chunk of a replicated tensor, as a view."""
        return x.chunk(self.size, dim)[self.rank]

    def local_indices(self, indices: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Convert indices into a sharded dimension to indices into this rank's shard.

        Args:
            indices: Indices into the full dimension.
            length: The number of entries in each shard.

        Returns:
            The indices into this rank's shard, and a mask that is ``True`` for indices into the shards of other ranks.
            Where the mask is ``True``, the index is 0.
        """
        local = indices - self.rank * length
        elsewhere = (local < 0) | (local >= length)
        return local.masked_fill(elsewhere, 0), elsewhere


def copy_to_tp(x: Tensor, group: TensorGroup) -> Tensor:
    """Return a replicated tensor as input of every rank's shard of a layer. Its gradient is summed over the ranks.

    Layers with the same input, such as the projections of an attention, share one all-reduce, unless the input is a
    leaf of the autograd graph.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    copied = shared_input(x, None)
    if copied is None:
        copied = _CopyToTP.apply(x, group)  # type: ignore[no-untyped-call]
        share_input(x, None, copied)
    return copied


def reduce_from_tp(x: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum over the ranks.

    Overwrites `x`, unless it is a view or not contiguous, so `x` must be the fresh result of an operation.
    """
    return _ReduceFromTP.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_from_tp(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """Return the shards of all ranks, concatenated along a dimension."""
    return _AllGather.apply(x, dim, group, False)  # type: ignore[no-untyped-call, no-any-return]


def scatter_to_tp(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """Return this rank's shard of a replicated tensor. The shard is a copy.

    Raises:
        ValueError: If the size of the dimension is not divisible by the number of ranks.
    """
    if x.shape[dim] % group.size:
        raise ValueError(
            f"A sequence of length {x.shape[dim]} cannot be sharded over tensor_parallel_size={group.size} ranks. The"
            f" sequence is dimension {dim} of an activation of shape {tuple(x.shape)}. Pad the sequence to a multiple"
            f" of {group.size}, or use sequence_parallel=False. [LH516]"
        )
    return _ScatterToTP.apply(x, dim, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_from_sp(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """Return the gathered sequence as input of every rank's shard of a layer. Its gradient is reduce-scattered.

    Layers with the same input share the collectives, as in :func:`copy_to_tp`.
    """
    gathered = shared_input(x, dim)
    if gathered is None:
        gathered = _AllGather.apply(x, dim, group, True)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() and x.requires_grad:
            share_input(x, dim, gathered)
    return gathered


def gather_input(x: Tensor, sequence_dim: int | None, group: TensorGroup) -> Tensor:
    """Return the full input of a layer whose weights are sharded.

    A replicated input is returned as it is, and its gradient is all-reduced. A sequence shard is all-gathered, and its
    gradient is reduce-scattered.

    Args:
        x: The replicated input, or this rank's sequence shard.
        sequence_dim: The dimension along which sequences are sharded; ``None`` if `x` is replicated.
        group: The tensor-parallel ranks.
    """
    return copy_to_tp(x, group) if sequence_dim is None else gather_from_sp(x, sequence_dim, group)


def shared_input(x: Tensor, how: Hashable) -> Tensor | None:
    """Return the tensor that another layer made from the same input in the same way, or ``None``.

    Args:
        x: The input. It counts as another input after a write in place.
        how: The way, as in :func:`share_input`: the dimension that is gathered, or ``None`` for :func:`copy_to_tp`.
    """
    cached: tuple[int, Hashable, Tensor] | None = getattr(x, "_shared_input", None)
    return cached[2] if cached is not None and cached[:2] == (version_counter(x), how) else None


def share_input(x: Tensor, how: Hashable, made: Tensor) -> None:
    """Store the tensor that a layer made from its input, for other layers with this input.

    A leaf of the autograd graph, such as a parameter, stores nothing: it outlives the step, but the tensor must not.

    Args:
        x: The input, which gets an attribute with the tensor.
        how: The way in which the tensor was made.
        made: The tensor.
    """
    if not x.is_leaf:
        x._shared_input = version_counter(x), how, made  # type: ignore[attr-defined]


def reduce_scatter_to_sp(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """Return this rank's shard, along a dimension, of the sum over the ranks.

    Frees the memory of `x`, which must be the fresh result of an operation.
    """
    return _ReduceScatterToSP.apply(x, dim, group)  # type: ignore[no-untyped-call, no-any-return]


def all_reduce_max(x: Tensor, group: TensorGroup) -> Tensor:
    """Compute the elementwise maximum over the ranks in place, and return `x`. It has no gradient."""
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group())
    return x


def all_gather_along(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """All-gather a tensor along any dimension. It has no gradient."""
    shard = x.movedim(dim, 0).contiguous()
    gathered = shard.new_empty(shard.shape[0] * group.size, *shard.shape[1:])
    all_gather_single(gathered, shard, group=group())
    return gathered.movedim(0, dim).contiguous()


def reduce_scatter_along(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """Reduce-scatter a tensor along any dimension. It has no gradient."""
    partial = x.movedim(dim, 0).contiguous()
    shard = partial.new_empty(partial.shape[0] // group.size, *partial.shape[1:])
    reduce_scatter_single(shard, partial, group=group())
    return shard.movedim(0, dim)


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.detach()  # autograd must not treat the result as a view

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


class _ReduceScatterToSP(_ScatterToTP):  # the backward is the same
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: TensorGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        shard = reduce_scatter_along(x, dim, group)
        x.untyped_storage().resize_(0)  # the sum replaces it, and recomputation need not store it
        return shard

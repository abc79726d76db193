"""Collectives over the tensor-parallel ranks that autograd knows.

Between parallel layers an activation is *replicated*: every rank has all of it, and the gradient of the whole loss for
it. Inside of them a rank computes with its shard of the weights; what flows backward out of there is its part of a sum.
The functions here lead from one kind to the other (the conjugate pairs of Shoeybi et al., "Megatron-LM", 2019,
https://arxiv.org/abs/1909.08053, and, for sequences, Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, https://arxiv.org/abs/2205.05198)::

                       forward          backward
    fan_out            -                all-reduce        replicated            -> used by every rank's shard
    fan_in             all-reduce       -                 partial sums          -> replicated
    gather             all-gather       slice             shards                -> replicated
    split              slice            all-gather        replicated            -> shards
    gather_fan_out     all-gather       reduce-scatter    shards of a sequence  -> used by every rank's shard
    fan_in_scatter     reduce-scatter   all-gather        partial sums          -> shards of a sequence

Where a user's code computes with a divided parameter itself, torch makes gradients that are DTensors; they become plain
ones here.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.process_group import all_gather_single, reduce_scatter_single

__all__ = [
    "TensorGroup",
    "copy_to_tp",
    "gather_from_sp",
    "gather_from_tp",
    "maximum",
    "reduce_from_tp",
    "reduce_scatter_to_sp",
    "scatter_to_tp",
]


class TensorGroup:
    """The ranks that share each layer, and this rank's place among them.

    torch owns the group. Callbacks copy modules, and a group cannot be copied: copies of a layer share this object.

    Args:
        group: The group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._reference = weakref.ref(group)
        self.size = group.size()
        self.rank = group.rank()

    @property
    def group(self) -> ProcessGroup:
        """The group of torch."""
        group = self._reference()
        assert group is not None, "the process groups have been destroyed"
        return group

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorGroup:
        return self


def copy_to_tp(x: Tensor, group: TensorGroup) -> Tensor:
    """A replicated tensor, about to be used by every rank's shard; its gradient is summed.

    Several layers that take one tensor (the projections of an attention, say) share one sum.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if x.is_leaf:
        return _FanOut.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]
    known: tuple[int, Tensor] | None = getattr(x, "_fanned_out", None)
    if known is None or known[0] != x._version:
        known = x._version, _FanOut.apply(x, group)  # type: ignore[no-untyped-call]
        x._fanned_out = known  # type: ignore[attr-defined]
    return known[1]


def reduce_from_tp(x: Tensor, group: TensorGroup) -> Tensor:
    """The sum over the ranks; changes `x`, which must be the fresh result of an operation."""
    result: Tensor = _FanIn.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def gather_from_tp(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """The shards of all ranks, joined along a dimension."""
    result: Tensor = _Gather.apply(x, dim, group, False)  # type: ignore[no-untyped-call]
    return result


def scatter_to_tp(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """This rank's shard of a replicated tensor.

    Raises:
        ValueError: If the dimension cannot be divided by the number of ranks.
    """
    if x.shape[dim] % group.size:
        raise ValueError(
            f"A sequence of length {x.shape[dim]} (dimension {dim} of an activation of shape {tuple(x.shape)}) cannot"
            f" be divided over tensor_parallel_size={group.size} ranks. Pad it to a multiple of {group.size}, or use"
            " sequence_parallel=False."
        )
    result: Tensor = _Split.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return result


def gather_from_sp(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """The shards of all ranks, joined, about to be used by every rank's shard of a layer; their gradient is summed.

    As in :func:`copy_to_tp`, several layers that take one tensor share the collectives.
    """
    if x.is_leaf or not (torch.is_grad_enabled() and x.requires_grad):
        return _Gather.apply(x, dim, group, True)  # type: ignore[no-untyped-call, no-any-return]
    known: tuple[int, Tensor] | None = getattr(x, "_gathered", None)
    if known is None or known[0] != x._version:
        known = x._version, _Gather.apply(x, dim, group, True)  # type: ignore[no-untyped-call]
        x._gathered = known  # type: ignore[attr-defined]
    return known[1]


def reduce_scatter_to_sp(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """This rank's shard, along a dimension, of the sum over the ranks.

    It uses up `x`, which must be the fresh result of an operation.
    """
    result: Tensor = _FanInScatter.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return result


def maximum(x: Tensor, group: TensorGroup) -> Tensor:
    """The largest value of all ranks, element by element, in place; not for autograd."""
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group.group)
    return x


def _joined(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """All-gather along any dimension."""
    first = x.movedim(dim, 0).contiguous()
    joined = first.new_empty(first.shape[0] * group.size, *first.shape[1:])
    all_gather_single(joined, first, group=group.group)
    return joined.movedim(0, dim).contiguous()


def _own(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    return x.chunk(group.size, dim)[group.rank]


def _summed(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """Reduce-scatter along any dimension."""
    first = x.movedim(dim, 0).contiguous()
    own = first.new_empty(first.shape[0] // group.size, *first.shape[1:])
    reduce_scatter_single(own, first, group=group.group)
    return own.movedim(0, dim)


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.detach()  # not a view for autograd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = full_tensor(gradient).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group.group)
        return gradient, None


class _FanIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        if x._is_view() or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        else:
            ctx.mark_dirty(x)
        dist.all_reduce(x, group=group.group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return full_tensor(gradient), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: TensorGroup, fans_out: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.fans_out = dim, group, fans_out
        return _joined(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back = _summed if ctx.fans_out else _own
        return back(full_tensor(gradient), ctx.dim, ctx.group), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: TensorGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _own(x, dim, group).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _joined(full_tensor(gradient), ctx.dim, ctx.group), None, None


class _FanInScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: TensorGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        summed = _summed(x, dim, group)
        x.untyped_storage().resize_(0)  # nobody needs it any more, and recomputation need not keep it
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _joined(full_tensor(gradient), ctx.dim, ctx.group), None, None

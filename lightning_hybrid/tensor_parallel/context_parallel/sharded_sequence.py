"""A sequence whose positions are sharded over ranks, and the functions that compute on shares, position by position.

A handler returns its share of the result on the whole sequence, or `NotImplemented`. Other operands are treated as
arguments of layers are by :class:`Division`: operands with a value for each position are divided, and operands that are
the same for all positions stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hybrid.distributed.process_group import SizedGroupRef
from lightning_hybrid.distributed.pytree import LEAF, TreeSpec, flatten, map_leaves, unflatten
from lightning_hybrid.tensor_parallel.context_parallel.mappings import ContextGroup, copy_to_cp, scatter_to_cp
from lightning_hybrid.tensor_parallel.sharded_activation import (
    Function,
    ShardedActivation,
    dim_after,
    elementwise,
    functions,
    in_shares,
)
from lightning_hybrid.tensor_parallel.sharding import Sharding, Shares
from lightning_hybrid.torch_internals import view_base


class ShardedSequence(ShardedActivation):
    """A sequence whose positions are divided over the context-parallel ranks."""

    @property
    def gradient_scale(self) -> int:
        """The number of ranks: gradients of parameters are averaged over them (`mappings`)."""
        size: int = self.group.size
        return size

    def share(self, dim: int, shares: Shares) -> Tensor:
        """Return this rank's share, in the graph: the one that a layer made, unless something was written."""
        if self.sharding.is_same(Sharding(dim, shares)) and not self.is_written():
            return self.local
        return scatter_to_cp(self.full_tensor(), dim, shares)

    def operand(self, tensor: Tensor, behind: int) -> Any:
        """Return a share of what goes by positions, and all of what is the same for each of them."""
        dim = tensor.ndim + behind
        if dim < 0 or tensor.shape[dim] == 1:
            return whole(tensor, self.group)
        is_divided = tensor.shape[dim] == self.sharding.size
        return self.sharding.at(dim).split(tensor, scatter_to_cp) if is_divided else NotImplemented


def shard(share: Tensor, dim: int, shares: Shares) -> ShardedSequence:
    """Return the whole sequence of which this is this rank's share."""
    return ShardedSequence.wrap(share, Sharding(dim, shares))


def on_share(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply what works position by position to a tensor, or to this rank's share of a sequence.

    Args:
        function: Makes a tensor with as many dimensions, of which it changes the last one.
        x: The tensor.
    """
    if not isinstance(x, ShardedSequence):
        return function(x)
    if x.is_written() or x.sharding.dim == x.ndim - 1:
        return function(x.full_tensor())
    return x.wrap(function(x.local), x.sharding)


def whole(value: Any, group: SizedGroupRef) -> Any:
    """Return what every rank's positions are computed with, such as a weight.

    The gradient of a parameter may be that of a share, as in layers: it is averaged over the ranks in the end.
    """
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or isinstance(view_base(value), nn.Parameter):
        return value
    return copy_to_cp(value, group)


# -- between stages ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceShare:
    """What goes from one stage to the next in the place of a :class:`ShardedSequence`: a share from each rank.

    Attributes:
        share: The share.
        sequence_dim: The dimension of the sequence.
        total: The length of the sequence.
    """

    share: Tensor
    sequence_dim: int
    total: int


def to_shares(tree: Any) -> Any:
    """Return the same tree, with shares in the place of sequences that are in shares."""
    return map_leaves(_to_share, tree)


def from_shares(tree: Any, group: ContextGroup, *, balanced: bool) -> Any:
    """Return the tree that :func:`to_shares` was given, on the next stage."""
    leaves, spec = flatten(tree)
    return _from_shares(iter(leaves), spec, lambda total: Shares(total, group, balanced=balanced))


def _from_shares(leaves: Iterator[Any], spec: TreeSpec, shares: Callable[[int], Shares]) -> Any:
    if spec.kind is SequenceShare:
        share, sequence_dim, total = (next(leaves) for _ in spec.children)
        return shard(share, sequence_dim, shares(total))
    if spec.kind is None:
        return next(leaves)
    values = [_from_shares(leaves, child, shares) for child in spec.children]
    return unflatten(values, TreeSpec.of(spec.kind, spec.names, (LEAF,) * len(values)))


def _to_share(leaf: Any) -> Any:
    if not isinstance(leaf, ShardedSequence):
        return leaf
    dim, before, *_ = leaf.sharding
    shares = Shares(before.total, before.group, balanced=before.balanced)
    if not leaf.sharding.is_same(Sharding(dim, shares)):  # some positions of a longer one, or sequences in a row
        return leaf.full_tensor()
    return SequenceShare(leaf.share(dim, shares), dim, shares.total)


# -- what works on shares ----------------------------------------------------------------------------------------------

_ELEMENTWISE = (
    *("to", "float", "double", "half", "bfloat16", "type_as", "clone", "neg", "abs", "square", "sqrt", "rsqrt", "pow"),
    *("exp", "log", "tanh", "sigmoid", "gelu", "relu", "silu", "clamp", "masked_fill", "where", "maximum", "minimum"),
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "eq", "ne"),
    *("__neg__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
    *("__div__", "__rdiv__", "__pow__", "__rpow__", "__eq__", "__ne__"),
)
_REDUCTIONS = ("sum", "mean", "var", "amax", "amin", "argmax", "logsumexp")
_NORMS = functions("layer_norm", "rms_norm")
ShardedSequence.implements(*functions(*_ELEMENTWISE))(elementwise)


@ShardedSequence.implements(F.dropout)
def _dropout(func: Function, args: Any, kwargs: Any) -> Any:
    """Where nothing is dropped; numbers that are drawn are those of the whole sequence."""
    given = dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
    is_off = given.get("p", 0.5) == 0 or not given.get("training", True)
    return args[0] if is_off and in_shares(args[0]) else NotImplemented


@ShardedSequence.implements(*_NORMS, *functions("linear", "matmul", "__matmul__"))
def _along_features(func: Function, args: Any, kwargs: Any) -> Any:
    """Handle a function that mixes features, with weights that are equal for all positions."""
    x, *others = args
    dims = 1
    if func in _NORMS:
        shape = others[0] if others else kwargs.get("normalized_shape")
        dims = len(shape) if isinstance(shape, Sequence) else 1
    elif not others or not isinstance(others[0], Tensor) or others[0].ndim != 2:
        return NotImplemented
    leaves, spec = flatten((others, kwargs))
    if not in_shares(x) or x.sharding.dim >= x.ndim - dims or any(isinstance(leaf, ShardedSequence) for leaf in leaves):
        return NotImplemented
    others, kwargs = unflatten([whole(leaf, x.group) for leaf in leaves], spec)
    return x.wrap(func(x.local, *others, **kwargs), x.sharding)


@ShardedSequence.implements(*functions(*_REDUCTIONS))
def _reduce(func: Function, args: Any, kwargs: Any) -> Any:
    x, *others = args
    dim = dim_after(func, x, others, kwargs)
    return NotImplemented if dim is None else x.wrap(func(x.local, *others, **kwargs), x.sharding.at(dim))


@ShardedSequence.implements(*functions("log_softmax"))
def _log_softmax(func: Function, args: Any, kwargs: Any) -> Any:
    x, *others = args
    dim = others[0] if others else kwargs.get("dim")
    is_other = isinstance(dim, int) and dim % x.ndim != x.sharding.dim
    return _reduce(func, args, kwargs) if is_other else NotImplemented


@ShardedSequence.implements(torch.cat, torch.concat)
def _cat(func: Function, args: Any, kwargs: Any) -> Any:
    """Samples of several microbatches."""
    tensors, *others = args
    dim = others[0] if others else kwargs.get("dim", 0)
    first = tensors[0]
    if not isinstance(dim, int) or kwargs.keys() - {"dim"} or not all(map(in_shares, tensors)):
        return NotImplemented
    alike = all(each.ndim == first.ndim and each.sharding.is_same(first.sharding) for each in tensors)
    if not alike or dim % first.ndim == first.sharding.dim:
        return NotImplemented
    return first.wrap(func([each.local for each in tensors], dim), first.sharding)

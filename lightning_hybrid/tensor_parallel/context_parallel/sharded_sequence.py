"""A sequence whose positions are sharded over ranks, and the functions that compute on shards, position by position.

Under context parallelism, layers return a :class:`ShardedSequence` to the user's step. Norms, heads and losses after
the layers then compute on shards, as long as the functions of this file suffice; other functions gather the sequence.
The base class, :class:`ShardedActivation`, explains why this is a tensor subclass. `ContextParallel` sends shards to
the next pipeline stage with :func:`to_shares` and :func:`from_shares`.

A handler returns its shard of the result for the full sequence, or `NotImplemented`. Other operands are treated like
the arguments of layers in :class:`Division`: operands with a value for each position are sharded, and operands that are
equal for all positions stay full.
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
    """A sequence whose positions are sharded over the context-parallel ranks."""

    @property
    def gradient_scale(self) -> int:
        """The number of ranks, because gradients of parameters are averaged over them (`mappings`)."""
        size: int = self.group.size
        return size

    def share(self, dim: int, shares: Shares) -> Tensor:
        """Return this rank's shard, in the graph: the shard that a layer made, unless the sequence was written.

        The full tensor is gathered if it was written, or if it is sharded in another way.

        Args:
            dim: The sequence dimension.
            shares: The positions of each rank.
        """
        if self.sharding.is_same(Sharding(dim, shares)) and not self.is_written():
            return self.local
        return scatter_to_cp(self.full_tensor(), dim, shares)

    def operand(self, tensor: Tensor, behind: int) -> Any:
        """Return the shard of an operand with values for each position, or the full operand if it has none.

        An operand of another length is `NotImplemented`.
        """
        dim = tensor.ndim + behind
        if dim < 0 or tensor.shape[dim] == 1:
            return whole(tensor, self.group)
        is_divided = tensor.shape[dim] == self.sharding.size
        return self.sharding.at(dim).split(tensor, scatter_to_cp) if is_divided else NotImplemented


def shard(share: Tensor, dim: int, shares: Shares) -> ShardedSequence:
    """Return the full sequence of which a tensor is this rank's shard."""
    return ShardedSequence.wrap(share, Sharding(dim, shares))


def on_share(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function that computes position by position to a tensor, or to this rank's sequence shard.

    Args:
        function: Returns a tensor with the same number of dimensions. It may change the size of the last one.
        x: The tensor, or a sharded sequence.

    Returns:
        The result; a sharded sequence if `x` is one with valid shards.
    """
    if not isinstance(x, ShardedSequence):
        return function(x)
    if x.is_written() or x.sharding.dim == x.ndim - 1:
        return function(x.full_tensor())
    return x.wrap(function(x.local), x.sharding)


def whole(value: Any, group: SizedGroupRef) -> Any:
    """Return a value that is equal for all positions, such as a weight, as operand of every rank's positions.

    A parameter needs no collective: its gradient may come from one shard, as in layers, because it is averaged over the
    ranks at the end.
    """
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or isinstance(view_base(value), nn.Parameter):
        return value
    return copy_to_cp(value, group)


# -- between stages ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceShare:
    """The value that is sent to the next stage for a :class:`ShardedSequence`: the shard of each rank.

    Messages between stages consist of plain tensors and dataclasses.

    Attributes:
        share: This rank's shard.
        sequence_dim: The dimension of the sequence.
        total: The length of the full sequence.
    """

    share: Tensor
    sequence_dim: int
    total: int


def to_shares(tree: Any) -> Any:
    """Return a tree in which each sharded sequence is replaced by a :class:`SequenceShare`.

    A slice, or a dimension with several sequences, is gathered and sent in full.
    """
    return map_leaves(_to_share, tree)


def from_shares(tree: Any, group: ContextGroup, *, balanced: bool) -> Any:
    """Return, on the next stage, the tree that :func:`to_shares` received."""
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
    if not leaf.sharding.is_same(Sharding(dim, shares)):  # a slice, or several sequences
        return leaf.full_tensor()
    return SequenceShare(leaf.share(dim, shares), dim, shares.total)


# -- functions that compute on shards ----------------------------------------------------------------------------------

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
    """Handle dropout that drops nothing. Random numbers are drawn for the full sequence."""
    given = dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
    is_off = given.get("p", 0.5) == 0 or not given.get("training", True)
    return args[0] if is_off and in_shares(args[0]) else NotImplemented


@ShardedSequence.implements(*_NORMS, *functions("linear", "matmul", "__matmul__"))
def _along_features(func: Function, args: Any, kwargs: Any) -> Any:
    """Handle a norm or a matrix product that mixes features, with weights that are equal for all positions."""
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
    """Handle the concatenation of samples of several microbatches."""
    tensors, *others = args
    dim = others[0] if others else kwargs.get("dim", 0)
    first = tensors[0]
    if not isinstance(dim, int) or kwargs.keys() - {"dim"} or not all(map(in_shares, tensors)):
        return NotImplemented
    alike = all(each.ndim == first.ndim and each.sharding.is_same(first.sharding) for each in tensors)
    if not alike or dim % first.ndim == first.sharding.dim:
        return NotImplemented
    return first.wrap(func([each.local for each in tensors], dim), first.sharding)

"""A whole sequence of which this rank has its share, until something reads all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hybrid.context_parallel.mappings import ContextGroup, Shares, all_gather_shares, scatter_to_cp
from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.pytree import LEAF, TreeSpec, flatten, map_leaves, unflatten


class ShardedSequence(Tensor):
    """What a layer returns to the code around it: a tensor of the shape of the whole sequence.

    ::

        layer --> sharded sequence --> layer          takes the share, nothing is sent
                          `--> + 1, norm, loss        the shares are gathered, once, and it is the whole sequence

    Operators of autograd take it as they take any tensor, and its gradient leads to the share. It is read below them.

    Args:
        share: This rank's share, without a graph.
        dim: Along which the sequence goes.
        shares: How it is divided.

    Attributes:
        sequence_dim: The dimension, as given.
        shares: As given.
    """

    sequence_dim: int
    shares: Shares
    _share: Tensor
    _with_graph: Tensor | None
    _written: int
    _whole: Tensor | None

    def __new__(cls, share: Tensor, dim: int, shares: Shares) -> ShardedSequence:
        """Make one."""
        shape = list(share.shape)
        shape[dim] = shares.total
        made: ShardedSequence = Tensor._make_wrapper_subclass(cls, shape, dtype=share.dtype, device=share.device)
        made._share, made.sequence_dim, made.shares = share, dim, shares
        made._whole = made._with_graph = None
        return made

    def read(self) -> Tensor:
        """All of it, always the same tensor: a collective, the first time."""
        if self._whole is None:
            self._whole = all_gather_shares(self._share, self.sequence_dim, self.shares)
        return self._whole

    def share(self, dim: int, shares: Shares) -> Tensor:
        """This rank's share, with its graph: the one that a layer made, unless something has been written since."""
        is_same = dim == self.sequence_dim and shares.lengths == self.shares.lengths
        if self._with_graph is not None and is_same and not self._may_be_written():
            return self._with_graph
        return scatter_to_cp(self, dim, shares)

    def _may_be_written(self) -> bool:
        """Whether something was written into it; in inference mode, where torch does not know, what was read may be."""
        return self._whole is not None if self.is_inference() else self._version != self._written

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A call: as of any tensor, so that autograd sees it."""
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """An operator reads it, or writes into it."""
        plain_args, plain_kwargs = map_leaves(_read, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        first = args[0] if args else None
        return first if isinstance(first, ShardedSequence) and result is first._whole else result


def shard(share: Tensor, dim: int, shares: Shares) -> ShardedSequence:
    """The whole sequence of which this is this rank's share."""
    made: ShardedSequence = _Shard.apply(share, dim, shares)  # type: ignore[no-untyped-call]
    made._with_graph, made._written = share, 0 if made.is_inference() else made._version
    return made


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
    """The same tree, with shares in the place of sequences that are in shares."""
    return map_leaves(_to_share, tree)


def from_shares(tree: Any, group: ContextGroup, *, balanced: bool) -> Any:
    """The inverse of :func:`to_shares`, on the next stage."""
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
    return SequenceShare(leaf.share(leaf.sequence_dim, leaf.shares), leaf.sequence_dim, leaf.shares.total)


def plain(tensor: Any) -> Any:
    """A plain tensor in the place of a sequence that may be in shares; anything else as it is."""
    return tensor.view(tensor.shape) if isinstance(tensor, ShardedSequence) else tensor


def _read(leaf: Any) -> Any:
    return leaf.read() if isinstance(leaf, ShardedSequence) else leaf


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, dim: int, shares: Shares) -> Tensor:
        ctx.dim, ctx.shares = dim, shares
        return ShardedSequence(share.detach(), dim, shares)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.shares.own(full_tensor(gradient), ctx.dim) * ctx.shares.group.size, None, None

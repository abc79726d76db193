"""A whole sequence of which this rank has its share, until something reads all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.pytree import LEAF, TreeSpec, flatten, map_leaves, unflatten
from lightning_hybrid.distributed.tensor_metadata import METADATA, getters
from lightning_hybrid.tensor_parallel.context_parallel.mappings import (
    ContextGroup,
    Shares,
    all_gather_shares,
    scatter_to_cp,
)

Handler = Callable[[Callable[..., Any], Any, Any], Any]
_HANDLED: dict[Callable[..., Any], Handler] = {}

#: What speaks of a tensor's own place in the graph; others get a plain tensor.
_WATCHES: frozenset[Any] = frozenset({Tensor.register_hook, Tensor.retain_grad})
_IN_GRAPH: frozenset[Any] = (
    getters("grad", "retains_grad", "output_nr", "_backward_hooks")
    | {Tensor.requires_grad_, Tensor.backward, torch.autograd.grad, torch.autograd.backward}
    | {getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")}
)


class SequenceLayout(NamedTuple):
    """The dimension along which a sequence goes, by itself or together with others.

    ::

        (batch, sequence, classes)      dim 1
        (batch * sequence, classes)     dim 0, outer = batch: the sequences one after the other
        (sequence * batch, classes)     dim 0, inner = batch: all samples of the first position, of the second, ...

    Attributes:
        dim: The dimension.
        shares: How the sequence is divided.
        outer: How many sequences there are along it.
        inner: How many entries each position has in each of them.
    """

    dim: int
    shares: Shares
    outer: int = 1
    inner: int = 1

    @property
    def size(self) -> int:
        """The size of the dimension, of the whole sequence."""
        return self.outer * self.shares.total * self.inner

    def is_same(self, other: SequenceLayout) -> bool:
        """Whether these are the same entries of a tensor of the same shape."""
        return self._replace(shares=other.shares) == other and self.shares.is_same(other.shares)

    def at(self, dim: int) -> SequenceLayout:
        """The same along another dimension."""
        return self._replace(dim=dim)

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """The shape of the whole, of that of a share."""
        return [*shape[: self.dim], self.size, *shape[self.dim + 1 :]]

    def own(self, x: Tensor) -> Tensor:
        """This rank's share, of a tensor that every rank has."""
        return self._split(x, self.shares.total, lambda x, dim, shares: shares.own(x, dim))

    def scatter(self, x: Tensor) -> Tensor:
        """The same for autograd."""
        return self._split(x, self.shares.total, scatter_to_cp)

    def gather(self, share: Tensor) -> Tensor:
        """The whole, of the shares of all ranks: a collective; not for autograd."""
        return self._split(share, self.shares.length, all_gather_shares)

    def _split(self, x: Tensor, length: int, function: Callable[[Tensor, int, Shares], Tensor]) -> Tensor:
        """Apply a function to a tensor in which the sequence has a dimension of its own."""
        if self.outer == self.inner == 1:
            return function(x, self.dim, self.shares)
        split: Tensor = x.unflatten(self.dim, (self.outer, length, self.inner))  # type: ignore[no-untyped-call]
        return function(split, self.dim + 1, self.shares).flatten(self.dim, self.dim + 2)

    def reshaped(self, shape: torch.Size, new: torch.Size) -> SequenceLayout | None:
        """Where the sequence is once a tensor has another shape of as many entries.

        Args:
            shape: The shape of the whole.
            new: The other one.

        Returns:
            The layout; ``None`` if the sequence lies across several dimensions.
        """
        before = shape[: self.dim].numel() * self.outer
        for dim, size in enumerate(new if new.numel() > 0 else ()):
            outer, rest = divmod(before, new[:dim].numel())
            if rest == 0 and size % (outer * self.shares.total) == 0:
                return SequenceLayout(dim, self.shares, outer, size // (outer * self.shares.total))
        return None


class ShardedSequence(Tensor):
    """What a layer returns to the code around it: a tensor of the shape of the whole sequence.

    ::

        layer --> sharded sequence --> layer                    takes the share, nothing is sent
                          |----------> norm, head, loss         compute on the share (`sequence_ops`): sharded sequences
                          `----------> anything else            the shares are gathered, once, and it is an ordinary
                                                                tensor from there on

    The graph is that of this tensor, whoever takes the share: so hooks and gradients of it mean what they always do.
    All ranks of the group must do the same with it, as they do if they run the same code.

    Args:
        share: This rank's share, without a graph.
        sequence: Where the sequence is, and how it is divided.
        strides: Of the whole; ``None`` if it is contiguous.
        is_gradient: Whether the share is `size` times the one of the whole, as gradients are that flow in the layers.

    Attributes:
        sequence: As given.
        is_gradient: As given.
    """

    sequence: SequenceLayout
    is_gradient: bool
    _share: Tensor
    _linked: Tensor | None  # the share, in the graph of this tensor
    _written: int
    _whole: Tensor | None
    _view: tuple[ShardedSequence, Callable[[Tensor], Tensor]] | None  # of what this is a view, and which
    _node: Any  # of the graph, as it was made: in the end it may be what a function of the user's returned

    def __new__(
        cls,
        share: Tensor,
        sequence: SequenceLayout,
        strides: Sequence[int] | None = None,
        *,
        is_gradient: bool = False,
    ) -> ShardedSequence:
        """Make one."""
        made: ShardedSequence = Tensor._make_wrapper_subclass(
            cls, sequence.whole_shape(share.shape), strides, dtype=share.dtype, device=share.device
        )
        made._share, made.sequence, made.is_gradient = share, sequence, is_gradient
        made._whole = made._linked = made._view = None
        return made

    @property
    def local(self) -> Tensor:
        """This rank's share, in the graph."""
        if not (torch.is_grad_enabled() and self.requires_grad):
            return self._share
        if self._linked is None:
            self._linked = _Unwrap.apply(self)  # type: ignore[no-untyped-call]
        return self._linked

    @property
    def share_data(self) -> Tensor:
        """This rank's share, without a graph."""
        return self._share

    @property
    def is_read(self) -> bool:
        """True if the shares have been gathered."""
        return self._whole is not None

    def read(self) -> Tensor:
        """All of it, without a graph, always the same tensor: a collective, the first time."""
        if self._whole is None:
            share: Any = self._share  # its classes may be sharded as well
            self._whole = self.sequence.gather(share.full_tensor() if hasattr(share, "full_tensor") else share)
            if self.is_gradient:
                self._whole /= self.sequence.shares.group.size
        return self._whole

    def plain(self) -> Tensor:
        """An ordinary tensor that shares its memory, in the graph."""
        if self._view is not None and self.grad_fn is self._node:
            base, view = self._view
            made = view(base.plain())
            return made if self.requires_grad else made.detach()
        with torch._C.DisableTorchFunctionSubclass():
            return self.view(self.shape)

    def share(self, dim: int, shares: Shares) -> Tensor:
        """This rank's share of the sequence, in the graph: the one that a layer made, unless something was written."""
        if self.sequence.is_same(SequenceLayout(dim, shares)) and not self.is_written():
            return self.local
        return scatter_to_cp(self.plain(), dim, shares)

    def is_written(self) -> bool:
        """Whether something was written into it; in inference mode, where torch does not know, what was read may be."""
        if self._view is not None and self._view[0].is_written():
            return True
        return self._whole is not None if self.is_inference() else self._version != self._written

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A call: of what only looks at the shape, of what works position by position, or of anything else."""
        kwargs = kwargs or {}
        if func in _WATCHES and isinstance(args[0], cls):
            args[0]._view = None  # its own place in the graph is the one that counts from here on
        if func in METADATA or func in _IN_GRAPH or func in _WATCHES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if "input" in kwargs and not args:
            args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        handler = _HANDLED.get(func)
        if handler is not None:
            result = handler(func, args, kwargs)
            if result is not NotImplemented:
                return result
        plain_args, plain_kwargs = map_leaves(plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        # What changes a tensor in place returns it.
        return args[0] if args and isinstance(args[0], cls) and result is plain_args[0] else result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """An operator reads it, or writes into it; or autograd adds up gradients, which needs no collective."""
        if func is torch.ops.aten.add.Tensor and not kwargs and any(map(_is_unread, args)):
            layout = next(each for each in args if _is_unread(each)).sequence
            one, other = (_share_of_gradient(each, layout) for each in args)
            return cls(one + other, layout, is_gradient=True)
        plain_args, plain_kwargs = map_leaves(_read, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        first = args[0] if args else None
        return first if isinstance(first, ShardedSequence) and result is first._whole else result


def implements(*functions: Callable[..., Any]) -> Callable[[Handler], Handler]:
    """Register what works on shares.

    Args:
        functions: Of torch.

    Returns:
        A decorator of ``handler(function, args, kwargs)``, which may return `NotImplemented`: then the shares are
        gathered, and the function does what it always does.
    """

    def register(handler: Handler) -> Handler:
        _HANDLED.update(dict.fromkeys(functions, handler))
        return handler

    return register


def shard(share: Tensor, dim: int, shares: Shares) -> ShardedSequence:
    """The whole sequence of which this is this rank's share."""
    return wrap(share, SequenceLayout(dim, shares))


def wrap(share: Tensor, layout: SequenceLayout, strides: Sequence[int] | None = None) -> ShardedSequence:
    """The same of any layout; `strides` are those of the whole, if it is not contiguous."""
    made: ShardedSequence = _Shard.apply(share, layout, strides)  # type: ignore[no-untyped-call]
    made._written, made._node = 0 if made.is_inference() else made._version, made.grad_fn
    return made


def on_share(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply what works position by position to a tensor, or to this rank's share of a sequence.

    Args:
        function: Makes a tensor with as many dimensions, of which it changes the last one.
        x: The tensor.
    """
    if not isinstance(x, ShardedSequence):
        return function(x)
    if x.is_written() or x.sequence.dim == x.ndim - 1:
        return function(x.plain())
    return wrap(function(x.local), x.sequence)


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
    dim, before, *_ = leaf.sequence
    shares = Shares(before.total, before.group, balanced=before.balanced)
    if not leaf.sequence.is_same(SequenceLayout(dim, shares)):  # some positions of a longer one, or sequences in a row
        return leaf.plain()
    return SequenceShare(leaf.share(dim, shares), dim, shares.total)


def plain(tensor: Any) -> Any:
    """A plain tensor in the place of a sequence that may be in shares; anything else as it is."""
    return tensor.plain() if isinstance(tensor, ShardedSequence) else tensor


def _is_unread(gradient: Any) -> bool:
    return isinstance(gradient, ShardedSequence) and gradient.is_gradient and gradient._whole is None


def _share_of_gradient(gradient: Tensor, layout: SequenceLayout) -> Tensor:
    """Of a gradient of the whole, what flows in the layers."""
    if _is_unread(gradient) and gradient.sequence.is_same(layout):  # type: ignore[attr-defined]
        return gradient._share  # type: ignore[attr-defined, no-any-return]
    return layout.own(full_tensor(_read(gradient))) * layout.shares.group.size


def _read(leaf: Any) -> Any:
    return leaf.read() if isinstance(leaf, ShardedSequence) else leaf


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, layout: SequenceLayout, strides: Sequence[int] | None) -> Tensor:
        ctx.layout = layout
        return ShardedSequence(share.detach(), layout, strides)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _share_of_gradient(gradient, ctx.layout), None, None


class _Unwrap(torch.autograd.Function):
    """From a sharded sequence to this rank's share; its gradient is a sharded sequence as well, until it is read."""

    @staticmethod
    def forward(ctx: Any, sequence: ShardedSequence) -> Tensor:
        ctx.layout = sequence.sequence
        return sequence._share.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ShardedSequence(full_tensor(gradient), ctx.layout, is_gradient=True)

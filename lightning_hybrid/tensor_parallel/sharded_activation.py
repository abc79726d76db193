"""A sharded activation: a tensor with the shape of the full activation, of which each rank holds a shard.

Layers return two subclasses of :class:`ShardedActivation` to the user's code: `VocabParallelLogits` (classes sharded
over tensor-parallel ranks) and `ShardedSequence` (positions sharded over context-parallel ranks). A tensor subclass is
needed because the user's step is unchanged: a plain shard would give wrong shapes and losses, and a gathered tensor
would cost its full memory and a message in each step. From a DTensor, torch would make DTensors of all later results,
but many operators and libraries do not support them.

Terms: *plain* means an ordinary tensor with all values. An activation *is read* once its shards have been gathered, and
*is written* if its shards are no longer valid, because code has changed the full tensor. A *handler* computes a torch
function on shards.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import Self

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.pytree import flatten, map_leaves, unflatten
from lightning_hybrid.distributed.tensor_metadata import METADATA, getters
from lightning_hybrid.tensor_parallel.sharding import Sharding
from lightning_hybrid.torch_internals import (
    DisableTorchDispatch,
    DisableTorchFunctionSubclass,
    gradient_hooks,
    make_wrapper,
    storage_identity,
    version_counter,
)

Function = Callable[..., Any]
Handler = Callable[[Function, Any, Any], Any]

#: Functions that watch a tensor's own node in the autograd graph. They end the link between a view and its base.
_WATCHES: frozenset[Any] = frozenset({Tensor.register_hook, Tensor.retain_grad})
#: Other functions about a tensor's own node. Like functions about its shape, they receive the tensor as it is.
_IN_GRAPH: frozenset[Any] = (
    getters("grad", "retains_grad", "output_nr")
    | {gradient_hooks, Tensor.requires_grad_, Tensor.backward, torch.autograd.grad, torch.autograd.backward}
    | {getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")}
)


class ShardedActivation(Tensor):
    """The sharded result of a layer, for the code around the layer. It has the shape of the full result.

    ::

        layer --> sharded activation --> layer                 takes the shard; nothing is sent
                          |------------> view, norm, loss      compute on the shard (`implements`); result sharded
                          `------------> anything else         the shards are gathered once; result an ordinary tensor

    Code that takes the shard stays in the graph of this tensor, so hooks and gradients of the tensor work as usual. All
    ranks of the group must call the same functions with the tensor, which is the case if they run the same code: the
    first function that reads values and has no handler is a collective. A subclass defines the scale of its gradients,
    and functions that compute on shards in addition to the handlers of this file.

    Args:
        local: This rank's shard, without a graph.
        sharding: The sharded dimension.
        strides: The strides of the full tensor; ``None`` if it is contiguous.
        scale: The factor between `local` and this rank's shard of the full tensor. Only gradients have a factor other
            than 1.

    Attributes:
        sharding: The sharded dimension.
        scale: The factor between `local` and this rank's shard of the full tensor.
        handlers: The functions that compute on shards, by torch function. Each subclass has its own copy.
    """

    handlers: ClassVar[dict[Function, Handler]] = {}
    #: True if a slice of the sharded dimension stays sharded. The shards of the slice can differ in length.
    can_narrow: ClassVar[bool] = True

    sharding: Sharding
    scale: int
    _local: Tensor
    _linked: Tensor | None  # the shard, in the graph of this tensor
    _written: int  # the version counter at creation
    _whole: Tensor | None  # the full tensor, once it has been read
    _view: tuple[ShardedActivation, Callable[[Tensor], Tensor]] | None  # the base of this view, and how it is made
    _node: Any  # the node at creation; later, the tensor may be the result of an autograd function of the user

    def __init_subclass__(cls) -> None:
        cls.handlers = dict(cls.handlers)

    def __new__(
        cls, local: Tensor, sharding: Sharding, strides: Sequence[int] | None = None, *, scale: int = 1
    ) -> Self:
        """Return an activation that is not connected to the graph of its shard, such as a gradient."""
        made: Self = make_wrapper(
            cls, sharding.whole_shape(local.shape), strides, dtype=local.dtype, device=local.device
        )
        made._local, made.sharding, made.scale = local, sharding, scale
        made._whole = made._linked = made._view = made._node = None
        made._written = 0
        return made

    @classmethod
    def wrap(cls, local: Tensor, sharding: Sharding, strides: Sequence[int] | None = None) -> Self:
        """Return the full tensor of which `local` is this rank's shard, in the graph of `local`.

        Args:
            local: This rank's shard.
            sharding: The sharded dimension.
            strides: The strides of the full tensor; ``None`` if it is contiguous.
        """
        made: Self = _Shard.apply(local, cls, sharding, strides)  # type: ignore[no-untyped-call]
        made._written, made._node = 0 if made.is_inference() else version_counter(made), made.grad_fn
        return made

    @classmethod
    def implements(cls, *functions: Function) -> Callable[[Handler], Handler]:
        """Register a handler for functions that compute on shards.

        Args:
            functions: Functions of torch.

        Returns:
            A decorator of ``handler(function, args, kwargs)``. If the handler returns `NotImplemented`, the shards are
            gathered and the function receives the full tensor.
        """

        def register(handler: Handler) -> Handler:
            cls.handlers.update(dict.fromkeys(functions, handler))
            return handler

        return register

    @property
    def gradient_scale(self) -> int:
        """The scale of gradients inside layers."""
        return 1

    def operand(self, tensor: Tensor, behind: int) -> Any:
        """Return the part of another operand that matches the shard elementwise, or `NotImplemented`.

        If the result is `NotImplemented`, the shards are gathered and the function receives full tensors.

        Args:
            tensor: An operand of the full tensor.
            behind: The sharded dimension, counted from the last one: -1 is the last.
        """
        return NotImplemented

    @property
    def local(self) -> Tensor:
        """This rank's shard, in the graph."""
        if not (torch.is_grad_enabled() and self.requires_grad):
            return self._local
        if self._linked is None:
            self._linked = _Unwrap.apply(self)  # type: ignore[no-untyped-call]
        return self._linked

    @property
    def local_data(self) -> Tensor:
        """This rank's shard, without a graph."""
        return self._local

    @property
    def group(self) -> Any:
        """The group of the ranks that have the shards."""
        return self.sharding.shares.group

    @property
    def is_read(self) -> bool:
        """True if the shards have been gathered."""
        return self._whole is not None

    def read(self) -> Tensor:
        """Return the full tensor, without a graph, always the same object. The first call is a collective."""
        if self._whole is None:
            share = full_tensor(plain(self._local))  # the classes of a sequence may be sharded too
            self._whole = self.sharding.gather(share)
            if self.scale != 1:
                self._whole /= self.scale
        return self._whole

    def full_tensor(self) -> Tensor:
        """Return an ordinary tensor in the graph, with the memory of :meth:`read`. The first call is a collective."""
        if self._view is not None and self.grad_fn is self._node:
            base, view = self._view
            made = view(base.full_tensor())
            return made if self.requires_grad else made.detach()
        with DisableTorchFunctionSubclass():
            return self.view(self.shape)

    def is_written(self) -> bool:
        """Return True if something was written into the full tensor.

        In inference mode, torch does not count writes, so a full tensor that was read counts as written.
        """
        if self._view is not None and self._view[0].is_written():
            return True
        return self._whole is not None if self.is_inference() else version_counter(self) != self._written

    def mark_written(self) -> None:
        """Use the full tensor from now on, because code that is not intercepted can write into it."""
        self._written = -1

    @staticmethod
    def to_plain(leaf: Any) -> Any:
        """Return the plain argument for a function that does not compute on shards."""
        return plain(leaf)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function with the tensor as it is (shape, graph), its handler, or the function with full tensors."""
        kwargs = kwargs or {}
        if func in _WATCHES and isinstance(args[0], cls):
            args[0]._view = None  # the graph node of the tensor itself counts from now on, not the node of its base
        if func in METADATA or func in _IN_GRAPH or func in _WATCHES:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if "input" in kwargs and not args:
            args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        handler = cls.handlers.get(func)
        if handler is not None:
            result = handler(func, args, kwargs)
            if result is not NotImplemented:
                return result
        plain_args, plain_kwargs = map_leaves(cls.to_plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        # A function that changes a tensor in place returns the tensor.
        return args[0] if args and isinstance(args[0], cls) and result is plain_args[0] else result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Call an operator with full tensors. The sum of two gradients is computed on shards, without a collective."""
        if func is torch.ops.aten.add.Tensor and not kwargs:
            gradient = next(filter(_is_unread_gradient, args), None)
            if gradient is not None:
                shares = [_share_of_gradient(each, gradient.sharding, gradient.scale) for each in args]
                return type(gradient)(shares[0] + shares[1], gradient.sharding, scale=gradient.scale)
        plain_args, plain_kwargs = map_leaves(_read, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        first = args[0] if args else None
        return first if isinstance(first, ShardedActivation) and result is first._whole else result


def plain(value: Any) -> Any:
    """Return the ordinary tensor of a sharded activation, which can be a collective. Return other values unchanged."""
    return value.full_tensor() if isinstance(value, ShardedActivation) else value


def in_shares(value: Any) -> bool:
    """Return True if a value is a sharded activation with valid shards of scale 1, so that handlers can use them."""
    return isinstance(value, ShardedActivation) and value.scale == 1 and not value.is_written()


def functions(*names: str) -> set[Function]:
    """Return the functions and methods of torch with these names."""
    owners = (torch, Tensor, F)
    return {each for owner in owners for name in names if callable(each := getattr(owner, name, None))}


# -- in the autograd graph ---------------------------------------------------------------------------------------------


class _Shard(torch.autograd.Function):
    """From this rank's shard to a sharded activation."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, kind: type[ShardedActivation], sharding: Sharding, strides: Sequence[int] | None
    ) -> Tensor:
        made = kind(local.detach(), sharding, strides)
        ctx.of_gradient = sharding, made.gradient_scale
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _share_of_gradient(gradient, *ctx.of_gradient), None, None, None


class _Unwrap(torch.autograd.Function):
    """From a sharded activation to this rank's shard. Its gradient is sharded too, until it is read."""

    @staticmethod
    def forward(ctx: Any, whole: ShardedActivation) -> Tensor:
        ctx.like = type(whole), whole.sharding, whole.gradient_scale
        return whole._local.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        kind, sharding, scale = ctx.like
        made: Tensor = kind(full_tensor(gradient), sharding, scale=scale)
        return made


def _is_unread_gradient(value: Any) -> bool:
    return isinstance(value, ShardedActivation) and value.scale == value.gradient_scale and value._whole is None


def _share_of_gradient(gradient: Tensor, sharding: Sharding, scale: int) -> Tensor:
    """Return the gradient of this rank's shard, with the scale of gradients inside layers."""
    if _is_unread_gradient(gradient) and gradient.sharding.is_same(sharding):  # type: ignore[attr-defined]
        return gradient._local  # type: ignore[attr-defined, no-any-return]
    own = sharding.own(full_tensor(_read(gradient)))
    return own if scale == 1 else own * scale


def _read(leaf: Any) -> Any:
    return leaf.read() if isinstance(leaf, ShardedActivation) else leaf


# -- handlers that compute on shards, for every sharded dimension ------------------------------------------------------


def elementwise(func: Function, args: Any, kwargs: Any) -> Any:
    """Handle an elementwise function of tensors and plain values. Functions that write in place are not handled."""
    leaves, spec = flatten((args, kwargs))
    first = next(leaf for leaf in leaves if isinstance(leaf, ShardedActivation))
    behind = first.sharding.dim - first.ndim  # shapes are broadcast from the last dimension on
    if "out" in kwargs or kwargs.get("inplace") or (len(args) > 1 and args[1] is True):  # in place
        return NotImplemented
    local = [_operand(leaf, first, behind) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if any(leaf is NotImplemented for leaf in local):
        return NotImplemented
    args, kwargs = unflatten(local, spec)
    result = func(*args, **kwargs)
    if result is first.local:
        return first
    return first.wrap(result, first.sharding.at(result.ndim + behind)) if isinstance(result, Tensor) else NotImplemented


def _operand(tensor: Tensor, first: ShardedActivation, behind: int) -> Any:
    if not isinstance(tensor, type(first)):
        return first.operand(tensor, behind)
    is_same = in_shares(tensor) and tensor.sharding.is_same(first.sharding.at(tensor.ndim + behind))
    return tensor.local if is_same else NotImplemented


def dim_after(func: Function, x: Any, others: Any, kwargs: Any) -> int | None:
    """Return the dimension to which a function of one tensor moves the sharded dimension.

    The function is called with a meta tensor in which only the sharded dimension has size 3.

    Args:
        func: The function.
        x: The tensor: a sharded activation, or another value.
        others: The other arguments.
        kwargs: The keyword arguments.

    Returns:
        The dimension; ``None`` if it no longer exists, if the shards of the tensor are not valid, or if another
        argument is a tensor.
    """
    given = flatten((others, kwargs))[0]
    if not in_shares(x) or any(isinstance(each, Tensor) for each in given):
        return None
    try:
        with DisableTorchDispatch():  # the estimate of a step must not count this as work
            probe = torch.empty([3 if dim == x.sharding.dim else 2 for dim in range(x.ndim)], device="meta")
            shape = list(func(probe, *others, **kwargs).shape)
    except (RuntimeError, IndexError, TypeError):  # the call with the full tensor raises the error again
        return None
    return shape.index(3) if 3 in shape else None


def view(func: Function, x: ShardedActivation, others: Any, kwargs: Any, local: Tensor, sharding: Sharding) -> Any:
    """Return a sharded activation that shares memory with another one if the function returns a view in torch.

    Args:
        func: The function.
        x: The tensor with which the function was called.
        others: The other arguments.
        kwargs: The keyword arguments.
        local: This rank's shard of the result.
        sharding: The sharding of the result.
    """
    with DisableTorchDispatch():
        before = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        after = func(before, *others, **kwargs)
    made = x.wrap(local, sharding, after.stride())
    if storage_identity(after.untyped_storage()) == storage_identity(before.untyped_storage()):
        made._view = x, lambda whole: func(whole, *others, **kwargs)
    return made


_MOVES = ("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "unsqueeze")


@ShardedActivation.implements(*functions(*_MOVES), *getters("mT"))
def _move(func: Function, args: Any, kwargs: Any) -> Any:
    x, *others = args
    dim = dim_after(func, x, others, kwargs)
    if dim is None:
        return NotImplemented
    return view(func, x, others, kwargs, func(x.local, *others, **kwargs), x.sharding.at(dim))


@ShardedActivation.implements(*functions("view", "reshape", "flatten", "unflatten"))
def _reshape(func: Function, args: Any, kwargs: Any) -> Any:
    x, *others = args
    if not in_shares(x) or any(isinstance(each, torch.dtype) for each in (*others, *kwargs.values())):
        return NotImplemented
    with DisableTorchDispatch():
        new = func(torch.empty_strided(x.shape, x.stride(), device="meta"), *others, **kwargs).shape
    sharding = x.sharding.reshaped(x.shape, new)
    if sharding is None:
        return NotImplemented
    local = [*new]
    local[sharding.dim] = sharding.outer * sharding.shares.length * sharding.inner
    return view(func, x, others, kwargs, x.local.reshape(local), sharding)


@ShardedActivation.implements(Tensor.view_as)
def _view_as(func: Function, args: Any, kwargs: Any) -> Any:
    """Handle `view_as` of a tensor with itself, by which autograd functions return an unchanged input."""
    x, other = args
    return _reshape(Tensor.view, (x, x.shape), {}) if x is other else NotImplemented


@ShardedActivation.implements(Tensor.contiguous)
def _contiguous(func: Function, args: Any, kwargs: Any) -> Any:
    x, *others = args
    if others or kwargs or not in_shares(x):
        return NotImplemented
    return x if x.is_contiguous() else x.wrap(x.local.contiguous(), x.sharding)


@ShardedActivation.implements(Tensor.__getitem__)
def _index(func: Function, args: Any, kwargs: Any) -> Any:
    """Handle slices and integers, and plain tensors of masks or indices if the last dimension is the sharded one.

    The sharded dimension can only be sliced: in full, or to more than one consecutive position if `can_narrow`.
    """
    x, index = args
    items = list(index) if isinstance(index, tuple) else [index]
    masks = [item for item in items if not (item is None or item is ... or type(item) in (slice, int))]
    are_plain = all(isinstance(mask, Tensor) and not isinstance(mask, ShardedActivation) for mask in masks)
    if not in_shares(x) or not are_plain or (masks and x.sharding.dim != x.ndim - 1):
        return NotImplemented
    sharding: Sharding = x.sharding
    at = next((place for place, item in enumerate(items) if item is ...), len(items))
    items[at : at + 1] = [slice(None)] * (x.ndim - sum(map(_num_dims, items)))
    dims = [sum(map(_num_dims, items[:place])) for place in range(len(items) + 1)]
    place = bisect(dims, sharding.dim) - 1
    if dims[-1] != x.ndim or not isinstance(wanted := items[place], slice):
        return NotImplemented
    start, stop, step = wanted.indices(sharding.size)
    if (start, stop, step) != (0, sharding.size, 1):
        if not x.can_narrow or step != 1 or stop - start < 2 or not sharding.is_simple:
            return NotImplemented
        shares, before = sharding.shares.narrowed(start, stop - start)
        sharding = sharding._replace(shares=shares)
        items[place] = slice(before, before + shares.length)
    local = func(x.local, tuple(items))
    if masks:
        return x.wrap(local, sharding.at(local.ndim - len(items) + place))
    sharding = sharding.at(sum(not isinstance(item, int) for item in items[:place]))
    return view(func, x, [index], {}, local, sharding)


def _num_dims(item: Any) -> int:
    """Return the number of dimensions that an item of an index uses."""
    if item is None or item is ...:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1

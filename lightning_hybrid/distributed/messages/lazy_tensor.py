"""A tensor whose values are fetched when they are first read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.distributed.pytree import flatten, map_leaves, unflatten
from lightning_hybrid.distributed.tensor_metadata import METADATA
from lightning_hybrid.torch_internals import DisableTorchFunctionSubclass, make_wrapper

_NAMES = (
    *("split", "chunk", "unbind", "narrow", "select", "view", "reshape", "flatten", "permute", "transpose", "movedim"),
    *("unsqueeze", "squeeze", "flip", "detach", "contiguous"),
    *("float", "double", "half", "bfloat16", "long", "int", "bool"),
)
# The result for a lazy tensor is lazy too: these functions only move or convert values.
_LAZY = {getattr(owner, name) for owner in (torch, Tensor) for name in _NAMES if callable(getattr(owner, name, None))}


class LazyTensor(Tensor):
    """A tensor that knows its shape, dtype and device, and gets its values when they are first read.

    ::

        x.shape, len(x), x.device             as for any tensor
        x.split(2), x.flatten(1), x.float()   lazy tensors
        x + 1, layer(x), x.tolist()           fetch the values; from now on `x` uses the tensor with the values

    Values written into it are seen by all tensors that share its memory, because they are written into the tensor with
    the values.

    Args:
        like: A tensor with its shape, strides and dtype, for example on the meta device.
        device: The device that it reports, on which the values will be.
        make: Returns the tensor with the values.
        note_read: Called when the values are first read by other code than :func:`peek`.
    """

    _make: Callable[[], Tensor]
    _note_read: Callable[[], object]
    _value: Tensor | None
    _is_read: bool

    def __new__(
        cls, like: Tensor, device: torch.device, make: Callable[[], Tensor], note_read: Callable[[], object]
    ) -> LazyTensor:
        """Return a new lazy tensor."""
        made: LazyTensor = make_wrapper(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
        made._make, made._note_read, made._value, made._is_read = make, note_read, None, False
        return made

    def materialize(self, *, reads: bool = True) -> Tensor:
        """Return the tensor with the values, which is always the same one.

        Args:
            reads: If True, this counts as reading the values.
        """
        if self._value is None:
            self._value = self._make()
        if reads and not self._is_read:
            self._is_read = True
            self._note_read()
        return self._value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function: on metadata, lazily if it only moves values, or else on the tensors with the values."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyTensor) and first._is_read:  # code that has read it may have changed its shape
            return func(first.materialize(), *args[1:], **kwargs)
        if func in METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(first, LazyTensor):
            others = flatten((args[1:], kwargs))[0]
            if func is Tensor.to and not kwargs.keys() - {"non_blocking"} and len(others) == 1 + len(kwargs):
                if isinstance(others[0], torch.dtype):
                    return _later(first, partial(_apply, func, args[1:], kwargs))
                if isinstance(others[0], (torch.device, str)):
                    target = torch.device(others[0])
                    return first if target == first.device else _moved(first, target, kwargs)
            if func in _LAZY and not any(isinstance(leaf, Tensor) for leaf in others):
                return _later(first, partial(_apply, func, args[1:], kwargs))
        args, kwargs = map_leaves(_materialized, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Call an operator on the tensors with the values."""
        args, kwargs = map_leaves(_materialized, (args, kwargs or {}))
        return func(*args, **kwargs)


def peek(tensor: Tensor) -> Tensor:
    """Return the tensor with the values, without counting this as reading."""
    return tensor.materialize(reads=False) if isinstance(tensor, LazyTensor) else tensor


def _materialized(leaf: Any) -> Any:
    return leaf.materialize() if isinstance(leaf, LazyTensor) else leaf


def _apply(func: Any, args: Any, kwargs: Any, tensor: Tensor) -> Any:
    return func(tensor, *args, **kwargs)


def _moved(tensor: LazyTensor, device: torch.device, kwargs: Any) -> LazyTensor:
    return LazyTensor(tensor, device, lambda: tensor.materialize(reads=False).to(device, **kwargs), tensor.materialize)


def _later(tensor: LazyTensor, call: Callable[[Tensor], Any]) -> Any:
    """Return the lazy results of a call on a lazy tensor: a lazy tensor, or a tree of lazy tensors."""
    shape, strides = tensor.shape, tensor.stride()
    shaped, spec = flatten(call(torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")))

    def make(position: int) -> Tensor:
        made: Tensor = flatten(call(tensor.materialize(reads=False)))[0][position]
        return made

    read = tensor.materialize
    lazy = [LazyTensor(each, tensor.device, partial(make, place), read) for place, each in enumerate(shaped)]
    return unflatten(lazy, spec)

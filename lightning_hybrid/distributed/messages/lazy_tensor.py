"""A tensor whose values are fetched when they are first read.

`leaf_readers` puts lazy tensors into the batches of ranks that need not receive a tensor: code of the user's step that
only passes the tensor to another stage works, and code that reads it fetches it. In the first batch of each form, lazy
tensors with values record the tensors that a rank reads. `None` in place of the tensor would not suffice, because steps
use the shapes of tensors that they do not read.
"""

from __future__ import annotations

import weakref
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

    A lazy result is computed when code first reads it, or a tensor from which it is computed, because this code may
    write the tensor::

        mask = x.bool()         lazy
        x[x == -100] = 0        fetches `x`, computes `mask`, and writes `x`

    So values written into a tensor are seen by all tensors that share its memory, and by no others, as in torch.

    Args:
        like: A tensor with its shape, strides and dtype, for example on the meta device.
        device: The device that it reports, on which the values will be.
        make: Returns the tensor with the values.
        note_read: Called once, when the values of this tensor, or of a lazy result of it, are first read by other code
            than :func:`peek`.
    """

    _make: Callable[[], Tensor]
    _note_read: Callable[[], object]
    _value: Tensor | None
    _is_read: bool
    _results: list[weakref.ref[LazyTensor]]

    def __new__(
        cls, like: Tensor, device: torch.device, make: Callable[[], Tensor], note_read: Callable[[], object]
    ) -> LazyTensor:
        """Return a new lazy tensor."""
        made: LazyTensor = make_wrapper(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
        made._make, made._note_read, made._value, made._is_read, made._results = make, note_read, None, False, []
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
            self._compute_results()
        return self._value

    def _compute_results(self) -> None:
        """Compute the lazy results of this tensor that still exist."""
        results, self._results = [result() for result in self._results], []
        for result in results:
            if result is not None:
                result.materialize(reads=False)
                result._compute_results()

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
    return _result(tensor, tensor, device, lambda: tensor.materialize(reads=False).to(device, **kwargs))


def _result(tensor: LazyTensor, like: Tensor, device: torch.device, make: Callable[[], Tensor]) -> LazyTensor:
    """Return a lazy result of a lazy tensor; see :class:`LazyTensor` for the arguments."""
    result = LazyTensor(like, device, make, tensor.materialize)
    tensor._results.append(weakref.ref(result))
    return result


def _later(tensor: LazyTensor, call: Callable[[Tensor], Any]) -> Any:
    """Return the lazy results of a call on a lazy tensor: a lazy tensor, or a tree of lazy tensors."""
    shape, strides = tensor.shape, tensor.stride()
    shaped, spec = flatten(call(torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")))

    def make(position: int) -> Tensor:
        made: Tensor = flatten(call(tensor.materialize(reads=False)))[0][position]
        return made

    lazy = [_result(tensor, each, tensor.device, partial(make, place)) for place, each in enumerate(shaped)]
    return unflatten(lazy, spec)

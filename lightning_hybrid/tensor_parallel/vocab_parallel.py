"""Logits whose classes are sharded over the tensor-parallel ranks, as a subclass of an ordinary tensor.

A user's step does with logits what it likes: slices, masks, `view(-1, vocabulary)`, cross-entropy in any of its forms.
What acts on other dimensions than the classes acts on the shards. The losses need a few numbers per sample of the other
ranks. For anything else the shards are gathered, once, and an ordinary tensor goes on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.tensor_parallel.mappings import TensorGroup, gather_from_tp

_AUTOGRAD = ("apply", "grad", "backward")
_Operation = Callable[..., Any]
_HANDLED_FUNCTIONS: dict[str, _Operation] = {}


#: The names that torch's functions take besides their own.
_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}


class VocabParallelLogits(torch.Tensor):
    """Logits, or their logarithmic softmax, of shape ``(..., classes, ...)``; this rank has a shard of the classes.

    All ranks of the group must do the same with it, as they do if they run the same code.

    Attributes:
        class_dim: The dimension of the classes.
        tensor_group: The ranks that have the others.
    """

    class_dim: int
    tensor_group: TensorGroup
    _local: Tensor  # without a graph: the graph is that of this tensor
    _shard: Tensor | None
    _full: Tensor | None
    _is_changed: bool

    @staticmethod
    def from_local(shard: Tensor, group: TensorGroup, class_dim: int = -1) -> VocabParallelLogits:
        """Wrap this rank's shard."""
        return _Wrap.apply(shard, group, class_dim % shard.ndim)  # type: ignore[no-untyped-call, no-any-return]

    @staticmethod
    def _wrap(local: Tensor, group: TensorGroup, class_dim: int) -> VocabParallelLogits:
        shape = list(local.shape)
        shape[class_dim] *= group.size
        logits = torch.Tensor._make_wrapper_subclass(VocabParallelLogits, shape, dtype=local.dtype, device=local.device)
        assert isinstance(logits, VocabParallelLogits)
        logits._local, logits.class_dim, logits.tensor_group = local, class_dim, group
        logits._shard, logits._full, logits._is_changed = None, None, False
        return logits

    @property
    def shard(self) -> Tensor:
        """This rank's shard, in the graph."""
        if self._is_changed:
            return self.tensor_group.local_chunk(self.full_tensor(), self.class_dim)
        if not (torch.is_grad_enabled() and self.requires_grad):
            return self._local
        if self._shard is None:
            self._shard = _Unwrap.apply(self)  # type: ignore[no-untyped-call]
        return self._shard

    def with_shard(self, shard: Tensor, class_dim: int | None = None) -> VocabParallelLogits:
        """Other values for the same classes."""
        return VocabParallelLogits.from_local(
            shard, self.tensor_group, self.class_dim if class_dim is None else class_dim
        )

    def full_tensor(self) -> Tensor:
        """An ordinary tensor of all classes; a collective, the first time."""
        if self._is_changed:
            assert self._full is not None
            return self._full
        shard = self.shard
        if self._full is None or shard.requires_grad > self._full.requires_grad:
            self._full = gather_from_tp(shard, self.class_dim, self.tensor_group)
        return self._full

    def _apply_in_place(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Change the values in place: from here on the full tensor is what counts."""
        if not self._is_changed:
            self._full, self._is_changed = self.full_tensor().clone(), True
        args, kwargs = to_plain_tensors((args, kwargs))
        result = func(self._full, *args, **kwargs)
        return self if result is self._full else result

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run on shards what can be run on them; gather them for the rest."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute
            name = f"get {getattr(getattr(func, '__self__', None), '__name__', '')}"
        if name in _AUTOGRAD:  # it passes on what it gets
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if "input" in kwargs and not args:
            args, kwargs = (kwargs["input"],), {key: value for key, value in kwargs.items() if key != "input"}
        first = args[0] if args and isinstance(args[0], VocabParallelLogits) else None
        if first is not None and _changes_in_place(name):
            return first._apply_in_place(func, *args[1:], **kwargs)
        handler = _HANDLED_FUNCTIONS.get(name)
        named = {_OF_NUMPY.get(key, key): value for key, value in kwargs.items()}
        if first is not None and handler is not None and (not named or _takes(handler, func, *args, **named)):
            result = handler(func, *args, **named)
            if result is not NotImplemented:
                return result
        args, kwargs = to_plain_tensors((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What autograd itself does: it passes tensors on, and adds gradients of the same classes."""
        first = next(arg for arg in args if isinstance(arg, VocabParallelLogits))
        local = [arg._local if isinstance(arg, VocabParallelLogits) else arg for arg in args]
        if func is torch.ops.aten.view.default:  # `view_as` itself
            local[1] = first._local.shape
        result = func(*local, **(kwargs or {}))
        return VocabParallelLogits._wrap(result, first.tensor_group, first.class_dim)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without the values: those of the other ranks are not at hand."""
        return f"VocabParallelLogits(shape={tuple(self.shape)}, class_dim={self.class_dim}, shard={self._local!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as an ordinary tensor."""
        return self.full_tensor().detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.full_tensor().detach().clone()


_signature = functools.lru_cache(inspect.signature)


def _takes(handler: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a handler knows these arguments; what it does not know (`out=`) is done with all classes."""
    try:
        _signature(handler).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


class _Wrap(torch.autograd.Function):
    """From a shard to logits in the graph, and, for gradients, back."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: TensorGroup, class_dim: int) -> VocabParallelLogits:
        ctx.layout = group, class_dim
        return VocabParallelLogits._wrap(shard.detach(), group, class_dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if isinstance(gradient, VocabParallelLogits):
            return gradient._local, None, None
        group, class_dim = ctx.layout  # of a sequence whose shares were gathered, with all classes
        return group.local_chunk(gradient, class_dim), None, None


class _Unwrap(torch.autograd.Function):
    """From logits to this rank's shard."""

    @staticmethod
    def forward(ctx: Any, logits: VocabParallelLogits) -> Tensor:
        ctx.layout = logits.tensor_group, logits.class_dim
        return logits._local.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> VocabParallelLogits:
        return VocabParallelLogits._wrap(gradient, *ctx.layout)


def _changes_in_place(name: str) -> bool:
    is_special = name.startswith("__")
    return name in ("__setitem__", "get data") or (
        name.startswith("__i") and name not in ("__init__", "__index__", "__int__", "__invert__")
        if is_special
        else name.endswith("_") and name not in ("requires_grad_", "retain_grad_")
    )


def implements(*names: str) -> Callable[[_Operation], _Operation]:
    """Register what replaces functions and methods of torch for logits in shards.

    Args:
        names: Theirs; ``"get shape"`` is that of an attribute.

    Returns:
        A decorator of ``operation(function, logits, *args, **kwargs)``, which may return `NotImplemented`: then the
        shards are gathered, and the function does what it always does.
    """

    def register(operation: _Operation) -> _Operation:
        _HANDLED_FUNCTIONS.update(dict.fromkeys(names, operation))
        return operation

    return register


def to_plain_tensors(value: Any) -> Any:
    """A tree of values, with ordinary tensors in the place of logits in shards and of DTensors."""
    if type(value) is Tensor:
        return value
    leaves, spec = flatten(value)
    if not any(isinstance(leaf, (VocabParallelLogits, DTensor)) for leaf in leaves):
        return value
    return unflatten(
        [leaf.full_tensor() if isinstance(leaf, VocabParallelLogits) else full_tensor(leaf) for leaf in leaves], spec
    )

"""What works on shares of a sequence, position by position: norms, heads, arithmetic, other shapes.

Every handler gives what the function would give on the whole sequence, or says `NotImplemented`. What is no sequence in
shares is taken along as :class:`Division` takes arguments of layers: what goes by positions is divided, and what every
position is computed with is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.distributed.tensor_metadata import getters
from lightning_hybrid.tensor_parallel.context_parallel.mappings import ContextGroup, copy_to_cp
from lightning_hybrid.tensor_parallel.context_parallel.sharded_sequence import (
    SequenceLayout,
    ShardedSequence,
    implements,
    wrap,
)

_Function = Callable[..., Any]

_ELEMENTWISE = (
    *("to", "float", "double", "half", "bfloat16", "type_as", "clone", "neg", "abs", "square", "sqrt", "rsqrt", "pow"),
    *("exp", "log", "tanh", "sigmoid", "gelu", "relu", "silu", "clamp", "masked_fill", "where", "maximum", "minimum"),
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "eq", "ne"),
    *("__neg__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
    *("__div__", "__rdiv__", "__pow__", "__rpow__", "__eq__", "__ne__"),
)
_REDUCTIONS = ("sum", "mean", "var", "amax", "amin", "argmax", "logsumexp")
_MOVES = ("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "unsqueeze")


def _functions(*names: str) -> set[_Function]:
    """What torch has under these names."""
    return {
        function for owner in (torch, Tensor, F) for name in names if callable(function := getattr(owner, name, None))
    }


def in_shares(value: Any) -> bool:
    """Whether this is a sequence whose shares are what counts."""
    return isinstance(value, ShardedSequence) and not value.is_gradient and not value.is_written()


def whole(value: Any, group: ContextGroup) -> Any:
    """What every rank's positions are computed with, such as a weight.

    The gradient of a parameter may be that of a share, as in layers: it is averaged over the ranks in the end.
    """
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or isinstance(value._base, nn.Parameter):
        return value
    return copy_to_cp(value, group)


# -- element by element ------------------------------------------------------------------------------------------------


@implements(*_functions(*_ELEMENTWISE))
def _elementwise(func: _Function, args: Any, kwargs: Any) -> Any:
    leaves, spec = flatten((args, kwargs))
    first = next(leaf for leaf in leaves if isinstance(leaf, ShardedSequence))
    behind = first.sequence.dim - first.ndim  # shapes are broadcast from their last dimension on
    if "out" in kwargs or kwargs.get("inplace") or (len(args) > 1 and args[1] is True):  # in place
        return NotImplemented
    local = [_operand(leaf, first, behind) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if any(leaf is NotImplemented for leaf in local):
        return NotImplemented
    args, kwargs = unflatten(local, spec)
    share = func(*args, **kwargs)
    if share is first.local:
        return first
    return wrap(share, first.sequence.at(share.ndim + behind)) if isinstance(share, Tensor) else NotImplemented


def _operand(tensor: Tensor, first: ShardedSequence, behind: int) -> Any:
    """What goes with the share of a sequence that is at a dimension from behind."""
    dim, layout = tensor.ndim + behind, first.sequence
    if isinstance(tensor, ShardedSequence):
        return tensor.local if in_shares(tensor) and tensor.sequence.is_same(layout.at(dim)) else NotImplemented
    if dim < 0 or tensor.shape[dim] == 1:
        return whole(tensor, layout.shares.group)
    return layout.at(dim).scatter(tensor) if tensor.shape[dim] == layout.size else NotImplemented


@implements(F.dropout)
def _dropout(func: _Function, args: Any, kwargs: Any) -> Any:
    """Where nothing is dropped; numbers that are drawn are those of the whole sequence."""
    given = dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
    is_off = given.get("p", 0.5) == 0 or not given.get("training", True)
    return args[0] if is_off and in_shares(args[0]) else NotImplemented


# -- along the last dimensions -----------------------------------------------------------------------------------------


@implements(*_functions("linear", "layer_norm", "rms_norm", "matmul", "__matmul__"))
def _along_features(func: _Function, args: Any, kwargs: Any) -> Any:
    """What mixes features, with weights that are the same for all positions."""
    x, *others = args
    dims = 1
    if func in _NORMS:
        shape = others[0] if others else kwargs.get("normalized_shape")
        dims = len(shape) if isinstance(shape, Sequence) else 1
    elif not others or not isinstance(others[0], Tensor) or others[0].ndim != 2:
        return NotImplemented
    leaves, spec = flatten((others, kwargs))
    if not in_shares(x) or x.sequence.dim >= x.ndim - dims or any(isinstance(leaf, ShardedSequence) for leaf in leaves):
        return NotImplemented
    others, kwargs = unflatten([whole(leaf, x.sequence.shares.group) for leaf in leaves], spec)
    return wrap(func(x.local, *others, **kwargs), x.sequence)


_NORMS = _functions("layer_norm", "rms_norm")


# -- along other dimensions --------------------------------------------------------------------------------------------


@implements(*_functions(*_REDUCTIONS))
def _reduce(func: _Function, args: Any, kwargs: Any) -> Any:
    return _probed(func, args, kwargs)


@implements(*_functions("log_softmax"))
def _log_softmax(func: _Function, args: Any, kwargs: Any) -> Any:
    x, *others = args
    dim = others[0] if others else kwargs.get("dim")
    if not isinstance(dim, int) or dim % x.ndim == x.sequence.dim:
        return NotImplemented
    return _probed(func, args, kwargs)


def _probed(func: _Function, args: Any, kwargs: Any) -> Any:
    """Another number of dimensions: an empty tensor whose sizes tell them apart says where the sequence goes."""
    x, *others = args
    dim = _target(func, x, others, kwargs)
    return NotImplemented if dim is None else wrap(func(x.local, *others, **kwargs), x.sequence.at(dim))


def _target(func: _Function, x: Any, others: Any, kwargs: Any) -> int | None:
    """Where the sequence is afterwards; ``None`` if it is gone, or is no matter of shares."""
    given = flatten((others, kwargs))[0]
    if not in_shares(x) or any(isinstance(each, Tensor) for each in given):
        return None
    probe = torch.empty([3 if dim == x.sequence.dim else 2 for dim in range(x.ndim)], device="meta")
    try:
        shape = list(func(probe, *others, **kwargs).shape)
    except (RuntimeError, IndexError, TypeError):  # which the whole sequence shall say
        return None
    return shape.index(3) if 3 in shape else None


# -- other shapes of the same numbers ----------------------------------------------------------------------------------


def _view(func: _Function, x: ShardedSequence, others: Any, kwargs: Any, share: Tensor, layout: SequenceLayout) -> Any:
    """A sharded sequence that shares memory with another one if torch lets it."""
    before = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    after = func(before, *others, **kwargs)
    made = wrap(share, layout, after.stride())
    if after.untyped_storage()._cdata == before.untyped_storage()._cdata:
        made._view = x, lambda whole: func(whole, *others, **kwargs)
    return made


@implements(*_functions(*_MOVES), *getters("mT"))
def _move(func: _Function, args: Any, kwargs: Any) -> Any:
    x, *others = args
    dim = _target(func, x, others, kwargs)
    if dim is None:
        return NotImplemented
    return _view(func, x, others, kwargs, func(x.local, *others, **kwargs), x.sequence.at(dim))


@implements(*_functions("view", "reshape", "flatten", "unflatten"))
def _reshape(func: _Function, args: Any, kwargs: Any) -> Any:
    x, *others = args
    if not in_shares(x) or any(isinstance(each, torch.dtype) for each in (*others, *kwargs.values())):
        return NotImplemented
    new = func(torch.empty_strided(x.shape, x.stride(), device="meta"), *others, **kwargs).shape
    layout = x.sequence.reshaped(x.shape, new)
    if layout is None:
        return NotImplemented
    local = [*new]
    local[layout.dim] = layout.outer * layout.shares.length * layout.inner
    return _view(func, x, others, kwargs, x.local.reshape(local), layout)


@implements(Tensor.view_as)
def _view_as(func: _Function, args: Any, kwargs: Any) -> Any:
    """Of itself: so functions of autograd pass a tensor on."""
    x, other = args
    return _reshape(Tensor.view, (x, x.shape), {}) if x is other else NotImplemented


@implements(Tensor.contiguous)
def _contiguous(func: _Function, args: Any, kwargs: Any) -> Any:
    x, *others = args
    if others or kwargs or not in_shares(x):
        return NotImplemented
    return x if x.is_contiguous() else wrap(x.local.contiguous(), x.sequence)


@implements(Tensor.__getitem__)
def _index(func: _Function, args: Any, kwargs: Any) -> Any:
    """Slices; of the sequence, consecutive positions of more than one."""
    x, index = args
    items = list(index) if isinstance(index, tuple) else [index]
    if not in_shares(x) or not all(item is None or item is ... or type(item) in (slice, int) for item in items):
        return NotImplemented
    layout: SequenceLayout = x.sequence
    num_dims = sum(item is not None and item is not ... for item in items)
    if ... not in items:
        items.append(...)
    at = items.index(...)
    items[at : at + 1] = [slice(None)] * (x.ndim - num_dims)
    places = [place for place, item in enumerate(items) if item is not None]
    if len(places) != x.ndim or not isinstance(wanted := items[places[layout.dim]], slice):
        return NotImplemented
    start, stop, step = wanted.indices(layout.size)
    if (start, stop, step) != (0, layout.size, 1):
        if step != 1 or stop - start < 2 or layout.outer > 1 or layout.inner > 1:
            return NotImplemented
        shares, before = layout.shares.narrowed(start, stop - start)
        layout = layout._replace(shares=shares)
        items[places[layout.dim]] = slice(before, before + shares.length)
    share = func(x.local, tuple(items))
    layout = layout.at(sum(not isinstance(item, int) for item in items[: places[layout.dim]]))
    return _view(func, x, [index], {}, share, layout)


@implements(torch.cat, torch.concat)
def _cat(func: _Function, args: Any, kwargs: Any) -> Any:
    """Samples of several microbatches."""
    tensors, *others = args
    dim = others[0] if others else kwargs.get("dim", 0)
    first = tensors[0]
    if not isinstance(dim, int) or kwargs.keys() - {"dim"} or not all(map(in_shares, tensors)):
        return NotImplemented
    alike = all(each.ndim == first.ndim and each.sequence.is_same(first.sequence) for each in tensors)
    if not alike or dim % first.ndim == first.sequence.dim:
        return NotImplemented
    return wrap(func([each.local for each in tensors], dim), first.sequence)

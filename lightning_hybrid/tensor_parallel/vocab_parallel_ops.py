"""What replaces torch's functions and methods for logits in shards.

Some act on other dimensions than the classes, or element by element: then they act on the shards. The losses need a few
numbers per sample of the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hybrid.tensor_parallel.cross_entropy import argmax, cross_entropy, in_loss_precision, log_sum_exp
from lightning_hybrid.tensor_parallel.mappings import copy_to_tp
from lightning_hybrid.tensor_parallel.vocab_parallel import VocabParallelLogits, implements

_METADATA = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "__len__", "get_device", "__hash__"),
    *("is_floating_point", "is_complex", "is_signed", "is_contiguous"),
    *("register_hook", "retain_grad"),
)
_ATTRIBUTES = (
    *("shape", "ndim", "dtype", "device", "layout", "names", "itemsize", "is_cuda", "is_cpu", "is_meta", "is_xpu"),
    *("is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_xla"),
    *("requires_grad", "grad_fn", "is_leaf", "grad", "retains_grad", "output_nr", "_version", "_backward_hooks"),
)
_ELEMENTWISE = (
    *("float", "double", "half", "bfloat16", "to", "contiguous", "clone", "detach", "tanh", "clamp", "clip"),
    *("neg", "add", "sub", "mul", "div", "true_divide"),
    *("__neg__", "__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__"),
)


@implements(*_METADATA, *(f"get {name}" for name in _ATTRIBUTES))
def _metadata(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@implements("view_as")
def _view_as(func: Callable[..., Any], logits: VocabParallelLogits, other: Tensor) -> Any:
    """Of itself: so autograd passes a tensor on, from a hook of a layer, say."""
    return _metadata(func, logits, other) if other is logits else NotImplemented


@implements(*_ELEMENTWISE)
def _elementwise(func: Callable[..., Any], logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    # A factor that learns, too: its gradient would be a sum over ranks.
    if any(isinstance(arg, Tensor) and (arg.ndim > 0 or arg.requires_grad) for arg in (*args, *kwargs.values())):
        return NotImplemented
    result = func(logits.shard, *args, **kwargs)
    return logits if result is logits.shard else logits.with_shard(result)


@implements("view", "reshape", "flatten", "unflatten")
def _reshape(func: Callable[..., Any], logits: VocabParallelLogits, *shape: Any, **kwargs: Any) -> Any:
    if "dtype" in kwargs or (shape and isinstance(shape[0], torch.dtype)):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        new = func(torch.empty(logits.shape, device="meta"), *shape, **kwargs).shape
    size, before = logits.shape[logits.class_dim], logits.shape[: logits.class_dim].numel()
    for dim, length in enumerate(new):
        if length == size and new[:dim].numel() == before:
            local = [*new]
            local[dim] //= logits.tensor_group.size
            return logits.with_shard(logits.shard.reshape(local), dim)
    return NotImplemented


@implements("transpose", "permute", "movedim", "moveaxis", "swapaxes", "unsqueeze", "get mT")
def _move(func: Callable[..., Any], logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    """Dimensions change places: an empty tensor whose sizes tell them apart says where the classes go."""
    probe = torch.empty([1 if dim != logits.class_dim else 2 for dim in range(logits.ndim)], device="meta")
    moved = func(probe, *args, **kwargs)
    return logits.with_shard(func(logits.shard, *args, **kwargs), list(moved.shape).index(2))


@implements("__getitem__")
def _index(func: Callable[..., Any], logits: VocabParallelLogits, index: Any) -> Any:
    """Slices and masks of the dimensions before the classes, where those are the last one."""
    if logits.class_dim != logits.ndim - 1:
        return NotImplemented
    indices = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, (list, range)) for item in indices):
        return NotImplemented
    num_dims = sum(0 if item is None or item is Ellipsis else item.ndim if _is_mask(item) else 1 for item in indices)
    if any(item is Ellipsis for item in indices):
        if indices[-1] is not Ellipsis and not _is_everything(indices[-1]):
            return NotImplemented
    elif num_dims == logits.ndim and not _is_everything(indices[-1]):
        return NotImplemented
    shard = func(logits.shard, index)
    return logits.with_shard(shard, shard.ndim - 1)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _is_everything(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


# -- operations that need something of the other ranks ------------------------------------------------------------


@implements("log_softmax")
def _log_softmax(func: Callable[..., Any], logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    names = ("dim", "_stacklevel", "dtype") if func is F.log_softmax else ("dim", "dtype")
    named = dict(zip(names, args, strict=False)) | kwargs
    dim, dtype = named.get("dim"), named.get("dtype")
    if not isinstance(dim, int) or dim % logits.ndim != logits.class_dim:
        return NotImplemented
    shard = in_loss_precision(logits.shard if dtype is None else logits.shard.to(dtype))
    # Every rank subtracts the same number from its own classes: the gradient of that number is a sum over ranks.
    normalizer = copy_to_tp(log_sum_exp(shard, logits.class_dim, logits.tensor_group), logits.tensor_group)
    return logits.with_shard(shard - normalizer)


@implements("cross_entropy", "nll_loss")
def _loss_of_classes(
    func: Callable[..., Any],
    scores: VocabParallelLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`cross_entropy` of logits, or `nll_loss` of what `log_softmax` gave."""
    is_deprecated = size_average is not None or reduce is not None
    if is_deprecated or not _is_class_dim(scores) or isinstance(target, VocabParallelLogits) or target.requires_grad:
        return NotImplemented
    shard = in_loss_precision(scores.shard) if func is F.cross_entropy else scores.shard
    return cross_entropy(
        shard,
        target,
        scores.class_dim,
        scores.tensor_group,
        are_logits=func is F.cross_entropy,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _is_class_dim(logits: VocabParallelLogits) -> bool:
    """Whether the classes are where the losses of torch look for them."""
    return logits.class_dim == (0 if logits.ndim == 1 else 1)


@implements("argmax")
def _argmax(func: Callable[..., Any], logits: VocabParallelLogits, dim: Any = None, keepdim: bool = False) -> Any:
    if not isinstance(dim, int) or dim % logits.ndim != logits.class_dim:
        return NotImplemented
    return argmax(logits.shard.detach(), logits.class_dim, keepdim, logits.tensor_group)

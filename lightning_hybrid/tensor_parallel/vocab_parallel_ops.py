"""What is done with logits in shards in the place of torch's functions and methods.

Some act on other dimensions than the classes, or element by element: then they act on the shards. The losses need a few
numbers per sample of the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hybrid.tensor_parallel import cross_entropy as losses
from lightning_hybrid.tensor_parallel.mappings import copy_to_tp
from lightning_hybrid.tensor_parallel.vocab_parallel import VocabParallelLogits, serves

__all__: list[str] = []  # imported for what it registers

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


@serves(*_METADATA, *(f"get {name}" for name in _ATTRIBUTES))
def _metadata(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@serves("view_as")
def _view_as(func: Callable[..., Any], logits: VocabParallelLogits, other: Tensor) -> Any:
    """Of itself: so autograd hands a tensor on, from a hook of a layer, say."""
    return _metadata(func, logits, other) if other is logits else NotImplemented


@serves(*_ELEMENTWISE)
def _elementwise(func: Callable[..., Any], logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    # A factor that learns, too: its gradient would be a sum over ranks.
    if any(isinstance(arg, Tensor) and (arg.ndim > 0 or arg.requires_grad) for arg in (*args, *kwargs.values())):
        return NotImplemented
    result = func(logits.shard, *args, **kwargs)
    return logits if result is logits.shard else logits.like(result)


@serves("view", "reshape", "flatten", "unflatten")
def _reshape(func: Callable[..., Any], logits: VocabParallelLogits, *shape: Any, **kwargs: Any) -> Any:
    if shape and isinstance(shape[0], torch.dtype):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        new = func(torch.empty(logits.shape, device="meta"), *shape, **kwargs).shape
    size, before = logits.shape[logits.class_dim], logits.shape[: logits.class_dim].numel()
    for dim, length in enumerate(new):
        if length == size and new[:dim].numel() == before:
            local = [*new]
            local[dim] //= logits.tensor_group.size
            return logits.like(logits.shard.reshape(local), dim)
    return NotImplemented


@serves("transpose", "permute", "movedim", "moveaxis", "swapaxes", "unsqueeze", "get mT")
def _move(func: Callable[..., Any], logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    """Dimensions change places: an empty tensor whose sizes tell them apart says where the classes go."""
    marks = torch.empty([1 if dim != logits.class_dim else 2 for dim in range(logits.ndim)], device="meta")
    moved = func(marks, *args, **kwargs)
    return logits.like(func(logits.shard, *args, **kwargs), list(moved.shape).index(2))


@serves("__getitem__")
def _index(func: Callable[..., Any], logits: VocabParallelLogits, index: Any) -> Any:
    """Slices and masks of the dimensions before the classes, where those are the last one."""
    if logits.class_dim != logits.ndim - 1:
        return NotImplemented
    indices = index if isinstance(index, tuple) else (index,)
    if any(isinstance(each, (list, range)) for each in indices):
        return NotImplemented
    taken = [
        0 if each is None or each is Ellipsis else each.ndim if _is_mask(each) else 1 for each in indices
    ]  # how many dimensions each of them uses
    if any(each is Ellipsis for each in indices):
        if indices[-1] is not Ellipsis and not _is_everything(indices[-1]):
            return NotImplemented
    elif sum(taken) == logits.ndim and not _is_everything(indices[-1]):
        return NotImplemented
    found = func(logits.shard, index)
    return logits.like(found, found.ndim - 1)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _is_everything(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


# -- operations that need something of the other ranks ------------------------------------------------------------


@serves("log_softmax")
def _log_softmax(func: Callable[..., Any], logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    names = ("dim", "_stacklevel", "dtype") if func is F.log_softmax else ("dim", "dtype")
    named = dict(zip(names, args, strict=False)) | kwargs
    dim, dtype = named.get("dim"), named.get("dtype")
    if not isinstance(dim, int) or dim % logits.ndim != logits.class_dim:
        return NotImplemented
    shard = losses.in_loss_precision(logits.shard if dtype is None else logits.shard.to(dtype))
    # Every rank subtracts the same number from its own classes: the gradient of that number is a sum over ranks.
    logarithm = copy_to_tp(losses.log_sum_exp(shard, logits.class_dim, logits.tensor_group), logits.tensor_group)
    return logits.like(shard - logarithm)


@serves("cross_entropy", "nll_loss")
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
    is_old = size_average is not None or reduce is not None
    if is_old or not _is_class_dim(scores) or isinstance(target, VocabParallelLogits) or target.requires_grad:
        return NotImplemented
    shard, logarithm = scores.shard, None
    dim, group = scores.class_dim, scores.tensor_group
    if func is F.cross_entropy:
        shard = losses.in_loss_precision(shard)
        logarithm = losses.log_sum_exp(shard, dim, group)
    return losses.cross_entropy(shard, logarithm, target, weight, ignore_index, reduction, label_smoothing, dim, group)


def _is_class_dim(logits: VocabParallelLogits) -> bool:
    """Whether the classes are where the losses of torch look for them."""
    return logits.class_dim == (0 if logits.ndim == 1 else 1)


@serves("argmax")
def _argmax(func: Callable[..., Any], logits: VocabParallelLogits, dim: Any = None, keepdim: bool = False) -> Any:
    if not isinstance(dim, int) or dim % logits.ndim != logits.class_dim:
        return NotImplemented
    return losses.argmax(logits.shard.detach(), logits.class_dim, keepdim, logits.tensor_group)

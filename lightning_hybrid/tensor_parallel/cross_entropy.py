r"""Losses over classes that are divided over the tensor-parallel ranks.

For logits z of V classes, with target class y, all of cross-entropy follows from three sums over the classes,

.. math:: \log \textstyle\sum_c e^{z_c}, \qquad \textstyle\sum_c [c = y]\, z_c, \qquad \sum_c w_c z_c,

each of which is a number per sample: a rank sums its own classes, and those sums travel, never the logits
(Shoeybi et al., "Megatron-LM", 2019, section 3).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hybrid.tensor_parallel.mappings import TensorGroup, maximum, reduce_from_tp

__all__ = ["argmax", "cross_entropy", "in_loss_precision", "log_sum_exp"]


def in_loss_precision(logits: Tensor) -> Tensor:
    """Under autocast torch takes these losses in float32."""
    if torch.is_autocast_enabled(logits.device.type) and logits.dtype in (torch.float16, torch.bfloat16):
        return logits.float()
    return logits


def log_sum_exp(shard: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """The logarithm of the sum of exponentials over all classes; ``dim`` is kept, with size 1.

    Args:
        shard: This rank's classes.
        dim: The dimension of the classes.
        group: The ranks that have the others.
    """
    result: Tensor = _LogSumExp.apply(shard, dim, group)  # type: ignore[no-untyped-call]
    return result


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, group: TensorGroup) -> Tensor:
        largest = maximum(shard.amax(dim, keepdim=True), group)
        largest = largest.masked_fill(largest.isinf(), 0.0)
        total = (shard - largest).exp_().sum(dim, keepdim=True)
        dist.all_reduce(total, group=group.group)
        result = total.log_().add_(largest)
        ctx.save_for_backward(shard, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shard, result = ctx.saved_tensors
        return (shard - result).exp_().mul_(gradient), None, None


def cross_entropy(
    shard: Tensor,
    logarithm: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    dim: int,
    group: TensorGroup,
) -> Tensor:
    """What `torch.nn.functional.cross_entropy` gives.

    Args:
        shard: This rank's classes of the logits.
        logarithm: What :func:`log_sum_exp` says of them; ``None`` if they are logarithmic probabilities already.
        target: Classes, of the shape of `shard` without `dim`; or probabilities of all classes.
        weight: Of all classes.
        ignore_index: The class that does not count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: The share of the target that is spread over all classes.
        dim: The dimension of the classes: 1, or 0 of a vector.
        group: The ranks that have the other classes.
    """
    num_classes = shard.shape[dim] * group.size
    constant = 0.0 if logarithm is None else logarithm.squeeze(dim)
    weights = torch.ones(num_classes, dtype=shard.dtype, device=shard.device) if weight is None else weight.to(shard)
    shape = [1] * shard.ndim
    shape[dim] = -1
    along = weights.view(shape)
    if target.is_floating_point() and target.ndim == shard.ndim:
        weighted = target.to(shard.dtype) * (1 - label_smoothing) + label_smoothing / num_classes
        weighted = weighted * along
        each = constant * weighted.sum(dim) - reduce_from_tp(
            (shard * _own_classes(weighted, dim, group)).sum(dim), group
        )
        total: Any = each.numel()  # of probabilities, torch takes the mean over samples, whatever the weights
    else:
        _check_classes(target, shard, ignore_index, num_classes, dim)
        ignored = target == ignore_index
        classes = target.long().masked_fill(ignored, 0)
        counts = weights[classes].masked_fill(ignored, 0.0)
        each = (constant - _pick(shard, classes, dim, group)).masked_fill(ignored, 0.0) * counts
        if label_smoothing:
            spread = constant * weights.sum() - reduce_from_tp(
                (shard * _own_classes(along, dim, group)).sum(dim), group
            )
            spread = spread.masked_fill(ignored, 0.0)
            each = each * (1 - label_smoothing) + spread * (label_smoothing / num_classes)
        total = counts.sum()
    if reduction == "none":
        return each
    if reduction == "sum":
        return each.sum()
    if not isinstance(total, Tensor):
        mean: Tensor = each.sum() / total
        return mean
    # If nothing counts, torch says NaN, and zero gradients.
    return (each.sum() / total.clamp_min(torch.finfo(total.dtype).tiny)).masked_fill(total == 0, math.nan)


def _check_classes(target: Tensor, shard: Tensor, ignore_index: int, num_classes: int, dim: int) -> None:
    """What torch checks; classes that do not exist only on the host, where it costs no waiting for a device."""
    expected = [*shard.shape[:dim], *shard.shape[dim + 1 :]]
    if list(target.shape) != expected:
        raise ValueError(f"Expected a target of shape {expected} for these logits, got {list(target.shape)}.")
    if type(target) is Tensor and target.device.type == "cpu":
        wrong = ((target < 0) | (target >= num_classes)) & (target != ignore_index)
        if wrong.any():
            raise IndexError(f"Target {int(target[wrong][0])} is out of bounds: there are {num_classes} classes.")


def argmax(shard: Tensor, dim: int, keepdim: bool, group: TensorGroup) -> Tensor:
    """The class with the largest logit, of all ranks' classes; the first one of several.

    Args:
        shard: This rank's classes.
        dim: The dimension of the classes.
        keepdim: Whether it stays, with size 1.
        group: The ranks that have the other classes.
    """
    value, index = shard.max(dim, keepdim=True)
    largest = maximum(value.clone(), group)
    size = shard.shape[dim]
    mine = torch.where((value == largest) | value.isnan(), index + group.rank * size, size * group.size)
    dist.all_reduce(mine, op=dist.ReduceOp.MIN, group=group.group)
    return mine if keepdim else mine.squeeze(dim)


def _pick(logarithms: Tensor, classes: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """The value of each sample's class, wherever it is."""
    size = logarithms.shape[dim]
    local = classes - group.rank * size
    elsewhere = (local < 0) | (local >= size)
    found = logarithms.gather(dim, local.masked_fill(elsewhere, 0).unsqueeze(dim)).squeeze(dim)
    return reduce_from_tp(found.masked_fill(elsewhere, 0.0), group)


def _own_classes(tensor: Tensor, dim: int, group: TensorGroup) -> Tensor:
    return tensor.chunk(group.size, dim)[group.rank]

r"""Losses over classes that are sharded over the tensor-parallel ranks.

For logits z of V classes, with target class y, cross-entropy needs three sums over the classes,

.. math:: \log \textstyle\sum_c e^{z_c}, \qquad \textstyle\sum_c [c = y]\, z_c, \qquad \sum_c w_c z_c,

each of which is a number per sample; the third one only with label smoothing or with class probabilities as targets.
Each rank sums its own classes, and the ranks all-reduce these sums, and a maximum for the exponentials, instead of
logits (Shoeybi et al., "Megatron-LM", 2019, section 3).

`vocab_parallel` calls the functions when the user's step calls torch's losses, `log_softmax` or `argmax` with sharded
logits. :func:`mean_of` and :func:`loss_arguments` also serve the losses of context parallelism. All ranks of the group
must call each function that has a `group`.
"""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hybrid.distributed.class_losses import reported
from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.tensor_parallel.mappings import TensorGroup, all_reduce_max, reduce_from_tp


def in_loss_precision(logits: Tensor) -> Tensor:
    """Cast half-precision logits to float32 under autocast, as torch does for these losses."""
    if torch.is_autocast_enabled(logits.device.type) and logits.dtype in (torch.float16, torch.bfloat16):
        return logits.float()
    return logits


def log_sum_exp(shard: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """Return the logarithm of the sum of exponentials over all classes. ``dim`` is kept, with size 1.

    The backward needs no collective, because the gradient of the result is equal on all ranks.

    Args:
        shard: This rank's classes.
        dim: The dimension of the classes.
        group: The ranks that have the other classes.
    """
    return _LogSumExp.apply(shard, dim, group)  # type: ignore[no-untyped-call, no-any-return]


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, group: TensorGroup) -> Tensor:
        largest = all_reduce_max(shard.amax(dim, keepdim=True), group)
        largest = largest.masked_fill(largest.isinf(), 0.0)
        total = (shard - largest).exp_().sum(dim, keepdim=True)
        dist.all_reduce(total, group=group())
        result = total.log_().add_(largest)
        ctx.save_for_backward(shard, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shard, result = ctx.saved_tensors
        return (shard - result).exp_().mul_(full_tensor(gradient)), None, None


def cross_entropy(
    shard: Tensor,
    target: Tensor,
    dim: int,
    group: TensorGroup,
    *,
    are_logits: bool,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` or `nll_loss`.

    A mean over class indices is reported to the observer of mean losses, see
    :mod:`lightning_hybrid.distributed.class_losses`.

    Args:
        shard: This rank's classes of the scores.
        target: Class indices, of the shape of `shard` without `dim`; or probabilities of all classes.
        dim: The dimension of the classes: 1, or 0 for a vector.
        group: The ranks that have the other classes.
        are_logits: True if the scores are logits. If False, they are log-probabilities.
        weight: The weights of all classes, shape ``(classes,)``; ``None`` for equal weights.
        ignore_index: The class index that is not counted.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: The part of the target that is spread over all classes, from 0 to 1.

    Returns:
        The loss, equal on all ranks: of shape ``()``, or of the shape of class indices if nothing is reduced.

    Raises:
        ValueError: If class indices have another shape.
        IndexError: If a class index is out of bounds; only for targets on the CPU.
    """
    num_classes = shard.shape[dim] * group.size
    normalizer: Any = log_sum_exp(shard, dim, group).squeeze(dim) if are_logits else 0.0
    weights = torch.ones(num_classes, dtype=shard.dtype, device=shard.device) if weight is None else weight.to(shard)
    weights_along_dim = weights.view([-1 if axis == dim else 1 for axis in range(shard.ndim)])
    losses: Tensor
    if target.is_floating_point() and target.ndim == shard.ndim:
        weighted = target.to(shard.dtype) * (1 - label_smoothing) + label_smoothing / num_classes
        weighted = weighted * weights_along_dim
        losses = normalizer * weighted.sum(dim) - _weighted_sum(shard, weighted, dim, group)
        # If targets are probabilities, torch averages over samples without weights.
        total: int | Tensor = losses.numel()
    else:
        _check_classes(target, shard, ignore_index, num_classes, dim)
        ignored = target == ignore_index
        classes = target.long().masked_fill(ignored, 0)
        sample_weights = weights[classes].masked_fill(ignored, 0.0)
        losses = (normalizer - _pick(shard, classes, dim, group)).masked_fill(ignored, 0.0) * sample_weights
        if label_smoothing:
            smooth = normalizer * weights.sum() - _weighted_sum(shard, weights_along_dim, dim, group)
            smooth = smooth.masked_fill(ignored, 0.0)
            losses = losses * (1 - label_smoothing) + smooth * (label_smoothing / num_classes)
        total = sample_weights.sum()
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if not isinstance(total, Tensor):
        return losses.sum() / total
    return reported(mean_of(losses.sum(), total), target, weight, ignore_index)


def mean_of(total: Tensor, count: Tensor) -> Tensor:
    """Return the mean of losses. If no target counts, it is NaN, and its gradients are zero, as in torch.

    Args:
        total: The sum of the losses, shape ``()``.
        count: The sum of the weights of all targets, or their number if targets are probabilities, shape ``()``.
    """
    count = count.to(total.dtype)
    return (total / count.clamp_min(torch.finfo(total.dtype).tiny)).masked_fill(count == 0, math.nan)


def loss_arguments(*args: Any, **kwargs: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the scores, the target, and the other arguments of a call of torch's `cross_entropy` or `nll_loss`.

    Other arguments are by name, without omitted arguments and without arguments that are ``None``.
    """
    given = dict(_ARGUMENTS.bind(*args, **kwargs).arguments)
    return given.pop("input"), given.pop("target"), {name: each for name, each in given.items() if each is not None}


_ARGUMENTS = signature(F.cross_entropy)  # `nll_loss` has the same arguments except the last one


def _check_classes(target: Tensor, shard: Tensor, ignore_index: int, num_classes: int, dim: int) -> None:
    """Raise an error for a wrong target, as torch does.

    Class indices are checked only on the CPU, because reading them from a device would wait for it. Subclasses of
    `Tensor`, such as fake tensors, may have no values and are not checked either.

    Raises:
        ValueError: If the target has another shape than the scores without their classes.
        IndexError: If a class index is out of bounds.
    """
    expected = [*shard.shape[:dim], *shard.shape[dim + 1 :]]
    if list(target.shape) != expected:
        raise ValueError(f"Expected a target of shape {expected} for these logits, got {list(target.shape)}. [LH532]")
    if type(target) is Tensor and target.device.type == "cpu":
        wrong = ((target < 0) | (target >= num_classes)) & (target != ignore_index)
        if wrong.any():
            raise IndexError(
                f"Target {int(target[wrong][0])} is out of bounds: there are {num_classes} classes. [LH531]"
            )


def argmax(shard: Tensor, dim: int, keepdim: bool, group: TensorGroup) -> Tensor:
    """Return the class with the largest logit. If several classes have this logit, return the first.

    A NaN counts as the largest logit, as in torch.

    Args:
        shard: This rank's classes.
        dim: The dimension of the classes.
        keepdim: If True, the dimension is kept, with size 1.
        group: The ranks that have the other classes.
    """
    value, index = shard.max(dim, keepdim=True)
    largest = all_reduce_max(value.clone(), group)
    size = shard.shape[dim]
    first = torch.where((value == largest) | value.isnan(), index + group.rank * size, size * group.size)
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group())
    return first if keepdim else first.squeeze(dim)


def _pick(shard: Tensor, classes: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """Return the score of each sample's class, from the rank that has it. This is a collective."""
    local, elsewhere = group.local_indices(classes, shard.shape[dim])
    found = shard.gather(dim, local.unsqueeze(dim)).squeeze(dim)
    return reduce_from_tp(found.masked_fill(elsewhere, 0.0), group)


def _weighted_sum(shard: Tensor, weights: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """Return the sum over all classes, weighted with weights of all classes. This is a collective."""
    return reduce_from_tp((shard * group.local_chunk(weights, dim)).sum(dim), group)

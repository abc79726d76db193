r"""Losses over classes for sequences that are sharded over ranks.

For positions s with losses l and weights w (the weight of the position's class, 0 if the position is ignored),

.. math:: L = \frac{\sum_r \sum_{s \in r} l_s}{\sum_s w_s} :

rank r sums over its own positions, and the ranks send this sum instead of logits. All ranks have the full labels, so
they all know the denominator.

The user's step calls torch's `cross_entropy` or `nll_loss` with a :class:`ShardedSequence`, which calls the handler of
this file. The package `context_parallel` imports the file, so that the handler is registered. If the classes are
sharded too (tensor parallelism), the local loss is the one of `tensor_parallel.cross_entropy`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hybrid.distributed.class_losses import normalizer_of, reported
from lightning_hybrid.tensor_parallel.context_parallel.mappings import reduce_from_cp
from lightning_hybrid.tensor_parallel.context_parallel.sharded_sequence import ShardedSequence
from lightning_hybrid.tensor_parallel.cross_entropy import loss_arguments, mean_of
from lightning_hybrid.tensor_parallel.sharded_activation import Function, in_shares


@ShardedSequence.implements(F.cross_entropy, F.nll_loss)
def _loss_of_classes(func: Function, args: Any, kwargs: Any) -> Any:
    """Handle a loss over classes. Losses that are not reduced stay a sharded sequence; others are all-reduced."""
    scores, target, options = loss_arguments(*args, **kwargs)
    reduction, weight = options.pop("reduction", "mean"), options.get("weight")
    if not _is_handled(scores, target, options) or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    sharding = scores.sharding
    # A target of classes lacks the class dimension, which is the second one.
    of_target = sharding if target.ndim == scores.ndim else sharding.at(max(sharding.dim - 1, 0))
    losses = func(scores.local, of_target.own(target), reduction="none", **options)
    of_losses = sharding.at(max(sharding.dim - 1, 0))
    if reduction == "none":
        return scores.wrap(losses, of_losses)
    # In half precision, the sum of many losses may overflow although their mean does not.
    total = reduce_from_cp(losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32)), sharding.shares.group)
    if reduction == "sum":
        return total.to(losses.dtype)
    ignore_index = options.get("ignore_index", -100)
    mean = mean_of(total, _denominator(scores, target, weight, ignore_index)).to(losses.dtype)
    return reported(mean, target, weight, ignore_index)


def _is_handled(scores: Any, target: Any, options: dict[str, Any]) -> bool:
    """Return True if each rank can compute the losses of its own positions.

    If False, torch computes the loss of the full sequence, or raises an error about it.
    """
    if not in_shares(scores) or scores.ndim < 2 or scores.sharding.dim == 1:
        return False
    is_plain = isinstance(target, Tensor) and not isinstance(target, ShardedSequence) and not target.requires_grad
    if not is_plain or options.keys() & {"size_average", "reduce"}:  # deprecated in torch
        return False
    classes = scores.shape[1]
    if target.is_floating_point():
        return bool(target.shape == scores.shape)
    if target.shape != scores.shape[:1] + scores.shape[2:]:
        return False
    if target.device.type != "cpu" or type(target) is not Tensor:  # in a step on shapes, targets have no values
        return True
    # Checked only on the CPU, because reading a device's values would wait for it. Each rank checks all targets, so all
    # ranks agree.
    wrong = ((target < 0) | (target >= classes)) & (target != options.get("ignore_index", -100))
    return not bool(wrong.any())


def _denominator(scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the denominator of a mean.

    It is the sum of the weights of all targets that count, or the number of samples if targets are probabilities.
    """
    if target.is_floating_point():
        return torch.tensor(scores.numel() // scores.shape[1], device=scores.device)
    return normalizer_of(target, weight, ignore_index)

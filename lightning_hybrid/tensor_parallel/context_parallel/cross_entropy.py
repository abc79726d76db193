r"""Losses over classes, of sequences in shares.

For positions s with losses l and weights w (that of a position's class, 0 where it is ignored),

.. math:: L = \frac{\sum_r \sum_{s \in r} l_s}{\sum_s w_s} :

rank r sums over its own positions, and that sum travels, never the logits. Labels are whole on every rank, so all of
them know the denominator.
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
    scores, target, options = loss_arguments(*args, **kwargs)
    reduction, weight = options.pop("reduction", "mean"), options.get("weight")
    if not _is_handled(scores, target, options) or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    sharding = scores.sharding
    # Of a target without the dimension of the classes, which is the second one.
    of_target = sharding if target.ndim == scores.ndim else sharding.at(max(sharding.dim - 1, 0))
    losses = func(scores.local, of_target.own(target), reduction="none", **options)
    of_losses = sharding.at(max(sharding.dim - 1, 0))
    if reduction == "none":
        return scores.wrap(losses, of_losses)
    # In half precision a sum of many may be too large where their mean is not.
    total = reduce_from_cp(losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32)), sharding.shares.group)
    if reduction == "sum":
        return total.to(losses.dtype)
    ignore_index = options.get("ignore_index", -100)
    mean = mean_of(total, _denominator(scores, target, weight, ignore_index)).to(losses.dtype)
    return reported(mean, target, weight, ignore_index)


def _is_handled(scores: Any, target: Any, options: dict[str, Any]) -> bool:
    """Whether each rank can take its own positions; where not, torch says of the whole sequence what is wrong."""
    if not in_shares(scores) or scores.ndim < 2 or scores.sharding.dim == 1:
        return False
    is_plain = isinstance(target, Tensor) and not isinstance(target, ShardedSequence) and not target.requires_grad
    if not is_plain or options.keys() & {"size_average", "reduce"}:  # which torch has given up
        return False
    classes = scores.shape[1]
    if target.is_floating_point():
        return bool(target.shape == scores.shape)
    if target.shape != scores.shape[:1] + scores.shape[2:]:
        return False
    if target.device.type != "cpu" or type(target) is not Tensor:  # in a step on shapes targets have no values
        return True
    # On the host, where it costs no waiting for a device: every rank looks at all of them, and says the same.
    wrong = ((target < 0) | (target >= classes)) & (target != options.get("ignore_index", -100))
    return not bool(wrong.any())


def _denominator(scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What a mean is divided by: the weights of all classes that count; of probabilities, the number of samples."""
    if target.is_floating_point():
        return torch.tensor(scores.numel() // scores.shape[1], device=scores.device)
    return normalizer_of(target, weight, ignore_index)

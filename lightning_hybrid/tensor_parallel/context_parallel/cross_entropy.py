r"""Losses over classes, of sequences in shares.

For positions s with losses l and weights w (that of a position's class, 0 where it is ignored),

.. math:: L = \frac{\sum_r \sum_{s \in r} l_s}{\sum_s w_s} :

rank r sums over its own positions, and that sum travels, never the logits. Labels are whole on every rank, so all of
them know the denominator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hybrid.distributed.class_losses import normalizer_of, reported
from lightning_hybrid.tensor_parallel.context_parallel.mappings import reduce_from_cp
from lightning_hybrid.tensor_parallel.context_parallel.sequence_ops import in_shares
from lightning_hybrid.tensor_parallel.context_parallel.sharded_sequence import ShardedSequence, implements, wrap

_ARGUMENTS = signature(F.cross_entropy)  # `nll_loss` has the same without the last one


@implements(F.cross_entropy, F.nll_loss)
def _loss_of_classes(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    scores, target, options = _bound(*args, **kwargs)
    reduction, weight = options.pop("reduction", "mean"), options.get("weight")
    if not _is_handled(scores, target, options) or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    layout = scores.sequence
    # Of a target without the dimension of the classes, which is the second one.
    of_target = layout if target.ndim == scores.ndim else layout.at(max(layout.dim - 1, 0))
    losses = func(scores.local, of_target.own(target), reduction="none", **options)
    of_losses = layout.at(max(layout.dim - 1, 0))
    if reduction == "none":
        return wrap(losses, of_losses)
    # In half precision a sum of many may be too large where their mean is not.
    total = reduce_from_cp(losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32)), layout.shares.group)
    if reduction == "sum":
        return total.to(losses.dtype)
    ignore_index = options.get("ignore_index", -100)
    mean = _mean(total, _denominator(scores, target, weight, ignore_index)).to(losses.dtype)
    return reported(mean, target, weight, ignore_index)


def _bound(*args: Any, **kwargs: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Scores, target, and the other arguments that were given, of either loss."""
    given = dict(_ARGUMENTS.bind(*args, **kwargs).arguments)
    return given.pop("input"), given.pop("target"), {name: each for name, each in given.items() if each is not None}


def _is_handled(scores: Any, target: Any, options: dict[str, Any]) -> bool:
    """Whether each rank can take its own positions; where not, torch says of the whole sequence what is wrong."""
    if not in_shares(scores) or scores.ndim < 2 or scores.sequence.dim == 1:
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


def _mean(total: Tensor, denominator: Tensor) -> Tensor:
    """If nothing counts, torch says NaN, and zero gradients."""
    denominator = denominator.to(total.dtype)
    tiny = torch.finfo(total.dtype).tiny
    return (total / denominator.clamp_min(tiny)).masked_fill(denominator == 0, math.nan)

"""Means of cross-entropy over targets: who wants to know of them is told, whoever computes them.

Torch's own are seen where `torch.nn.functional` calls them, so that modules, functions imported by name and libraries
such as transformers are seen alike. Cross entropies over classes or positions that ranks share report themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.distributed.replaced import replaced_attributes
from lightning_hybrid.torch_internals import loss_functions

__all__ = ["Observer", "normalizer_of", "observed", "reported"]

Observer = Callable[[Tensor, Tensor, "Tensor | None", int], Tensor]
"""A function that receives a mean loss, the target classes, the class weights and the index of the ignored class, and
returns the value to use instead of the mean loss."""

_MEAN = 1  # torch's number for reduction="mean"
_observer: Observer | None = None


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tell an observer of every mean over classes that is computed inside."""
    global _observer

    def seen(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(
            scores: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN, *others: Any
        ) -> Tensor:
            mean = function(scores, target, weight, reduction, *others)
            return reported(mean, target, weight, others[0] if others else -100) if reduction == _MEAN else mean

        return call

    # Without these functions no loss is recognized, and the comparison of microbatches judges by values alone.
    names = [name for name in ("cross_entropy_loss", "nll_loss_nd") if hasattr(loss_functions, name)]
    before, _observer = _observer, observer
    try:
        with replaced_attributes(loss_functions, **{name: seen(getattr(loss_functions, name)) for name in names}):
            yield
    finally:
        _observer = before


def reported(mean: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Tell the observer, if there is one, of a mean over classes, and return what stands for it.

    Args:
        mean: Shape ``()``.
        target: Classes, of any shape; means over probabilities are not told.
        weight: Of all classes, shape ``(classes,)``.
        ignore_index: The class that does not count.
    """
    if _observer is None or target.is_floating_point() or torch.compiler.is_compiling():  # that would stay compiled
        return mean
    return _observer(mean, target, weight, ignore_index)


def normalizer_of(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return what a mean over classes is divided by, shape ``()``: the weights of the targets that count.

    Label smoothing does not change it.

    Args:
        target: Classes, of any shape.
        weight: Of all classes, shape ``(classes,)``; ``None`` for 1 each.
        ignore_index: The class that does not count.
    """
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return weight[target.long().masked_fill(~counted, 0)].masked_fill(~counted, 0).sum()

"""Mean cross-entropy losses: while an observer is registered, it receives each mean loss that is computed.

Losses of torch are observed at the point where `torch.nn.functional` calls them. So calls of modules, of functions
imported by name, and of libraries such as transformers are all observed. The package's own cross-entropies over sharded
classes or positions call :func:`reported`.

Microbatches and replicas may have unequal numbers of targets. The mean of their losses then differs from the loss of
the whole batch. Observers find the mean losses in a step and weight them by their targets: see
:mod:`lightning_hybrid.trainer.losses.loss_terms`.

Code of a step enters :func:`observed`: the comparison of microbatches (`trainer.microbatch_comparison`), the targets of
replicas (`trainer.replica_targets`) and the weights of loss terms (`trainer.losses.term_weights`).
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
    """Call an observer with each mean loss over classes while entered, and replace the loss by the observer's result.

    Do not nest these contexts.
    """
    global _observer

    def seen(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(
            scores: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN, *others: Any
        ) -> Tensor:
            mean = function(scores, target, weight, reduction, *others)
            return reported(mean, target, weight, others[0] if others else -100) if reduction == _MEAN else mean

        return call

    # If a later torch lacks these functions, its losses are not observed. Microbatches are then compared only by the
    # values of their losses.
    names = [name for name in ("cross_entropy_loss", "nll_loss_nd") if hasattr(loss_functions, name)]
    before, _observer = _observer, observer
    try:
        with replaced_attributes(loss_functions, **{name: seen(getattr(loss_functions, name)) for name in names}):
            yield
    finally:
        _observer = before


def reported(mean: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Call the observer, if there is one, with a mean loss over classes.

    Args:
        mean: The loss, shape ``()``.
        target: The target classes, integers of any shape. For class probabilities, the observer is not called.
        weight: The weights of the classes, shape ``(classes,)``; ``None`` if there are none.
        ignore_index: The class that is ignored.

    Returns:
        The value to use instead of the mean, shape ``()``: the observer's result, or `mean` itself without an observer,
        for class probabilities, and while torch compiles code.
    """
    # Operations of the observer would become part of compiled code, and stay in it after the context ends.
    if _observer is None or target.is_floating_point() or torch.compiler.is_compiling():
        return mean
    return _observer(mean, target, weight, ignore_index)


def normalizer_of(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the number by which a mean loss over classes is divided.

    It is the sum of the weights of all targets that are not ignored. Label smoothing does not change this number.

    Args:
        target: The target classes, integers of any shape.
        weight: The weights of the classes, shape ``(classes,)``; ``None`` if every weight is 1.
        ignore_index: The class that is ignored.

    Returns:
        The number, shape ``()``.
    """
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return weight[target.long().masked_fill(~counted, 0)].masked_fill(~counted, 0).sum()

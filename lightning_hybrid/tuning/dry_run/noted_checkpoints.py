"""The tensors that layers save with each kind of recomputation, found in one forward without recomputation.

`DryRunStrategy` enters :class:`NotedCheckpoints` around the step instead of activation checkpointing. With activation
checkpointing, a dry run would need one forward for each kind of recomputation. Here, all tensors get a *kind* (saved
inside a layer, input of a layer, or result that selective recomputation keeps), and :func:`kinds_without` selects the
kinds that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.distributed.replaced import replaced_forwards
from lightning_hybrid.memory.account import SavedTensorMeter
from lightning_hybrid.memory.activation_checkpoint.checkpoint import tensors_to_save
from lightning_hybrid.memory.activation_checkpoint.selective import SavedResults, save_tensors
from lightning_hybrid.torch_internals import version_counter

_INSIDE, _INPUTS, _RESULTS = "saved inside a layer", "inputs of a layer", "results kept by 'selective'"
_CPU = torch.device("cpu")


def kinds_without(recompute: bool | str) -> frozenset[str]:
    """Return the kinds of tensors that layers do not save with a kind of recomputation.

    Args:
        recompute: The kind: False, True, or `"selective"`, as of `HybridStrategy`.
    """
    if recompute is False:
        return frozenset({_INPUTS, _RESULTS})
    return frozenset({_INSIDE} if recompute == "selective" else {_INSIDE, _RESULTS})


class NotedCheckpoints:
    """A recorder of the tensors that layers save, and of the inputs and kept results of each call, by kind.

    The kinds count as follows::

        recompute    False              True     "selective"
        counts       saved inside       inputs   inputs, kept results

    Inputs and results live as long as a tensor that was saved inside, as with
    :class:`~lightning_hybrid.memory.activation_checkpoint.checkpoint.ActivationCheckpointing`. Also as there, the first
    call of a layer saves copies of its inputs, and all calls do if the layer changes its inputs.

    Args:
        layers: The layers that a layout can recompute.
        meter: Counts the saved tensors.
        uncounted: Makes a context for operations that are not part of the step, such as these copies.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        meter: SavedTensorMeter,
        uncounted: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._layers = list({id(layer): layer for layer in layers}.values())
        self._meter, self._uncounted = meter, uncounted
        self._changes_input: dict[nn.Module, bool] = {}

    def __call__(self) -> AbstractContextManager[None]:
        """Record while entered. Enter it around forwards."""
        return replaced_forwards(self._layers, self._noted)

    def _noted(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            tensors = tensors_to_save(flatten((args, kwargs))[0]) if torch.is_grad_enabled() else None
            return forward(*args, **kwargs) if tensors is None else self._run(layer, forward, args, kwargs, tensors)

        return noted

    def _run(self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        kept: list[Any] = []
        with self._uncounted():
            copies = self._changes_input.get(layer, True)
            inputs = [tensor.detach().clone() if copies else tensor.detach() for tensor in tensors]
        versions = [version_counter(tensor) for tensor in tensors]
        results = SavedResults(_CPU, enabled=True)
        with self._meter.noting(_INSIDE, keeps=kept), results.record():
            outputs = forward(*args, **kwargs)
        self._changes_input.setdefault(layer, versions != [version_counter(tensor) for tensor in tensors])
        with self._meter.noting(_INPUTS):
            kept.append(save_tensors(inputs))
        with self._meter.noting(_RESULTS):
            results.save()
            kept.append(results)
        return outputs

"""The generators that a loader draws from: everybody's, and some that it has of its own and may share with others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_hybrid.distributed.random import generator_marks, generator_states, set_generator_states

__all__ = ["Generators", "own_states", "set_own_states"]


class Generators:
    """Those that an iterator may draw from: everybody's, and those of its loader.

    Args:
        loader: The loader.
        device: The device of the model.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        self._device = device
        self._own = _own_generators(loader)

    def marks(self) -> tuple[Any, ...]:
        """What differs after something has been drawn."""
        return *generator_marks(self._device), *(each.get_state().numpy().tobytes() for each in self._own)

    def states(self) -> dict[str, Any]:
        """The states, of tensors and plain values."""
        return {**generator_states(self._device), "own": [each.get_state() for each in self._own]}

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Put the generators into these states."""
        set_generator_states(states, self._device)
        for generator, state in zip(self._own, states["own"], strict=False):
            generator.set_state(state)


def _own_generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers have of their own, whatever is wrapped around them."""
    found: dict[int, torch.Generator] = {}
    seen: dict[int, Any] = {}
    waiting = [loader]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen[id(each)] = each
        generator = getattr(each, "generator", None)
        if isinstance(generator, torch.Generator):
            found.setdefault(id(generator), generator)
        waiting += [getattr(each, name, None) for name in ("_loader", "sampler", "batch_sampler", *_WRAPPED)]
    return list(found.values())


_WRAPPED = ("_sampler", "_batch_sampler")  # in samplers of ours and of Lightning


def own_states(loader: Any) -> list[torch.Tensor]:
    """The states of the generators that a loader and its samplers have of their own."""
    return [generator.get_state() for generator in _own_generators(loader)]


def set_own_states(loader: Any, states: list[torch.Tensor]) -> None:
    """Put the generators that a loader and its samplers have of their own into these states."""
    for generator, state in zip(_own_generators(loader), states, strict=False):
        generator.set_state(state)

"""Layers that run again in backward, with the inputs, random numbers and buffers of the first time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.distributed.random import set_torch_states, torch_states
from lightning_hybrid.memory.activation_checkpoint.selective import Kept

__all__ = ["ActivationCheckpointing"]


class ActivationCheckpointing:
    """While this is entered, layers keep what they are called with and nothing else, and run again in backward.

    ::

        layer(x)      hooks before --> forward --> hooks after
                                          :
        backward                       forward, again, until all that autograd needs is there

    Hooks on the layer do not run again; what is inside of it does. Layers look as always as soon as it is left: names,
    copies and pickles know nothing of it.

    Args:
        layers: The layers.
        device: Where they draw random numbers.
        selective: Whether the results of matrix products and of attention are kept as well.
    """

    def __init__(self, layers: Iterable[nn.Module], device: torch.device, *, selective: bool = False) -> None:
        self._layers = [_Layer(layer, device, selective) for layer in {id(layer): layer for layer in layers}.values()]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter it around forwards; backwards may follow later."""
        before: list[tuple[dict[str, Any], Any]] = []
        try:
            for layer in self._layers:
                attributes = vars(layer.module)
                before.append((attributes, attributes.get("forward")))
                attributes["forward"] = layer.recomputed(layer.module.forward)
            yield
        finally:
            for attributes, forward in before:
                if forward is None:
                    del attributes["forward"]
                else:  # somebody else's
                    attributes["forward"] = forward


class _Habits(NamedTuple):
    """What a layer was seen to do when it was first called.

    Attributes:
        changes_input: Whether it changes what it is called with.
        changes_buffers: The buffers that it changes: their owners and names.
    """

    changes_input: bool
    changes_buffers: list[tuple[nn.Module, str]]


class _Layer:
    """A layer, and what has been learnt about it."""

    def __init__(self, module: nn.Module, device: torch.device, selective: bool) -> None:
        self.module = module
        self.device = device
        self.selective = selective
        self._parts = list(module.modules())
        self._habits: dict[tuple[bool, ...], _Habits] = {}

    def recomputed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in the place of the layer's `forward`."""

        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            leaves, spec = flatten((args, kwargs))
            places: dict[int, int] = {}  # a tensor that comes twice is one tensor again, which layers look at
            tensors: list[Tensor] = []
            for leaf in leaves:
                if isinstance(leaf, Tensor) and id(leaf) not in places:
                    places[id(leaf)] = len(tensors)
                    tensors.append(leaf)
            # Logits in shards are no tensors that autograd could keep.
            if not tensors or not all(type(each) in _PLAIN or isinstance(each, DTensor) for each in tensors):
                return forward(*args, **kwargs)
            order = [places.get(id(leaf)) if isinstance(leaf, Tensor) else None for leaf in leaves]
            others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

            def run(*given: Tensor) -> Any:
                mixed = [other if i is None else given[i] for i, other in zip(order, others, strict=True)]
                args, kwargs = unflatten(mixed, spec)
                return forward(*args, **kwargs)

            del args, kwargs, leaves
            call = _Call(self, run)
            outputs = checkpoint(call, *tensors, use_reentrant=False, preserve_rng_state=False)
            call.kept.save()
            return outputs

        return recomputed

    def mode(self) -> tuple[bool, ...]:
        """What habits depend on: which parts are in training."""
        return tuple([part.training for part in self._parts])

    def habits(self) -> _Habits | None:
        """What it does in its present mode; ``None`` before it was called in it."""
        return self._habits.get(self.mode())

    def learn(self, habits: _Habits) -> None:
        """Remember what it does in its present mode."""
        self._habits[self.mode()] = habits

    def buffers(self) -> list[tuple[nn.Module, str]]:
        """Where its buffers are."""
        return [(part, name) for part in self._parts for name, buffer in part._buffers.items() if buffer is not None]


class _Call:
    """One call of a layer: runs it, and however often backward asks, runs it again.

    Args:
        layer: The layer.
        run: Runs it on the tensors among its arguments.
    """

    def __init__(self, layer: _Layer, run: Callable[..., Any]) -> None:
        self._layer = layer
        self._run = run
        self._was_run = False
        self._draws = _Draws(layer.device)
        self.kept = Kept(layer.device) if layer.selective else _KEEPS_NOTHING

    def __call__(self, *tensors: Tensor) -> Any:
        if not self._was_run:
            self._was_run = True
            return self._first(tensors)
        with self._draws.again(), self._buffers_of_then(), self.kept.again():
            return self._run(*self._own(tensors))

    def _first(self, tensors: tuple[Tensor, ...]) -> Any:
        habits = self._layer.habits()
        watched = self._layer.buffers() if habits is None else habits.changes_buffers
        self._buffers = [(part, name, part._buffers[name].detach().clone()) for part, name in watched]  # type: ignore[union-attr]
        self._copies = habits is None or habits.changes_input
        own = self._own(tensors)
        versions = [each._version for each in own] if habits is None else []
        with self._draws.first(), self.kept.first():
            outputs = self._run(*own)
        if habits is None:
            self._buffers = [each for each in self._buffers if not _is_same(each[0]._buffers[each[1]], each[2])]
            changes_input = versions != [each._version for each in own]
            self._layer.learn(_Habits(changes_input, [(part, name) for part, name, _ in self._buffers]))
        return outputs

    def _own(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """What the layer may change: autograd keeps the inputs as they are."""
        return [each.clone() for each in tensors] if self._copies else list(tensors)

    @contextmanager
    def _buffers_of_then(self) -> Iterator[None]:
        """Buffers that the layer changes are as they were before it, and afterwards as they are now."""
        now = [part._buffers[name] for part, name, _ in self._buffers]
        try:
            for part, name, value in self._buffers:
                part._buffers[name] = value.clone()
            yield
        finally:
            for (part, name, _), value in zip(self._buffers, now, strict=True):
                part._buffers[name] = value


class _Draws:
    """Random numbers that are drawn once, and then the same ones again, unnoticed by others.

    The streams of numpy and `random` take long to copy back; that is done only if something was drawn from them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def first(self) -> Iterator[None]:
        self._torch = torch_states(self._device)
        self._numpy: Any = np.random.get_state()
        self._python: Any = random.getstate()
        yield
        if _is_equal(self._numpy, np.random.get_state()):
            self._numpy = None
        if self._python == random.getstate():
            self._python = None

    @contextmanager
    def again(self) -> Iterator[None]:
        outside = torch_states(self._device)
        numpy = None if self._numpy is None else np.random.get_state()
        python = None if self._python is None else random.getstate()
        try:
            set_torch_states(self._torch, self._device)
            _set_others(self._numpy, self._python)
            yield
        finally:
            set_torch_states(outside, self._device)
            _set_others(numpy, python)


def _set_others(numpy: Any, python: Any) -> None:
    if numpy is not None:
        np.random.set_state(numpy)
    if python is not None:
        random.setstate(python)


def _is_equal(first: Any, second: Any) -> bool:
    """Of two states of numpy."""
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def _is_same(now: Tensor | None, before: Tensor) -> bool:
    """Whether a buffer was certainly left alone; shapes without values do not tell."""
    if now is None or now.shape != before.shape or type(now) not in _WITH_VALUES:
        return False
    return torch.equal(now, before)


class _KeepsNothing:
    """What is kept where all is recomputed."""

    first = again = staticmethod(nullcontext)

    def save(self) -> None:
        """There is nothing."""


_KEEPS_NOTHING = _KeepsNothing()
_WITH_VALUES: tuple[type, ...] = (Tensor, nn.Parameter)
_PLAIN = _WITH_VALUES
try:
    from torch._subclasses.fake_tensor import FakeTensor

    _PLAIN = (*_PLAIN, FakeTensor)  # shapes alone, of which memory is foretold
except ImportError:
    pass

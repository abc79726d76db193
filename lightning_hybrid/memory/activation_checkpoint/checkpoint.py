"""Recomputation of layers in backward, with the inputs, random numbers and buffers of their forward.

`ModuleParallelizer.around_forwards` makes one :class:`ActivationCheckpointing` for each run, and the step programs
enter its context around forwards. torch's `checkpoint` does the recomputation, but alone it is not enough. It draws the
random numbers of torch's generators again, but not of Python and NumPy. If a layer updates a buffer or changes its
input in place, torch would do so twice, or recompute from the changed values. A cache object among the arguments would
also be filled twice. So :class:`_Call` restores all of this before it runs a layer again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.distributed.pytree import copy_object, flatten, unflatten
from lightning_hybrid.distributed.random import RandomReplay
from lightning_hybrid.distributed.replaced import replaced_entries, replaced_forwards
from lightning_hybrid.memory.activation_checkpoint.selective import SavedResults
from lightning_hybrid.torch_internals import FakeTensor, current_dispatch_mode, version_counter


class ActivationCheckpointing:
    """Context in which layers save only their inputs, and run again in backward.

    ::

        layer(x)      hooks before --> forward --> hooks after
                                          :
        backward                       forward again, until autograd has all tensors that it needs

    Hooks of the layer do not run again, but hooks of its submodules do. A layer runs as usual if gradients are
    disabled, if no argument contains a tensor, or if an argument is a tensor that autograd cannot save, such as
    vocabulary-parallel logits. Outside the context, layers are unchanged, including names, copies and pickles.

    Args:
        layers: The layers.
        device: The device on which the layers draw random numbers.
        selective: If True, also save results that are expensive to compute; see :class:`~.selective.SavedResults`.
    """

    def __init__(self, layers: Iterable[nn.Module], device: torch.device, *, selective: bool = False) -> None:
        self._layers = {layer: _Layer(layer, device, selective) for layer in layers}

    def __call__(self) -> AbstractContextManager[None]:
        """Return a context for forwards. Their backwards may run after the context."""
        return replaced_forwards(self._layers, lambda module, forward: self._layers[module].checkpointed(forward))


class _SideEffects(NamedTuple):
    """The side effects of a layer, found in its first call in a mode, see :meth:`_Layer._mode`.

    Attributes:
        changes_input: True if the call changed its inputs in place.
        buffers: The buffers that the call changed: their modules and names.
    """

    changes_input: bool
    buffers: list[tuple[nn.Module, str]]


class _Layer:
    """A layer, with its known side effects.

    Args:
        module: The layer.
        device: The device on which the layer draws random numbers.
        selective: The argument of :class:`ActivationCheckpointing`.
    """

    def __init__(self, module: nn.Module, device: torch.device, selective: bool) -> None:
        self.module = module
        self.device = device
        self.selective = selective
        self._submodules = list(module.modules())
        self._side_effects: dict[tuple[Hashable, ...], _SideEffects] = {}

    def checkpointed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that replaces the layer's `forward`."""

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            leaves, spec = flatten((args, kwargs))
            tensors = tensors_to_save(leaves)
            if tensors is None:
                return forward(*args, **kwargs)
            positions = {id(tensor): position for position, tensor in enumerate(tensors)}
            order = [positions.get(id(leaf)) if isinstance(leaf, Tensor) else None for leaf in leaves]
            # The first run gets the caller's objects. Later runs get copies from before it, such as a cache without its
            # keys.
            given = [[None if isinstance(leaf, Tensor) else leaf for leaf in leaves]]
            others = [copy_object(other) for other in given[0]]

            def run(*inputs: Tensor) -> Any:
                objects = given.pop() if given else [copy_object(other) for other in others]
                mixed = [other if i is None else inputs[i] for i, other in zip(order, objects, strict=True)]
                args, kwargs = unflatten(mixed, spec)
                return forward(*args, **kwargs)

            del args, kwargs, leaves
            known = self.side_effects
            changes_input = known is None or known.changes_input
            # The first run gets the caller's tensors and may change them. Later runs use the copies.
            kept = [_copy(tensor) for tensor in tensors] if changes_input else tensors
            call = _Call(self, run, tuple(tensors))
            del tensors
            outputs = checkpoint(call, *kept, use_reentrant=False, preserve_rng_state=False)
            call.results.save()
            return outputs

        return checkpointed

    @property
    def side_effects(self) -> _SideEffects | None:
        """The side effects in the current mode; ``None`` before the first call in it."""
        return self._side_effects.get(self._mode())

    @side_effects.setter
    def side_effects(self, side_effects: _SideEffects) -> None:
        self._side_effects[self._mode()] = side_effects

    def _mode(self) -> tuple[Hashable, ...]:
        # A mode consists of `training` of all submodules, and of torch's dispatch mode: under a dispatch mode, such as
        # a mode that compares results, a layer may have fewer side effects.
        return type(current_dispatch_mode()), *[submodule.training for submodule in self._submodules]

    def buffers(self) -> list[tuple[nn.Module, str]]:
        """Return the modules and names of the layer's buffers."""
        named = ((owner, name, buffer) for owner in self._submodules for name, buffer in owner._buffers.items())
        return [(owner, name) for owner, name, buffer in named if buffer is not None]


class _Call:
    """One call of a layer. torch's `checkpoint` calls this object in forward, and again at each recomputation.

    Args:
        layer: The layer.
        run: Runs the layer with the tensors among its arguments.
        given: These tensors. If the layer changes them, recomputation gets other tensors with the same values.
    """

    def __init__(self, layer: _Layer, run: Callable[..., Any], given: tuple[Tensor, ...]) -> None:
        self._layer = layer
        self._run = run
        self._given: tuple[Tensor, ...] | None = given
        self._random = RandomReplay(layer.device)
        self.results = SavedResults(layer.device, enabled=layer.selective)

    def __call__(self, *tensors: Tensor) -> Any:
        if self._given is not None:
            given, self._given = self._given, None
            return self._forward(given)
        # Autograd needs the saved inputs unchanged.
        inputs = [tensor.clone() for tensor in tensors] if self._changes_input else tensors
        with self._random.replay(), self._former_buffers(), self.results.replay():
            return self._run(*inputs)

    def _forward(self, inputs: tuple[Tensor, ...]) -> Any:
        known = self._layer.side_effects
        buffers = self._layer.buffers() if known is None else known.buffers
        self._buffers = [(owner, name, owner._buffers[name].detach().clone()) for owner, name in buffers]  # type: ignore[union-attr]
        self._changes_input = known is not None and known.changes_input
        versions = [version_counter(tensor) for tensor in inputs] if known is None else []
        with self._random.record(), self.results.record():
            outputs = self._run(*inputs)
        if known is None:
            self._buffers = [each for each in self._buffers if not _is_same(each[0]._buffers[each[1]], each[2])]
            self._changes_input = versions != [version_counter(tensor) for tensor in inputs]
            owners = [(owner, name) for owner, name, _ in self._buffers]
            self._layer.side_effects = _SideEffects(self._changes_input, owners)
        return outputs

    def _former_buffers(self) -> AbstractContextManager[None]:
        """Restore, inside the context, the values that changed buffers had before forward."""
        return replaced_entries((owner._buffers, {name: value.clone()}) for owner, name, value in self._buffers)


def tensors_to_save(leaves: Iterable[Any]) -> list[Tensor] | None:
    """Return the tensors among a layer's arguments that are saved for recomputation; ``None`` if it is not recomputed.

    A tensor that occurs twice is in the list once, because layers may compare identities.

    Args:
        leaves: The leaves of the arguments.
    """
    tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
    # Autograd cannot save vocabulary-parallel logits.
    can_be_saved = all(type(tensor) in _PLAIN or isinstance(tensor, DTensor) for tensor in tensors)
    return tensors if tensors and can_be_saved else None


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _is_same(current: Tensor | None, former: Tensor) -> bool:
    """Return True if a buffer has certainly not changed. Fake tensors are never certain."""
    if current is None or current.shape != former.shape or type(current) not in _WITH_VALUES:
        return False
    return torch.equal(current, former)


_WITH_VALUES: tuple[type, ...] = (Tensor, nn.Parameter)
_PLAIN = _WITH_VALUES if FakeTensor is None else (*_WITH_VALUES, FakeTensor)  # dry runs use fake tensors

"""The user's module with fake parameters, for a run that leaves no trace."""

from __future__ import annotations

import copy
import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.pipeline_parallel.frame.discovery import Discovery

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_CONTAINERS = frozenset({list, dict, set, deque, Counter, OrderedDict, defaultdict})


@contextmanager
def fake_module(module: nn.Module, units: Iterable[nn.Module], discovery: Discovery) -> Iterator[Callable[[], bool]]:
    """Inside, parameters are fake tensors; whatever the step changes in the module is as before afterwards.

    Args:
        module: The user's module.
        units: The units, whose buffers are fake too.
        discovery: Makes the fake tensors.

    Yields:
        To be called once the step has run: tells the discovery which attributes are others, and says whether tensors
            that the step makes once, for itself and all later ones, have been made. These stay.
    """
    of_units = {id(part) for unit in units for part in unit.modules()}  # a metric's hash depends on its state
    stand_ins = _StandIns(discovery)
    saved = [(part, dict(vars(part))) for part in _all_parts(module)]
    # What the module's own code uses comes first: what is tied to it is no part of a unit.
    for part, attributes in sorted(saved, key=lambda entry: id(entry[0]) in of_units):
        in_unit = id(part) in of_units
        for name, value in attributes.items():
            vars(part)[name] = stand_ins(value, in_unit=in_unit)
    swapped = [(part, vars(part) | part._buffers) for part, _ in saved]
    generators = [
        (f"{name!r} of {type(part).__name__}", value, _state_of(value))
        for part, attributes in saved
        for name, value in attributes.items()
        if isinstance(value, _GENERATORS)
    ]
    lazy: dict[int, dict[str, Tensor]] = {}

    def finish() -> bool:
        for name, generator, state in generators:
            if _state_of(generator) != state:
                raise WrongUseError(
                    f"The step draws random numbers from a generator of its own, {name}. Stages make different parts of"
                    " the step, so they would draw different numbers from it. Draw without `generator=`: each call has"
                    " a seed of its own then, which is the same on every stage."
                )
        for part, attributes in swapped:
            for name, value in (vars(part) | part._buffers).items():
                before = attributes.get(name)
                if isinstance(before, Tensor) and value is not before:
                    discovery.replaced(before, value)
                if before is None and isinstance(value, Tensor) and discovery.has_values(value):
                    lazy.setdefault(id(part), {})[name] = value
        return bool(lazy)

    for part, _ in saved:
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in hooks.items() if _is_own(hook)]:
                del hooks[key]
    try:
        yield finish
    finally:
        for part, attributes in saved:
            vars(part).clear()
            vars(part).update(attributes)
            for name, value in lazy.get(id(part), {}).items():
                setattr(part, name, value)  # a buffer stays one
        for _, generator, state in generators:
            _restore(generator, state)


class _StandIns:
    """What stands for the attributes of modules: fake tensors, copies of tensors, containers of these."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery
        self._known: dict[int, Tensor] = {}  # what is tied stays tied
        self._containers: dict[int, Any] = {}

    def __call__(self, value: Any, *, in_unit: bool) -> Any:
        """What stands for an attribute; itself, if the step cannot change it."""
        if isinstance(value, Tensor):
            if id(value) not in self._known:
                self._known[id(value)] = self._of_tensor(value, in_unit=in_unit)
            return self._known[id(value)]
        if type(value) not in _CONTAINERS:
            return value
        if id(value) in self._containers:
            return self._containers[id(value)]
        other = self._containers[id(value)] = copy.copy(value)
        if not isinstance(other, (set, deque)):
            for key, entry in other.items() if isinstance(other, dict) else enumerate(other):
                other[key] = self(entry, in_unit=in_unit)
        return other

    def _of_tensor(self, tensor: Tensor, *, in_unit: bool) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return self._discovery.parameter(tensor, in_unit=in_unit)
        return self._discovery.fake(tensor) if in_unit else self._discovery.copy(tensor)


def _state_of(generator: Any) -> bytes:
    """The state of a generator, as bytes that can be compared."""
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy().tobytes())
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())


def _restore(generator: Any, state: bytes) -> None:
    """Put a generator into a state that :func:`_state_of` gave."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = pickle.loads(state)
    elif isinstance(generator, random.Random):
        generator.setstate(pickle.loads(state))
    else:
        generator.set_state(pickle.loads(state))


def _is_own(hook: Callable[..., Any]) -> bool:
    """Whether a hook is one of this package, and no part of the user's step."""
    return (getattr(hook, "__module__", None) or type(hook).__module__).startswith("lightning_hybrid.")


def _all_parts(module: nn.Module) -> list[nn.Module]:
    """The parts of a module, and those that they have in plain lists and dictionaries."""
    parts: dict[nn.Module, None] = dict.fromkeys(module.modules())
    for part in list(parts):
        for value in vars(part).values():
            if type(value) in (list, tuple, dict):
                entries = value.values() if isinstance(value, dict) else value
                for entry in entries:
                    if isinstance(entry, nn.Module):
                        parts |= dict.fromkeys(entry.modules())
    return list(parts)

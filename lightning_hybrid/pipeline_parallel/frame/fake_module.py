"""The user's module with fake parameters, for a run that leaves no trace."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Generator, Tensor, nn

from lightning_hybrid.pipeline_parallel.frame.discovery import Discovery

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
    stand_ins: dict[int, Tensor] = {}

    def stand_in(tensor: Tensor, *, in_unit: bool) -> Tensor:
        if id(tensor) not in stand_ins:
            if isinstance(tensor, nn.Parameter):
                stand_ins[id(tensor)] = discovery.parameter(tensor, in_unit=in_unit)
            else:
                stand_ins[id(tensor)] = discovery.fake(tensor) if in_unit else discovery.copy(tensor)
        return stand_ins[id(tensor)]

    def copied(value: Any, *, in_unit: bool) -> Any:
        if isinstance(value, Tensor):
            return stand_in(value, in_unit=in_unit)
        if type(value) not in _CONTAINERS:
            return value
        other = copy.copy(value)
        if not isinstance(other, (set, deque)):
            for key, entry in other.items() if isinstance(other, dict) else enumerate(other):
                other[key] = copied(entry, in_unit=in_unit)
        return other

    saved = [(part, dict(vars(part))) for part in _all_parts(module)]
    # What the module's own code uses comes first: what is tied to it is no part of a unit.
    for part, attributes in sorted(saved, key=lambda entry: id(entry[0]) in of_units):
        in_unit = id(part) in of_units
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                vars(part)[name] = stand_in(value, in_unit=in_unit)
            elif type(value) in _CONTAINERS:
                vars(part)[name] = copied(value, in_unit=in_unit)
    swapped = [(part, vars(part) | part._buffers) for part, _ in saved]
    values = [value for _, attributes in saved for value in attributes.values()]
    generators = [(value, value.get_state()) for value in values if isinstance(value, Generator)]
    lazy: dict[int, dict[str, Tensor]] = {}

    def finish() -> bool:
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
            vars(part).update(attributes | lazy.get(id(part), {}))
        for generator, state in generators:
            generator.set_state(state)


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

"""The user's module with fake parameters, for a trace that leaves no changes behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.distributed.random import GENERATORS, equal_states, generator_state
from lightning_hybrid.distributed.replaced import Preserved, tables_of
from lightning_hybrid.distributed.taps import is_own_hook
from lightning_hybrid.pipeline_parallel.frame.discovery import Discovery
from lightning_hybrid.pipeline_parallel.frame.stage_states import Copies, find_owners, find_places
from lightning_hybrid.torch_internals import forward_hooks, forward_pre_hooks


@contextmanager
def fake_module(
    module: nn.Module, units: Sequence[nn.Module], arguments: Sequence[Any], discovery: Discovery
) -> Iterator[Callable[[], bool]]:
    """Replace the parameters of a module by fake tensors while entered, and undo all changes by the step afterwards.

    Changes in objects of the user that the module or the arguments hold are undone too.

    Args:
        module: The user's module.
        units: The units; their buffers become fake too.
        arguments: The arguments of the step.
        discovery: Makes the fake tensors.

    Yields:
        A function to call when the step has run. It reports changed attributes to the discovery. It returns True if the
        step has created tensors for itself and all later steps, such as a lazily created table; these tensors are kept.

    Raises:
        WrongUseError: If the step draws random numbers from a generator of its own.
    """
    of_units = {id(part) for unit in units for part in unit.modules()}  # metrics hash their state
    copies, fakes = Copies(), _Fakes(discovery)
    owners = find_owners([module])
    given = find_owners(flatten(list(arguments))[0]).values()
    of_batch = [owner for owner in given if not any(owner is other for other in owners.values())]
    parts = [*owners.values(), *of_batch]
    generators = [
        (f"{name!r} of {type(part).__name__}", value, generator_state(value))
        for part in parts
        for name, value in vars(part).items()
        if isinstance(value, GENERATORS)
    ]
    lazy: list[tuple[Any, str, Tensor]] = []
    swapped: list[tuple[Any, dict[str, Any]]] = []

    def finish() -> bool:
        """Report changed attributes to the discovery, and return True if the step has created tensors that are kept."""
        for name, generator, state in generators:
            if not equal_states(generator_state(generator), state):
                raise WrongUseError(
                    f"The step draws random numbers from its own generator, {name}. Stages run different parts of the"
                    " step, so they would draw different numbers. Draw the numbers without `generator=`: each call then"
                    " has its own seed, which is the same on every stage. [LH448]"
                )
        for part, attributes in swapped:
            for name, value in _held(part).items():
                before = attributes.get(name)
                if isinstance(value, Tensor) and value is not before:
                    discovery.note_assigned(part, name, before, value)
                if before is None and isinstance(value, Tensor) and discovery.has_values(value):
                    lazy.append((part, name, value))
        discovery.graph.changed = copies.changed()
        return bool(lazy)

    with Preserved(parts, generators=[generator for _, generator, _ in generators]):
        # Modules around the units come first, so that a tensor that is tied to them is not handled as part of a unit.
        for part in sorted(parts, key=lambda part: id(part) in of_units):
            is_given, table = any(part is other for other in of_batch), vars(part)
            tensor = torch.clone if is_given else partial(fakes, in_unit=id(part) in of_units)
            for name, value in table.items():
                table[name] = copies(value, tensor)
        swapped += [(part, _held(part)) for part in parts]
        for part in parts:
            for hooks in (forward_pre_hooks(part), forward_hooks(part)) if isinstance(part, nn.Module) else ():
                for key in [key for key, hook in hooks.items() if is_own_hook(hook)]:
                    del hooks[key]
        yield finish
    for part, name, value in lazy:
        setattr(part, name, value)  # `setattr` keeps a buffer a buffer
    graph = discovery.graph
    written = graph.changed.union(*((*call.counts, *call.fills) for call in graph.calls))
    graph.places = find_places(find_owners([module], units), written)


class _Fakes:
    """A factory of the tensors that replace the module's tensors. Tied parameters stay tied.

    Args:
        discovery: Makes the tensors.
    """

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    def __call__(self, tensor: Tensor, *, in_unit: bool) -> Tensor:
        """Return the replacement of a tensor: a fake tensor for parameters and tensors of units, otherwise a copy."""
        if isinstance(tensor, nn.Parameter):
            return self._discovery.parameter(tensor)
        return self._discovery.fake(tensor) if in_unit else self._discovery.copy(tensor)


def _held(part: Any) -> dict[str, Any]:
    """Return the attributes and buffers of a module, or the attributes of an object, by name."""
    return {name: value for table in tables_of(part) for name, value in table.items()}

"""The user's module with fake parameters, for a trace that leaves no changes behind.

:meth:`FrameCut._follow` enters :func:`fake_module` around each trace, on every rank. A rank does not have all
parameters, so a trace runs with fake tensors: tensors with shapes but without values. A copy of the module would be
simpler, but closures, hooks and objects of the user refer to the original module, so its attributes are replaced in
place. A *unit* is a module that runs on exactly one stage, such as a pipelined layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.distributed.random import GENERATORS, equal_states, generator_state
from lightning_hybrid.distributed.replaced import Preserved, tables_of
from lightning_hybrid.distributed.taps import runs_in_traces
from lightning_hybrid.pipeline_parallel.frame.discovery import Discovery
from lightning_hybrid.pipeline_parallel.frame.stage_states import Copies, find_owners, find_places
from lightning_hybrid.torch_internals import forward_hooks, forward_pre_hooks, non_persistent_buffers


@contextmanager
def fake_module(
    module: nn.Module, units: Sequence[nn.Module], arguments: Sequence[Any], discovery: Discovery
) -> Iterator[Callable[[], bool]]:
    """Replace the tensors of a module while entered, and undo changes by the step afterwards.

    ::

        parameters, tensors in units           fake tensors
        other buffers and attributes           copies, also of containers and arrays
        objects of the user in the module      the same objects, with copies in their attributes
          or in the arguments
        forward hooks of this package          are removed

    Only tensors that the step has created for itself and all later steps are kept, such as a lazily created table. On
    exit, `discovery.graph.places` is set.

    Args:
        module: The user's module.
        units: The pipelined layers. Their buffers and other tensors become fake too, because only one stage has them.
        arguments: The arguments of the step.
        discovery: Makes the fake tensors.

    Yields:
        A function to call when the step has run. It reports changed attributes to the discovery, sets
        `discovery.graph.changed`, and returns True if the step has created tensors that are kept. It raises a
        `WrongUseError` if the step has drawn random numbers from a generator of its own, such as an attribute of the
        module.
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
    created: list[_Created] = []
    swapped: list[tuple[Any, dict[str, Any]]] = []

    def finish() -> bool:
        """Report changed attributes to the discovery, and return True if the step has created tensors that are kept.

        Raises:
            WrongUseError: If the step has drawn random numbers from a generator of its own.
        """
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
                    created.append(_Created.of(part, name, value))
        discovery.graph.changed = copies.changed()
        return bool(created)

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
                for key in [key for key, hook in hooks.items() if not runs_in_traces(hook)]:
                    del hooks[key]
        yield finish
    for each in created:
        each.keep()
    graph = discovery.graph
    written = graph.changed.union(*((*call.counts, *call.fills) for call in graph.calls))
    graph.places = find_places(find_owners([module], units), written)


class _Created(NamedTuple):
    """A tensor that the step has created, and that later steps need, such as a table that is computed once.

    Attributes:
        part: The module or object that holds the tensor.
        name: The name of its attribute or buffer.
        value: The tensor.
        is_persistent: For a buffer, True if state dicts contain it; ``None`` for an attribute.
    """

    part: Any
    name: str
    value: Tensor
    is_persistent: bool | None

    @classmethod
    def of(cls, part: Any, name: str, value: Tensor) -> _Created:
        """Return the record of a tensor that a module or object holds now."""
        is_buffer = isinstance(part, nn.Module) and name in part._buffers
        return cls(part, name, value, name not in non_persistent_buffers(part) if is_buffer else None)

    def keep(self) -> None:
        """Store the tensor again, after the attributes and buffers have been restored."""
        if self.is_persistent is None or self.name in self.part._buffers:
            setattr(self.part, self.name, self.value)  # keeps a buffer that was registered as ``None`` a buffer
        else:
            self.part.register_buffer(self.name, self.value, persistent=self.is_persistent)


class _Fakes:
    """A factory of the tensors that replace the module's tensors.

    :class:`Copies` calls it once for each tensor, so tied parameters stay tied.

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

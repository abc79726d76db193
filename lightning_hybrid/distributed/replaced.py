"""Temporary replacements of attributes, dictionary entries and forwards, and contexts that restore modules.

A step must leave no trace of the package in the user's objects and in torch, even after an exception. So code that
changes them temporarily uses these contexts: step programs, traces, dry runs, trials of layers, and activation
checkpointing. Copies of modules would not suffice: they take memory, and the user's code has references to the
originals.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_hybrid.distributed.random import (
    generator_state,
    generator_states,
    set_generator_state,
    set_generator_states,
)


@contextmanager
def replaced_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object to other values while entered.

    Args:
        owner: The object.
        values: The values by name. The object must have all these attributes. A class may inherit them.
    """
    is_class = isinstance(owner, type)  # its attributes may be inherited, or descriptors
    before = {name: vars(owner).get(name, MISSING) if is_class else getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


#: Used in place of a value if an attribute or entry does not exist.
MISSING = object()


@contextmanager
def replaced_entries(changes: Iterable[tuple[MutableMapping[Any, Any], Mapping[Any, Any]]]) -> Iterator[None]:
    """Set entries of dictionaries to other values while entered. Entries that did not exist are removed on exit.

    Parameters and buffers of a module are entries of `_parameters` and `_buffers`. Attributes of an object are entries
    of ``vars(object)``.

    Args:
        changes: Each dictionary with its new entries. Entries whose value is `MISSING` are removed while entered.
    """
    found = [(table, dict(entries)) for table, entries in changes]
    before = [(table, {key: table.get(key, MISSING) for key in entries}) for table, entries in found]
    try:
        _set_entries(found)
        yield
    finally:
        _set_entries(before)


def _set_entries(changes: Iterable[tuple[MutableMapping[Any, Any], Mapping[Any, Any]]]) -> None:
    for table, entries in changes:
        for key, value in entries.items():
            if value is MISSING:
                table.pop(key, None)
            else:
                table[key] = value


class Preserved:
    """A context that restores the state of modules and related objects on exit.

    The state is saved when this object is made, not on entry. The context can be entered several times, so that several
    tries begin with the same state. The state consists of references: attributes and entries refer to the same objects
    again, but changes inside these objects remain, unless they are in `containers`.

    Args:
        owners: Modules and objects whose attributes and buffers are restored. Values of tensors are not restored, see
            :func:`preserved_values`. Entries of `_parameters` are not restored either, because ZeRO exchanges some of
            them in a step.
        containers: Lists, sets, deques and dictionaries whose entries are restored.
        generators: Generators of the user whose states are restored.
        device: The device whose global generators (torch, numpy, `random`) are restored; ``None`` does not restore
            global generators.
    """

    def __init__(
        self,
        owners: Iterable[Any] = (),
        *,
        containers: Iterable[Any] = (),
        generators: Iterable[Any] = (),
        device: torch.device | None = None,
    ) -> None:
        self._tables = [(table, dict(table)) for owner in owners for table in tables_of(owner)]
        self._contents = [(container, container.copy()) for container in containers]
        self._generators = [(generator, generator_state(generator)) for generator in generators]
        self._random = None if device is None else (generator_states(device), device)

    def __enter__(self) -> Self:
        """Begin a try."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Restore the state."""
        for table, before in self._tables:
            restore(table, before)
        for container, before in self._contents:
            refill(container, before)
        for generator, state in self._generators:
            set_generator_state(generator, state)
        if self._random is not None:
            set_generator_states(*self._random)


@contextmanager
def preserved_values(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of some tensors on exit, in place. Autograd does not detect this change."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in before:
            tensor.data.copy_(value)


def copied_buffers(module: nn.Module) -> AbstractContextManager[None]:
    """Give a module copies of its buffers while entered, so that it does not modify the originals."""
    tables = (part._buffers for part in module.modules())
    return replaced_entries(
        (table, {name: buffer.clone() for name, buffer in table.items() if buffer is not None}) for table in tables
    )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Change `torch.get_default_dtype` while entered."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def tables_of(owner: Any) -> list[dict[str, Any]]:
    """Return the dictionary of an object's attributes and, for a module, also the dictionary of its buffers."""
    return [vars(owner), owner._buffers] if isinstance(owner, nn.Module) else [vars(owner)]


def table_of(owner: Any, name: str) -> dict[str, Any]:
    """Return the dictionary that holds an attribute or a buffer; the attributes if neither exists."""
    return next((table for table in reversed(tables_of(owner)) if name in table), vars(owner))


def restore(table: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Restore the entries of a table, in place. An unchanged table is not written, as other threads may read it."""
    if list(table) == list(before) and all(map(operator.is_, table.values(), before.values())):
        return
    for name in [name for name in table if name not in before]:
        del table[name]
    for name, value in before.items():
        if table.get(name, before) is not value:
            table[name] = value


def refill(container: Any, before: Any) -> None:
    """Restore the contents of a container in place.

    Args:
        container: The list, deque, set or dictionary.
        before: A copy of the container from before.
    """
    same = (
        container == before
        if isinstance(before, set)
        else len(container) == len(before) and all(map(operator.is_, entries_of(container), entries_of(before)))
    )
    if not same:
        container.clear()
        getattr(container, "extend" if isinstance(before, (list, deque)) else "update")(before)


def entries_of(container: Any) -> Iterator[Any]:
    """Return the contents of a container. For a dictionary these are its keys and values."""
    return (part for entry in container.items() for part in entry) if isinstance(container, dict) else iter(container)


def replaced_forwards(
    modules: Iterable[nn.Module], wrap: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]
) -> AbstractContextManager[None]:
    """Replace the `forward` of each module while entered.

    On exit, names, copies and pickles of the modules are as before. A replacement that is entered later is called
    first, and ``tests/strategy/test_forward_order.py`` tests this order::

        pipeline split --> sequence split        --> recomputation --> region of a layer     --> class of the layer
                           (context parallelism)                       (context parallelism)     (tensor parallelism)

    Args:
        modules: The modules, each one only once.
        wrap: Receives a module and its forward, and returns the replacement.
    """
    return replaced_entries(
        (table, {"forward": wrap(module, table.get("forward") or _forward_of(module))})
        for module in modules
        for table in [vars(module)]
    )


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the `forward` of a module's class, looked up at each call: the class may change temporarily."""
    return lambda *args, **kwargs: type(module).forward(module, *args, **kwargs)

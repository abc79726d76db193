"""Attributes, entries of dictionaries, and forwards that are replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn


@contextmanager
def replaced_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of an object other values while entered.

    Args:
        owner: The object.
        values: The values by name; the object has all of these attributes.
    """
    is_class = isinstance(owner, type)  # whose attributes may be inherited, or descriptors
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


#: In the place of a value: without this attribute or entry.
MISSING = object()


@contextmanager
def replaced_entries(changes: Iterable[tuple[MutableMapping[Any, Any], Mapping[Any, Any]]]) -> Iterator[None]:
    """Give entries of dictionaries other values while entered; entries that were missing are removed at the end.

    Parameters and buffers are entries of a module's `_parameters` and `_buffers`, and attributes of ``vars(object)``.

    Args:
        changes: Each dictionary with its new entries; those that are `MISSING` are removed while entered.
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


def replaced_forwards(
    modules: Iterable[nn.Module], wrap: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]
) -> AbstractContextManager[None]:
    """Replace the `forward` of each module while entered.

    Afterwards names, copies and pickles of the modules are as before. What is entered later is called first::

        cut of the pipeline --> division of sequences --> recomputation --> region of a layer  -->  class of the layer
                                (context parallelism)                       (context parallelism)   (tensor parallelism)

    Args:
        modules: The modules, each of them once.
        wrap: Takes a module and its forward, and returns the replacement.
    """
    return replaced_entries(
        (table, {"forward": wrap(module, table.get("forward") or _forward_of(module))})
        for module in modules
        for table in [vars(module)]
    )


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the `forward` of a module's class, looked up at each call: a module may have another class for a while."""
    return lambda *args, **kwargs: type(module).forward(module, *args, **kwargs)

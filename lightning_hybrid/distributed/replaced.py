"""Attributes, entries of dictionaries, and forwards that are replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
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
    before = {name: vars(owner).get(name, _MISSING) if is_class else getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextmanager
def replaced_entries(changes: Iterable[tuple[MutableMapping[Any, Any], Mapping[Any, Any]]]) -> Iterator[None]:
    """Give entries of dictionaries other values while entered; entries that were missing are removed at the end.

    Parameters and buffers are entries of a module's `_parameters` and `_buffers`, and attributes of ``vars(object)``.

    Args:
        changes: Each dictionary with its new entries.
    """
    found = [(table, dict(entries)) for table, entries in changes]
    before = [(table, {key: table.get(key, _MISSING) for key in entries}) for table, entries in found]
    try:
        for table, entries in found:
            table.update(entries)
        yield
    finally:
        for table, entries in before:
            for key, value in entries.items():
                if value is _MISSING:
                    table.pop(key, None)
                else:
                    table[key] = value


_MISSING = object()


@contextmanager
def replaced_forwards(
    modules: Iterable[nn.Module], wrap: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace the `forward` of each module while entered.

    Afterwards names, copies and pickles of the modules are as before.

    Args:
        modules: The modules.
        wrap: Takes a module and its forward, and returns the replacement.
    """
    replaced: list[tuple[dict[str, Any], Any]] = []
    try:
        for module in modules:
            attributes = vars(module)
            before = attributes.get("forward")
            replaced.append((attributes, before))
            attributes["forward"] = wrap(module, before or _forward_of(module))
        yield
    finally:
        for attributes, before in replaced:
            if before is None:
                del attributes["forward"]
            else:  # somebody else's
                attributes["forward"] = before


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the `forward` of a module's class, looked up at each call: a module may have another class for a while."""
    return lambda *args, **kwargs: type(module).forward(module, *args, **kwargs)

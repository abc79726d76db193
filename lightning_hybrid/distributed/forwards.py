"""Forwards of modules that others stand for, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def replaced_forwards(
    modules: Iterable[nn.Module], wrap: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Let another function stand for the `forward` of each module while entered.

    Names, copies and pickles of modules know nothing of it once it is left.

    Args:
        modules: The modules.
        wrap: Gets a module and its forward, and returns what stands for it.
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
    """Return what a module's class does: the one that it has when called, as it may be of another for a while."""
    return lambda *args, **kwargs: type(module).forward(module, *args, **kwargs)

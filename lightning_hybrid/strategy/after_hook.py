"""Something is done when a hook of the user's module has been called, whoever calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["AfterHook"]


class AfterHook:
    """Takes the place of a method of one module until it has been called once.

    Args:
        module: The module.
        name: Of the method.
        then: What is done after it.
    """

    def __init__(self, module: nn.Module, name: str, then: Callable[[], None]) -> None:
        self._module, self._name = module, name
        hook = getattr(module, name)

        @functools.wraps(hook)
        def called(*args: Any, **kwargs: Any) -> None:
            self.forget()
            hook(*args, **kwargs)
            then()

        vars(module)[name] = called

    def forget(self) -> None:
        """Give the method its place back."""
        vars(self._module).pop(self._name, None)

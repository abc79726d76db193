"""Parameters that get no memory when a module is made, or little: only their shapes matter to a dry run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_hybrid.distributed.dtensor import copy_attributes

#: Bytes that parameters may take where a module cannot do without their values.
MOST_BYTES = 2 * 2**30

_T = TypeVar("_T")


class Registered:
    """A count of registered parameters.

    Attributes:
        number: The parameters.
    """

    number = 0


@contextmanager
def parameters_without_memory() -> Iterator[Registered]:
    """Move each parameter to the meta device when its module registers it, while entered.

    ``torch.empty`` of a layer takes no memory until somebody writes to it, and `reset_parameters` comes after the
    layer has registered its parameters. Unlike inside ``with torch.device("meta")``, all other tensors have values:
    buffers, states of metrics, and rates that `__init__` reads from a `torch.linspace`.
    """
    registered = Registered()
    # By identity, so that tied parameters stay tied; Python reuses the identity of an object that is gone.
    replaced: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def hook(module: nn.Module, name: str, parameter: Any) -> Any:
        if not _takes_memory(parameter):
            return None
        if id(parameter) not in replaced or replaced[id(parameter)][0]() is not parameter:
            registered.number += 1
            made = nn.Parameter(torch.empty_like(parameter.detach(), device="meta"), parameter.requires_grad)
            copy_attributes(parameter, made)
            replaced[id(parameter)] = weakref.ref(parameter), made
        return replaced[id(parameter)][1]

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield registered
    finally:
        handle.remove()


@contextmanager
def parameters_with_little_memory(reason: BaseException) -> Iterator[None]:
    """Limit the memory of registered parameters to :data:`MOST_BYTES` while entered.

    Args:
        reason: Why the module cannot do without values.

    Raises:
        ValueError: If they would take more.
    """
    seen: dict[int, nn.Parameter] = {}  # alive, so that no other gets their identity
    total = 0

    def hook(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal total
        if not _takes_memory(parameter) or id(parameter) in seen:
            return
        seen[id(parameter)] = parameter
        total += parameter.nbytes
        if total > MOST_BYTES:
            text = " ".join(f"{type(reason).__name__}: {reason}".split())
            raise ValueError(
                "Planning this module requires the values of its parameters, because its code failed without them"
                f" ({text}). These values take more than {MOST_BYTES / 2**30:g} GiB, which is too much for many nodes."
                " Avoid reading parameter values in `__init__`, `configure_model` or `training_step`. Alternatively,"
                " use a smaller module, for example with fewer layers. [LH132]"
            ) from reason

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _takes_memory(parameter: Any) -> bool:
    return isinstance(parameter, Tensor) and not parameter.is_meta and not nn.parameter.is_lazy(parameter)


def made_without_memory(make: Callable[[], _T]) -> _T:
    """Return what a function makes, where parameters have no memory, or little if it cannot be made so.

    Args:
        make: Makes modules. It is called a second time after an error.

    Raises:
        ValueError: If it cannot do without values that take too much memory.
    """
    try:
        with parameters_without_memory():
            return make()
    except Exception as error:  # whatever it is, with values it is what a run says
        reason = error
    with parameters_with_little_memory(reason):
        return make()

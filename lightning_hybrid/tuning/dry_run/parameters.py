"""Modules made with parameters that have no memory, or little: a dry run needs only their shapes.

A dry run and the commands that load a configuration make the user's module in these contexts, so that a model of any
size can be planned on a laptop. First, parameters have no values. If the module's code fails because it reads them, the
module is made again with values, up to a limit.

``with torch.device("meta")`` would be simpler, but it also takes the values of buffers and of tensors that `__init__`
computes with.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_hybrid.distributed.dtensor import copy_attributes

#: The largest number of bytes of parameters in a module that needs their values.
MOST_BYTES = 2 * 2**30

_T = TypeVar("_T")


class Registered:
    """A counter of registered parameters.

    Attributes:
        number: The number of parameters that were moved to the meta device. Tied parameters count once.
    """

    number = 0


@contextmanager
def parameters_without_memory() -> Iterator[Registered]:
    """Move each parameter to the meta device when its module registers it, while entered.

    The result of ``torch.empty`` takes no memory before the first write, and a layer calls `reset_parameters` after it
    has registered its parameters. Unlike in ``with torch.device("meta")``, all other tensors have values: buffers,
    states of metrics, and rates that `__init__` reads from a `torch.linspace`. The hook is global, so it applies to all
    modules of this process.

    Yields:
        The counter of the parameters that were moved.
    """
    registered = Registered()
    # By `id`, so that tied parameters stay tied. Python reuses the `id` of a deleted object, so the object is compared.
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
        reason: The error of the module without values, for the text of the error.

    Raises:
        ValueError: If the parameters take more memory.
    """
    seen: dict[int, nn.Parameter] = {}  # keeps the parameters alive, so that no other object gets the same `id`
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
    """Return the result of a function that makes modules with parameters that have no memory, or little if needed.

    Args:
        make: Makes modules. It is called a second time after any error.

    Raises:
        ValueError: If the modules need values, and the values take too much memory.
        Exception: The error of the second call.
    """
    try:
        with parameters_without_memory():
            return make()
    except Exception as error:  # any error can come from missing values; with values, it is the error of a run
        reason = error
    with parameters_with_little_memory(reason):
        return make()

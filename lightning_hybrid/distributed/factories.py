"""Factory functions on tensor-parallel parameters: they return plain tensors in a step, and DTensors in optimizers.

`StepContext.step` enters :func:`plain_factories` around a step of a run with tensor parallelism. `trainer.manual_step`
enters :func:`sharded_factories` around each optimizer step that user code makes inside such a step. Both functions
change torch's table of handlers for operations on DTensors, of which a process has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_hybrid.torch_internals import dtensor_handlers

_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")
_PLAIN: list[dict[Any, Any]] = []  # the handlers that :func:`plain_factories` has installed


@contextmanager
def plain_factories() -> Iterator[None]:
    """Make factory functions on a parameter, such as `parameter.new_zeros`, return plain tensors while entered.

    The user's step makes states and noise with these functions, and passes them to code that does not accept DTensors.
    Optimizers outside of the step still get DTensors, and so do DTensors that are not parameters. This has no effect
    inside another such context, or if this version of torch stores its handlers elsewhere.
    """
    handlers = dtensor_handlers()
    if handlers is None:
        yield
        return

    def make(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        like, *rest = args
        if isinstance(like, nn.Parameter):
            shape = like.shape if operation in likes else ()
            return operation(torch.empty(shape, dtype=like.dtype, device=like.device), *rest, **kwargs)
        for each in own:  # the DTensor is not a parameter but, for example, a gradient: return a DTensor
            handlers.pop(each)
        try:
            return operation(*args, **kwargs)
        finally:
            handlers.update(own)

    likes = {getattr(torch.ops.aten, name).default for name in _LIKE}
    own = dict.fromkeys(likes | {getattr(torch.ops.aten, name).default for name in _NEW}, make)
    if own.keys() & handlers.keys():  # a step inside another step
        yield
        return
    handlers.update(own)
    _PLAIN.append(own)
    try:
        yield
    finally:
        _PLAIN.remove(own)
        for each in own:
            handlers.pop(each)


@contextmanager
def sharded_factories() -> Iterator[None]:
    """Undo :func:`plain_factories` while entered, for an optimizer that creates its states inside a step."""
    handlers = dtensor_handlers()
    if not _PLAIN or handlers is None:
        yield
        return
    own = _PLAIN.pop()
    for each in own:
        handlers.pop(each)
    try:
        yield
    finally:
        handlers.update(own)
        _PLAIN.append(own)

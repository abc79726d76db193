"""Reentrant activation checkpointing (`use_reentrant=True`) in code that is split into stages.

:class:`FrameCut` enters :func:`without_reentrant` around the steps of a batch, so that users do not have to change
their `checkpoint` calls, which may be in a library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from lightning_hybrid.distributed.replaced import replaced_attributes
from lightning_hybrid.torch_internals import DisableTorchFunction


@contextmanager
def without_reentrant(is_divided: Callable[[], bool]) -> Iterator[None]:
    """Run calls of `checkpoint` with ``use_reentrant=True`` in the other way while entered; the results are equal.

    With ``use_reentrant=True``, a checkpoint is one `torch.autograd.Function`, whose backward runs a nested backward.
    Neither can be split into stages. With ``use_reentrant=False``, operators only save fewer tensors. Calls inside
    layers are not changed, nor are functions with which other code has replaced torch's function. The replacement is
    global: it is an attribute of `torch.utils.checkpoint`.

    Args:
        is_divided: Returns True if the code that is running is split into stages: it is code around the layers of a
            step.
    """
    # `checkpoint` looks up the function by this name, also if other code has imported `checkpoint` or made a partial.
    function: Any = checkpoint.CheckpointFunction

    def apply(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Run a checkpointed function, not reentrant if it is split into stages."""
        if not is_divided():
            return function.apply(run, preserve_rng_state, *args)
        if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            with _no_grad():  # as in torch's function, no tensor gets a gradient
                return run(*args)
        return checkpoint.checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)

    with replaced_attributes(checkpoint, CheckpointFunction=SimpleNamespace(apply=apply)):
        yield


@contextmanager
def _no_grad() -> Iterator[None]:
    """Switch gradients off without a call that the trace sees, because the path must not depend on `requires_grad`."""
    before = torch.is_grad_enabled()
    _set_grad_enabled(False)
    try:
        yield
    finally:
        _set_grad_enabled(before)


def _set_grad_enabled(enabled: bool) -> None:
    """Set the gradient mode without a call that the trace sees."""
    with DisableTorchFunction():
        torch.set_grad_enabled(enabled)

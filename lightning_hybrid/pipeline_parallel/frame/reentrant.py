"""`torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` in code that is divided into stages."""

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
    """Run what calls of `checkpoint` with ``use_reentrant=True`` run again in the other way, which gives the same.

    With ``use_reentrant=True`` a checkpoint is one `torch.autograd.Function`, and its backward is a step of its own
    inside of the backward that runs. Neither can be divided. With ``use_reentrant=False`` operators save less, and
    that is all. Calls inside of layers stay as they are, and so does what others have put in the place of torch's
    function.

    Args:
        is_divided: Whether the code that runs now is divided into stages.
    """
    # Everybody who has imported `checkpoint`, or made a partial of it, finds the function by this name.
    function: Any = checkpoint.CheckpointFunction

    def apply(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if not is_divided():
            return function.apply(run, preserve_rng_state, *args)
        if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            with _no_grad():  # as the function does: nothing in it gets a gradient
                return run(*args)
        return checkpoint.checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)

    with replaced_attributes(checkpoint, CheckpointFunction=SimpleNamespace(apply=apply)):
        yield


@contextmanager
def _no_grad() -> Iterator[None]:
    """Switch gradients off outside of the followed path, which must not depend on `requires_grad`."""
    before = torch.is_grad_enabled()
    _set_grad_enabled(False)
    try:
        yield
    finally:
        _set_grad_enabled(before)


def _set_grad_enabled(enabled: bool) -> None:
    with DisableTorchFunction():
        torch.set_grad_enabled(enabled)

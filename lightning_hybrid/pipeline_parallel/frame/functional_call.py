"""Calls of a pinned module: its parameters and buffers are arguments, and its new buffers are returned.

A pinned module is code around the layers that became a unit, because it has to run on one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError


def call_with_states(
    call: Callable[..., Any], module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call a module on one stage, and give the new values of its buffers to the other stages.

    ::

        buffer written in place      is an argument that the call writes, such as running statistics in `F.batch_norm`
        buffer replaced              is a second result, and becomes the buffer

    `torch.func.functional_call` does not fit: it restores the module's own tensors, so new values would have to be
    written into these tensors, although backward may still need the old values.

    Args:
        call: Calls a function with arguments on the stage of the module, and returns its result on all stages.
        module: The module.
        forward: The `forward` of the module.
        args: The arguments of the call.
        kwargs: The keyword arguments of the call.

    Raises:
        WrongUseError: If a new buffer is attached to the autograd graph.
    """
    slots = [
        (table, name) for part in module.modules() for table in (part._parameters, part._buffers) for name in table
    ]
    own = tuple(table[name] for table, name in slots)
    buffers = {id(part._buffers) for part in module.modules()}

    def run(args: Any, kwargs: Any, given: Sequence[Tensor | None]) -> Any:
        """Run `forward` with the given parameters and buffers; return the result, and the buffers that it replaced."""
        _put(slots, given)
        try:
            result = forward(*args, **kwargs)
            now = [table[name] if id(table) in buffers else None for table, name in slots]
        finally:
            if any(each is not other for each, other in zip(given, own, strict=True)):  # replaced its own tensors
                _put(slots, own)
        _check_gradients(module, slots, now)
        replaced = [None if each is before else each for each, before in zip(now, given, strict=True)]
        return result, replaced

    result, replaced = call(run, (args, kwargs, own), {})
    for (table, name), value in zip(slots, replaced, strict=True):
        if value is not None and value is not table[name]:
            table[name] = value
    return result


def _put(slots: Sequence[tuple[dict[str, Any], str]], tensors: Sequence[Tensor | None]) -> None:
    """Put tensors into the slots of parameters and buffers."""
    for (table, name), tensor in zip(slots, tensors, strict=True):
        table[name] = tensor


def _check_gradients(module: nn.Module, slots: Sequence[tuple[dict[str, Any], str]], buffers: Sequence[Any]) -> None:
    """Raise an error if a buffer is attached to the autograd graph."""
    for (_, name), buffer in zip(slots, buffers, strict=True):
        if buffer is not None and buffer.requires_grad:
            raise WrongUseError(
                f"After a call, the buffer {name!r} of {type(module).__name__} is attached to the autograd graph, but"
                " the buffer is kept for the next step. Update it under `torch.no_grad()`, or write `x.detach()` into"
                " it. [LH468]"
            )

"""A call of a module that has its parameters and buffers as arguments, and returns the buffers that it replaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError


def call_with_states(
    call: Callable[..., Any], module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call a module on one stage, and let the other stages have what it has made of its buffers.

    ::

        written in place         an argument that is written, as running statistics are by `F.batch_norm`
        another tensor           a second result: the buffer from now on

    `torch.func.functional_call` does this too, but puts its own tensors back afterwards, so that what stays would have
    to be written into them; backward may still need them.

    Args:
        call: Calls a function with arguments on the stage of the module, and gives what it returned on all.
        module: The module.
        forward: Its `forward`.
        args: Arguments of the call.
        kwargs: Likewise.
    """
    slots = [
        (table, name) for part in module.modules() for table in (part._parameters, part._buffers) for name in table
    ]
    own = tuple(table[name] for table, name in slots)
    buffers = {id(part._buffers) for part in module.modules()}

    def run(args: Any, kwargs: Any, given: Sequence[Tensor | None]) -> Any:
        _put(slots, given)
        try:
            result = forward(*args, **kwargs)
            now = [table[name] if id(table) in buffers else None for table, name in slots]
        finally:
            if any(each is not other for each, other in zip(given, own, strict=True)):  # they stand for its own
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
    for (table, name), tensor in zip(slots, tensors, strict=True):
        table[name] = tensor


def _check_gradients(module: nn.Module, slots: Sequence[tuple[dict[str, Any], str]], buffers: Sequence[Any]) -> None:
    for (_, name), buffer in zip(slots, buffers, strict=True):
        if buffer is not None and buffer.requires_grad:
            raise WrongUseError(
                f"After a call, the buffer {name!r} of {type(module).__name__} is attached to the autograd graph, but"
                " the buffer is kept for the next step. Update it under `torch.no_grad()`, or write `x.detach()` into"
                " it. [LH468]"
            )

"""Calls of a pinned module: its parameters and buffers are arguments, and its new buffers are results.

A pinned module is a module around the layers that became a unit during a trace, because it needs values that only one
stage has. A unit is a module that runs on exactly one stage. :class:`FrameCut` redirects each call of such a module
here, in the trace and in each step.

The plan of the step knows only the arguments and results of calls. A parameter of a pinned module may be on other
stages, too, and a later call on any stage may read a buffer that the module updates. As arguments and results, both are
sent between stages like all other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError

# The tables `_parameters` and `_buffers` of the module and its submodules, each with one name, and the dotted name.
_Slots = Sequence[tuple[dict[str, Any], str, str]]


def call_pinned(
    call_unit: Callable[..., Any], module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call a pinned module as a unit, and store the buffers that the call replaces in the module.

    ::

        buffer written in place      is an argument that the call writes, such as running statistics in `F.batch_norm`
        buffer replaced              is a second result, and becomes the buffer

    `torch.func.functional_call` does not fit, because it calls the module with its hooks. The hooks already run around
    this call, as code around the units.

    Args:
        call_unit: Calls a function as :meth:`StepMode.call_unit` does: it traces the call, makes it on the stage of the
            module, returns tensors that another stage has sent, or (in lockstep) makes it on every stage.
        module: The module.
        forward: The `forward` of the module.
        args: The arguments of the call.
        kwargs: The keyword arguments of the call.

    Returns:
        The result of `forward`.

    Raises:
        WrongUseError: If a buffer requires gradients after the call.
    """
    slots = [
        (table, name, f"{prefix}.{name}" if prefix else name)
        for prefix, part in module.named_modules()
        for table in (part._parameters, part._buffers)
        for name in table
    ]
    own = tuple(table[name] for table, name, _ in slots)
    buffer_tables = {id(part._buffers) for part in module.modules()}

    def run(args: Any, kwargs: Any, given: Sequence[Tensor | None]) -> Any:
        """Run `forward` with the given parameters and buffers.

        Returns:
            The result, and for each slot the new buffer if `forward` has replaced it, otherwise ``None``.
        """
        _put(slots, given)
        try:
            result = forward(*args, **kwargs)
            buffers = [table[name] if id(table) in buffer_tables else None for table, name, _ in slots]
        finally:
            if any(each is not other for each, other in zip(given, own, strict=True)):
                _put(slots, own)  # the trace gave fake tensors, or another stage sent the tensors
        _check_gradients(module, slots, buffers)
        return result, [None if each is before else each for each, before in zip(buffers, given, strict=True)]

    result, replaced = call_unit(run, (args, kwargs, own), {})
    for (table, name, _), value in zip(slots, replaced, strict=True):
        if value is not None and value is not table[name]:
            table[name] = value
    return result


def _put(slots: _Slots, tensors: Sequence[Tensor | None]) -> None:
    """Put tensors into the slots of parameters and buffers."""
    for (table, name, _), tensor in zip(slots, tensors, strict=True):
        table[name] = tensor


def _check_gradients(module: nn.Module, slots: _Slots, buffers: Sequence[Tensor | None]) -> None:
    """Raise an error if a buffer requires gradients."""
    for (_, _, name), buffer in zip(slots, buffers, strict=True):
        if buffer is not None and buffer.requires_grad:
            raise WrongUseError(
                f"After a call, the buffer {name!r} of {type(module).__name__} requires gradients, but the buffer is"
                " kept for the next step. Update it under `torch.no_grad()`, or write `x.detach()` into it. [LH468]"
            )

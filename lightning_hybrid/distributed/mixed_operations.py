"""Operations of parameters that are divided (DTensors) with tensors that are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.distributed.dtensor import full_tensor, keeping_blocks, whole_numbers


@contextmanager
def mixed_operations() -> Iterator[None]:
    """Inside, operations take parameters of which some are divided and some are not, as optimizers and penalties do."""
    from torch.distributed.tensor.experimental import implicit_replication  # a tenth of a second

    with keeping_blocks(), whole_numbers(), implicit_replication(), _plain_gradients():
        yield


@contextmanager
def _plain_gradients() -> Iterator[None]:
    """Inside, a plain tensor that meets a DTensor, as a loss meets a penalty, has a gradient that is plain.

    Torch makes a DTensor of it below autograd. So its gradient is one too, and goes on to code of plain tensors, where
    torch has no rule for some operations, such as attention.
    """
    inherited = vars(DTensor)["__torch_function__"]

    def meet(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each not in (Tensor, nn.Parameter) and not issubclass(each, DTensor) for each in types):
            return NotImplemented  # it knows what to do
        if torch.is_grad_enabled() and func not in _OF_GRAPHS and not _writes(func):
            args, kwargs = _with_plain_gradients(tuple(args)), _with_plain_gradients(kwargs or {})
        return inherited(func, types, args, kwargs or {})

    kind: Any = DTensor
    kind.__torch_function__ = classmethod(meet)
    try:
        yield
    finally:
        kind.__torch_function__ = inherited


#: What takes tensors as places in a graph, and not as values.
_OF_GRAPHS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


def _writes(func: Any) -> bool:
    """Whether a function of torch writes what it is given."""
    name: str = getattr(func, "__name__", "")
    return name.endswith("_") and (not name.endswith("__") or name.startswith("__i") or name == "__set__")


def _with_plain_gradients(value: Any) -> Any:
    """Return arguments whose plain tensors have plain gradients; objects in them, such as hooks, stay as they are."""
    if type(value) in (list, tuple):
        return type(value)(map(_with_plain_gradients, value))
    if type(value) is dict:
        return {name: _with_plain_gradients(each) for name, each in value.items()}
    if type(value) in (Tensor, nn.Parameter) and value.requires_grad:
        return _PlainGradient.apply(value)  # type: ignore[no-untyped-call]
    return value


class _PlainGradient(torch.autograd.Function):
    """The identity, of which the gradient is plain."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        whole: Tensor = full_tensor(gradient)
        return whole

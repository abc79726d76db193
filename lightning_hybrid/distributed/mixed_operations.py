"""Operations that mix sharded parameters (DTensors) with plain tensors.

`World.open` enters :func:`mixed_operations` for a whole run with tensor parallelism or ZeRO, and the dry run of
`tuning` enters it too. torch refuses an operation on a DTensor and a plain tensor, but the user's code has such
operations: optimizers whose states are plain, gradient clipping by hand, penalties on parameters. The context changes
torch for the whole process.
"""

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
    """Allow operations on DTensors and plain tensors while entered.

    Plain tensors count as replicated. `x.item()` and `float(x)` of a DTensor become collectives of its ranks, see
    :func:`~.dtensor.whole_numbers`.
    """
    from torch.distributed.tensor.experimental import implicit_replication  # importing this takes 0.1 s

    with keeping_blocks(), whole_numbers(), implicit_replication(), _plain_gradients():
        yield


@contextmanager
def _plain_gradients() -> Iterator[None]:
    """Keep the gradient of a plain tensor plain if the tensor is combined with a DTensor.

    A loss is a plain tensor, and a penalty on parameters is a DTensor.

    torch converts the plain tensor below autograd, so its gradient would be a DTensor. The backward pass would hand
    this gradient to operations without a sharding rule, such as attention.
    """
    inherited = vars(DTensor)["__torch_function__"]

    def meet(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each not in (Tensor, nn.Parameter) and not issubclass(each, DTensor) for each in types):
            return NotImplemented  # another tensor subclass handles the call
        if torch.is_grad_enabled() and func not in _OF_GRAPHS and not _writes(func):
            args, kwargs = _with_plain_gradients(tuple(args)), _with_plain_gradients(kwargs or {})
        return inherited(func, types, args, kwargs or {})

    kind: Any = DTensor
    kind.__torch_function__ = classmethod(meet)
    try:
        yield
    finally:
        kind.__torch_function__ = inherited


#: Functions that use their tensors as nodes of the autograd graph, not as values.
_OF_GRAPHS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


def _writes(func: Any) -> bool:
    """Return True if a torch function writes its first argument, judged by the function's name."""
    name: str = getattr(func, "__name__", "")
    return name.endswith("_") and (not name.endswith("__") or name.startswith("__i") or name == "__set__")


def _with_plain_gradients(value: Any) -> Any:
    """Return arguments in which plain tensors have plain gradients. Other objects, such as hooks, are not searched."""
    if type(value) in (list, tuple):
        return type(value)(map(_with_plain_gradients, value))
    if type(value) is dict:
        return {name: _with_plain_gradients(each) for name, each in value.items()}
    if type(value) in (Tensor, nn.Parameter) and value.requires_grad:
        return _PlainGradient.apply(value)  # type: ignore[no-untyped-call]
    return value


class _PlainGradient(torch.autograd.Function):
    """The identity function; its gradient is a plain tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        whole: Tensor = full_tensor(gradient)
        return whole

"""Parameters that are divided over ranks (DTensors), seen from one rank: its shard, and the gradient of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

__all__ = [
    "divided_like",
    "full",
    "give_gradient",
    "is_sharded",
    "keeping_marks",
    "local_gradient",
    "local_of",
    "local_view",
    "settle_gradient",
    "shard_of",
]


@contextmanager
def keeping_marks(module: nn.Module | None) -> Iterator[None]:
    """Keep marks such as `no_weight_decay` on divided parameters while their module is moved: torch loses them."""
    parameters = [] if module is None else [each for each in module.parameters() if isinstance(each, DTensor)]
    marks = [dict(vars(parameter)) for parameter in parameters]
    yield
    for parameter, each in zip(parameters, marks, strict=True):
        vars(parameter).update(each)


def is_sharded(tensor: object) -> bool:
    """Whether ranks hold different parts of this tensor."""
    return isinstance(tensor, DTensor) and any(not placement.is_replicate() for placement in tensor.placements)


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing memory, without a graph; a plain tensor is held whole."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


def shard_of(parameter: Any) -> Any:
    """The shard of a parameter, in the graph; what is not divided (or ``None``) as it is.

    The same as `parameter.to_local()`, which finds out anew each time, and for each gradient, how the parameter is
    divided: that takes as long as a small layer.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return _Shard.apply(parameter) if _is_direct(parameter) else parameter.to_local()  # type: ignore[no-untyped-call]


class _Shard(torch.autograd.Function):
    """From a DTensor to this rank's shard; its gradient is divided as it is."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        shard: Tensor = parameter._local_tensor.detach()
        return shard

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        return _divided(gradient, ctx.spec)


def _divided(local: Tensor, spec: Any) -> DTensor:
    make: Any = DTensor
    made: DTensor = make(local, spec, requires_grad=False)
    return made


def _is_direct(parameter: DTensor) -> bool:
    """Whether this version of torch lets a DTensor be made from what it keeps to itself: tried at the first one."""
    if not _DIRECT:
        try:
            twin = _divided(parameter._local_tensor.detach(), parameter._spec)
            _DIRECT.append(twin.placements == parameter.placements and twin.shape == parameter.shape)
        except Exception:  # names are other ones, or mean something else
            _DIRECT.append(False)
    return _DIRECT[0]


_DIRECT: list[bool] = []  # what was found, once it has been tried


def local_gradient(parameter: Tensor) -> Tensor | None:
    """What this rank holds of a parameter's gradient, sharing memory."""
    gradient = parameter.grad
    return local_of(gradient) if isinstance(gradient, DTensor) else gradient


def give_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Make a tensor of the shape of this rank's shard the parameter's gradient."""
    if isinstance(parameter, DTensor):
        gradient = DTensor.from_local(
            gradient,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    parameter.grad = gradient


def local_view(parameter: Tensor) -> Tensor:
    """A plain tensor whose memory, and whose gradient's memory, are those of this rank's shard."""
    if not isinstance(parameter, DTensor):
        return parameter
    view = local_of(parameter).detach()
    view.grad = local_gradient(parameter)
    return view


def settle_gradient(parameter: Tensor) -> None:
    """Give the gradient the division of its parameter.

    Layers that the user has divided with styles of torch may leave partial sums, or gradients divided another way.
    Every rank of the parameter's mesh must call this.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return
    if not isinstance(parameter, DTensor):
        parameter.grad = gradient.full_tensor()
    elif gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def divided_like(value: Any, parameter: Tensor) -> Any:
    """A whole tensor divided as a parameter of the same shape is; anything else as it is.

    Every rank has the whole tensor, and keeps its part.
    """
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        return value
    whole = DTensor.from_local(value.to(parameter.device), parameter.device_mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=parameter.placements)


def full(value: Any) -> Any:
    """The whole of a tensor that is divided: a collective; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    there: Any = value.to(value.device_mesh.device_type)  # after a run it may lie on the host
    return there.full_tensor()

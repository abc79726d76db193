"""Gradients that travel together as one flat tensor, and come back as the same sum on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from lightning_hybrid.distributed.dtensor import give_gradient, local_gradient, redistribute_grad, to_local

__all__ = ["Bucket", "SummedBucket", "flatten_gradient", "gradient_dtype", "too_late"]


class Bucket(ABC):
    """Some parameters of one dtype on one device, whose gradients travel together.

    Args:
        parameters: The parameters, in the order in which their gradients should arrive.

    Attributes:
        missing: The positions of those whose gradient this rank has not, or does not have yet.
        work: What travels; ``None`` if nothing does.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.clear()

    def clear(self) -> None:
        """Nothing has arrived yet."""
        self.missing = set(range(len(self.parameters)))
        self.work: Work | None = None

    @property
    @abstractmethod
    def travelling(self) -> list[Tensor]:
        """What is under way."""

    def wait(self) -> None:
        """Wait for the sum: the host on CPU, the current stream on CUDA."""
        assert self.work is not None
        self.work.wait()

    @abstractmethod
    def launch(self, group: ProcessGroup, scale: float) -> None:
        """Pack what is in ``.grad``, free it, and start the sum over the group.

        Args:
            group: The ranks.
            scale: The factor.

        Raises:
            TypeError: If a gradient has another dtype or device than its parameter.
        """

    @abstractmethod
    def give_back(self) -> None:
        """Give the gradients, after :meth:`wait`.

        Raises:
            RuntimeError: If a parameter got another gradient in the meantime.
        """


class SummedBucket(Bucket):
    """Some parameters of one dtype on one device, whose gradients travel as one flat tensor.

    The tensor exists from :meth:`launch` to :meth:`give_back`: all elements of all gradients, then one number per
    parameter that is not 0 where this rank has a gradient.

    Args:
        parameters: The parameters, in the order in which their gradients should arrive.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters)
        # A gradient has the strides that autograd would give it (channels last, say): optimizers are faster that way.
        shards = [to_local(parameter) for parameter in parameters]
        self.shapes = [shard.shape for shard in shards]
        self.strides = [torch.empty_like(shard, device="meta").stride() for shard in shards]
        self.flat: Tensor | None = None

    @property
    def travelling(self) -> list[Tensor]:
        """What is under way."""
        return [] if self.flat is None else [self.flat]

    @torch.no_grad()
    def launch(self, group: ProcessGroup, scale: float) -> None:
        """Start the sum.

        One copy for all of a bucket: a copy per gradient would cost more time than it saves memory, as the peak, all
        gradients and one bucket, is the same.
        """
        first = self.parameters[0]
        for parameter in self.parameters:
            redistribute_grad(parameter)
        has_gradient = torch.ones(len(self.parameters), dtype=gradient_dtype(first), device=first.device)
        self.missing = {index for index, parameter in enumerate(self.parameters) if parameter.grad is None}
        for index in self.missing:
            has_gradient[index] = 0
        members = zip(self.parameters, self.shapes, self.strides, strict=True)
        pieces = [flatten_gradient(*member) for member in members]
        self.flat = torch.cat([*pieces, has_gradient])
        if scale != 1.0:
            self.flat.mul_(scale)
        for parameter in self.parameters:
            parameter.grad = None
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def give_back(self) -> None:
        """Make views into the flat tensor the parameters' gradients, and forget it."""
        assert self.flat is not None
        # Reading waits for the device, and nobody else's gradient matters to a rank that has all of them.
        used = self.flat[-len(self.parameters) :].tolist() if self.missing else []
        offset = 0
        members = zip(self.parameters, self.shapes, self.strides, strict=True)
        for index, (parameter, shape, stride) in enumerate(members):
            if parameter.grad is not None:
                raise too_late(parameter)
            if index not in self.missing or used[index]:
                give_gradient(parameter, self.flat.as_strided(shape, stride, offset))
            offset += shape.numel()
        self.flat = None
        self.clear()


def flatten_gradient(parameter: nn.Parameter, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """The elements of a parameter's gradient in the order of memory, as a view if possible; zeros if there is none."""
    gradient = local_gradient(parameter)
    dtype = gradient_dtype(parameter)
    if gradient is None:
        return torch.zeros((), dtype=dtype, device=parameter.device).expand(shape.numel())
    if gradient.dtype != dtype or gradient.device != parameter.device:
        raise TypeError(
            f"The gradient of a parameter of shape {tuple(parameter.shape)} is {gradient.dtype} on {gradient.device},"
            f" but the parameter is {parameter.dtype} on {parameter.device}. Averaging needs them to be alike; cast the"
            " gradient in a hook of the parameter."
        )
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()  # ranks use different rows of an embedding: only the dense sizes are equal
    if gradient.stride() != stride:
        gradient = torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype, device=gradient.device).copy_(
            gradient
        )
    return gradient.as_strided((gradient.numel(),), (1,))


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype in which a parameter's gradient is added up and travels."""
    return parameter.grad_dtype or parameter.dtype


def too_late(parameter: Tensor) -> RuntimeError:
    """The error of a gradient that comes after its bucket has begun to travel."""
    return RuntimeError(
        f"A parameter of shape {tuple(parameter.shape)} got a second gradient in one step after its bucket had begun to"
        " travel to the other ranks. This happens with re-entrant checkpointing around a parameter that is used more"
        " than once: pass `use_reentrant=False` to `torch.utils.checkpoint.checkpoint`. Otherwise reduce it with"
        " `overlap=False`."
    )

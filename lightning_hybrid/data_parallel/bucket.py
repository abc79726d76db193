"""Gradients that are reduced together, as one flat tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from lightning_hybrid.distributed.dtensor import give_gradient, local_gradient, redistribute_grad, to_local

__all__ = ["AllReduceBucket", "Bucket", "late_gradient_error"]


class Bucket(ABC):
    """Some parameters of one dtype on one device, whose gradients are reduced as one flat tensor.

    The tensor exists from :meth:`launch` to :meth:`finish`: the elements of all gradients, and one number per parameter
    that is not 0 where this rank has a gradient.

    Args:
        parameters: The parameters, in the order in which their gradients should arrive.

    Attributes:
        missing: The positions of those whose gradient this rank has not, or does not have yet.
        work: The collective in flight; ``None`` if there is none.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        # A gradient has the strides that autograd would give it (channels last, say): optimizers are faster that way.
        local = [to_local(parameter) for parameter in parameters]
        self._shapes = [tensor.shape for tensor in local]
        self._strides = [torch.empty_like(tensor, device="meta").stride() for tensor in local]
        self._clear()

    def _clear(self) -> None:
        """No gradient has arrived yet."""
        self.missing = set(range(len(self.parameters)))
        self.work: Work | None = None
        self._flat: Tensor | None = None

    @torch.no_grad()
    def launch(self, group: ProcessGroup, scale: float) -> None:
        """Pack what is in ``.grad``, free it, and start the sum over the group.

        One copy for all of a bucket: a copy per gradient would cost more time than it saves memory, as the peak, all
        gradients and one bucket, is the same.

        Args:
            group: The ranks.
            scale: The factor.

        Raises:
            TypeError: If a gradient has another dtype or device than its parameter.
        """
        first = self.parameters[0]
        for parameter in self.parameters:
            redistribute_grad(parameter)
        has_gradient = torch.ones(len(self.parameters), dtype=_gradient_dtype(first), device=first.device)
        self.missing = {index for index, parameter in enumerate(self.parameters) if parameter.grad is None}
        for index in self.missing:
            has_gradient[index] = 0
        gradients = map(_flatten_gradient, self.parameters, self._shapes, self._strides)
        flat = self._pack(gradients, has_gradient, group.size())
        if scale != 1.0:
            flat.mul_(scale)
        for parameter in self.parameters:
            parameter.grad = None
        self._flat, self.work = self._reduce(flat, group)

    def wait(self) -> None:
        """Wait for the sum: the host on CPU, the current stream on CUDA."""
        assert self.work is not None
        self.work.wait()

    def finish(self) -> None:
        """Give the gradients, after :meth:`wait`.

        Raises:
            RuntimeError: If a parameter got another gradient in the meantime.
        """
        assert self._flat is not None
        # Reading waits for the device, and nobody else's gradient matters to a rank that has all of them.
        sums = self._flat[-len(self.parameters) :].tolist() if self.missing else []
        for parameter in self.parameters:
            if parameter.grad is not None:
                raise late_gradient_error(parameter)
        used = [index not in self.missing or bool(sums[index]) for index in range(len(self.parameters))]
        self._unpack(self._flat, used)
        self._clear()

    @abstractmethod
    def _pack(self, gradients: Iterator[Tensor], has_gradient: Tensor, num_ranks: int) -> Tensor:
        """Make one tensor of flat gradients, and of the numbers that say which of them this rank has."""

    @abstractmethod
    def _reduce(self, flat: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
        """Start the sum; return where it will be, with the numbers at its end."""

    @abstractmethod
    def _unpack(self, flat: Tensor, used: Sequence[bool]) -> None:
        """Give parameters that some rank has used their gradients."""


class AllReduceBucket(Bucket):
    """A bucket of which every rank gets the same sum; gradients become views into it."""

    def _pack(self, gradients: Iterator[Tensor], has_gradient: Tensor, num_ranks: int) -> Tensor:
        return torch.cat([*gradients, has_gradient])

    def _reduce(self, flat: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        return flat, work

    def _unpack(self, flat: Tensor, used: Sequence[bool]) -> None:
        offset = 0
        for parameter, shape, stride, is_used in zip(self.parameters, self._shapes, self._strides, used, strict=True):
            if is_used:
                give_gradient(parameter, flat.as_strided(shape, stride, offset))
            offset += shape.numel()


def _flatten_gradient(parameter: nn.Parameter, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """The elements of a parameter's gradient in the order of memory, as a view if possible; zeros if there is none."""
    gradient = local_gradient(parameter)
    dtype = _gradient_dtype(parameter)
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


def _gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype in which a parameter's gradient is added up and reduced."""
    return parameter.grad_dtype or parameter.dtype


def late_gradient_error(parameter: Tensor) -> RuntimeError:
    """The error of a gradient that comes after its bucket has been launched."""
    return RuntimeError(
        f"A parameter of shape {tuple(parameter.shape)} got a second gradient in one step after its bucket had begun to"
        " travel to the other ranks. This happens with re-entrant checkpointing around a parameter that is used more"
        " than once: pass `use_reentrant=False` to `torch.utils.checkpoint.checkpoint`. Otherwise reduce it with"
        " `overlap=False`."
    )

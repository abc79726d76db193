"""Parameters compute in half precision, and optimizers work on copies of them in float32."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.distributed.dtensor import give_gradient, keeping_marks, local_gradient, put_data, to_local


class _Master:
    """A parameter, and its value in float32.

    Args:
        parameter: Not yet in half precision.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.value = to_local(parameter).to(torch.float32)
        self._half = self.value
        self._grad_dtype: torch.dtype | None = None

    def open(self) -> None:
        """The parameter is its master, and its gradient float32."""
        self._half = half = to_local(self.parameter)
        # Whoever has changed the parameter meanwhile (a callback that swaps weights, a limit on them) means it.
        is_changed = half != self.value.to(half.dtype)
        self.value.copy_(torch.where(is_changed, half, self.value))
        self._grad_dtype = self.parameter.grad_dtype
        self._put(self.value, torch.float32)

    def close(self) -> None:
        """The parameter is in half precision, where it was before, with its master's value rounded."""
        self.value = to_local(self.parameter).to(torch.float32)  # some replace the memory of a parameter
        self._half.copy_(self.value)
        self._put(self._half, self._grad_dtype)

    def _put(self, value: Tensor, grad_dtype: torch.dtype | None) -> None:
        parameter, gradient = self.parameter, local_gradient(self.parameter)
        parameter.grad = None
        put_data(parameter, value)
        if parameter.grad_dtype != grad_dtype:  # which follows the parameter's, until it is set
            parameter.grad_dtype = grad_dtype
        if gradient is not None:
            give_gradient(parameter, gradient.to(grad_dtype or value.dtype))


class MasterWeights:
    """Parameters in half precision have a master copy in float32, on which optimizers work.

    A parameter stays the same object, with the same hooks, wherever it is found. What changes is its memory, and its
    dtype with it::

                                          parameter            gradient      beside it
        forwards and backwards            half precision       half          master
        open() ... close()                master, in float32   in float32    half precision
        after :meth:`remove`              master, in float32

    It is open while optimizers are made, hooks and clipping see gradients, and optimizers step; and while checkpoints
    are written or read, which therefore have the masters under the parameters' names. Where replicas shard parameters
    (ZeRO) a master is that of a shard, as the optimizer's states are.

    From *Mixed Precision Training* (Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740).

    Args:
        module: The user's module, divided, before it is converted to half precision: nothing has been rounded yet.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._is_open = False
        self._handles: list[RemovableHandle] = []
        self._masters = [_Master(each) for each in module.parameters() if each.is_floating_point() and not each.is_meta]

    def to(self, device: torch.device) -> None:
        """Move the masters to where the parameters have been moved."""
        for master in self._masters:
            master.value = master.value.to(device)

    @torch.no_grad()
    def open(self) -> None:
        """Parameters are their masters from here on."""
        if not self._is_open:
            self._is_open = True
            for master in self._masters:
                master.open()

    @torch.no_grad()
    def close(self) -> None:
        """Parameters are in half precision from here on."""
        if self._is_open:
            self._is_open = False
            for master in self._masters:
                master.close()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, parameters are their masters."""
        if self._is_open:
            yield
            return
        self.open()
        try:
            yield
        finally:
            self.close()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the step of an optimizer, in which they are opened after the backward."""
        try:
            yield
        finally:
            self.close()

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Whoever steps one of these in the middle of a step computes in half precision in what follows."""
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self.close()))

    def drop(self, parameters: Container[int]) -> None:
        """These have left this rank.

        Args:
            parameters: Their identities.
        """
        self._masters = [master for master in self._masters if id(master.parameter) not in parameters]

    def remove(self) -> None:
        """Leave the module in float32, as it was before: nothing of what was trained is rounded."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.open()
        self._masters.clear()
        with keeping_marks(self._module):
            self._module.float()  # buffers, and what stands for parameters of other stages


class NoMasterWeights:
    """In the place of :class:`MasterWeights` where optimizers work on the parameters themselves."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Nothing changes."""
        yield

    step = opened

    def _nothing(self, *_: Any) -> None:
        pass

    to = open = close = follow = drop = remove = _nothing

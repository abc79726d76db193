"""Parameters compute in half precision, and optimizers work on copies of them in float32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.distributed.dtensor import give_gradient, local_gradient, moving, put_data, to_local


class _Master:
    """A parameter, and its value in float32.

    Args:
        parameter: Not yet in half precision.

    Attributes:
        is_open: Whether the parameter is its master.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter, self.is_open = parameter, False
        self.value = to_local(parameter).to(torch.float32)
        self._half = self.value
        self._grad_dtype: torch.dtype | None = None

    def open(self) -> None:
        """The parameter is its master, and its gradient float32."""
        self.is_open = True
        self._half = half = to_local(self.parameter)
        # Whoever has changed the parameter meanwhile (a callback that swaps weights, a limit on them) means it.
        is_changed = half != self.value.to(half.dtype)
        self.value.copy_(torch.where(is_changed, half, self.value))
        self._grad_dtype = self.parameter.grad_dtype
        self._put(self.value, torch.float32)

    def close(self) -> None:
        """The parameter is in half precision, where it was before, with its master's value rounded."""
        self.is_open = False
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
        open() ... close()                master, in float32   in float32    half precision; frozen ones stay closed
        opened()                          likewise, all of them
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
        self._handles: list[RemovableHandle] = []
        self._masters = [_Master(each) for each in module.parameters() if each.is_floating_point() and not each.is_meta]

    def to(self, device: torch.device) -> None:
        """Move the masters to where the parameters have been moved."""
        for master in self._masters:
            master.value = master.value.to(device)

    def open(self) -> None:
        """Parameters that an optimizer may step are their masters from here on."""
        _open(each for each in self._masters if each.parameter.requires_grad or each.parameter.grad is not None)

    def close(self) -> None:
        """Parameters are in half precision from here on."""
        _close(self._masters)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, all parameters are their masters."""
        closed = [master for master in self._masters if not master.is_open]
        _open(closed)
        try:
            yield
        finally:
            _close(closed)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the step of an optimizer, in which they are opened after the backward."""
        try:
            yield
        finally:
            self.close()

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Whoever steps one of these in the middle of a step, as by `optimizer.step()` of torch, steps masters.

        What follows is computed in half precision.
        """
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self.open()))
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self.close()))

    def release_parameters(self) -> None:
        """Do nothing: masters belong to the parameters themselves."""

    def take_parameters(self, placeholders: Mapping[int, Tensor]) -> None:
        """Drop the masters of parameters that have left this rank; see :class:`Follower`."""
        self._masters = [master for master in self._masters if id(master.parameter) not in placeholders]

    def remove(self) -> None:
        """Leave the module in float32, as it was before: nothing of what was trained is rounded."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _open(self._masters)
        self._masters.clear()
        with moving(self._module):
            self._module.float()  # buffers, and what stands for parameters of other stages


@torch.no_grad()
def _open(masters: Iterable[_Master]) -> None:
    for master in masters:
        if not master.is_open:
            master.open()


@torch.no_grad()
def _close(masters: Iterable[_Master]) -> None:
    for master in masters:
        if master.is_open:
            master.close()


class NoMasterWeights:
    """In the place of :class:`MasterWeights` where optimizers work on the parameters themselves."""

    opened = step = nullcontext

    def _nothing(self, *_: Any) -> None:
        pass

    to = open = close = follow = release_parameters = take_parameters = remove = _nothing

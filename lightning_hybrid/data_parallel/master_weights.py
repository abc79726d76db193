"""Master weights: parameters compute in half precision, and optimizers work on float32 copies of them.

`HybridStrategy(master_weights=True)` makes a :class:`MasterWeights` for a run with ``precision="bf16-true"`` or
``"16-true"``, before the module is converted. The strategy opens it around `configure_optimizers`, optimizer steps, and
reading and writing of checkpoints. Separate float32 parameters in the optimizers would be simpler, but then the user's
hooks, parameter groups and checkpoints would refer to other objects than the optimizers.

Master weights are *open* while the parameters hold their float32 values, and *closed* while the parameters hold values
in half precision.
"""

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
    """A parameter and its float32 value.

    Args:
        parameter: The parameter, before it is converted to half precision.

    Attributes:
        value: The float32 value of this rank's shard. It is up to date while the master weight is closed.
        is_open: True while the parameter holds the float32 value.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter, self.is_open = parameter, False
        self.value = to_local(parameter).to(torch.float32)
        self._half = self.value
        self._grad_dtype: torch.dtype | None = None

    def open(self) -> None:
        """Set the parameter to its float32 value, and convert its gradient to float32."""
        self.is_open = True
        self._half = half = to_local(self.parameter)
        # If other code has changed the parameter meanwhile (a callback that swaps or clamps weights), the change is
        # kept.
        is_changed = half != self.value.to(half.dtype)
        self.value.copy_(torch.where(is_changed, half, self.value))
        self._grad_dtype = self.parameter.grad_dtype
        self._put(self.value, torch.float32)

    def close(self) -> None:
        """Set the parameter to its rounded value in half precision, in the same memory as before."""
        self.is_open = False
        self.value = to_local(self.parameter).to(torch.float32)  # some code replaces the memory of a parameter
        self._half.copy_(self.value)
        self._put(self._half, self._grad_dtype)

    def _put(self, value: Tensor, grad_dtype: torch.dtype | None) -> None:
        parameter, gradient = self.parameter, local_gradient(self.parameter)
        parameter.grad = None
        put_data(parameter, value)
        if parameter.grad_dtype != grad_dtype:  # it equals the parameter's dtype until it is set
            parameter.grad_dtype = grad_dtype
        if gradient is not None:
            give_gradient(parameter, gradient.to(grad_dtype or value.dtype))


class MasterWeights:
    """The float32 copies of half-precision parameters, on which optimizers work.

    A parameter stays the same object, with the same hooks. Only its memory and its dtype change::

                                          parameter            gradient      stored separately
        forwards and backwards            half precision       half (1)      master weight
        open() ... close()                float32              float32       half precision (frozen ones stay closed)
        opened()                          as with open(), for all parameters
        after :meth:`remove`              float32

        (1) or float32 with the setting `float32_gradients`, see `fp32_grads`

    Master weights are open while optimizers are made, while hooks and clipping use gradients, and while optimizers
    step. They are also open while checkpoints are written or read, so that checkpoints contain the master weights under
    the parameters' names. If replicas shard parameters (ZeRO), master weights are sharded like the optimizer states.

    From *Mixed Precision Training* (Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740).

    Args:
        module: The user's module, parallelized, before it is converted to half precision, so that nothing is rounded
            yet.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._handles: list[RemovableHandle] = []
        self._masters = [_Master(each) for each in module.parameters() if each.is_floating_point() and not each.is_meta]

    def to(self, device: torch.device) -> None:
        """Move the master weights to the new device of the parameters."""
        for master in self._masters:
            master.value = master.value.to(device)

    def open(self) -> None:
        """Set the parameters that an optimizer may step to their master weights: not frozen, or with a gradient.

        If code has changed a half-precision parameter since :meth:`close`, the master weight gets the changed values.
        """
        _open(each for each in self._masters if each.parameter.requires_grad or each.parameter.grad is not None)

    def close(self) -> None:
        """Set the parameters to their half-precision values."""
        _close(self._masters)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Set all parameters to their master weights inside the context."""
        closed = [master for master in self._masters if not master.is_open]
        _open(closed)
        try:
            yield
        finally:
            _close(closed)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Close the master weights after the step of an optimizer. The strategy opens them after its backward."""
        try:
            yield
        finally:
            self.close()

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Let these optimizers use the master weights if user code steps them in the middle of a training step.

        After the step, the forward continues in half precision.
        """
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self.open()))
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self.close()))

    def release_parameters(self) -> None:
        """Do nothing, because master weights belong to the parameters themselves."""

    def take_parameters(self, placeholders: Mapping[int, Tensor]) -> None:
        """Drop the master weights of parameters that have left this rank; see :class:`Follower`."""
        self._masters = [master for master in self._masters if id(master.parameter) not in placeholders]

    def remove(self) -> None:
        """Convert the module back to float32, without rounding the trained values."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _open(self._masters)
        self._masters.clear()
        with moving(self._module):
            self._module.float()  # buffers, and placeholders for parameters of other stages


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
    """The replacement of :class:`MasterWeights` if optimizers work on the parameters themselves."""

    opened = step = nullcontext

    def _nothing(self, *_: Any) -> None:
        pass

    to = open = close = follow = release_parameters = take_parameters = remove = _nothing

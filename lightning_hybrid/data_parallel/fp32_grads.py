"""Accumulation in float32 of the gradients of half-precision parameters.

`GradientSync` calls it if the setting `float32_gradients` is on, for parameters in half precision
(``precision="bf16-true"`` or ``"16-true"``). Autograd accumulates in the dtype of the parameter unless `grad_dtype` is
set, and optimizers accept only that dtype, so the gradients are converted back at the end.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Float32Gradients:
    """A switch between float32 gradients, in which microbatches add up, and gradients in the dtype of the parameter.

    ::

        begin()     .grad will be float32            each backward adds its half-precision gradient to it
        end()       .grad has its parameter's dtype  rounded once

    In bfloat16, 256 + 1 is 256, so later gradients would be lost. With master weights, :meth:`end` is called only at
    the end of a run: optimizers then work on float32 parameters, so gradients are never rounded.

    Args:
        parameters: The parameters. Only those in half precision are affected.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        half = {id(each): each for each in parameters if each.is_floating_point() and each.element_size() < 4}
        self._parameters = list(half.values())
        self._is_float32 = False

    def begin(self) -> None:
        """Accumulate gradients in float32 from now on. Does nothing if they are in float32 already."""
        self._switch(float32=True)

    def end(self) -> None:
        """Round the final gradients to the dtype of their parameters."""
        self._switch(float32=False)

    @torch.no_grad()
    def _switch(self, *, float32: bool) -> None:
        if float32 == self._is_float32:
            return
        self._is_float32 = float32
        for parameter in self._parameters:
            grad_dtype = torch.float32 if float32 else parameter.dtype
            gradient = parameter.grad
            parameter.grad = None
            parameter.grad_dtype = grad_dtype
            if gradient is not None:
                parameter.grad = gradient.to(grad_dtype)

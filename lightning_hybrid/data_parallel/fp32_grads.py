"""Accumulation in float32 of the gradients of half-precision parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Float32Gradients:
    """Accumulates and reduces gradients in float32; optimizers receive them in the dtype of their parameter.

    ::

        begin()     .grad will be float32            each backward adds its half-precision gradient to it
        end()       .grad has its parameter's dtype  rounded once

    In bfloat16, 256 + 1 is 256, so later gradients would be lost.

    Args:
        parameters: The parameters. Only those in half precision are affected.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        half = {id(each): each for each in parameters if each.is_floating_point() and each.element_size() < 4}
        self._parameters = list(half.values())
        self._is_float32 = False

    def begin(self) -> None:
        """Accumulate gradients in float32 from now on."""
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

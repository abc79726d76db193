"""Gradients of parameters in half precision, added up in float32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Float32Gradients:
    """Gradients are float32 while microbatches add to them and while they are reduced; optimizers get their own dtype.

    ::

        begin()     .grad will be float32        each backward adds what it has, in half precision, to it
        end()       .grad is as its parameter    rounded once

    In bfloat16, 256 + 1 is 256: what comes late is lost.

    Args:
        parameters: The parameters; those in half precision take part.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        half = {id(each): each for each in parameters if each.is_floating_point() and each.element_size() < 4}
        self._parameters = list(half.values())
        self._is_float32 = False

    def begin(self) -> None:
        """Gradients are added up from here on."""
        self._switch(float32=True)

    def end(self) -> None:
        """They are final."""
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

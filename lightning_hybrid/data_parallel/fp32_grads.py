"""Gradients of parameters in half precision, added up in float32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Float32Gradients"]


class Float32Gradients:
    """While micro-batches add to them, and while they travel, gradients are float32; optimizers get what they expect.

    ::

        begin()     .grad will be float32        each backward adds what it has, in half precision, to it
        end()       .grad is as its parameter    rounded once

    In bfloat16, 256 + 1 is 256: what comes late is lost.

    Args:
        parameters: The parameters; those in half precision take part.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        every = {id(each): each for each in parameters if each.is_floating_point() and each.element_size() < 4}
        self._parameters = list(every.values())
        self._has_begun = False

    def begin(self) -> None:
        """Gradients are added up from here on."""
        if not self._has_begun:
            self._become(torch.float32)
        self._has_begun = True

    def end(self) -> None:
        """They are final."""
        if self._has_begun:
            self._become(None)
        self._has_begun = False

    @torch.no_grad()
    def _become(self, dtype: torch.dtype | None) -> None:
        for parameter in self._parameters:
            wanted = dtype or parameter.dtype
            gradient = parameter.grad
            parameter.grad = None
            parameter.grad_dtype = wanted
            if gradient is not None:
                parameter.grad = gradient.to(wanted)

"""Single random numbers have values where tensors have none: streams of layers are made of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.pipeline_parallel.frame.fake_tensors import FakeTensor

#: Inside, no mode sees what operations do, and tensors have values.
without_modes: Any
try:
    from torch.utils._python_dispatch import _disable_current_modes as without_modes
except ImportError:  # then a step is run with numbers
    without_modes = nullcontext

_READING = frozenset({torch.equal, Tensor.__int__, Tensor.item})


class RealDraws(TorchFunctionMode):
    """While this is entered, a number that is drawn alone has a value, and so has what is read of such tensors.

    Numbers that ranks of a group have in common decide about the streams of their layers; a step on shapes would end
    there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A call."""
        kwargs = kwargs or {}
        if self._has_values(func, args, kwargs):
            with without_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _has_values(func: Any, args: Any, kwargs: Any) -> bool:
        if func is torch.randint:
            return () in (*args, kwargs.get("size"))
        return func in _READING and not any(isinstance(leaf, FakeTensor) for leaf in flatten(args)[0])

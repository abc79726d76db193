"""What a step computes and sends, counted operation by operation on tensors without numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.distributed.pytree import flatten

Mode: Any
try:
    from torch.utils._python_dispatch import TorchDispatchMode as Mode
except ImportError:
    Mode = object
FLOPS: dict[Any, Callable[..., int]]
try:
    from torch.utils.flop_counter import flop_registry as FLOPS
except ImportError:
    FLOPS = {}

_FUSED_ATTENTION = "_scaled_dot_product_flash_attention"
# The share of a tensor that a rank of a ring of n sends, and its hops, in units of (n - 1) / n and n - 1.
_COLLECTIVES = {"allreduce_": 2, "_allgather_base_": 1, "_reduce_scatter_base_": 1}


@dataclass(frozen=True)
class Operation:
    """One operation of a forward.

    Attributes:
        flops: Of products of matrices and convolutions: two for each multiplication.
        bytes: Of tensors that it reads and writes.
        is_kept: Whether selective recomputation saves its result.
    """

    flops: float
    bytes: float
    is_kept: bool


@dataclass(frozen=True)
class Message:
    """One collective among the ranks that share a layer.

    Attributes:
        bytes: Of the full tensor.
        passes: How often a ring sends it: 2 for a sum, 1 to gather or to reduce-scatter.
    """

    bytes: float
    passes: int


class OperationCounter:
    """Records the operations of a step, by the label of the place where they are called.

    Args:
        place: Says where the step is.

    Attributes:
        operations: In order, by label.
        messages: In order, by label.
    """

    def __init__(self, place: Callable[[], Hashable]) -> None:
        self._place = place
        self.operations: dict[Hashable, list[Operation]] = defaultdict(list)
        self.messages: dict[Hashable, list[Message]] = defaultdict(list)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter it around the step."""
        if Mode is object:
            raise ValueError(f"torch {torch.__version__} does not let operations be counted; measure them instead.")
        with _CountingMode(self._record):
            yield

    def _record(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        namespace, _, name = function._schema.name.partition("::")
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if namespace == "c10d":
            if name in _COLLECTIVES:
                largest = max(tensor.nbytes for tensor in tensors)
                self.messages[self._place()].append(Message(largest, _COLLECTIVES[name]))
        elif not function.is_view:
            made = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
            moved = sum(tensor.nbytes for tensor in (*tensors, *made))
            flops = _count_flops(function, args, kwargs, result)
            is_kept = flops > 0 and name not in ("bmm", "baddbmm")
            if moved:
                self.operations[self._place()].append(Operation(flops, moved, is_kept))


def _count_flops(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    packet = function.overloadpacket
    if packet not in FLOPS and function._schema.name.startswith(f"aten::{_FUSED_ATTENTION}"):
        packet = getattr(torch.ops.aten, _FUSED_ATTENTION)  # the kernel of the CPU
    return FLOPS[packet](*args, **kwargs, out_val=result) if packet in FLOPS else 0


class _CountingMode(Mode):  # type: ignore[misc]
    def __init__(self, record: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._record(function, args, kwargs or {}, result)
        return result

"""What one run of the user's step does around the units: its calls in order, and which result is made from which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.distributed.pytree import TreeSpec
from lightning_hybrid.pipeline_parallel.frame.decisions import Decisions


class Value(NamedTuple):
    """The name of a tensor that a call made: the same on every rank, as the calls are.

    Attributes:
        call: The number of the call.
        leaf: The position among the leaves of what the call returned. Far beyond these come tensors that it wrote.
    """

    call: int
    leaf: int


class Argument(NamedTuple):
    """A leaf of what a call returned that is one of its arguments itself, as it is after writing in place."""

    position: int


@dataclass(frozen=True, slots=True)
class AbsentTensor:
    """What an absent value looks like.

    Attributes:
        tensor: A fake tensor: shape, strides, dtype and device, without values.
    """

    tensor: Tensor


@dataclass(slots=True)
class Call:
    """One call of a torch function, of a leaf module, or of a unit.

    Attributes:
        function: What is called: a function or a leaf module; ``None`` for a unit.
        unit: The position of the unit; ``None`` for anything else.
        name: For messages: the function's, or the module's dotted one.
        where: The line of the user's code, as ``file:line``.
        operands: The absent values that it needs, each once.
        parameters: The names of the parameters outside of units that it needs.
        outputs: The leaves of what it returns: :class:`AbsentTensor`, :class:`Argument`, or a value that is no tensor.
            Nothing where no operand is absent: then it is computed everywhere.
        spec: The tree of what it returns.
        is_absent: Whether its results depend on parameters or units.
        draws: Whether it draws random numbers.
        old: Values that it changes in place, under the names they had before; with the names they have afterwards.
        written: Tensors that are on every rank (buffers, states of metrics), and that it writes: their positions among
            the arguments, with the names that they have afterwards.
        is_in_place: Whether what it writes has to be written wherever it is needed, because it cannot be sent.
        counts: Such tensors that a call without absent operands writes, by their positions among the arguments: every
            stage does.
        is_effect: Whether it does something to its operands that is no value (a hook on a gradient).
        is_everywhere: Whether every stage has to make it, because it writes a parameter that all of them have.
        states: Tensors of the module (buffers, attributes) among its arguments, by their identities.
    """

    function: Callable[..., Any] | None
    unit: int | None
    name: str
    where: str
    operands: tuple[Value, ...] = ()
    parameters: frozenset[str] = frozenset()
    outputs: list[Any] = field(default_factory=list)
    spec: TreeSpec | None = None
    is_absent: bool = False
    draws: bool = False
    old: dict[Value, Value] = field(default_factory=dict)
    written: dict[int, Value] = field(default_factory=dict)
    is_in_place: bool = False
    counts: tuple[int, ...] = ()
    is_effect: bool = False
    is_everywhere: bool = False
    states: tuple[int, ...] = ()

    def returns(self, value: Value) -> bool:
        """Whether a value is among what the call returns, and not only something that it wrote."""
        return value.leaf < len(self.outputs)

    def __str__(self) -> str:
        """For messages."""
        return f"{self.name} at {self.where}"


@dataclass(slots=True)
class Graph:
    """What a step does around its units.

    Attributes:
        calls: In the order in which the step makes them.
        wanted: The values that the step returns, logs or keeps, and those that it needs for what could not be followed.
        decisions: What the user's code read from the batch.
        state_writes: Tensors of the module that the step writes with absent values, or replaces by such, by their
            identities; with what the last of them is.
        needed: What needed the number of an absent value; ``None`` if the step was followed to its end.
    """

    calls: list[Call] = field(default_factory=list)
    wanted: list[Value] = field(default_factory=list)
    decisions: Decisions = field(default_factory=lambda: Decisions({}, {}))
    state_writes: dict[int, Value] = field(default_factory=dict)
    needed: str | None = None


def function_name(function: Callable[..., Any]) -> str:
    """The name of a torch function, for messages."""
    name = getattr(function, "__name__", repr(function))
    of_getter = getattr(getattr(function, "__self__", None), "__name__", name)
    return str(of_getter if name == "__get__" else name)


def getters(*names: str) -> frozenset[Callable[..., Any]]:
    """What the attributes of tensors of these names call, where this version of torch has them."""
    found: list[Any] = [getattr(Tensor, name, None) for name in names]
    return frozenset(each.__get__ for each in found if hasattr(each, "__get__") and not callable(each))


#: What only looks at a tensor's shape, dtype or place: too frequent to be followed, and the same for an absent one.
METADATA: frozenset[Callable[..., Any]] = getters(
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "names", "itemsize"),
    *("is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested", "_version"),
    *("nbytes", "is_xla", "is_mkldnn", "is_vulkan", "is_ipu", "is_maia", "is_mtia", "is_sparse_csr", "_base"),
) | frozenset(
    {
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.element_size, Tensor.is_signed),
        *(Tensor.get_device, Tensor.storage_offset, Tensor.__hash__, Tensor.is_inference),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_grad_enabled),
    }
)

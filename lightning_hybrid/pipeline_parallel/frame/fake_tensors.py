"""Fake tensors of a trace, and runs on zeros for code that reads values of fake tensors.

A fake tensor (torch's `FakeTensor`) has a shape, strides, a dtype and a device, but no values. In a trace, it replaces
a tensor whose values only some stages have. :class:`Discovery` uses this file in traces. `pipeline_parallel.chain` and
`tuning.dry_run` use the fake mode alone. Code in a layer may read values, for example of a mask, where torch raises an
error; :func:`run_on_zeros` then runs the layer with zeros, so that the trace can continue.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.modes import FunctionMode
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.distributed.replaced import Preserved, replaced_attributes
from lightning_hybrid.distributed.watch.watched_thread import READING
from lightning_hybrid.pipeline_parallel.frame.graph import users_line
from lightning_hybrid.pipeline_parallel.frame.operators import Operators, Seen, memory_of
from lightning_hybrid.pipeline_parallel.frame.stage_states import Contents
from lightning_hybrid.torch_internals import (
    FAKE_TENSOR_LOGGER,
    GROUPED_PRODUCT,
    PARAMETER_MARK,
    FakeTensor,
    FakeTensorMode,
    without_dispatch_modes,
)


class AbsentValueError(WrongUseError):
    """The values of a tensor are used on a rank that does not have them."""


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode for fake tensors. No operator can use these tensors after their use has ended.

    Attributes:
        is_over: True after the step has been traced; in :class:`CodeBefore`, from the call of the layers on. It is
            False at first, and the user of the mode sets it.
    """

    is_over = False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on tensors, at least one of which is fake.

        Raises:
            AbsentValueError: If `is_over` is True.
        """
        if self.is_over:
            raise AbsentValueError(absent_text(f"`{func.overloadpacket.__name__}` at {users_line()}"))
        if func is _GROUPED_PRODUCT:
            shape, dtype = _grouped_shape(*args, **(kwargs or {}))
            return super().dispatch(torch.ops.aten.new_empty.default, types, (args[0], shape), {"dtype": dtype})
        return super().dispatch(func, types, args, kwargs)


_GROUPED_PRODUCT = getattr(getattr(torch.ops.aten, GROUPED_PRODUCT, None), "default", None)


def _grouped_shape(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> tuple[list[int], torch.dtype]:
    """Return the shape and dtype of a matrix product in groups; the arguments are those of `torch._grouped_mm`."""
    shape = [a.shape[-2], b.shape[-1]]
    if a.ndim == b.ndim:
        shape.insert(0, a.shape[0] if offs is None else len(offs))
    return shape, out_dtype or a.dtype


def fake_mode() -> FakeMode:
    """Return a mode for fake tensors, in which operators also accept tensors with values."""
    return FakeMode(allow_non_fake_inputs=True)


_READING = frozenset({torch.equal, Tensor.__int__, Tensor.item})


def with_single_numbers() -> FunctionMode:
    """Return a mode, for use in a fake mode, in which a single number of `torch.randint` has a value that can be read.

    `tuning.dry_run` enters it. Ranks of a group draw common numbers to seed the random streams of their layers. With a
    fake tensor, a dry run of a step would end there. `torch.equal`, `int` and `item` also work for other tensors that
    have values.
    """
    return FunctionMode(_call_with_values)


def _call_with_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Make a call; without modes if it draws a single number or reads values of tensors that are not fake."""
    is_single = func is torch.randint and () in (*args, kwargs.get("size"))
    if is_single or (func in _READING and not any(isinstance(leaf, FakeTensor) for leaf in flatten(args)[0])):
        with without_dispatch_modes():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def fake_like(mode: Any, tensor: Tensor, device: torch.device) -> Tensor:
    """Return a fake tensor with the shape, strides and dtype of a tensor, which may have no values on this rank.

    It requires no gradient.

    It is built without an operator: in the fake mode, an operator takes twenty times as long for each parameter.

    Args:
        mode: The fake mode.
        tensor: The tensor with the shape, strides and dtype.
        device: The device that the fake tensor reports.
    """
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, empty, device)


def as_parameter(fake: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """Turn a fake tensor into an `nn.Parameter` in place, without an operator, and return it.

    The class `nn.Parameter` does the same with tensors of other classes.
    """
    fake.requires_grad_(requires_grad)
    setattr(fake, PARAMETER_MARK, True)
    assert isinstance(fake, nn.Parameter)
    return fake


def is_whole(tensor: Tensor) -> bool:
    """Return True if a tensor has integers or booleans, as lengths and masks do."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def absent_text(what: str) -> str:
    """Return the error message for code that uses values of a tensor on a rank that does not have them.

    Args:
        what: The code that uses the values.
    """
    return (
        f"{what} uses a tensor from another pipeline stage. The tensor was not used at this point when the step was"
        " traced for a batch with the same shapes, or it was hidden in an object. Pass the tensor itself as an"
        " argument, or set HybridStrategy(dynamic_shapes=True), which traces every step. [LH416]"
    )


def collect_new() -> None:
    """Free cycles of objects that were created since :func:`~.collector.without_collector` was entered.

    Otherwise, tensors in such cycles would count as tensors that the user's code still holds.

    It waits while a watcher reads the stack of this thread, because the watcher then keeps variables of finished calls.
    """
    with READING:
        gc.collect(0)  # new objects are young


def without_torchs_errors() -> AbstractContextManager[None]:
    """Keep torch from logging that an operator refuses fake tensors while entered: the operator raises an error too."""
    return replaced_attributes(logging.getLogger(FAKE_TENSOR_LOGGER), disabled=True)


def run_on_zeros(
    modules: Iterable[nn.Module],
    fakes: list[Any],
    run: Callable[[list[Any]], Any],
    operators: Operators,
    fake: Callable[[Tensor], Tensor],
    objects: Contents,
    known: Mapping[int, Tensor],
    *,
    fill: Callable[..., Tensor] = torch.zeros,
    keeps: Collection[int] = (),
) -> tuple[Any, Seen]:
    """Return the result of a unit or function that reads values: run its code on zeros of the same shapes.

    Operands that every stage has keep their values, because zeros may be invalid as lengths or indices.

    Errors of the user's code are raised here as in one process. Objects among the arguments, such as a key-value cache,
    still contain tensors from the previous attempt with fake tensors: these are removed before the run, and zeros are
    replaced by fake tensors after the run.

    Args:
        modules: The modules of the unit, with fake parameters, buffers and attributes, which have values during the
            run; none for a function.
        fakes: The leaves of the arguments, with a fake tensor for each tensor.
        run: Makes the call; it takes the leaves of the arguments.
        operators: Records the effects of the operators.
        fake: Returns a fake tensor that looks like a tensor with values.
        objects: The contents of objects among the arguments before the first attempt.
        known: Copies of the operands that have values, by the `id()` of their fake tensors.
        fill: Makes the values of the other operands, and of parameters, buffers and attributes, from a shape, as
            `torch.zeros` does.
        keeps: The positions of the leaves of the result that keep their values.

    Returns:
        The result, with fake tensors and arguments as leaves; and the effects of the operators on the fake tensors.
        `Seen.known` has the integer leaves of the result that were computed only from known integer operands, by their
        position.
    """
    zeros: dict[int, tuple[Tensor, Tensor]] = {}

    def zero(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        if id(value) not in zeros:
            made = known.get(id(value))
            made = fill(value.shape, dtype=value.dtype, device=value.device) if made is None else made
            zeros[id(value)] = value, nn.Parameter(made) if isinstance(value, nn.Parameter) else made
        return zeros[id(value)][1]

    parts = list(modules)
    objects.put_back()
    with Preserved(parts, containers=[part._parameters for part in parts]):
        for table in (table for part in parts for table in (vars(part), part._parameters, part._buffers)):
            table.update({name: zero(value) for name, value in table.items()})
        given = [zero(leaf) for leaf in fakes]
        lengths = [made for value, made in zeros.values() if id(value) in known and is_whole(made)]
        with torch.no_grad(), operators.watch(lengths) as seen:
            outputs, spec = flatten(run(given))
    fake_of = {id(made): value for value, made in zeros.values()}
    seen.written |= {memory_of(value) for value, made in zeros.values() if memory_of(made) in seen.written}

    def without_values(made: Tensor) -> Tensor:
        return made if isinstance(made, FakeTensor) else fake_of[id(made)] if id(made) in fake_of else fake(made)

    objects.replace_new(without_values)
    arguments = set(map(id, given))
    seen.known = {
        position: leaf
        for position, leaf in enumerate(outputs)
        if isinstance(leaf, Tensor) and is_whole(leaf) and id(leaf) not in arguments and memory_of(leaf) in seen.known
    }
    outputs = [
        without_values(leaf) if isinstance(leaf, Tensor) and position not in keeps else leaf
        for position, leaf in enumerate(outputs)
    ]
    return unflatten(outputs, spec), seen

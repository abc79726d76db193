"""The graph of a traced step: the calls around its units in order, and the earlier results that each call uses.

A *unit* is a module that runs on exactly one stage, such as a pipelined layer. A tensor is *absent* if it depends on
parameters or on the result of a unit: only some stages have its values, and the trace has a fake tensor. A tensor is
*real* if every stage has its values. A call is absent if its result is. A *leaf module* is a module around the units
whose parameters are sharded over tensor-parallel ranks; its call counts as one call of a function.

:class:`Discovery` makes the graph in a trace, with the same calls and names on all ranks of a model group.
:func:`find_routes` and :func:`make_part` read it to plan the step, and :class:`FramePlan` keeps it, because later steps
are compared with it.
"""

from __future__ import annotations

import inspect
import sysconfig
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import TreeSpec, flatten, is_unchanged
from lightning_hybrid.distributed.taps import Taps
from lightning_hybrid.distributed.tensor_metadata import getters
from lightning_hybrid.pipeline_parallel.frame.decisions import Decisions, is_in_place
from lightning_hybrid.pipeline_parallel.frame.unit_attributes import KeptAttribute
from lightning_hybrid.torch_internals import PACK_SEQUENCE, PAD_SEQUENCE, is_view

_OwnBackward: Any = torch.autograd.function.BackwardCFunction
# Files whose code only forwards calls of the user's code.
_NOT_THE_USERS = (
    f"{Path(torch.__file__).parent}/",
    f"{Path(__file__).parent.parent.parent}/",
    str(Path(sysconfig.get_paths()["stdlib"]) / "contextlib"),
)

# Containers that a unit could fill in addition to returning a result.
_LISTS = frozenset({list, dict, defaultdict, OrderedDict})


class Value(NamedTuple):
    """The name of an absent tensor that a call made or wrote.

    All ranks make the same calls, so the names are equal on all ranks.

    Attributes:
        call: The number of the call.
        leaf: The position among the leaves of the result. Much larger numbers name tensors that the call wrote in
            place.
    """

    call: int
    leaf: int


def call_unit(call: Call, unit: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a unit, and raise an error if it changes a list or a dictionary among its arguments.

    Traces and steps call it. Other stages have their own lists and dictionaries, and would not see the change.

    Args:
        call: The call, for the error message.
        unit: The `forward` of the unit.
        args: The arguments of the call.
        kwargs: The keyword arguments of the call.

    Raises:
        WrongUseError: If the unit changes one of them.
    """
    if _LISTS.isdisjoint(map(type, (*args, *kwargs.values()))):
        return unit(*args, **kwargs)
    leaves, spec = flatten((args, kwargs))
    result = unit(*args, **kwargs)
    if not is_unchanged((args, kwargs), leaves, spec):
        raise WrongUseError(
            f"{call} changes a list or a dictionary that it receives, but other stages do not see the change. Return"
            " the new value from the layer instead. [LH450]"
        )
    return result


class Argument(NamedTuple):
    """The position of an argument that a call returns as a leaf of its result, such as a tensor it writes in place."""

    position: int


@dataclass(frozen=True, slots=True)
class AbsentTensor:
    """The description of an absent tensor.

    Attributes:
        tensor: A fake tensor with its shape, strides, dtype and device.
    """

    tensor: Tensor


@dataclass(slots=True)
class Call:
    """One call of a torch function, of a leaf module, or of a unit.

    Attributes:
        function: The function or leaf module that is called; ``None`` for a unit.
        unit: The position of the unit; ``None`` for other calls.
        name: The name of the function, or the dotted name of the module, for messages.
        where: The line of the user's code, as ``file:line``.
        operands: The names of the absent tensors that the call needs, each once; after :meth:`Graph.read`, also of the
            parameters that not every stage has.
        parameters: The names of the parameters among the arguments, and of the parameters of a leaf module. A unit's
            own parameters are not included.
        has_data: True if an absent call has real tensors among its arguments.
        outputs: The leaves of the result: :class:`AbsentTensor`, :class:`Argument`, a plain value, or a real tensor of
            lengths. Empty if the call is not absent: every stage makes it.
        spec: The tree of the result.
        is_absent: True if the result depends on parameters or units.
        draws: True if the call drew random numbers in the trace.
        draws_elsewhere: True if a unit draws random numbers from numpy or `random`.
        old: Absent tensors that the call changes in place: the name of each before the call, with its name after the
            call.
        written: Real tensors (buffers, states of metrics) that an absent call writes: the position of each among the
            arguments, with its name after the call.
        is_in_place: True if each stage that needs the written tensors has to make the call, because they cannot be
            sent.
        counts: The `id()` of the module's tensors that the call writes, if it is not absent, such as a step counter.
            Every stage writes them.
        fills: The `id()` of the module's tensors that the call writes, if it is absent.
        is_effect: True if the call returns no new tensor, but does something to its operands (a hook on a gradient).
        rewritten: The names of the parameters that the call writes, on every stage that has them; ``""`` for a
            parameter without a name in the module.
        computes_with: The names of the parameters whose values the call reads. A view of a parameter reads no values.
        has_batch: True if an absent call has real tensors among its arguments that depend on the batch.
        is_made_again: True if `torch.utils.checkpoint` recomputes the call in backward.
        states: The `id()` of the module's tensors (buffers, attributes) among the arguments.
        inside: The modules whose `forward` makes the call, the innermost first; empty if `states` is empty.
        taps: Hooks inside a unit whose arguments are returned with the result of the unit, so that every stage can call
            the hooks; ``None`` if there are none.
        aliases: Positions of leaves in the result that are the same tensor as an earlier leaf, with the position of
            that leaf.
    """

    function: Callable[..., Any] | None
    unit: int | None
    name: str
    where: str
    operands: tuple[Value, ...] = ()
    parameters: frozenset[str] = frozenset()
    has_data: bool = False
    outputs: list[Any] = field(default_factory=list)
    spec: TreeSpec | None = None
    is_absent: bool = False
    draws: bool = False
    draws_elsewhere: bool = False
    old: dict[Value, Value] = field(default_factory=dict)
    written: dict[int, Value] = field(default_factory=dict)
    is_in_place: bool = False
    counts: tuple[int, ...] = ()
    fills: tuple[int, ...] = ()
    is_effect: bool = False
    rewritten: frozenset[str] = frozenset()
    computes_with: frozenset[str] = frozenset()
    has_batch: bool = False
    is_made_again: bool = False
    states: tuple[int, ...] = ()
    inside: tuple[nn.Module, ...] = ()
    taps: Taps | None = None
    aliases: dict[int, int] = field(default_factory=dict)

    def returns(self, value: Value) -> bool:
        """Return True if a value is a leaf of the result, and not only a tensor that the call wrote."""
        return value.leaf < len(self.outputs)

    def num_bytes(self, value: Value) -> int:
        """Return the size of a value in bytes; 0 if the call does not return it as an absent tensor."""
        leaf = self.outputs[value.leaf] if self.returns(value) else None
        return leaf.tensor.numel() * leaf.tensor.element_size() if isinstance(leaf, AbsentTensor) else 0

    def __str__(self) -> str:
        """Describe the call for messages."""
        return f"{self.name} at {self.where}"


@dataclass(slots=True)
class Graph:
    """The calls of a step around its units.

    Attributes:
        calls: The calls in the order in which the step makes them. The position of a call is its number.
        wanted: The names of the absent tensors that the last stage needs at the end of the trace: the user's code still
            holds them, or the call that ended the trace needs them. Parameters themselves are not included.
        decisions: The values that the user's code read from real tensors and from the batch; see `decisions.py`.
        state_writes: Tensors of the module, by `id()`, into which the step writes values of absent tensors, or which it
            replaces by absent tensors; with the name of the last value.
        assigned: The attributes and buffers to which the step assigns absent tensors, each as its owner and its name.
        kept: If the trace ended early or failed, the attributes in which units store tensors.
        needed: The call that needed the value of an absent tensor, as text, where the trace ended; ``None`` if the
            trace reached the end of the step. The call itself is not in `calls`.
        needed_in: The modules whose `forward` ran at the end of the trace, the innermost first.
        states: The tensors of the module that are arguments of calls, by `id()`.
        written_inputs: The positions of the tensors that the step writes among the leaves of its arguments.
        changed: The `id()` of containers and arrays of the module that the step changes.
        places: The paths of the attributes and buffers that hold these containers and arrays, or module tensors that
            the step writes; by the `id()` of the object.
        invariant: The numbers of calls that do not depend on the batch, and so probably have the same result for each
            microbatch.
        reads: Calls that return one parameter each, for parameters that not every stage has; see :meth:`read`. Their
            numbers follow the numbers of `calls`. The user's code makes no such calls.
    """

    calls: list[Call] = field(default_factory=list)
    wanted: list[Value] = field(default_factory=list)
    decisions: Decisions = field(default_factory=lambda: Decisions({}, {}))
    state_writes: dict[int, Value] = field(default_factory=dict)
    assigned: list[tuple[Any, str]] = field(default_factory=list)
    kept: list[KeptAttribute] = field(default_factory=list)
    needed: str | None = None
    needed_in: tuple[nn.Module, ...] = ()
    states: dict[int, Tensor] = field(default_factory=dict)
    written_inputs: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    places: dict[int, list[str]] = field(default_factory=dict)
    invariant: frozenset[int] = frozenset()

    def texts(self) -> list[str]:
        """Return the calls, and the values that calls and the end of the step use, as texts that all ranks compare."""
        used = [f"{call}, which uses {self._names(call.operands)}" for call in self.calls if call.operands]
        return [*map(str, self.calls), *used, f"the end of the step, which keeps {self._names(self.wanted)}"]

    def _names(self, values: Iterable[Value]) -> str:
        """Return the names of values for messages: the call and the leaf of each."""
        return ", ".join(f"{self.calls[value.call]} [{value.leaf}]" for value in values)

    reads: list[Call] = field(default_factory=list)

    def read(self, names: Collection[str]) -> None:
        """Add a read call for each parameter, and make its result an operand of the calls that use the parameter.

        Then parameters are sent between stages as other values are. A second call replaces the reads of the first call.

        Args:
            names: The names of the parameters; names that no call uses are ignored.
        """
        used = sorted({name for call in self.calls for name in call.parameters if name in names})
        self.reads = [Call(None, None, repr(name), "", parameters=frozenset((name,)), is_absent=True) for name in used]
        values = {name: Value(len(self.calls) + position, 0) for position, name in enumerate(used)}
        for call in self.calls:
            made = [value for value in call.operands if value.call < len(self.calls)]
            call.operands = (*made, *(values[name] for name in sorted(call.parameters & values.keys())))

    @property
    def all_calls(self) -> list[Call]:
        """Return the calls and the reads, by their numbers."""
        return [*self.calls, *self.reads]

    def made_of_parameters(self) -> dict[int, frozenset[str]]:
        """Return the numbers of reads, and of calls that depend only on reads, with the names of their parameters."""
        made_of = {len(self.calls) + position: read.parameters for position, read in enumerate(self.reads)}
        for number, call in enumerate(self.calls if self.reads else ()):
            if call.unit is None and call.operands and not call.has_data:
                operands = [made_of.get(value.call) for value in call.operands]
                if None not in operands:
                    made_of[number] = frozenset().union(*filter(None, operands))
        return made_of

    def parameter_of(self, value: Value) -> str | None:
        """Return the name of the parameter that a value is; ``None`` if the value is not the result of a read."""
        if value.call < len(self.calls):
            return None
        (name,) = self.reads[value.call - len(self.calls)].parameters
        return name


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a torch function, for messages."""
    name = getattr(function, "__name__", repr(function))
    of_getter = getattr(getattr(function, "__self__", None), "__name__", name)
    return str(of_getter if name == "__get__" else name)


def gives_back(call: Call, outputs: Sequence[Any], places: Mapping[int, int]) -> bool:
    """Return True if a call returned only its arguments, although the function does not work in place.

    With another batch, the same call may return new tensors: a layer may be skipped at random. If a call returns both
    new tensors and arguments (a mask), it is expected to return these arguments always; :func:`check_returned` checks
    this.

    Args:
        call: The call.
        outputs: The leaves of the result.
        places: The positions of the arguments, by `id()`.
    """
    tensors = [leaf for leaf in outputs if isinstance(leaf, Tensor)]
    return not is_in_place(call.function) and all(id(leaf) in places for leaf in tensors)


def check_backward(tensor: Tensor) -> None:
    """Raise an error if an absent tensor around the units has a backward.

    In a trace, calls with absent results are made with gradients off, so only a `torch.autograd.Function` can give a
    tensor a backward.

    Args:
        tensor: An absent tensor.

    Raises:
        WrongUseError: If the tensor has a backward.
    """
    try:
        function = tensor.grad_fn
    except RuntimeError:  # raised for a view whose base was written
        return
    if function is None or (is_view(tensor) and not isinstance(function, _OwnBackward)):
        return
    is_hook = type(function).__name__ == "BackwardHookFunctionBackward"
    what = "module's backward hook" if is_hook else "`torch.autograd.Function`"
    raise WrongUseError(
        f"A {what} was applied at {users_line()} outside the pipelined layers, so its backward cannot be split into"
        f" stages. {'Register it on a module inside' if is_hook else 'Call it inside'} one of these layers. [LH449]"
    )


def find_checkpoint() -> FrameType | None:
    """Return the frame of the innermost `torch.utils.checkpoint` call on the stack; ``None`` if there is none."""
    frame = inspect.currentframe()
    while frame is not None and not frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
        frame = frame.f_back
    while frame and frame.f_back and frame.f_back.f_code.co_filename == frame.f_code.co_filename:
        frame = frame.f_back
    return frame


def running_modules() -> tuple[nn.Module, ...]:
    """Return the modules whose `forward` is running, the innermost first."""
    modules, frame = list[nn.Module](), inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module):
            modules.append(module)
        frame = frame.f_back
    return tuple(modules)


def users_line() -> str:
    """Return the line of the user's code that is running, as ``file:line``."""
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


#: Functions whose results are detached from the autograd graph.
DETACHES = frozenset({torch.detach, torch.detach_, Tensor.detach, Tensor.detach_}) | getters("data")
#: The positions of leaves of the result that depend on lengths but not on values of sequences, by the function's name.
OF_LENGTHS: dict[str, tuple[int, ...]] = {PACK_SEQUENCE: (1,), PAD_SEQUENCE: (1,)}
#: Functions that compute derivatives.
DERIVATIVES = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
#: Functions that read values without an operator that has a tag for it.
READS = frozenset(
    {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__format__, Tensor.__contains__}
)
#: The most bytes of arguments and results that an invariant call may keep; larger calls are made for each microbatch.
MOST_KEPT = 2**24
#: Functions whose results let code write a tensor without a torch operator.
GIVES_MEMORY: frozenset[Callable[..., Any] | None] = frozenset(
    {
        *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__),
        *(Tensor.untyped_storage, Tensor.storage, Tensor.data_ptr),
    }
)
#: Functions that access the gradient of a tensor.
HOOKS: frozenset[Callable[..., Any] | None] = frozenset({Tensor.register_hook, Tensor.retain_grad})

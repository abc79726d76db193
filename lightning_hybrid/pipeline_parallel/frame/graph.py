"""What one run of the user's step does around the units: its calls in order, and which result is made from which."""

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
from lightning_hybrid.torch_internals import PACK_SEQUENCE, PAD_SEQUENCE, is_view

_OwnBackward: Any = torch.autograd.function.BackwardCFunction
# Code that only passes calls of the user's on.
_NOT_THE_USERS = (
    f"{Path(torch.__file__).parent}/",
    f"{Path(__file__).parent.parent.parent}/",
    str(Path(sysconfig.get_paths()["stdlib"]) / "contextlib"),
)

# What the user's code may fill beside what it returns.
_LISTS = frozenset({list, dict, defaultdict, OrderedDict})


class Value(NamedTuple):
    """The name of a tensor that a call made: the same on every rank, as the calls are.

    Attributes:
        call: The number of the call.
        leaf: The position among the leaves of what the call returned. Far beyond these come tensors that it wrote.
    """

    call: int
    leaf: int


def call_unit(call: Call, unit: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a unit, which must not change the lists and dictionaries that it is given: other stages have their own.

    Args:
        call: The call.
        unit: The `forward` of the unit.
        args: Its arguments.
        kwargs: Likewise.

    Raises:
        WrongUseError: If it does.
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
        parameters: The names of the parameters that it is given.
        has_data: Whether it needs tensors that are on every rank, beside these.
        outputs: The leaves of what it returns: :class:`AbsentTensor`, :class:`Argument`, or a value: what is no tensor,
            or lengths. Nothing where no operand is absent: then it is computed everywhere.
        spec: The tree of what it returns.
        is_absent: Whether its results depend on parameters or units.
        draws: Whether it draws random numbers.
        draws_elsewhere: Whether it draws some of numpy or `random`; only units are asked.
        old: Values that it changes in place, under the names they had before; with the names they have afterwards.
        written: Tensors that are on every rank (buffers, states of metrics), and that it writes: their positions among
            the arguments, with the names that they have afterwards.
        is_in_place: Whether what it writes has to be written wherever it is needed, because it cannot be sent.
        counts: Tensors of the module that a call without absent operands writes, by their identities: every stage does.
        fills: Those that one with absent operands writes.
        is_effect: Whether it does something to its operands that is no value (a hook on a gradient).
        rewritten: The names of the parameters that it writes, which every stage does that has them; ``""`` for one that
            the module does not name.
        computes_with: The names of the parameters whose memory it reads, if it does more than to make a view of it.
        has_batch: Whether it needs tensors that are on every rank and depend on the batch.
        is_made_again: Whether `torch.utils.checkpoint` makes it again in backward.
        states: Tensors of the module (buffers, attributes) among its arguments, by their identities.
        inside: The modules whose `forward` makes the call, the innermost one first, if there are such tensors.
        taps: Hooks inside a unit whose calls are returned beside its result, and made by every stage; ``None`` where
            there are none.
        aliases: Leaves of what it returns that are the same tensor as an earlier one, with that.
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
        """Whether a value is among what the call returns, and not only something that it wrote."""
        return value.leaf < len(self.outputs)

    def num_bytes(self, value: Value) -> int:
        """The size of a value that it returns."""
        leaf = self.outputs[value.leaf] if self.returns(value) else None
        return leaf.tensor.numel() * leaf.tensor.element_size() if isinstance(leaf, AbsentTensor) else 0

    def __str__(self) -> str:
        """For messages."""
        return f"{self.name} at {self.where}"


@dataclass(slots=True)
class Graph:
    """What a step does around its units.

    Attributes:
        calls: In the order in which the step makes them.
        wanted: The values that something still holds when the step is over, or cannot be followed any more; and those
            that are needed there.
        decisions: What the user's code read from the batch.
        state_writes: Tensors of the module that the step writes with absent values, or replaces by such, by their
            identities; with what the last of them is.
        assigned: The attributes and buffers to which the step assigns absent values, each as its owner and its name.
        needed: What needed the number of an absent value; ``None`` if the step was followed to its end.
        needed_in: The modules whose `forward` ran then, the innermost one first.
        states: The tensors of the module that are among the arguments of calls, by their identities.
        written_inputs: The positions of tensors among the leaves of the step's arguments that it writes.
        changed: Containers and arrays of the module that it changes, by their identities.
        places: The paths of the attributes and buffers that hold these, or tensors that it writes; by their identities.
        invariant: The calls that do not depend on the batch, and so are likely to make the same for each microbatch.
        reads: What gives the parameters that not every stage has, one for each; their numbers are behind those of the
            calls. The user's code makes no such calls.
    """

    calls: list[Call] = field(default_factory=list)
    wanted: list[Value] = field(default_factory=list)
    decisions: Decisions = field(default_factory=lambda: Decisions({}, {}))
    state_writes: dict[int, Value] = field(default_factory=dict)
    assigned: list[tuple[Any, str]] = field(default_factory=list)
    needed: str | None = None
    needed_in: tuple[nn.Module, ...] = ()
    states: dict[int, Tensor] = field(default_factory=dict)
    written_inputs: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    places: dict[int, list[str]] = field(default_factory=dict)
    invariant: frozenset[int] = frozenset()

    def texts(self) -> list[str]:
        """What must be the same on every rank, each as text: the calls, and what these and later stages use of them."""
        used = [f"{call}, which uses {self._names(call.operands)}" for call in self.calls if call.operands]
        return [*map(str, self.calls), *used, f"the end of the step, which keeps {self._names(self.wanted)}"]

    def _names(self, values: Iterable[Value]) -> str:
        return ", ".join(f"{self.calls[value.call]} [{value.leaf}]" for value in values)

    reads: list[Call] = field(default_factory=list)

    def read(self, names: Collection[str]) -> None:
        """Let parameters be values like any other: calls have them among their operands, and reads give them.

        It takes the place of an earlier call of this method.

        Args:
            names: Of the parameters; those that no call needs are left out.
        """
        used = sorted({name for call in self.calls for name in call.parameters if name in names})
        self.reads = [Call(None, None, repr(name), "", parameters=frozenset((name,)), is_absent=True) for name in used]
        values = {name: Value(len(self.calls) + position, 0) for position, name in enumerate(used)}
        for call in self.calls:
            made = [value for value in call.operands if value.call < len(self.calls)]
            call.operands = (*made, *(values[name] for name in sorted(call.parameters & values.keys())))

    @property
    def all_calls(self) -> list[Call]:
        """The calls and the reads, by their numbers."""
        return [*self.calls, *self.reads]

    def made_of_parameters(self) -> dict[int, frozenset[str]]:
        """The calls and reads that give nothing but parameters, and functions of these alone; with their names."""
        made_of = {len(self.calls) + position: read.parameters for position, read in enumerate(self.reads)}
        for number, call in enumerate(self.calls if self.reads else ()):
            if call.unit is None and call.operands and not call.has_data:
                operands = [made_of.get(value.call) for value in call.operands]
                if None not in operands:
                    made_of[number] = frozenset().union(*filter(None, operands))
        return made_of

    def parameter_of(self, value: Value) -> str | None:
        """The name of the parameter that a value is; ``None`` if it is something else."""
        if value.call < len(self.calls):
            return None
        (name,) = self.reads[value.call - len(self.calls)].parameters
        return name


def function_name(function: Callable[..., Any]) -> str:
    """The name of a torch function, for messages."""
    name = getattr(function, "__name__", repr(function))
    of_getter = getattr(getattr(function, "__self__", None), "__name__", name)
    return str(of_getter if name == "__get__" else name)


def gives_back(call: Call, outputs: Sequence[Any], places: Mapping[int, int]) -> bool:
    """Whether a call gave back nothing but arguments, though it might have made something of them.

    Where it made something else, arguments among it are what it only hands on (a mask); that it always does so is seen
    when it runs.

    Args:
        call: The call.
        outputs: The leaves of what it returned.
        places: The positions of its arguments, by their identities.
    """
    tensors = [leaf for leaf in outputs if isinstance(leaf, Tensor)]
    return not is_in_place(call.function) and all(id(leaf) in places for leaf in tensors)


def check_backward(tensor: Tensor) -> None:
    """Calls are made with gradients off, so only a `torch.autograd.Function` has put a backward on an absent tensor.

    Args:
        tensor: An absent one, around the units.

    Raises:
        WrongUseError: If it has.
    """
    try:
        function = tensor.grad_fn
    except RuntimeError:  # of a view that was written
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
    """The outermost call inside of `torch.utils.checkpoint` that what runs here is a part of."""
    frame = inspect.currentframe()
    while frame is not None and not frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
        frame = frame.f_back
    while frame and frame.f_back and frame.f_back.f_code.co_filename == frame.f_code.co_filename:
        frame = frame.f_back
    return frame


def running_modules() -> tuple[nn.Module, ...]:
    """The modules whose `forward` runs, the innermost one first."""
    modules, frame = list[nn.Module](), inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module):
            modules.append(module)
        frame = frame.f_back
    return tuple(modules)


def users_line() -> str:
    """The line of the user's code that runs, as ``file:line``."""
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


#: Results of these are cut off from the graph, whatever they are made from.
DETACHES = frozenset({torch.detach, torch.detach_, Tensor.detach, Tensor.detach_}) | getters("data")
#: The positions of results that are made of lengths alone, whatever the values are; by the names of functions.
OF_LENGTHS: dict[str, tuple[int, ...]] = {PACK_SEQUENCE: (1,), PAD_SEQUENCE: (1,)}
#: These differentiate.
DERIVATIVES = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
#: These read numbers without an operator that says so.
READS = frozenset(
    {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__format__, Tensor.__contains__}
)
#: Bytes of what a call reads and makes beyond which it is made for each microbatch, and not kept for the next one.
MOST_KEPT = 2**24
#: Through what these give, a tensor may be written without a trace.
GIVES_MEMORY: frozenset[Callable[..., Any] | None] = frozenset(
    {
        *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__),
        *(Tensor.untyped_storage, Tensor.storage, Tensor.data_ptr),
    }
)
#: These see the gradient of a tensor.
HOOKS: frozenset[Callable[..., Any] | None] = frozenset({Tensor.register_hook, Tensor.retain_grad})

"""The run of one stage's part of a step, according to its plan.

:meth:`FrameCut.run` enters a :class:`Running` around the user's step, for each microbatch and stage of this rank. A
*unit* is a module that runs on exactly one stage, such as a pipelined layer. The mode counts the calls of the code
around the units. It makes each call, or *answers* it: it returns the result in the plan, or tensors that have arrived
from the previous stage. The user's own code runs, not code that is generated from the plan, so a step that takes
another path than its plan is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import LEAF, flatten, unflatten
from lightning_hybrid.distributed.replaced import table_of
from lightning_hybrid.distributed.tensor_metadata import METADATA, getters
from lightning_hybrid.pipeline_parallel.frame.decisions import apply
from lightning_hybrid.pipeline_parallel.frame.graph import (
    AbsentTensor,
    Argument,
    Call,
    call_unit,
    function_name,
)
from lightning_hybrid.pipeline_parallel.frame.plan import Action, Part
from lightning_hybrid.pipeline_parallel.frame.step_mode import StepMode
from lightning_hybrid.pipeline_parallel.frame.unit_attributes import HiddenAttributes
from lightning_hybrid.pipeline_parallel.frame.writes import call_each, is_foreach
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder
from lightning_hybrid.torch_internals import CONTEXT_PREFIXES, DisableTorchFunction, FakeTensor, version_counter

# Beginnings of the names of functions that begin and end contexts.
_ENDS = (*CONTEXT_PREFIXES, "set_")
_DEVICE = getters("device")
# Types of results, other than tensors, that are kept: values that a call reads from its tensors.
_NUMBERS = frozenset({bool, int, float})
# Types of arguments that are compared with `==`.
_VALUES = frozenset(
    {
        *(type(None), bool, int, float, complex, str, type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)


class OtherPathError(Exception):
    """The step takes another path than in the trace. :meth:`FrameCut.run` turns it into a `PathChangedError`.

    ``args`` are the number of the first call that differs; a text for this call, or the position of its unit; and the
    function, module or unit position that is called there.
    """


class LateParameterError(Exception):
    """A call after the end of the trace uses a parameter of another stage; ``args`` are the parameter's placeholder.

    :meth:`FrameCut.run` turns it into an error with the parameter's name.
    """


class LateUnitError(Exception):
    """A unit is called after the last unit of the trace; ``args`` are its position."""


class Unwind(BaseException):
    """An exception that leaves the user's step once this stage has all tensors that later stages need.

    It is not an `Exception`, so that `except Exception` in the user's code does not catch it.
    """


class InvariantCalls:
    """Calls that have the same result for every microbatch of a step, so that they are made only once.

    Examples are positions, causal masks and rotary tables. Compilers call this loop-invariant code motion. The trace
    tells which calls may be invariant. Before a kept result is returned, the call is checked: it must have the same
    tensors, which no torch operator has written since, and equal values. Collectives do not count as operators:
    `tensor_bytes.tell_autograd` notes their writes. :class:`FrameCut` makes one object for each plan and batch, so all
    stages of a rank use it.

    Attributes:
        made: The calls that were made, by their numbers.
    """

    def __init__(self) -> None:
        self.made: dict[int, _Made] = {}

    def make(self, number: int, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call, and keep its result if a later check can tell that it is still valid.

        Args:
            number: The number of the call in the user's step.
            func: The function.
            args: The arguments of the call.
            kwargs: The keyword arguments of the call.

        Returns:
            The result.
        """
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        is_read = bool(given) and type(result) in _NUMBERS
        results = () if is_read else result if type(result) is tuple else (result,)
        tensors = [*results, *given]
        if all(map(_is_new_tensor, results)) and not any(each.is_inference() for each in tensors):
            is_flat = not kwargs and all(type(each) is Tensor or type(each) in _VALUES for each in args)
            versions = [(each, version_counter(each)) for each in tensors]
            self.made[number] = _Made(func, _copied(args), _copied(kwargs), is_flat, result, versions)
        return result


class _Made(NamedTuple):
    """A call that was made, with its result.

    Attributes:
        function: The function that was called.
        args: Its arguments.
        kwargs: Its keyword arguments.
        is_flat: True if the call has no keyword arguments, and all arguments are tensors or plain values.
        result: The result of the call.
        versions: The tensors among the arguments and results, each with its version after the call.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    is_flat: bool
    result: Any
    versions: list[tuple[Tensor, int]]

    def holds(self, func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Return True if a call would have the same result now."""
        if func is not self.function:
            return False
        for tensor, version in self.versions:
            if version_counter(tensor) != version or tensor.requires_grad:
                return False
        if self.is_flat and not kwargs and len(args) == len(self.args) and all(map(is_, args, self.args)):
            return True  # most often, all arguments are the same objects
        return _is_same_argument(args, self.args) and _is_same_argument(kwargs or {}, self.kwargs)


class Running(StepMode):
    """A mode that runs one stage's part of one step, without communication.

    Args:
        part: The work of the stage.
        inputs: The tensors from the previous stage, in the order of its `Part.sent`.
        parameters: The parameters `Part.parameters`, by name. Parameters of other stages are placeholders, which the
            mode replaces by received or fetched values in the arguments of calls.
        fetched: The values of parameters of later stages, by name.
        device: The device of this rank.
        seed: Seeds the generators for the call with a number.
        random: Returns a context for a unit that draws random numbers from numpy or `random`, by the number of the
            call.
        invariant: The invariant calls of the step; ``None`` if no results are kept.
        skipped: The numbers of calls that write parameters and that another microbatch makes.
        hidden: Attributes that are hidden from the code around the units.

    Attributes:
        number: The number of the next call.
        sent: The tensors for the next stage, in the order of `Part.sent`; ``None`` for tensors not computed yet.
        missing: The number of tensors for the next stage that are not computed yet.
    """

    def __init__(
        self,
        part: Part,
        inputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        fetched: Mapping[str, Tensor],
        device: torch.device,
        seed: Callable[[int], None],
        random: Callable[[int], AbstractContextManager[None]],
        invariant: InvariantCalls | None,
        skipped: Collection[int],
        hidden: HiddenAttributes,
    ) -> None:
        super().__init__()
        self._invariant, self._hidden = invariant, hidden
        self._made: Mapping[int, _Made] = {} if invariant is None else invariant.made
        self._device = device
        self._actions, self._inputs = part.without(skipped), inputs
        self._free_from, self._leaves_from, self._is_last = part.free_from, part.leaves_from, part.is_last
        self._draws, self._followed_to, self._is_guarded = part.draws, part.followed_to, part.is_guarded
        self._is_over = False
        self._seed, self._random = seed, random
        self.number = 0
        self.sent: list[Any] = [None] * len(part.sent)
        for source, target, changes in part.passed:
            self.sent[target] = inputs[source].clone() if changes else inputs[source]
        for name, target in part.read:
            # A copy, because the send may still be running when the optimizer or a hook writes the parameter.
            self.sent[target] = (fetched if name in part.fetched else parameters)[name].clone()
        self._arrived = {id(parameters[name]): inputs[source] for name, source in part.arrived}
        self._arrived |= {id(parameters[name]): fetched[name] for name in part.fetched}
        self.missing = len(part.sent) - len(part.passed) - len(part.read)
        self._is_left = False
        if self.missing == 0 and not self._is_last:
            self._free_from = self._leaves_from
        self._prepare(0)
        self._watched: Sequence[Tensor] = ()
        self._versions: list[int] = []

    def __enter__(self) -> Self:
        """Handle calls from here on, unless no further call has to be handled."""
        if not self._is_over:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop handling calls."""
        if not self._is_over:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Detect if calls after the last traced call write some tensors. Call it before the mode is entered.

        Args:
            tensors: The tensors.
        """
        self._watched = tensors
        self._followed_to = None

    def written(self) -> list[int]:
        """Return the positions of the watched tensors that these calls have written."""
        versions = zip(self._versions, self._watched, strict=False)
        return [position for position, (before, tensor) in enumerate(versions) if version_counter(tensor) != before]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make or answer a call of the code around the units."""
        if func in METADATA:
            if func in _DEVICE and is_placeholder(args[0]):
                return self._device  # the device that the tensor would have
            return func(*args, **kwargs) if kwargs else func(*args)
        number = self.number
        made = self._made.get(number)
        if made is not None and number < self._free_from and made.holds(func, args, kwargs):
            self.number = number + 1
            return made.result
        self.is_answering = True
        try:
            if is_foreach(func):
                return call_each(lambda single, *given: self._call(single, single, *given), func, args, kwargs or {})
            return self._call(func, func, args, kwargs)
        finally:
            self.is_answering = False

    def _call(self, key: Any, func: Any, args: Any, kwargs: Any, name: str | None = None) -> Any:
        """Make a call, or answer it. The mode is off, so calls inside the function are not handled.

        Args:
            key: The function or module that the plan has to contain at this number.
            func: The function that makes the call.
            args: The arguments of the call.
            kwargs: The keyword arguments of the call.
            name: The name for messages; ``None`` for the name of the function.

        Raises:
            OtherPathError: If the plan has another call at this number.
            Unwind: If this stage is finished; see :meth:`_leave`.
        """
        number = self.number
        self.number = number + 1
        if self._arrived:
            args, kwargs = self._with_arrived(args, kwargs)
        if number >= self._free_from:
            return self._run_freely(number, key, func, args, kwargs)
        action = self._actions[number]
        if action.function is not key and action.function != key:
            raise OtherPathError(number, name or f"`{function_name(key)}`", key)
        if action.answer is None:
            if action.is_invariant and self._invariant is not None:
                result = self._invariant.make(number, func, args, kwargs)
            else:
                if action.draws:
                    self._seed(number)
                if action.instead is not None:
                    func = action.instead
                result = func(*args, **kwargs) if kwargs else func(*args)
        else:
            result = action.answer(self._inputs, args, kwargs or {})
        if action.draws:
            self._prepare(number + 1)
        if action.sent:
            self._keep(action, result, args, kwargs or {})
        return result

    def _run_freely(self, number: int, key: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a call from `Part.free_from` on, on the last stage, where all values exist; leave other stages."""
        if not self._is_last:
            self._leave(func)
            return func(*args, **(kwargs or {}))
        if number < len(self._actions) and self._actions[number].draws and self._actions[number].function == key:
            self._seed(number)
        if number == len(self._actions):
            self._versions = [version_counter(tensor) for tensor in self._watched]
        return (self._run_guarded if self._is_guarded else apply)(func, args, kwargs or {})

    def _run_guarded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a call on the last stage, which may lack a parameter that the trace did not find.

        Raises:
            LateParameterError: If the call computes with a parameter of another stage.
        """
        leaves, _ = flatten((args, kwargs))
        placeholder = next((leaf for leaf in leaves if is_placeholder(leaf)), None)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if placeholder is None:
                raise
            raise LateParameterError(placeholder) from error
        if placeholder is not None and getattr(result, "is_meta", False) and all(result is not leaf for leaf in leaves):
            raise LateParameterError(placeholder)
        return result

    def call_module(self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make or answer a call of a leaf module."""
        if self._is_over:
            return forward(*args, **kwargs)
        self.__exit__(None, None, None)
        try:
            return self._call(module, forward, args, kwargs, repr(name))
        finally:
            self.__enter__()

    def call_unit(self, index: int, unit: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make or answer a call of a unit.

        Raises:
            OtherPathError: If the plan has another call at this number.
            LateUnitError: If a unit is called on the last stage after all units of the plan.
            Unwind: If this stage is finished; see :meth:`_leave`.
            WrongUseError: If the unit changes its arguments, or returns something else than in the trace.
        """
        number = self.number
        self.number = number + 1
        if self._arrived:
            args, kwargs = self._with_arrived(args, kwargs)
        if number >= self._free_from:
            if not self._is_last:
                self._leave(unit)
            raise LateUnitError(index)
        action = self._actions[number]
        if action.unit != index:
            raise OtherPathError(number, index, index)
        taps = action.call.taps
        if action.answer is not None:
            with DisableTorchFunction():  # the answer may write buffers
                result = action.answer(self._inputs, args, kwargs)
        else:
            unit = self._hidden.showing(unit)
            self.__exit__(None, None, None)
            try:
                with self._random(number) if action.draws_elsewhere else nullcontext():
                    if action.draws:
                        self._seed(number)
                    with nullcontext() if taps is None else taps.recording() as tapped:
                        result = call_unit(action.call, unit, args, kwargs)
                if taps is not None:
                    result = result, tapped
                check_returned(action.call, result, args, kwargs)
                if action.sent:
                    self._keep(action, result, args, kwargs)
            finally:
                if self.number == self._followed_to:
                    self._is_over = True
                self.__enter__()
        if action.draws:
            with DisableTorchFunction():
                self._prepare(number + 1)
        if taps is not None:
            result, tapped = result
            taps.replay(tapped)
        return result

    def _with_arrived(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a call, with received values in place of the parameters of other stages."""
        leaves, spec = flatten((args, kwargs or {}))
        return unflatten([self._arrived.get(id(leaf), leaf) for leaf in leaves], spec)

    def _prepare(self, number: int) -> None:
        """Seed the generators for the next call that draws; a checkpoint around this call saves their state."""
        if self._draws:
            self._seed(next((each for each in self._draws if each >= number), len(self._actions)))

    def _leave(self, func: Any) -> None:
        """Leave the step at the first call after all tensors for later stages are computed.

        The step is not left immediately, because hooks of the last layer run first. It is not left in a call that ends
        a context (`no_grad`, autocast), which must complete, nor a second time while it is being left.

        Raises:
            Unwind: If the step is left.
        """
        if not self._is_left and not getattr(func, "__name__", "").startswith(_ENDS):
            self._is_left = True
            raise Unwind

    def _keep(self, action: Action, result: Any, args: Any, kwargs: Any) -> None:
        """Store results that the next stage needs. Once all are stored, the step can be left on this stage."""
        leaves = [result] if type(result) is Tensor else flatten(result)[0]
        for leaf, position, is_copied in action.sent:
            tensor = flatten((args, kwargs))[0][leaf.position] if isinstance(leaf, Argument) else leaves[leaf]
            self.sent[position] = tensor.clone() if is_copied else tensor
        self.missing -= len(action.sent)
        if self.missing == 0 and not self._is_last:
            self._free_from = self._leaves_from


def _is_new_tensor(result: Any) -> bool:
    """Return True if a result is an ordinary tensor that requires no gradient."""
    return type(result) is Tensor and not result.requires_grad


def _copied(tree: Any) -> Any:
    """Return a copy of a tree, so that later changes of its lists and dictionaries do not change the copy."""
    kind = type(tree)
    if kind is dict:
        return {name: _copied(value) for name, value in tree.items()}
    return kind(map(_copied, tree)) if kind is list or kind is tuple else tree


def _is_same_argument(one: Any, other: Any) -> bool:
    """Return True if two trees have the same tensors and equal plain values. Other objects count as different."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is Tensor:
        return one is other
    if kind is tuple or kind is list or kind is torch.Size:
        return len(one) == len(other) and all(map(_is_same_argument, one, other))
    if kind is dict:
        return one.keys() == other.keys() and all(_is_same_argument(one[name], other[name]) for name in one)
    if kind is slice:
        return _is_same_argument((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    return kind in _VALUES and one == other and (kind is not float or str(one) == str(other))  # 0.0 is not -0.0


@contextmanager
def undoing_assigned(assigned: Iterable[tuple[Any, str]]) -> Iterator[None]:
    """Restore attributes and buffers to which a stage has assigned fake tensors while entered.

    The last stage has the values, and sends them to the other stages at the end of an epoch.

    Args:
        assigned: The owner and the name of each attribute or buffer.
    """
    tables = [(table_of(owner, name), name) for owner, name in assigned]
    before = [table.get(name, tables) for table, name in tables]
    try:
        yield
    finally:
        for (table, name), value in zip(tables, before, strict=True):
            if isinstance(table.get(name), FakeTensor):
                if value is tables:  # the attribute did not exist
                    del table[name]
                else:
                    table[name] = value


def check_returned(call: Call, result: Any, args: Any, kwargs: Any) -> None:
    """Raise an error if the result of a unit has another structure, plain value or returned argument than in the trace.

    Other stages use these from the trace. Values and shapes of tensors are not compared.

    Args:
        call: The call in the trace.
        result: The result.
        args: The arguments of the call.
        kwargs: The keyword arguments of the call.

    Raises:
        WrongUseError: If the result differs.
    """
    if type(result) is Tensor and call.spec == LEAF and type(call.outputs[0]) is AbsentTensor:
        return
    leaves, spec = flatten(result)
    texts: tuple[Any, Any] | None = (spec, call.spec) if spec != call.spec else None
    given: list[Any] = []
    for leaf, seen in zip(leaves, call.outputs, strict=False) if texts is None else ():
        if type(seen) is AbsentTensor:
            if not isinstance(leaf, Tensor):
                texts = repr(leaf), "a tensor"
        elif type(seen) is Argument:
            given = given or flatten((args, kwargs))[0]
            if leaf is not given[seen.position]:
                texts = "a new value", "one of its arguments"
        elif not _is_same(leaf, seen):
            texts = "a tensor" if isinstance(leaf, Tensor) else repr(leaf), repr(seen)
    if texts is not None and call.taps is not None:
        raise WrongUseError(
            f"Forward hooks inside {call} received different values than when the step was traced for a batch with the"
            " same shapes, but code around the layers uses values that these hooks collect. Make sure that these hooks"
            " are called in the same way in every step. [LH445]"
        )
    if texts is not None:
        raise WrongUseError(
            f"{call} returned {texts[0]}, but it returned {texts[1]} when the step was traced for a batch with the same"
            " shapes. Other stages cannot know the new result. Layers must return tensors, always in the same"
            " structure. [LH437]"
        )


def _is_same(leaf: Any, seen: Any) -> bool:
    """Return True if two plain values are equal. Objects of other classes are not compared, only their class."""
    if isinstance(seen, np.ndarray):
        return np.array_equal(leaf, seen)
    if type(leaf) is not type(seen):
        return False
    return not isinstance(seen, (bool, int, float, complex, str, bytes)) or leaf == seen or leaf != leaf

"""A stage's part of one step, while it runs."""

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
from lightning_hybrid.distributed.replaced import tables_of
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
from lightning_hybrid.pipeline_parallel.frame.writes import call_each, is_foreach
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder
from lightning_hybrid.torch_internals import CONTEXT_PREFIXES, DisableTorchFunction, FakeTensor, version_counter

# How functions are called that begin and end contexts.
_ENDS = (*CONTEXT_PREFIXES, "set_")
_DEVICE = getters("device")
# Results that are kept beside tensors: what a call reads from the ones that it is given.
_NUMBERS = frozenset({bool, int, float})
# Arguments of calls that are equal if `==` says so.
_VALUES = frozenset(
    {
        *(type(None), bool, int, float, complex, str, type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)


class OtherPathError(Exception):
    """The step does something else than what was discovered.

    ``args`` are the number of the call, what it is (for messages; of a unit its position), and what it calls: a
    function, a module, or the position of a unit; ``None`` where the step has ended.
    """


class LateParameterError(Exception):
    """A call that was not followed uses a parameter of another stage; ``args`` are the parameter's placeholder."""


class LateUnitError(Exception):
    """A unit is called after the last one that was discovered; ``args`` are its position."""


class Unwind(BaseException):
    """Leaves the user's step once everything that later stages want is there."""


class InvariantCalls:
    """Calls that are the same for every microbatch of a step are made once: positions, causal masks, rotary tables.

    Compilers call that loop-invariant code. Which calls these may be is known from the step that was followed; that
    they are the same is checked each time: the same tensors, which no operator of torch has written since, and equal
    values. What collectives write is told by :func:`torch.autograd.graph.increment_version`.

    Attributes:
        made: By their numbers, the calls that were made.
    """

    def __init__(self) -> None:
        self.made: dict[int, _Made] = {}

    def make(self, number: int, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call, and remember it where it can be known later whether it would make the same again.

        Args:
            number: Of the call in the user's step.
            func: What is called.
            args: Arguments of the call.
            kwargs: Likewise.
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
    """What a call has made, and of what.

    Attributes:
        function: What was called.
        args: Its arguments.
        kwargs: Likewise.
        is_flat: Whether there are only tensors and plain values among them, without names.
        result: What it returned.
        versions: Of all tensors that it was given or returned.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    is_flat: bool
    result: Any
    versions: list[tuple[Tensor, int]]

    def holds(self, func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Whether a call would make the same now."""
        if func is not self.function:
            return False
        for tensor, version in self.versions:
            if version_counter(tensor) != version or tensor.requires_grad:
                return False
        if self.is_flat and not kwargs and len(args) == len(self.args) and all(map(is_, args, self.args)):
            return True  # most often they are the same objects
        return _is_same_argument(args, self.args) and _is_same_argument(kwargs or {}, self.kwargs)


class Running(StepMode):
    """A stage's part of one step."""

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
        skipped: Collection[int] = (),
    ) -> None:
        super().__init__()
        self._invariant = invariant
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
            # A copy: what the optimizer, or a hook after the step, writes may still be under way.
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
        """Follow calls from here on; not where there is nothing to follow any more."""
        if not self._is_over:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Do not follow calls from here on."""
        if not self._is_over:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Notice whether calls behind the last one that was followed write some tensors."""
        self._watched = tensors
        self._followed_to = None

    def written(self) -> list[int]:
        """The positions of those tensors that they have written."""
        versions = zip(self._versions, self._watched, strict=False)
        return [position for position, (before, tensor) in enumerate(versions) if version_counter(tensor) != before]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A call of frame code."""
        if func in METADATA:
            if func in _DEVICE and is_placeholder(args[0]):
                return self._device  # where it would be
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
        """Make a call, or answer it; nothing is followed in here.

        Args:
            key: What was found to be called here: a function, or a module.
            func: What is called.
            args: Arguments of the call.
            kwargs: Likewise.
            name: For messages; ``None`` for that of the function.
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
        """A call after the last unit of the last stage: nothing is absent any more."""
        if not self._is_last:
            self._leave(func)
            return func(*args, **(kwargs or {}))
        if number < len(self._actions) and self._actions[number].draws and self._actions[number].function == key:
            self._seed(number)
        if number == len(self._actions):
            self._versions = [version_counter(tensor) for tensor in self._watched]
        return (self._run_guarded if self._is_guarded else apply)(func, args, kwargs or {})

    def _run_guarded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call that was not followed, and may compute with a parameter of another stage."""
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
        """A call of a module of the frame that is one call."""
        if self._is_over:
            return forward(*args, **kwargs)
        self.__exit__(None, None, None)
        try:
            return self._call(module, forward, args, kwargs, repr(name))
        finally:
            self.__enter__()

    def call_unit(self, index: int, unit: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a unit."""
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
            with DisableTorchFunction():  # it may write what the unit has written elsewhere
                result = action.answer(self._inputs, args, kwargs)
        else:
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
        """The arguments of a call, with the values of parameters that other stages have."""
        leaves, spec = flatten((args, kwargs or {}))
        return unflatten([self._arrived.get(id(leaf), leaf) for leaf in leaves], spec)

    def _prepare(self, number: int) -> None:
        """Start the stream of the next call that draws: what checkpoints that one goes back there in backward."""
        if self._draws:
            self._seed(next((each for each in self._draws if each >= number), len(self._actions)))

    def _leave(self, func: Any) -> None:
        """Leave the step at the first call after all that later stages want.

        Not at once: hooks of the layer that made the last of it come first. And not in a call that ends a context (of
        gradients switched off, of autocast), which has to be ended; nor while the step is being left.
        """
        if not self._is_left and not getattr(func, "__name__", "").startswith(_ENDS):
            self._is_left = True
            raise Unwind

    def _keep(self, action: Action, result: Any, args: Any, kwargs: Any) -> None:
        """Something that the next stage wants is there; once everything is, the step can be left on this stage."""
        leaves = [result] if type(result) is Tensor else flatten(result)[0]
        for leaf, position, is_copied in action.sent:
            tensor = flatten((args, kwargs))[0][leaf.position] if isinstance(leaf, Argument) else leaves[leaf]
            self.sent[position] = tensor.clone() if is_copied else tensor
        self.missing -= len(action.sent)
        if self.missing == 0 and not self._is_last:
            self._free_from = self._leaves_from


def _is_new_tensor(result: Any) -> bool:
    return type(result) is Tensor and not result.requires_grad


def _copied(tree: Any) -> Any:
    """A tree that stays as it is when its lists and dictionaries are changed."""
    kind = type(tree)
    if kind is dict:
        return {name: _copied(value) for name, value in tree.items()}
    return kind(map(_copied, tree)) if kind is list or kind is tuple else tree


def _is_same_argument(one: Any, other: Any) -> bool:
    """Whether two trees hold the same tensors and equal plain values; others are not looked into."""
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
    """Let attributes and buffers be what they were at the end, where a stage has assigned values that it does not have.

    The last stage has these values, and gives them to the others when an epoch ends.

    Args:
        assigned: The owner and the name of each.
    """
    tables = [(_table_of(owner, name), name) for owner, name in assigned]
    before = [table.get(name, tables) for table, name in tables]
    try:
        yield
    finally:
        for (table, name), value in zip(tables, before, strict=True):
            if isinstance(table.get(name), FakeTensor):
                if value is tables:  # there was none
                    del table[name]
                else:
                    table[name] = value


def _table_of(owner: Any, name: str) -> dict[str, Any]:
    return next((table for table in reversed(tables_of(owner)) if name in table), vars(owner))


def check_returned(call: Call, result: Any, args: Any, kwargs: Any) -> None:
    """What a unit returns beside the values of tensors is what the other stages take it to be.

    Args:
        call: The call, as it was when it was first seen.
        result: What it returns now.
        args: Its arguments.
        kwargs: Likewise.

    Raises:
        WrongUseError: If it is something else.
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
    """Whether two values that are no tensors are equal; objects of other classes are not looked into."""
    if isinstance(seen, np.ndarray):
        return np.array_equal(leaf, seen)
    if type(leaf) is not type(seen):
        return False
    return not isinstance(seen, (bool, int, float, complex, str, bytes)) or leaf == seen or leaf != leaf

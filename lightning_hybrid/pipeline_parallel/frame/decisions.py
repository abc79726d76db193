"""Decisions of a step: values that the user's code reads from real tensors, and that may select the calls of the step.

A tensor is *real* if every stage has its values, as the batch and buffers do. :class:`Discovery` records the calls of
real tensors in a trace, and makes a :class:`Decisions` of them. A plan that was made from this trace fits another batch
only if that batch leads to the same decisions. Before a step, :class:`FrameCut` checks this with
:meth:`Decisions.hold`, which repeats only the calls that lead to decisions; another trace would take 10 to 200 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_hybrid.distributed.pytree import TreeSpec, flatten, unflatten

#: Functions whose results have no values yet, and may become part of an autograd graph later.
_EMPTY: frozenset[Callable[..., Any]] = frozenset(
    {
        *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
        *(Tensor.new_empty, Tensor.new_empty_strided),
    }
)


class Input(NamedTuple):
    """The source of a tensor: a leaf of the step's arguments.

    Attributes:
        position: The position of the leaf among all leaves of the arguments.
    """

    position: int


class Made(NamedTuple):
    """The source of a tensor: the result of a call of real tensors.

    Attributes:
        call: The number of the call.
        leaf: The position among the leaves of the result.
    """

    call: int
    leaf: int


@dataclass(frozen=True)
class RealCall:
    """A call without absent operands.

    Attributes:
        function: The function that is called.
        sources: The leaves of its arguments: :class:`Input`, :class:`Made`, another tensor (usually of the module), or
            a plain value.
        spec: The tree of the arguments and keyword arguments.
        draws: True if the call draws random numbers.
        touched: The memory of its operands, as identifiers of :func:`memory_of`.
        written: The memory that it writes, as such identifiers.
    """

    function: Callable[..., Any]
    sources: list[Any]
    spec: TreeSpec
    draws: bool
    touched: frozenset[int]
    written: frozenset[int]


class Decisions:
    """The values that a step has read from real tensors, and that may select the next calls.

    Values that do not depend on the batch, on random numbers or on tensors of the module are left out, because they
    never change.

    Args:
        calls: The calls of real tensors by number, in order.
        outcomes: The results of the calls that read values or whose result shapes depend on values, by the number of
            the call; see :func:`outcome_of`.
        integers: The integers in the batch, by their positions among the leaves of the arguments, of which the batch is
            the first. Code can read them without a call that can be traced.

    Attributes:
        read_states: True if a decision depends on tensors of the module, which may differ from rank to rank.
        different: The difference that the last :meth:`hold` found: the number of a call, or a text for an integer;
            ``None`` if it found no difference.
    """

    def __init__(
        self,
        calls: Mapping[int, RealCall],
        outcomes: Mapping[int, list[Any]],
        integers: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.different: int | str | None = None
        self._integers = integers
        varying = _varying(calls)
        self._outcomes = {number: outcome for number, outcome in outcomes.items() if number in varying}
        self._calls = _leading_to(self._outcomes, calls)
        self._writes = any(call.written for call in self._calls.values())
        self.read_states = any(isinstance(source, Tensor) for call in self._calls.values() for source in call.sources)

    def __len__(self) -> int:
        """Return the number of decisions."""
        return len(self._outcomes) + len(self._integers)

    def hold(self, arguments: Sequence[Any], seed: Callable[[int], None]) -> bool:
        """Return True if a step with these arguments reads the same values.

        It repeats the calls that lead to decisions on this rank, without communication. If one of them writes a tensor,
        they all get copies of the user's tensors. A call may raise an error for the values of this batch.

        Args:
            arguments: The arguments of the step.
            seed: Seeds the generators for the call with a number.
        """
        self.different = None
        if not len(self):
            return True
        inputs, _ = flatten(list(arguments))
        for position, integer in self._integers.items():
            if inputs[position] != integer:
                self.different = f"an integer in the batch, such as {integer}"
                return False
        copies: dict[int, Tensor] = {}  # of the user's tensors, if a call writes something
        results: dict[int, list[Any]] = {}

        def copied(tensor: Tensor) -> Tensor:
            return copies.setdefault(id(tensor), tensor.clone()) if self._writes else tensor

        for number, call in self._calls.items():
            if call.draws:
                seed(number)
            leaves = [
                copied(inputs[source.position])
                if type(source) is Input
                else results[source.call][source.leaf]
                if type(source) is Made
                else copied(source)
                if isinstance(source, Tensor)
                else source
                for source in call.sources
            ]
            result = apply(call.function, *unflatten(leaves, call.spec))
            if number in self._outcomes and not _same(outcome_of(result), self._outcomes[number]):
                self.different = number
                return False
            results[number] = flatten(result)[0]
        return True


def _varying(calls: Mapping[int, RealCall]) -> set[int]:
    """Return the numbers of the calls whose results may differ in another step."""
    varying: set[int] = set()
    written: set[int] = set()  # by a varying call
    for number, call in calls.items():
        if (
            call.draws
            or call.touched & written
            or any(
                source.call in varying if type(source) is Made else isinstance(source, (Input, Tensor))
                for source in call.sources
            )
        ):
            varying.add(number)
            written |= call.written
    return varying


def may_be_invariant(call: RealCall, invariant: Collection[int]) -> bool:
    """Return True if a call does not depend on the batch, so that it probably has the same result for every microbatch.

    Calls that draw random numbers, write tensors or return tensors without values are excluded.

    Args:
        call: The call.
        invariant: The numbers of earlier calls for which this is true.
    """
    return (
        not call.draws
        and not call.written
        and not is_in_place(call.function)
        and call.function not in _EMPTY
        and all(
            source.call in invariant if type(source) is Made else type(source) is not Input for source in call.sources
        )
    )


def is_in_place(function: Callable[..., Any] | None) -> bool:
    """Return True if a function changes its first argument and returns it, according to its name."""
    name = getattr(function, "__name__", "")
    return name.endswith("_") and not name.startswith("__")


def _leading_to(numbers: Collection[int], calls: Mapping[int, RealCall]) -> dict[int, RealCall]:
    """Return the calls on which some calls depend, including calls that write their operands, and the calls themselves.

    Args:
        numbers: The numbers of the calls.
        calls: All calls by number, in order.
    """
    needed: dict[int, RealCall] = {}
    used: set[int] = set(numbers)
    touched: set[int] = set()
    last = max(numbers, default=-1)
    for number, call in reversed(list(calls.items())):
        if number <= last and (number in used or call.written & touched):
            needed[number] = call
            used |= {source.call for source in call.sources if type(source) is Made}
            touched |= call.touched
    return dict(sorted(needed.items()))


def apply(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with arguments and keyword arguments."""
    return function(*args, **kwargs)


def read_values(*tensors: Tensor) -> list[Any]:
    """Return the values of tensors, as lists."""
    return [tensor.tolist() for tensor in tensors]


def integers_of(batch: Any) -> dict[int, int]:
    """Return the integers in a batch by their positions among its leaves, except the integers in lists.

    A list may have one entry per sample, so its integers are expected to differ.
    """
    leaves, spec = flatten(batch)
    return {position: leaves[position] for position in _alone(spec, 0) if type(leaves[position]) is int}


def _alone(spec: TreeSpec, first: int) -> Iterator[int]:
    """Return the positions of the leaves that are not in a list.

    Args:
        spec: The tree.
        first: The position of its first leaf.
    """
    if spec.kind is None:
        yield first
    for child in spec.children if spec.kind is not list else ():
        yield from _alone(child, first)
        first += child.num_leaves


def outcome_of(result: Any) -> list[Any]:
    """Return the parts of a result that may be decisions: plain values, and the shapes of tensors."""
    return [leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in flatten(result)[0]]


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return True if two outcomes are equal, leaf by leaf."""
    return len(one) == len(other) and all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) else type(a) is type(b) and a == b
        for a, b in zip(one, other, strict=True)
    )

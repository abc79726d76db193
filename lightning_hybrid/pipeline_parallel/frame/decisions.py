"""What the user's code reads from tensors that are on every rank, and how it is read again for another batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_hybrid.distributed.pytree import TreeSpec, flatten, unflatten

#: What these make has no numbers yet, and gets its place in a graph of autograd later on.
_EMPTY: frozenset[Callable[..., Any]] = frozenset(
    {
        *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
        *(Tensor.new_empty, Tensor.new_empty_strided),
    }
)


class Input(NamedTuple):
    """A tensor among the arguments of the step."""

    position: int


class Made(NamedTuple):
    """A tensor that a call of real tensors made."""

    call: int
    leaf: int


@dataclass(frozen=True)
class RealCall:
    """A call without absent operands.

    Attributes:
        function: What is called.
        sources: Its arguments: where tensors come from, and values.
        spec: Their tree.
        draws: Whether it draws random numbers.
        touched: The memory of its operands.
        written: The memory that it writes.
    """

    function: Callable[..., Any]
    sources: list[Any]
    spec: TreeSpec
    draws: bool
    touched: frozenset[int]
    written: frozenset[int]


class Decisions:
    """What a step has read from tensors that are on every rank, and what may decide which calls come next.

    What does not depend on the batch, on random numbers or on tensors of the module is left out: it stays as it is.

    Args:
        calls: The calls of real tensors, by their numbers, in order.
        outcomes: By the numbers of those that have read something: what they gave.
        integers: Those of the batch, by their positions: lengths and paths may depend on them without a trace.

    Attributes:
        read_states: Whether tensors are read that are not made of the batch, and may differ from rank to rank.
        different: What was something else when they were last compared: the number of a call, or an integer, as text;
            ``None`` if nothing was.
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
        """How many there are."""
        return len(self._outcomes) + len(self._integers)

    def hold(self, arguments: Sequence[Any], seed: Callable[[int], None]) -> bool:
        """Whether a step with these arguments reads the same.

        Args:
            arguments: Of the step.
            seed: Seeds the generators for the call of a number.
        """
        self.different = None
        if not len(self):
            return True
        inputs, _ = flatten(list(arguments))
        for position, integer in self._integers.items():
            if inputs[position] != integer:
                self.different = f"an integer in the batch, such as {integer}"
                return False
        copies: dict[int, Tensor] = {}  # of tensors that are the user's, where anything is written
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
    """The calls whose results may be others in another step."""
    varying: set[int] = set()
    written: set[int] = set()  # by one of them
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
    """Whether a call is likely to make the same for every microbatch of a step: it does not depend on the batch.

    Args:
        call: The call.
        invariant: The numbers of such calls before it.
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
    """Whether a function is one that changes its first argument, and gives it back, by its name."""
    name = getattr(function, "__name__", "")
    return name.endswith("_") and not name.startswith("__")


def _leading_to(numbers: Collection[int], calls: Mapping[int, RealCall]) -> dict[int, RealCall]:
    """The calls that lead to some; those that write what these use are among them."""
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
    """Call a function with a tree of arguments."""
    return function(*args, **kwargs)


def read_values(*tensors: Tensor) -> list[Any]:
    """Return the numbers of tensors, as lists."""
    return [tensor.tolist() for tensor in tensors]


def integers_of(batch: Any) -> dict[int, int]:
    """The integers that a batch holds, by their positions among its leaves; those in lists go by samples."""
    leaves, spec = flatten(batch)
    return {position: leaves[position] for position in _alone(spec, 0) if type(leaves[position]) is int}


def _alone(spec: TreeSpec, first: int) -> Iterator[int]:
    """The positions of leaves that are in no list."""
    if spec.kind is None:
        yield first
    for child in spec.children if spec.kind is not list else ():
        yield from _alone(child, first)
        first += child.num_leaves


def outcome_of(result: Any) -> list[Any]:
    """What may decide something: numbers, and of tensors their shapes."""
    return [leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in flatten(result)[0]]


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether what was read is equal, leaf by leaf."""
    return len(one) == len(other) and all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) else type(a) is type(b) and a == b
        for a, b in zip(one, other, strict=True)
    )

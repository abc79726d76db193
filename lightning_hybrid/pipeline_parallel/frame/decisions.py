"""What the user's code reads from tensors that are on every rank, and how it is read again for another batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lightning_hybrid.distributed.pytree import TreeSpec, flatten, unflatten


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

    def tensors(self) -> set[Input | Made]:
        """The operands that are not constants."""
        return {source for source in self.sources if isinstance(source, (Input, Made))}


class Reader:
    """Reads a number from tensors that are on every rank, as a step has read it.

    Args:
        calls: By their numbers, the calls that lead to it; it is the result of the last one.
    """

    def __init__(self, calls: dict[int, RealCall]) -> None:
        self._calls = calls

    def __call__(self, arguments: Sequence[Any], seed: Callable[[int], None]) -> Any:
        """Read.

        Args:
            arguments: Of the step.
            seed: Seeds the generators for the call of a number.
        """
        inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in flatten(list(arguments))[0]]
        copies: dict[int, Tensor] = {}  # of tensors that are the user's, and may be written
        results: dict[int, list[Any]] = {}
        result = None
        for number, call in self._calls.items():
            if call.draws:
                seed(number)
            leaves = [
                inputs[source.position]
                if isinstance(source, Input)
                else results[source.call][source.leaf]
                if isinstance(source, Made)
                else copies.setdefault(id(source), source.clone())
                if isinstance(source, Tensor)
                else source
                for source in call.sources
            ]
            result = apply(call.function, *unflatten(leaves, call.spec))
            results[number] = flatten(result)[0]
        return outcome_of(result)


def apply(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with a tree of arguments."""
    return function(*args, **kwargs)


def outcome_of(result: Any) -> list[Any]:
    """What may decide something: numbers, and of tensors their shapes."""
    return [leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in flatten(result)[0]]

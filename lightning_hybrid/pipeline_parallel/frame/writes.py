"""Parameters that a step writes (the moving average of a teacher): once a step, however many microbatches it has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.pipeline_parallel.frame.graph import AbsentTensor, Graph
from lightning_hybrid.torch_internals import FOREACH


@dataclass(frozen=True)
class Writes:
    """The calls of a step that write parameters and do not depend on the batch, by the microbatch that makes them.

    Attributes:
        first: Those made for the first microbatch: everything that uses the parameters comes after them.
        last: Those made for the last one: everything comes before them.
        mixed: Those that one microbatch alone cannot make, each with the name of its parameter.
        serving: These calls, and those that make nothing but what they write.
        sources: The names of the parameters that the writes of one need, by its name.
    """

    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    mixed: tuple[tuple[int, str], ...] = ()
    serving: frozenset[int] = frozenset()
    sources: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def limited(self) -> frozenset[int]:
        """The calls that not every microbatch makes."""
        return self.first | self.last


# What their counterparts for one tensor take by name, after so many tensors.
_BY_NAME = {"addcmul": (3, "value"), "addcdiv": (3, "value")}


def is_foreach(function: Callable[..., Any]) -> bool:
    """Return whether a function is one of lists of tensors, such as `torch._foreach_mul_`."""
    return getattr(function, "__name__", "").startswith(FOREACH)


def call_each(
    call: Callable[..., Any], function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Make the calls for single tensors that a call for a list of them stands for.

    Tensors of a list may live on several stages, and torch has no DTensor form of all of these functions.

    Args:
        call: Makes a call; takes the function, and the arguments of it.
        function: What is called: one for lists, see :func:`is_foreach`.
        args: Its arguments.
        kwargs: Likewise.
    """
    singles = _calls_of_each(function, args, kwargs)
    if singles is None:
        return call(function, args, kwargs)
    results = [call(*single) for single in singles]
    return results if function.__name__.endswith("_") else tuple(results)


def _calls_of_each(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] | None:
    name = function.__name__
    if not args or not isinstance(args[0], (list, tuple)) or not args[0]:
        return None
    name, count = name.removeprefix(FOREACH), len(args[0])
    single = getattr(Tensor, name, None)
    if single is None:
        return None
    by_name = _BY_NAME.get(name.rstrip("_"))
    if by_name is not None and len(args) > by_name[0]:
        args, kwargs = args[: by_name[0]], {**kwargs, by_name[1]: args[by_name[0]]}

    def of(values: Any, position: int) -> Any:
        is_row = isinstance(values, (list, tuple)) and len(values) == count
        return values[position] if is_row else values

    return (
        (single, tuple(of(each, at) for each in args), {key: of(each, at) for key, each in kwargs.items()})
        for at in range(count)
    )


def find_writes(graph: Graph, units_of: Mapping[str, Collection[int]]) -> Writes:
    """Return which calls write parameters of numbers that are the same for every microbatch, and when.

    Args:
        graph: The step.
        units_of: The positions of the units that contain a parameter, by its name.
    """
    writers: dict[str, list[int]] = {}
    of_batch: set[int] = set()
    for number, call in enumerate(graph.calls):
        if call.unit is not None or call.has_batch or any(value.call in of_batch for value in call.operands):
            of_batch.add(number)
        for name in call.rewritten:
            writers.setdefault(name, []).append(number)
    if not writers:
        return Writes()
    first, last, mixed = set[int](), set[int](), dict[int, str]()
    serving, sources = set[int](), dict[str, frozenset[str]]()
    for name, numbers in sorted(writers.items()):
        if not of_batch.isdisjoint(numbers):
            continue
        for_write = _for_write(graph, set(numbers))
        uses = _uses(graph, name, for_write, set(units_of.get(name, ())))
        serving |= for_write
        sources[name] = frozenset().union(*(graph.calls[number].parameters for number in for_write))
        returns = any(isinstance(leaf, AbsentTensor) for number in numbers for leaf in graph.calls[number].outputs)
        if not name or returns:
            mixed |= dict.fromkeys(numbers, name)
        elif min(uses, default=len(graph.calls)) > max(numbers):
            first.update(numbers)
        elif max(uses) < min(numbers):
            last.update(numbers)
        else:
            mixed |= dict.fromkeys(numbers, name)
    for number in first & last:  # one call writes several parameters
        mixed[number] = min(graph.calls[number].rewritten)
    return Writes(
        frozenset(first - mixed.keys()),
        frozenset(last - mixed.keys()),
        tuple(sorted(mixed.items())),
        frozenset(serving),
        sources,
    )


def _for_write(graph: Graph, writers: set[int]) -> set[int]:
    """Return some calls that write a parameter, and those that make nothing but what they write."""
    for_write = set(writers)
    consumers: dict[int, set[int]] = {}
    for number, call in enumerate(graph.calls):
        for value in call.operands:
            consumers.setdefault(value.call, set()).add(number)
    wanted = {value.call for value in graph.wanted}
    for number in range(max(writers) - 1, -1, -1):
        if number not in wanted and number in consumers and consumers[number] <= for_write:
            for_write.add(number)
    return for_write


def _uses(graph: Graph, name: str, for_write: Collection[int], units: Collection[int]) -> list[int]:
    """Return the calls that use a parameter for something else than for what they write into it."""
    return [
        number
        for number, call in enumerate(graph.calls)
        if (call.unit in units if call.unit is not None else name in call.computes_with) and number not in for_write
    ]


def skipped(writes: Sequence[Writes], graphs: Sequence[Graph], written_again: Collection[str]) -> list[frozenset[int]]:
    """Return, for each microbatch of a step, the writes that it leaves to another one.

    Args:
        writes: Of the plan of each microbatch.
        graphs: The steps.
        written_again: The names of parameters that several stages of one rank write.

    Raises:
        WrongUseError: If a parameter is written in a way that cannot be done once.
    """
    if len(writes) == 1 or not any(each.first or each.last or each.mixed for each in writes):
        return [frozenset()] * len(writes)
    names = [[_names(graph, each.first), _names(graph, each.last)] for each, graph in zip(writes, graphs, strict=True)]
    before, after = (set().union(*(each[position] for each in names)) for position in (0, 1))
    for each, graph in zip(writes, graphs, strict=True):
        for number in sorted({number for number, _ in each.mixed} | each.limited):
            call = graph.calls[number]
            if number not in each.limited or call.rewritten & before & after or call.rewritten & set(written_again):
                raise WrongUseError(
                    f"{call} updates the parameter {min(call.rewritten)!r}. Either the step uses this parameter both"
                    " before and after the update, or several stages on the same rank share it. Each of"
                    f" {len(writes)} microbatches would update it, but training in one process updates it only once."
                    " Set `num_microbatches=1`, or update it in a hook, such as `on_train_batch_end`. [LH467]"
                )
    first = next((at for at, each in enumerate(writes) if each.first), -1)
    last = max((at for at, each in enumerate(writes) if each.last), default=-1)
    return [
        frozenset(() if at == first else each.first) | frozenset(() if at == last else each.last)
        for at, each in enumerate(writes)
    ]


def _names(graph: Graph, numbers: Collection[int]) -> set[str]:
    return set().union(*(graph.calls[number].rewritten for number in numbers))

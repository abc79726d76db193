"""Writes of parameters in a step, such as the moving average of a teacher: they are made once for all microbatches.

In one process, a step writes such a parameter once. With microbatches, the user's step runs several times, and each run
would write it again. :class:`FrameCut` calls :func:`find_writes` for each plan, and :func:`skipped` selects the
microbatch that makes each write before the microbatches of a batch run. Only writes that do not depend on the batch are
limited to one microbatch. `trainer.losses.repeated_writes` does the same in runs without traced steps.
"""

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
    """The calls of a step that write parameters and do not depend on the batch. Calls are identified by their numbers.

    Attributes:
        first: Calls that only the first microbatch makes: all uses of the parameter come after them.
        last: Calls that only the last microbatch makes: all uses of the parameter come before them.
        mixed: Calls that one microbatch alone cannot make, each with the name of its parameter (``""`` for a parameter
            without a name in the module): uses come before and after them, or later code uses their result.
        serving: The calls that write parameters, and the calls whose results only these calls use.
        sources: For each written parameter, the names of the parameters from which its new value is computed, with
            itself.
    """

    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    mixed: tuple[tuple[int, str], ...] = ()
    serving: frozenset[int] = frozenset()
    sources: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def limited(self) -> frozenset[int]:
        """Return the calls that not every microbatch makes."""
        return self.first | self.last


# Arguments that the functions for single tensors take by name: the number of tensors before the argument, and its name.
_BY_NAME = {"addcmul": (3, "value"), "addcdiv": (3, "value")}


def is_foreach(function: Callable[..., Any]) -> bool:
    """Return True if a function takes lists of tensors, such as `torch._foreach_mul_`."""
    return getattr(function, "__name__", "").startswith(FOREACH)


def call_each(
    call: Callable[..., Any], function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Replace a call for lists of tensors by calls for single tensors, and return their results.

    Tensors of one list may be on several stages, and torch does not support DTensors in all functions for lists. If
    torch has no function for single tensors, the call is made as it is.

    Args:
        call: Makes a call. It takes the function, the arguments and the keyword arguments.
        function: The function for lists; see :func:`is_foreach`.
        args: The arguments of the function.
        kwargs: The keyword arguments of the function.
    """
    singles = _calls_of_each(function, args, kwargs)
    if singles is None:
        return call(function, args, kwargs)
    results = [call(*single) for single in singles]
    return results if function.__name__.endswith("_") else tuple(results)


def _calls_of_each(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] | None:
    """Return the function and the arguments for each tensor; ``None`` if torch has no function for single tensors."""
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
    """Return the calls that write parameters with values that are equal for every microbatch, and when they are made.

    Args:
        graph: The calls of the step.
        units_of: The positions of the units that contain a parameter, by its name. Each call of such a unit uses it.
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
    for number in first & last:  # the call writes several parameters
        mixed[number] = min(graph.calls[number].rewritten)
    return Writes(
        frozenset(first - mixed.keys()),
        frozenset(last - mixed.keys()),
        tuple(sorted(mixed.items())),
        frozenset(serving),
        sources,
    )


def _for_write(graph: Graph, writers: set[int]) -> set[int]:
    """Return the calls that write a parameter, and the calls whose results only these calls use.

    Args:
        graph: The calls of the step.
        writers: The numbers of the calls that write the parameter.
    """
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
    """Return the numbers of the calls that use a parameter for more than computing its new value.

    Args:
        graph: The calls of the step.
        name: The name of the parameter.
        for_write: The calls that compute or write its new value.
        units: The positions of the units that contain the parameter.
    """
    return [
        number
        for number, call in enumerate(graph.calls)
        if (call.unit in units if call.unit is not None else name in call.computes_with) and number not in for_write
    ]


def skipped(writes: Sequence[Writes], graphs: Sequence[Graph]) -> list[frozenset[int]]:
    """Return, for each microbatch of a step, the calls that write parameters and that another microbatch makes.

    Args:
        writes: The writes in the plan of each microbatch.
        graphs: The graph in the plan of each microbatch.

    Raises:
        WrongUseError: If one microbatch alone cannot make a write, or if a parameter is written before its uses in one
            microbatch and after them in another one.
    """
    if len(writes) == 1 or not any(each.first or each.last or each.mixed for each in writes):
        return [frozenset()] * len(writes)
    names = [[_names(graph, each.first), _names(graph, each.last)] for each, graph in zip(writes, graphs, strict=True)]
    before, after = (set().union(*(each[position] for each in names)) for position in (0, 1))
    for each, graph in zip(writes, graphs, strict=True):
        for number in sorted({number for number, _ in each.mixed} | each.limited):
            call = graph.calls[number]
            if number not in each.limited or call.rewritten & before & after:
                raise WrongUseError(
                    f"{call} updates the parameter {min(call.rewritten)!r}, which the step uses both before and after"
                    f" the update. Each of {len(writes)} microbatches would update it, but training in one process"
                    " updates it only once."
                    " Set `num_microbatches=1`, or update it in a hook, such as `on_train_batch_end`. [LH467]"
                )
    first = next((at for at, each in enumerate(writes) if each.first), -1)
    last = max((at for at, each in enumerate(writes) if each.last), default=-1)
    return [
        frozenset(() if at == first else each.first) | frozenset(() if at == last else each.last)
        for at, each in enumerate(writes)
    ]


def _names(graph: Graph, numbers: Collection[int]) -> set[str]:
    """Return the names of the parameters that some calls write."""
    return set().union(*(graph.calls[number].rewritten for number in numbers))

"""What each stage does at each call of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_hybrid.distributed.pytree import TreeSpec, flatten, unflatten
from lightning_hybrid.pipeline_parallel.frame.graph import AbsentTensor, Argument, Call, Graph, Value
from lightning_hybrid.pipeline_parallel.frame.routes import Route


@dataclass(frozen=True, eq=False)
class FramePlan:
    """What the stages do in steps with one signature that take one path.

    Attributes:
        number: Tells plans apart; equal on all ranks.
        graph: What the step does.
        parts: What each stage does of it.
        parameters: The names of the parameters outside of units that each stage uses.
    """

    number: int
    graph: Graph
    parts: tuple[Part, ...]
    parameters: tuple[frozenset[str], ...]


def stages_by_parameter(plans: Iterable[FramePlan]) -> dict[str, set[int]]:
    """The stages that use each parameter outside of units, by its name."""
    stages: dict[str, set[int]] = {}
    for plan in plans:
        for stage, names in enumerate(plan.parameters):
            for name in names:
                stages.setdefault(name, set()).add(stage)
    return stages


@dataclass(frozen=True, slots=True)
class Action:
    """What a stage does at one call.

    Attributes:
        function: The torch function or leaf module that is called; ``None`` for a unit.
        unit: The position of the unit; ``None`` for anything else.
        draws: Whether it draws random numbers.
        counts: Arguments of this rank's own that it writes, and that another stage of this rank writes too.
        answer: What is returned where the call is not made; ``None`` where it is.
        sent: Leaves of the result, or arguments, that the next stage wants: (leaf, position among what is sent, whether
            it will be changed in place).
    """

    function: Callable[..., Any] | None
    unit: int | None
    draws: bool
    counts: tuple[int, ...]
    answer: Answer | None
    sent: tuple[tuple[int | Argument, int, bool], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What an absent call returns.

    Attributes:
        leaves: Fake tensors and plain values; arguments of the call where it returns them.
        spec: The tree.
        value: The tree, if it is always the same.
        received: (leaf, position among the inputs): what arrived from other stages.
        written: (position among the arguments, position among the inputs): buffers whose new values arrived.
    """

    leaves: list[Any]
    spec: TreeSpec
    value: Any
    received: tuple[tuple[int, int], ...]
    written: tuple[tuple[int, int], ...]

    def __call__(self, inputs: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        """What the call returns."""
        if self.value is not None:
            return self.value
        leaves = list(self.leaves)
        arguments: list[Any] = []
        if self.written or any(type(leaf) is Argument for leaf in leaves):
            arguments, _ = flatten((args, kwargs))
            leaves = [arguments[leaf.position] if type(leaf) is Argument else leaf for leaf in leaves]
        for leaf, position in self.received:
            leaves[leaf] = inputs[position]
        for argument, position in self.written:
            arguments[argument].data.copy_(inputs[position])  # not noticed by what a microbatch keeps for backward
        return unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True)
class Part:
    """What a stage does in a step.

    Attributes:
        actions: What it does at each call.
        passed: (position among the inputs, position among what is sent): what only passes through.
        sent: The values for the next stage.
        free_from: From this call on everything is computed, whatever it is.
        leaves_from: Before this call the step is not left, because it has to do something.
        draws: The calls that draw random numbers.
        followed_to: From this call on nothing has to be looked at, if the call before it was a unit of this stage.
        is_last: Whether the step runs to its end.
    """

    actions: list[Action]
    passed: tuple[tuple[int, int, bool], ...]
    sent: tuple[Value, ...]
    free_from: int
    leaves_from: int
    draws: tuple[int, ...]
    followed_to: int | None
    is_last: bool


def make_part(
    graph: Graph, route: Route, made_here: set[int], made_later: set[int], *, again: bool, is_last: bool
) -> Part:
    """What a stage does.

    Args:
        graph: What the step does.
        route: What the stage makes, receives and sends.
        made_here: The calls that any stage of this rank makes.
        made_later: The calls that later stages of this rank make.
        again: Whether a later stage of this rank runs the step again.
        is_last: Whether it is the last stage.
    """
    received = {value: position for position, value in enumerate(route.received)}
    sent = {value: position for position, value in enumerate(route.sent)}
    changed = {old for number in route.computed for old in graph.calls[number].old}
    own: dict[int, list[tuple[int | Argument, int, bool]]] = {}
    for value, position in sent.items():
        if value not in received:
            call = graph.calls[value.call]
            argument = next((place for place, written in call.written.items() if written == value), None)
            leaf = value.leaf if argument is None else Argument(argument)
            will_change = value in changed or argument is not None
            own.setdefault(value.call, []).append((leaf, position, will_change))
    actions = []
    free_from = 0
    for number, call in enumerate(graph.calls):
        is_made = not call.is_absent or number in route.computed
        answer = None if is_made else _make_answer(number, call, received, number in made_here)
        counts = call.counts if again else ()
        if is_made and number in made_later:
            counts += tuple(call.written)
        actions.append(Action(call.function, call.unit, call.draws, counts, answer, tuple(own.get(number, ()))))
        if call.unit is not None or answer is not None:
            free_from = number + 1
    passed = tuple((received[value], sent[value], value in changed) for value in sent if value in received)
    running = [number for number, call in enumerate(graph.calls) if _must_run(number, call, route)]
    leaves_from = running[-1] + 1 if running else 0
    draws = tuple(number for number, call in enumerate(graph.calls) if call.draws)
    followed_to = free_from if is_last and max(draws, default=-1) < free_from else None
    free_from = free_from if is_last else len(actions)
    return Part(actions, passed, tuple(sent), free_from, leaves_from, draws, followed_to, is_last)


def _must_run(number: int, call: Call, route: Route) -> bool:
    """Whether a call does something beside giving values."""
    return bool(call.counts) or ((call.is_effect or call.is_everywhere) and number in route.computed)


def _make_answer(number: int, call: Call, received: dict[Value, int], is_written: bool) -> Answer:
    assert call.spec is not None
    leaves = [leaf.tensor if isinstance(leaf, AbsentTensor) else leaf for leaf in call.outputs]
    arrived = tuple(
        (leaf, received[Value(number, leaf)]) for leaf in range(len(leaves)) if Value(number, leaf) in received
    )
    arriving = {} if is_written else call.written  # another stage of this rank may be some microbatches ahead
    written = tuple((place, received[value]) for place, value in arriving.items() if value in received)
    is_fixed = not arrived and not written and not any(type(leaf) is Argument for leaf in leaves)
    return Answer(leaves, call.spec, unflatten(leaves, call.spec) if is_fixed else None, arrived, written)

"""What each stage does at each call of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import LEAF, TreeSpec, flatten, unflatten
from lightning_hybrid.pipeline_parallel.frame.graph import AbsentTensor, Argument, Call, Graph, Value
from lightning_hybrid.pipeline_parallel.frame.operators import SETS_DATA
from lightning_hybrid.pipeline_parallel.frame.routes import Route, Travel
from lightning_hybrid.pipeline_parallel.frame.writes import Writes, skipped

_DROPOUTS: frozenset[Any] = frozenset(
    {
        *(torch.dropout, torch.dropout_, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    }
)


@dataclass(frozen=True, eq=False)
class FramePlan:
    """What the stages do in steps with one signature that take one path.

    Attributes:
        number: Tells plans apart; equal on all ranks.
        graph: What the step does.
        parts: What each stage does of it.
        parameters: The names of the parameters outside of units that each stage uses, and has.
        travels: What is sent of those that a stage uses and does not have.
        fetched: Of which stages the values are that earlier ones use, and get before the step, by name.
        kept: Tensors of the module that other stages than the last one read, and that it must not write where nothing
            is followed any more; with a call that reads them.
        writes: Of parameters, that one microbatch of a step makes for all.
        of_layers: The parameters of units that the code around them uses, by name, each with the first such call.
    """

    number: int
    graph: Graph
    parts: tuple[Part, ...]
    parameters: tuple[frozenset[str], ...]
    travels: tuple[Travel, ...]
    fetched: Mapping[str, int]
    kept: tuple[tuple[Tensor, Call], ...]
    writes: Writes = field(default_factory=Writes)
    of_layers: Mapping[str, Call] = field(default_factory=dict)

    @cached_property
    def rewritten(self) -> frozenset[str]:
        """The names of the parameters that the step writes."""
        return frozenset().union(*(call.rewritten for call in self.graph.calls)) - {""}

    @cached_property
    def computed_layers(self) -> dict[str, Call]:
        """Those of `of_layers` that go into something else than writes of parameters, each with the first such call."""
        around = [call for number, call in enumerate(self.graph.calls) if number not in self.writes.serving]
        calls = [call for call in reversed(around) if call.unit is None]
        return {name: call for call in calls for name in sorted(call.parameters & self.of_layers.keys())}


def find_kept(graph: Graph, routes: Sequence[Route], excluded: Collection[int]) -> tuple[tuple[Tensor, Call], ...]:
    """What the last stage must not write once the number of an absent value was needed, as others read it."""
    if graph.needed is None:
        return ()
    elsewhere = set().union(*(route.computed for route in routes[:-1]))
    readers = [call for number, call in enumerate(graph.calls) if not call.is_absent or number in elsewhere]
    first = {state: call for call in reversed(readers) for state in call.states}
    return tuple((graph.states[state], call) for state, call in first.items() if state not in excluded)


def skipped_writes(plans: Sequence[FramePlan]) -> list[frozenset[int]]:
    """Return, for each microbatch of a step, the writes of parameters that it leaves to another one.

    Args:
        plans: Of each microbatch.

    Raises:
        WrongUseError: If a parameter is written in a way that cannot be done once.
    """
    again = {name for plan in plans for part in plan.parts for name in part.rewritten}
    return skipped([plan.writes for plan in plans], [plan.graph for plan in plans], again)


def stages_by_parameter(parameters: Iterable[Sequence[frozenset[str]]]) -> dict[str, set[int]]:
    """The stages that use each parameter outside of units, by its name.

    Args:
        parameters: Of each of some steps, the names of what each stage uses.
    """
    stages: dict[str, set[int]] = {}
    for of_stages in parameters:
        for stage, names in enumerate(of_stages):
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
        draws_elsewhere: Whether it draws some of numpy or `random`.
        answer: What is returned where the call is not made; ``None`` where it is.
        is_invariant: Whether it is made, and likely to make the same for each microbatch.
        sent: Leaves of the result, or arguments, that the next stage wants: (leaf, position among what is sent, whether
            a copy is sent, because it will be changed in place, or may be a view of a parameter).
        call: The call, as it was when it was first seen.
        instead: What is called in the place of what the user calls, if that is something else.
    """

    function: Callable[..., Any] | None
    unit: int | None
    draws: bool
    draws_elsewhere: bool
    answer: Answer | None
    is_invariant: bool
    sent: tuple[tuple[int | Argument, int, bool], ...]
    call: Call
    instead: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What an absent call returns.

    Attributes:
        leaves: Fake tensors and plain values; arguments of the call where it returns them.
        spec: The tree.
        value: What is returned, if it is a single leaf that is always the same; a container is the user's to change.
        received: (leaf, position among the inputs): what arrived from other stages.
        written: (position among the arguments, position among the inputs): buffers whose new values arrived.
        aliases: (leaf, earlier leaf) that are one tensor.
        known: Leaves that are tensors with values; each call returns copies, which are the user's to change.
    """

    leaves: list[Any]
    spec: TreeSpec
    value: Any
    received: tuple[tuple[int, int], ...]
    written: tuple[tuple[int, int], ...]
    aliases: tuple[tuple[int, int], ...] = ()
    known: tuple[int, ...] = ()

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
        for leaf in self.known:
            leaves[leaf] = leaves[leaf].clone()
        for leaf, earlier in self.aliases:
            leaves[leaf] = leaves[earlier]
        for argument, position in self.written:
            # Autograd must not notice: batch norm keeps its statistics for backward, though it needs no number of them.
            arguments[argument].data.copy_(inputs[position])
        return unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True)
class Part:
    """What a stage does in a step.

    Attributes:
        actions: What it does at each call.
        passed: (position among the inputs, position among what is sent): what only passes through.
        read: (name, position among what is sent): parameters of this stage that later ones use.
        arrived: (name, position among the inputs): parameters of an earlier stage that this one uses.
        fetched: The names of parameters of later stages that this one uses.
        sent: The values for the next stage.
        free_from: From this call on everything is computed, whatever it is.
        leaves_from: Before this call the step is not left, because it has to do something.
        draws: The calls that draw random numbers.
        followed_to: From this call on nothing has to be looked at, if the call before it was a unit of this stage.
        is_guarded: Whether calls that were not followed may use parameters that this stage does not have.
        is_last: Whether the step runs to its end.
        places: The paths of what holds something that this stage writes in place, and a later one of this rank too.
        rewritten: The names of such parameters.
    """

    actions: list[Action]
    passed: tuple[tuple[int, int, bool], ...]
    read: tuple[tuple[str, int], ...]
    arrived: tuple[tuple[str, int], ...]
    fetched: frozenset[str]
    sent: tuple[Value, ...]
    free_from: int
    leaves_from: int
    draws: tuple[int, ...]
    followed_to: int | None
    is_guarded: bool
    is_last: bool
    places: tuple[str, ...]
    rewritten: tuple[str, ...]

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that travel from here, or to here."""
        return [*self.fetched, *(name for name, _ in (*self.read, *self.arrived))]

    def without(self, numbers: Collection[int]) -> list[Action]:
        """Return the actions, with those of some calls answered and not made.

        Args:
            numbers: Of calls that write parameters.
        """
        if not numbers:
            return self.actions
        actions = list(self.actions)
        for number in numbers:
            action = actions[number]
            if action.answer is None:
                actions[number] = replace(action, answer=_make_answer(number, action.call, {}, False))
        return actions


def make_part(
    graph: Graph,
    route: Route,
    made_here: set[int],
    made_later: set[int],
    limited: Collection[int],
    *,
    again: bool,
    is_last: bool,
    lacks: bool,
) -> Part:
    """What a stage does.

    Args:
        graph: What the step does.
        route: What the stage makes, receives and sends.
        made_here: The calls that any stage of this rank makes.
        made_later: The calls that later stages of this rank make.
        limited: The calls that not every microbatch makes.
        again: Whether a later stage of this rank runs the step again.
        is_last: Whether it is the last stage.
        lacks: Whether there are parameters outside of units that it does not have.
    """
    received = {value: position for position, value in enumerate(route.received)}
    sent = {value: position for position, value in enumerate(route.sent)}
    calls, of_parameters = graph.all_calls, graph.made_of_parameters()
    used = {value for number in route.computed for value in calls[number].operands}
    changed = {old for number in route.computed for old in calls[number].old}
    own: dict[int, list[tuple[int | Argument, int, bool]]] = {}
    for value, position in sent.items():
        if value not in received and graph.parameter_of(value) is None:
            call = calls[value.call]
            argument = next((place for place, written in call.written.items() if written == value), None)
            leaf = value.leaf if argument is None else Argument(argument)
            is_copied = value in changed or argument is not None or value.call in of_parameters
            own.setdefault(value.call, []).append((leaf, position, is_copied))
    actions = []
    free_from = 0
    for number, call in enumerate(graph.calls):
        is_made = not call.is_absent or number in route.computed
        answer = None if is_made else _make_answer(number, call, received, number in made_here)
        actions.append(
            Action(
                call.function,
                call.unit,
                draws=_may_draw(call),
                draws_elsewhere=call.draws_elsewhere,
                answer=answer,
                is_invariant=number in graph.invariant and not _may_draw(call) and number not in own,
                sent=tuple(own.get(number, ())),
                call=call,
                instead=assign if is_made and call.rewritten and _assigns(call) else None,
            )
        )
        if call.unit is not None or answer is not None or number in limited:
            free_from = number + 1
    passed = tuple((received[value], sent[value], value in changed) for value in sent if value in received)
    running = [number for number, call in enumerate(graph.calls) if _must_run(number, call, route)]
    leaves_from = running[-1] + 1 if running else 0
    draws = tuple(number for number, call in enumerate(graph.calls) if _may_draw(call))
    read = _parameters(graph, {value: position for value, position in sent.items() if value not in received})
    arrived = _parameters(graph, {value: position for value, position in received.items() if value in used})
    is_guarded = is_last and lacks and graph.needed is not None
    is_over = is_last and not arrived and not is_guarded and max(draws, default=-1) < free_from
    return Part(
        actions,
        passed,
        read,
        arrived,
        frozenset(route.fetched),
        tuple(sent),
        free_from if is_last else len(actions),
        leaves_from,
        draws,
        free_from if is_over else None,
        is_guarded,
        is_last,
        *_written_again(graph, route.computed & made_later if again else None),
    )


def _written_again(graph: Graph, made: set[int] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The places of what a stage and a later one of its rank both write, and the names of such parameters.

    Args:
        graph: What the step does.
        made: The calls with absent operands that both make; ``None`` if there is no later one.
    """
    if made is None:
        return (), ()
    calls = [graph.all_calls[number] for number in sorted(made)]
    written = {*graph.changed, *(each for call in graph.calls for each in call.counts)}
    written = written.union(*(call.fills for call in calls))
    places = dict.fromkeys(path for each, paths in graph.places.items() if each in written for path in paths)
    return tuple(places), tuple(sorted(set().union(*(call.rewritten for call in calls)) - {""}))


def _parameters(graph: Graph, positions: Mapping[Value, int]) -> tuple[tuple[str, int], ...]:
    """Those of some values that are parameters: their names, with the positions."""
    named = ((graph.parameter_of(value), position) for value, position in positions.items())
    return tuple((name, position) for name, position in named if name is not None)


def _may_draw(call: Call) -> bool:
    """Whether a call draws; dropout does with another rate, whatever it was when the step was first seen."""
    return call.draws or call.function in _DROPOUTS


def shard_text(of_layers: Mapping[str, Call]) -> str:
    """Return the text for a step whose code around the layers uses parameters of which replicas have shards.

    Args:
        of_layers: These parameters by name, each with the first such call.
    """
    name, call = min(of_layers.items(), key=lambda entry: entry[0])
    return (
        f"{call} uses the parameter {name!r} outside the layer that contains it. With zero_stage=3, each replica has"
        " only a shard of the parameter there. Use zero_stage=2 or zero_stage=1. [LH411]"
    )


def _assigns(call: Call) -> bool:
    return bool(call.function == SETS_DATA)


def assign(tensor: Tensor, value: Tensor) -> None:
    """Write what is assigned to `tensor.data`: shards, buckets and what restores tensors know its memory.

    Args:
        tensor: A parameter.
        value: What is assigned.

    Raises:
        WrongUseError: If it has another shape or dtype.
    """
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        raise WrongUseError(
            f"The `data` of a parameter with shape {tuple(tensor.shape)} and dtype {tensor.dtype} was set to a tensor"
            f" with shape {tuple(value.shape)} and dtype {value.dtype}. The shape and the dtype must stay the same."
            " [LH471]"
        )
    with torch.no_grad():
        tensor.detach().copy_(value)


def _must_run(number: int, call: Call, route: Route) -> bool:
    """Whether a call does something beside giving values."""
    return bool(call.counts or ((call.is_effect or call.rewritten) and number in route.computed))


def _make_answer(number: int, call: Call, received: dict[Value, int], is_written: bool) -> Answer:
    assert call.spec is not None
    leaves = [leaf.tensor if isinstance(leaf, AbsentTensor) else leaf for leaf in call.outputs]
    arrived = tuple(
        (leaf, received[Value(number, leaf)]) for leaf in range(len(leaves)) if Value(number, leaf) in received
    )
    arriving = {} if is_written else call.written  # another stage of this rank may be some microbatches ahead
    written = tuple((place, received[value]) for place, value in arriving.items() if value in received)
    is_fixed = call.spec == LEAF and not arrived and not written and type(leaves[0]) is not Argument
    known = tuple(position for position, leaf in enumerate(call.outputs) if isinstance(leaf, Tensor))
    aliases = tuple(call.aliases.items())
    return Answer(leaves, call.spec, leaves[0] if is_fixed else None, arrived, written, aliases, known)

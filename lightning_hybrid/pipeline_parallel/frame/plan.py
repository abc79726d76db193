"""The plan of a traced step: what each stage does at each call, and which tensors it sends to the next stage.

A *unit* is a module that runs on exactly one stage, such as a pipelined layer. An *absent* call is a call whose result
depends on parameters or units, so that only some stages make it. Every stage makes all other calls.

:meth:`FrameCut.find_plan` makes a :class:`FramePlan` from a graph and its routes. In each step with this plan, every
stage executes its :class:`Part` in a :class:`Running`. The graph alone would be enough to run a step, but steps repeat
each call for each microbatch, so results and positions are computed once, in the plan.
"""

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
    """The work of all stages in steps that have the same signature and take the same path.

    Attributes:
        number: The identifier of the plan; equal on all ranks of the model group.
        graph: The calls of the step.
        parts: The work of each stage.
        parameters: For each stage, the names of the parameters outside the units that it has and uses.
        `travels`: The parameters that are sent to stages that use them but do not have them.
        fetched: Parameters that a stage uses and that only later stages have: the name, and the stage whose values are
            broadcast before the step. Empty with gradients.
        kept: Tensors of the module that the last stage must not write after the trace ended, because other stages read
            them; each with a call that reads it.
        writes: The calls that write parameters and that only one microbatch of a step makes.
        of_layers: The parameters of units that the code around the units uses, by name, each with the first call that
            uses it.
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
        """Return the names of the parameters that the step writes."""
        return frozenset().union(*(call.rewritten for call in self.graph.calls)) - {""}

    @cached_property
    def computed_layers(self) -> dict[str, Call]:
        """Return the entries of `of_layers` that are used for more than writes of parameters, with the first use."""
        around = [call for number, call in enumerate(self.graph.calls) if number not in self.writes.serving]
        calls = [call for call in reversed(around) if call.unit is None]
        return {name: call for call in calls for name in sorted(call.parameters & self.of_layers.keys())}


def find_kept(graph: Graph, routes: Sequence[Route], excluded: Collection[int]) -> tuple[tuple[Tensor, Call], ...]:
    """Return tensors of the module that other stages read, so that the last stage must not write them after the trace.

    Args:
        graph: The calls of the step.
        routes: The route of each stage.
        excluded: The `id()` of tensors that may be written, such as states of metrics.

    Returns:
        The tensors, each with the first call that reads it. Empty if the trace reached the end of the step.
    """
    if graph.needed is None:
        return ()
    elsewhere = set().union(*(route.computed for route in routes[:-1]))
    readers = [call for number, call in enumerate(graph.calls) if not call.is_absent or number in elsewhere]
    first = {state: call for call in reversed(readers) for state in call.states}
    return tuple((graph.states[state], call) for state, call in first.items() if state not in excluded)


def skipped_writes(plans: Sequence[FramePlan]) -> list[frozenset[int]]:
    """Return, for each microbatch of a step, the calls that write parameters and that another microbatch makes.

    Args:
        plans: The plan of each microbatch.

    Raises:
        WrongUseError: If one microbatch alone cannot make a write; see :func:`~.writes.skipped`.
    """
    return skipped([plan.writes for plan in plans], [plan.graph for plan in plans])


def stages_by_parameter(parameters: Iterable[Sequence[frozenset[str]]]) -> dict[str, set[int]]:
    """Return the stages that use each parameter outside the units, by name.

    Args:
        parameters: For each step, the names of the parameters that each stage uses.
    """
    stages: dict[str, set[int]] = {}
    for of_stages in parameters:
        for stage, names in enumerate(of_stages):
            for name in names:
                stages.setdefault(name, set()).add(stage)
    return stages


@dataclass(frozen=True, slots=True)
class Action:
    """The action of a stage at one call.

    Attributes:
        function: The torch function or leaf module that is called; ``None`` for a unit.
        unit: The position of the unit; ``None`` for other calls.
        draws: True if the call may draw random numbers.
        draws_elsewhere: True if the call drew random numbers from numpy or `random` in the trace; only for units.
        answer: The function that computes the result if the stage does not make the call; ``None`` if it makes the
            call.
        is_invariant: True if the result is probably equal for each microbatch, so that it can be kept.
        sent: Tensors that the next stage needs: (leaf of the result or argument, position among the sent tensors, True
            if a copy is sent, because the tensor is later changed in place or may be a view of a parameter).
        call: The call in the trace.
        instead: The function to call in place of the user's function: :func:`assign` for an assignment to
            `parameter.data`; ``None`` for the user's function.
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
    """The result of a call that the stage does not make.

    Attributes:
        leaves: The leaves of the result: fake tensors, plain values, tensors with values (see `known`), and
            :class:`Argument` for arguments of the call.
        spec: The tree of the result.
        value: The result, if it is a single leaf that never changes; otherwise ``None``. Containers are built for each
            call, because the user's code may change them.
        received: (leaf, position among the inputs) of tensors that have arrived from another stage.
        written: (position among the arguments, position among the inputs) of buffers whose new values have arrived.
        aliases: (leaf, earlier leaf) of leaves that are the same tensor.
        known: The positions of leaves that are tensors with values. Each result gets copies, because the user's code
            may change them.
    """

    leaves: list[Any]
    spec: TreeSpec
    value: Any
    received: tuple[tuple[int, int], ...]
    written: tuple[tuple[int, int], ...]
    aliases: tuple[tuple[int, int], ...] = ()
    known: tuple[int, ...] = ()

    def __call__(self, inputs: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        """Return the result of the call, and write buffers among the arguments whose new values have arrived.

        Args:
            inputs: The tensors that have arrived from the previous stage.
            args: The arguments of the call.
            kwargs: The keyword arguments of the call.
        """
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
            # `.data` hides the write from autograd: batch norm saves its statistics for backward without using them.
            arguments[argument].data.copy_(inputs[position])
        return unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True)
class Part:
    """The work of one stage in a step.

    Attributes:
        actions: The action at each call.
        passed: (position among the inputs, position among the sent tensors, True if a copy is sent because this stage
            changes the tensor) of tensors that are forwarded to the next stage.
        read: (name, position among the sent tensors) of parameters of this stage, or fetched parameters, that this
            stage sends because later stages use them.
        arrived: (name, position among the inputs) of parameters of an earlier stage that this stage uses.
        fetched: The names of parameters of later stages that this stage uses.
        sent: The names of the values for the next stage, in order.
        free_from: On the last stage, the number of the first call from which on it makes every call without looking at
            the plan. On other stages, the number of traced calls.
        leaves_from: The number of the first call at which the stage may leave the step. Earlier calls have side
            effects.
        draws: The numbers of the calls of the step that may draw random numbers, whichever stage makes them.
        followed_to: The number of the call from which on the mode is not needed, if the call before it is a unit of
            this stage; ``None`` if the mode is needed to the end.
        is_guarded: True if calls after the end of the trace may use parameters that this stage does not have.
        is_last: True if the stage runs the step to its end.
        places: The paths of attributes and buffers that hold something which both this stage and a later stage of this
            rank write in place.
        rewritten: The names of parameters that both this stage and a later stage of this rank write.
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
        """Return the names of the parameters that this stage sends, receives or fetches."""
        return [*self.fetched, *(name for name, _ in (*self.read, *self.arrived))]

    def without(self, numbers: Collection[int]) -> list[Action]:
        """Return the actions, changed so that some calls are answered instead of made.

        Args:
            numbers: The numbers of these calls, which write parameters and which another microbatch makes.
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
    """Return the work of a stage.

    Args:
        graph: The calls of the step.
        route: The calls that the stage makes, and the values that it receives and sends.
        made_here: The absent calls that any stage of this rank makes.
        made_later: The absent calls that later stages of this rank make.
        limited: The calls that not every microbatch makes.
        again: True if a later stage of this rank runs the step again, because the schedule is interleaved.
        is_last: True for the last stage.
        lacks: True if the stage does not have all parameters outside the units.
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
    """Return the paths of objects, and the names of parameters, that both a stage and a later stage of its rank write.

    Args:
        graph: The calls of the step.
        made: The absent calls that both stages make; ``None`` if the rank has no later stage.
    """
    if made is None:
        return (), ()
    calls = [graph.all_calls[number] for number in sorted(made)]
    written = {*graph.changed, *(each for call in graph.calls for each in call.counts)}
    written = written.union(*(call.fills for call in calls))
    places = dict.fromkeys(path for each, paths in graph.places.items() if each in written for path in paths)
    return tuple(places), tuple(sorted(set().union(*(call.rewritten for call in calls)) - {""}))


def _parameters(graph: Graph, positions: Mapping[Value, int]) -> tuple[tuple[str, int], ...]:
    """Return the names of the parameters among some values, with the positions of the values."""
    named = ((graph.parameter_of(value), position) for value, position in positions.items())
    return tuple((name, position) for name, position in named if name is not None)


def _may_draw(call: Call) -> bool:
    """Return True if a call may draw random numbers. A dropout may: its rate may have been zero in the trace."""
    return call.draws or call.function in _DROPOUTS


def shard_text(of_layers: Mapping[str, Call]) -> str:
    """Return the error message for a step whose code around the layers uses parameters that ZeRO-3 shards.

    Args:
        of_layers: The parameters by name, each with the first call that uses it.
    """
    name, call = min(of_layers.items(), key=lambda entry: entry[0])
    return (
        f"{call} uses the parameter {name!r} outside the layer that contains it. With zero_stage=3, each replica has"
        " only a shard of the parameter there. Use zero_stage=2 or zero_stage=1. [LH411]"
    )


def _assigns(call: Call) -> bool:
    """Return True if a call assigns to `tensor.data`."""
    return bool(call.function == SETS_DATA)


def assign(tensor: Tensor, value: Tensor) -> None:
    """Write a value into a parameter in place, instead of assigning it to `tensor.data`.

    The parameter must keep its memory, because ZeRO shards, gradient buckets and saved states refer to it. Steps call
    it if they are traced, and so does `trainer.losses.repeated_writes` in other steps.

    Args:
        tensor: The parameter.
        value: The new value, with the shape and the dtype of the parameter.

    Raises:
        WrongUseError: If the value has another shape or dtype.
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
    """Return True if a stage must make a call for its side effect: it writes the module, or has an effect here."""
    return bool(call.counts or ((call.is_effect or call.rewritten) and number in route.computed))


def _make_answer(number: int, call: Call, received: dict[Value, int], is_written: bool) -> Answer:
    """Return the answer to a call that a stage does not make.

    Args:
        number: The number of the call.
        call: The call.
        received: The values that the stage receives, with their positions.
        is_written: True if a stage of this rank makes the call, so that buffers already have their new values.
    """
    assert call.spec is not None
    leaves = [leaf.tensor if isinstance(leaf, AbsentTensor) else leaf for leaf in call.outputs]
    arrived = tuple(
        (leaf, received[Value(number, leaf)]) for leaf in range(len(leaves)) if Value(number, leaf) in received
    )
    arriving = {} if is_written else call.written  # a stage of this rank may be some microbatches ahead
    written = tuple((place, received[value]) for place, value in arriving.items() if value in received)
    is_fixed = call.spec == LEAF and not arrived and not written and type(leaves[0]) is not Argument
    known = tuple(position for position, leaf in enumerate(call.outputs) if isinstance(leaf, Tensor))
    aliases = tuple(call.aliases.items())
    return Answer(leaves, call.spec, leaves[0] if is_fixed else None, arrived, written, aliases, known)

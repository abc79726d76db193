"""Routes: which calls of a traced step each stage makes, and which values it receives and sends.

A *unit* is a module that runs on exactly one stage, such as a pipelined layer. An *absent* call is a call whose result
depends on parameters or units; every stage makes all other calls, so routes do not contain them. A *value* is an absent
tensor, named by the call that made it.

:class:`FrameCut` calls :func:`find_routes` for each plan, and :class:`ChainUse` calls :func:`find_routes_around` for
each step that it traces. Values are sent forward only, from each stage to the next. Every stage runs the user's code,
so to send as few values as possible, each stage makes the calls that it can make itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.pipeline_parallel.frame.graph import HOOKS, Call, Graph, Value

#: Advice on how to keep a parameter on another stage too.
KEEP_TEXT = (
    "In the first training step, also use the parameter on the stage that needs it now, for example by adding `0 *"
    " parameter.sum()` to a tensor on that stage. Alternatively, make the parameter part of a layer."
)


class OrderError(ValueError):
    """A unit needs the result of a unit on a later stage; see :func:`find_routes` for its ``args``."""


class StateError(WrongUseError):
    """A tensor of the module is written on one stage and read on another stage.

    Args:
        text: The message.
        state: The `id()` of the tensor.
    """

    def __init__(self, text: str, state: int) -> None:
        super().__init__(text)
        self.state = state


@dataclass
class Route:
    """The part of one stage in a step.

    Attributes:
        computed: The numbers of the absent calls that the stage makes, and of reads of parameters (`Graph.reads`).
        received: The values that arrive from the previous stage. Some of them may also be in `sent`.
        sent: The values for the next stage.
        fetched: The names of the parameters that the stage uses and that only later stages have.
    """

    computed: set[int] = field(default_factory=set)
    received: dict[Value, None] = field(default_factory=dict)
    sent: dict[Value, None] = field(default_factory=dict)
    fetched: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Travel:
    """Parameters that are sent in one run of a step to stages that use them but do not have them.

    Attributes:
        names: The name of the parameter; or, for a value that is computed from parameters and is not smaller than each
            of them (such as a transposed one), the names of these parameters.
        stages: The stages that use the value and do not have the parameters.
        num_bytes: The bytes that are sent forward, over all stages. A gradient has the same size and is sent back.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    num_bytes: int


def find_routes(
    graph: Graph,
    stage_of: Mapping[int, int],
    num_stages: int,
    holders: Mapping[str, Collection[int]],
    *,
    fetches: bool,
) -> list[Route]:
    """Return the calls that each stage makes, and the values that it receives and sends.

    A stage makes a value itself if it can: from the batch, its parameters, its units and the values that it receives
    anyway. Otherwise it receives the value from the first stage that can make it, and a parameter from the nearest
    earlier stage that has it. If no single stage has all operands of a call, the stage receives the operands and makes
    the call. It receives the result instead if the result depends only on parameters and the batch and is not larger
    than the operands that the stage lacks; then an earlier stage makes the call. Parameters that not all stages have
    are sent as other values are.

    Args:
        graph: The calls of the step, after :meth:`Graph.read`.
        stage_of: The stage of each unit, by its position.
        num_stages: The number of stages.
        holders: The stages of the parameters that not every stage has, by name.
        fetches: If True, a stage may use values of parameters of later stages, which is possible only without
            gradients.

    Returns:
        The route of each stage.

    Raises:
        OrderError: If a stage needs the result of a later stage. ``args`` are the call of the unit that needs the
            result (``None`` if the end of the step needs it), and the call of the later stage's unit.
        StateError: If a tensor of the module is written on one stage and read on another.
        WrongUseError: If a tensor or a parameter is changed and another stage would not see the change, if a parameter
            is needed on a stage to which it cannot be sent, or if several stages compute a tensor with a gradient hook.
    """
    router = _Router(graph, stage_of, [Route() for _ in range(num_stages)], holders)
    for number, call in enumerate(graph.calls):
        if call.unit is not None:
            router.routes[stage_of[call.unit]].computed.add(number)
    for stage in range(num_stages):
        for number in sorted(router.routes[stage].computed):
            router.need(graph.calls[number].operands, stage, number)
    return router.finish(fetches=fetches)


def find_routes_around(
    graph: Graph, number: int, num_stages: int, holders: Mapping[str, Collection[int]]
) -> list[Route]:
    """Return the routes around a chain of layers that is called as a whole; only the outer stages run the step.

    The chain is the only unit, at position 0.

    Args:
        graph: The calls of the step, after :meth:`Graph.read`.
        number: The number of the call of the chain. The last stage makes this call; the first stage makes its
            arguments.
        num_stages: The number of stages.
        holders: The stages of all parameters outside the chain, by name.

    Returns:
        The route of each stage. If no route sends a value, the stages only send activations between the chain's layers.

    Raises:
        StateError, WrongUseError: As in :func:`find_routes`.
    """
    router = _Router(graph, {0: num_stages - 1}, [Route() for _ in range(num_stages)], holders)
    router.need(graph.calls[number].operands, 0, number)
    router.routes[-1].computed.add(number)
    for written in [n for n, call in enumerate(graph.calls[:number]) if call.is_absent and call.written]:
        router.need([Value(written, 0)], num_stages - 1, None)  # real tensors that are written before the chain
    return router.finish(fetches=False)


def find_travels(graph: Graph, routes: Sequence[Route], sizes: Mapping[str, int]) -> tuple[Travel, ...]:
    """Return the parameters that are sent to stages that do not have them, for a warning; see :class:`Travel`.

    Values that are computed from parameters and are smaller than one of them are left out.

    Args:
        graph: The calls of the step.
        routes: The route of each stage.
        sizes: The size of each parameter in bytes, by name.
    """
    calls, made_of = graph.all_calls, graph.made_of_parameters()
    used = [{value for number in route.computed for value in calls[number].operands} for route in routes]
    travels = []
    for value in sorted({value for values in used for value in values if value.call in made_of}):
        names, name = sorted(made_of[value.call]), graph.parameter_of(value)
        size = calls[value.call].num_bytes(value) if name is None else sizes[name]
        fetching = {stage for stage, route in enumerate(routes) if name in route.fetched}
        receiving = {stage for stage, route in enumerate(routes) if value in used[stage] and value in route.received}
        if (fetching or receiving) and size >= max(sizes[each] for each in names):  # a norm or a few rows are cheap
            num_messages = sum(value in route.sent for route in routes) + bool(fetching)
            travels.append(Travel(tuple(names), tuple(sorted(fetching | receiving)), num_messages * size))
    return tuple(travels)


def travel_text(step: str, travels: Iterable[Travel], holders: Mapping[str, Collection[int]], num_bytes: int) -> str:
    """Return the warning about parameters that are sent between stages in each step, which is slow.

    `step` is the name of the step. `travels` are the parameters that are sent, once for each microbatch. `holders` are
    the stages that have these parameters, by name. `num_bytes` is the number of bytes that are sent in a step.
    """
    places = {(name, travel.stages): None for travel in travels for name in travel.names}
    uses = [f"{name!r} is on {_stages(holders[name])}, but is used on {_stages(stages)}" for name, stages in places]
    return (
        f"`{step}` uses parameters on stages that do not have them: {'; '.join(uses)}. A parameter outside the layers"
        " is kept only on the stages where the first training batch used it, so these parameters are sent between"
        f" stages in each step ({num_bytes:,} bytes in total). {KEEP_TEXT}"
    )


def lives_on_text(stages: Collection[int]) -> str:
    """Return a text that names the stages of a parameter, and the reason."""
    return f"is on {_stages(stages)}, where the first training batch used it"


def _stages(stages: Collection[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, sorted(stages)))}"


class _Router:
    """A search for the routes, stage by stage.

    Args:
        graph: The calls of the step.
        stage_of: The stage of each unit.
        routes: The routes, which the search fills.
        holders: The stages of the parameters that not every stage has, by name.
    """

    def __init__(
        self,
        graph: Graph,
        stage_of: Mapping[int, int],
        routes: list[Route],
        holders: Mapping[str, Collection[int]],
    ) -> None:
        self._graph, self._calls = graph, graph.all_calls
        self._stage_of, self._holders = stage_of, holders
        self.routes = routes
        hooks = [call for call in graph.calls if call.function in HOOKS]
        self._hooked = {value.call for call in hooks for value in call.operands}
        self._can: list[dict[int, bool]] = [{} for _ in routes]
        self._ready = self._find_ready()

    def finish(self, *, fetches: bool) -> list[Route]:
        """Add the values for the end of the step, the writes and the effects, check the routes, and return them.

        It is called when every stage has its units and their operands.

        Args:
            fetches: If True, a stage may use values of parameters of later stages.

        Raises:
            OrderError, StateError, WrongUseError: As in :func:`find_routes`.
        """
        last = len(self.routes) - 1
        self.need(self._graph.wanted, last, None)
        self.write_parameters()
        self.make_the_rest(last)
        self.make_effects()
        self.fetch_parameters(allowed=fetches)
        self.check_rewritten()
        self.check_writes()
        self.check_states(self._graph.state_writes)
        for route in self.routes:
            route.received, route.sent = dict.fromkeys(sorted(route.received)), dict.fromkeys(sorted(route.sent))
        return self.routes

    def need(self, values: Sequence[Value], stage: int, needed_by: int | None) -> None:
        """Make values available on a stage: by a call there, or by sends from an earlier stage.

        It does not recurse over operands, because chains of calls can be longer than the recursion limit.

        Args:
            values: The values.
            stage: The stage.
            needed_by: The number of the call that needs the values; ``None`` for the end of the step.

        Raises:
            OrderError: If a unit of a later stage makes a value.
            WrongUseError: If a unit changes a tensor in place, and the new value cannot be sent.
        """
        waiting = list(reversed(values))
        while waiting:
            value = waiting.pop()
            route, call = self.routes[stage], self._calls[value.call]
            if value in route.received or (value.call in route.computed and call.unit is not None):
                continue
            source = self._source(value, stage)
            if call.unit is not None and source is None:
                later = None if needed_by is None else self._calls[needed_by]
                raise OrderError(later, call)
            if source is None or source == stage:
                if value.call not in route.computed:
                    route.computed.add(value.call)
                    self._can[stage][value.call] = True
                    waiting += reversed(call.operands)
                waiting += [old for old, new in call.old.items() if new == value]  # a view of the written tensor
                continue
            if call.unit is not None and not call.returns(value) and (call.is_in_place or not call.written):
                raise WrongUseError(
                    f"{call} changes a tensor in place, but another stage uses the tensor afterward. Return the new"
                    " value from the layer, and use the returned value instead. [LH460]"
                )
            if value.call not in self.routes[source].computed:
                self.need([value], source, needed_by)
            self._send(value, source, stage)

    def write_parameters(self) -> None:
        """Make each call that writes a parameter on all stages that have the parameter; raise an error if it cannot."""
        for number, call in enumerate(self._calls):
            for stage, route in enumerate(self.routes):
                if number not in route.computed and any(self._holds(name, stage) for name in call.rewritten):
                    if not self._makes(number, stage):
                        raise WrongUseError(self._write_text(call, stage))
                    self.need([Value(number, 0)], stage, None)

    def _write_text(self, call: Call, stage: int) -> str:
        """Return the error message for a write whose values are not available on a stage that has the parameter."""
        sources = sorted({name for value in call.operands for name in self._calls[value.call].parameters})
        sources = [name for name in sources if not self._holds(name, stage)]
        if not sources:
            return (
                f"{call} updates the parameter {min(call.rewritten)!r} with values that only stage"
                f" {len(self.routes) - 1} has, but the parameter is also on stage {stage}. Its values would differ"
                " between stages. Update it in a hook, such as `on_train_batch_end`, or make it part of a layer of the"
                " body. [LH463]"
            )
        places = _stages(self._holders[sources[0]])
        return (
            f"{call} updates the parameter {min(call.rewritten)!r} on stage {stage} with values of the parameter"
            f" {sources[0]!r}, which is on {places}. Set `layer.pipeline_stage` of the layers of both parameters to the"
            " same stage, or update the parameter in a hook, such as `on_train_batch_end`. [LH462]"
        )

    def make_effects(self) -> None:
        """Make each call with an effect on a tensor (a hook on its gradient) on the stages that compute the tensor.

        Raises:
            WrongUseError: If several stages would make such a hook: each has only a part of the gradient.
        """
        for number, call in enumerate(self._calls):
            for route in self.routes:
                if call.is_effect and all(value.call in route.computed for value in call.operands):
                    route.computed.add(number)
            makers = [stage for stage, route in enumerate(self.routes) if number in route.computed]
            if call.function in HOOKS and call.operands and len(makers) > 1:
                raise WrongUseError(
                    f"{call} registers a gradient hook on a tensor that {_stages(makers)} compute, but each of these"
                    " stages has only a part of the tensor's gradient. Register the hook on a new tensor that is never"
                    " modified in place, such as `y = x * 1`, and use `y` instead of `x` afterward. [LH469]"
                )

    def check_writes(self) -> None:
        """Raise an error if a stage receives a tensor and a view of it separately, and then writes one in place."""
        for stage, route in enumerate(self.routes):
            for number in route.computed:
                call = self._calls[number]
                arrived = sorted(value for value in call.old if value in route.received)
                is_apart = len(arrived) > 1 or (len(arrived) == 1 and arrived[0] != min(call.old))
                if call.unit is None and len(call.old) > 1 and is_apart:
                    raise WrongUseError(
                        f"On stage {stage}, {call} changes a tensor in place, but an earlier stage has already sent a"
                        " view of this tensor. Create a new tensor instead. [LH470]"
                    )

    def check_states(self, writes: Mapping[int, Value]) -> None:
        """Raise an error if a stage reads a tensor of the module that only another stage writes.

        In the next step, this stage would read the old value.
        """
        for state, value in writes.items():
            writer = self._calls[value.call]
            holders = [
                value.call in route.computed or (value in route.received and value in writer.written.values())
                for route in self.routes
            ]
            for stage, route in enumerate(self.routes):
                reader = next((self._calls[n] for n in sorted(route.computed) if state in self._calls[n].states), None)
                if reader is not None and not holders[stage]:
                    raise StateError(
                        f"{writer} updates a buffer or an attribute of the module on stage {holders.index(True)}, but"
                        f" {reader} reads it on stage {stage}. In the next step, stage {stage} would still have the old"
                        " value. Update and read the value inside one layer of the body. Alternatively, update the"
                        " value before the layers or in a hook. [LH461]",
                        state,
                    )

    def make_the_rest(self, stage: int) -> None:
        """Make all calls after the last unit that a stage can make, because later steps may use other results."""
        last = max((number for number, call in enumerate(self._calls) if call.unit is not None), default=-1)
        route = self.routes[stage]
        for number in range(last + 1, len(self._graph.calls)):
            call = self._calls[number]
            is_received = any(value.call == number for value in route.received)
            if call.is_absent and not is_received and number not in route.computed and self._makes(number, stage):
                self.need([Value(number, 0)], stage, None)

    def _source(self, value: Value, stage: int) -> int | None:
        """Return the stage that provides a value to a stage; ``None`` if no stage up to this one can make it alone.

        The result is also ``None`` if the call writes in place, so that the stage has to make it with its own tensor.
        """
        call = self._calls[value.call]
        if call.unit is not None:
            home = self._stage_of[call.unit]
            return home if home <= stage else None
        if value in call.written.values() and not call.is_in_place:  # a stage that makes the call anyway has the value
            for earlier in range(stage + 1):
                if value.call in self.routes[earlier].computed:
                    return earlier
        # A hook has to see the full gradient, so one stage makes the tensor and sends it to the other stages.
        if self._makes(value.call, stage) and (value.call not in self._hooked or call.is_in_place):
            return stage
        if call.is_in_place:  # the call must write the tensor of this stage
            return None
        # The nearest stage that has the parameter: the value is then sent through the fewest stages.
        is_parameter = self._graph.parameter_of(value) is not None
        others = range(stage)[::-1] if is_parameter else range(stage + 1)
        source = next((each for each in others if self._makes(value.call, each)), None)
        return self._collector(value, stage) if source is None else source

    def _find_ready(self) -> dict[int, int]:
        """Return the first stage that can have all operands, for calls that depend only on parameters and the batch."""
        reads = enumerate(self._graph.reads, len(self._graph.calls))
        ready = {number: min(min(self._holders[name]) for name in call.parameters) for number, call in reads}
        for number, call in enumerate(self._graph.calls):
            is_value = call.is_absent and call.unit is None and not (call.old or call.written or call.rewritten)
            if is_value and number not in self._hooked and all(value.call in ready for value in call.operands):
                ready[number] = max((ready[value.call] for value in call.operands), default=0)
        return ready

    def _collector(self, value: Value, stage: int) -> int | None:
        """Return an earlier stage that makes a value from operands of several stages, if this sends fewer bytes.

        For example, a sum over all parameters is accumulated from stage to stage, instead of sending each term to the
        last stage. ``None`` if the stage receives the operands and makes the call itself.
        """
        call, source = self._calls[value.call], self._ready.get(value.call, stage)
        if source >= stage or call.unit is not None:
            return None
        sent = [each for each in call.operands if not self._makes(each.call, stage)]
        is_less = call.num_bytes(value) <= sum(self._calls[each.call].num_bytes(each) for each in sent)
        return source if is_less else None

    def _makes(self, number: int, stage: int) -> bool:
        """Return True if a stage can make a call from its parameters, its units and the values that it receives."""
        route, waiting = self.routes[stage], [number]
        known = self._can[stage]
        while waiting:
            at = waiting[-1]
            call = self._calls[at]
            if at in known:
                waiting.pop()
            elif at in route.computed:
                known[at] = True
            elif call.unit is not None:
                known[at] = False
            elif at >= len(self._graph.calls):
                known[at] = all(self._holds(name, stage) for name in call.parameters)
            else:
                operands = [value.call for value in call.operands if value not in route.received]
                unknown = [each for each in operands if each not in known]
                if unknown:
                    waiting += unknown
                else:
                    known[at] = all(known[each] for each in operands)
        return known[number]

    def _holds(self, name: str, stage: int) -> bool:
        """Return True if a stage has a parameter."""
        return stage in self._holders.get(name, (stage,))

    def fetch_parameters(self, *, allowed: bool) -> None:
        """Note the parameters that a stage needs and that only later stages have.

        Args:
            allowed: True if these values may be fetched. With gradients it is False, as gradients could not be sent
                back.
        """
        for stage, route in enumerate(self.routes):
            for call in (self._calls[number] for number in sorted(route.computed)):
                for value in call.operands:
                    name = self._graph.parameter_of(value)
                    if name is None or self._holds(name, stage):
                        continue
                    if value.call in route.computed:
                        route.fetched.add(name)
                    where = "to earlier stages" if name in route.fetched else ""
                    where = "to code that `torch.utils.checkpoint` recomputes" if call.is_made_again else where
                    if where and not allowed:
                        raise WrongUseError(
                            f"{call} uses the parameter {name!r} on stage {stage}, but the parameter cannot be sent"
                            f" {where}. It {lives_on_text(self._holders[name])}. {KEEP_TEXT} [LH408]"
                        )

    def check_rewritten(self) -> None:
        """Raise an error if a parameter is written and sent in the same step: stages would have different values."""
        travelling = {self._graph.parameter_of(value) for route in self.routes for value in route.received}
        travelling = travelling.union(*(route.fetched for route in self.routes))
        for call in self._calls:
            for name in sorted(call.rewritten & travelling):
                raise WrongUseError(
                    f"{call} updates the parameter {name!r}, which {lives_on_text(self._holders[name])}, but another"
                    f" stage uses it in the same step. Update it in a hook, such as `on_train_batch_end`. {KEEP_TEXT}"
                    " [LH464]"
                )

    def _send(self, value: Value, source: int, stage: int) -> None:
        """Add a value to the sends and receives of all stage boundaries between two stages."""
        for through in range(source, stage):
            self.routes[through].sent[value] = None
            self.routes[through + 1].received[value] = None
            self._can[through + 1].clear()

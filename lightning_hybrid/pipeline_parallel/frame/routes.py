"""What each stage computes of a step, and which values it receives and sends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.pipeline_parallel.frame.graph import HOOKS, Call, Graph, Value

#: What lets a parameter live on another stage too.
KEEP_TEXT = (
    "In the first training step, also use the parameter on the stage that needs it now, for example by adding `0 *"
    " parameter.sum()` to a tensor on that stage. Alternatively, make the parameter part of a layer."
)


class OrderError(ValueError):
    """A unit needs what a unit of a later stage makes."""


class StateError(WrongUseError):
    """A tensor of the module is written on one stage and read on another one; `state` is its identity."""

    def __init__(self, text: str, state: int) -> None:
        super().__init__(text)
        self.state = state


@dataclass
class Route:
    """One stage's part of a step.

    Attributes:
        computed: The numbers of the absent calls that it makes itself.
        received: The values that arrive, and are passed on where they are among those sent.
        sent: The values for the next stage.
        fetched: The names of the parameters that it uses and that only later stages have.
    """

    computed: set[int] = field(default_factory=set)
    received: dict[Value, None] = field(default_factory=dict)
    sent: dict[Value, None] = field(default_factory=dict)
    fetched: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Travel:
    """What is sent of parameters in one run of a step, because stages use them that do not have them.

    Attributes:
        names: Of a parameter; or of those that a value is made of that is not smaller, such as a transposed one.
        stages: That use it, and do not have it.
        num_bytes: What is sent; where it has a gradient, as much comes back.
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
    """Find out what has to be where.

    A stage makes a value itself if it can: out of the batch, its parameters, its units and what it receives anyway.
    Else it receives it from the first stage that can. Else, where the operands of a call are spread over several
    stages, it receives these; or the result, if that is made of parameters and is not larger: an earlier stage then
    makes it. Parameters that not all stages have are values like any other.

    Args:
        graph: What the step does.
        stage_of: The stage of each unit.
        num_stages: The number of stages.
        holders: The stages of the parameters outside of units that not all of them have, by name.
        fetches: Whether stages may have the values of parameters of later stages: those that need no gradient.

    Returns:
        The route of each stage.

    Raises:
        OrderError: If the stages cannot be passed once from first to last; ``args`` are the call of the unit that
            comes too early (``None`` if what the step returns does), and that of the later stage's unit.
        WrongUseError: If something is changed in place where another stage would not see it, or a parameter is needed
            where it is not.
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
    """Likewise, around a chain of layers that is called as a whole: only the first and the last stage run the step.

    Args:
        graph: What the step does.
        number: Of the call of the chain. It is one of the last stage; what it is called with, the first stage makes.
        num_stages: The number of stages.
        holders: The stages of all parameters outside of the chain, by name.

    Returns:
        The route of each stage; nothing travels but what the layers of the chain hand on, if nothing is sent.

    Raises:
        WrongUseError: If something is changed in place where another stage would not see it, or a parameter is needed
            where it is not.
    """
    router = _Router(graph, {0: num_stages - 1}, [Route() for _ in range(num_stages)], holders)
    router.need(graph.calls[number].operands, 0, number)
    router.routes[-1].computed.add(number)
    for written in [n for n, call in enumerate(graph.calls[:number]) if call.is_absent and call.written]:
        router.need([Value(written, 0)], num_stages - 1, None)  # a tensor that every stage has, or makes
    return router.finish(fetches=False)


def find_travels(graph: Graph, routes: Sequence[Route], sizes: Mapping[str, int]) -> tuple[Travel, ...]:
    """Which parameters travel.

    Args:
        graph: What the step does.
        routes: What each stage makes, receives and sends.
        sizes: The bytes of parameters, by name.
    """
    calls, made_of = graph.all_calls, graph.made_of_parameters()
    used = [{value for number in route.computed for value in calls[number].operands} for route in routes]
    travels = []
    for value in sorted({value for values in used for value in values if value.call in made_of}):
        names, name = sorted(made_of[value.call]), graph.parameter_of(value)
        size = calls[value.call].num_bytes(value) if name is None else sizes[name]
        fetching = {stage for stage, route in enumerate(routes) if name in route.fetched}
        receiving = {stage for stage, route in enumerate(routes) if value in used[stage] and value in route.received}
        if (fetching or receiving) and size >= max(sizes[each] for each in names):  # a norm, or a few rows, are cheap
            num_messages = sum(value in route.sent for route in routes) + bool(fetching)
            travels.append(Travel(tuple(names), tuple(sorted(fetching | receiving)), num_messages * size))
    return tuple(travels)


def travel_text(step: str, travels: Iterable[Travel], holders: Mapping[str, Collection[int]], num_bytes: int) -> str:
    """The text for parameters that travel, as it is dear.

    Args:
        step: The name of the step.
        travels: What is sent of them; once for each microbatch.
        holders: The stages that have them, by name.
        num_bytes: What is sent in a step.
    """
    places = {(name, travel.stages): None for travel in travels for name in travel.names}
    uses = [f"{name!r} is on {_stages(holders[name])}, but is used on {_stages(stages)}" for name, stages in places]
    return (
        f"`{step}` uses parameters on stages that do not have them: {'; '.join(uses)}. A parameter outside the layers"
        " is kept only on the stages where the first training batch used it, so these parameters are sent between"
        f" stages in each step ({num_bytes:,} bytes in total). {KEEP_TEXT}"
    )


def lives_on_text(stages: Collection[int]) -> str:
    """The text that says where a parameter lives, and why."""
    return f"is on {_stages(stages)}, where the first training batch used it"


def _stages(stages: Collection[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, sorted(stages)))}"


class _Router:
    """Works out the routes, stage by stage."""

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
        """Once every stage makes its units: what the last one wants beside them, and what goes along with that.

        Args:
            fetches: Whether stages may have the values of parameters of later stages.
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
        """Let a stage have values; without recursion, as chains of calls are long."""
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
                waiting += [old for old, new in call.old.items() if new == value]  # a view of what is written
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
        """What writes parameters is done on all stages that have them, out of what all of these have."""
        for number, call in enumerate(self._calls):
            for stage, route in enumerate(self.routes):
                if number not in route.computed and any(self._holds(name, stage) for name in call.rewritten):
                    if not self._makes(number, stage):
                        raise WrongUseError(self._write_text(call, stage))
                    self.need([Value(number, 0)], stage, None)

    def _write_text(self, call: Call, stage: int) -> str:
        """The text for a write with values that a stage that has the parameter cannot have."""
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
        """What is done to a tensor (a hook on its gradient) is done where the tensor is made."""
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
        """A tensor that is written, and views of it that are used afterwards, must not arrive one by one."""
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
        """A tensor of the module that the step writes must be read, in the next step, where it was written."""
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
        """After the last unit, let a stage make whatever it can: the code there may differ from step to step."""
        last = max((number for number, call in enumerate(self._calls) if call.unit is not None), default=-1)
        route = self.routes[stage]
        for number in range(last + 1, len(self._graph.calls)):
            call = self._calls[number]
            is_received = any(value.call == number for value in route.received)
            if call.is_absent and not is_received and number not in route.computed and self._makes(number, stage):
                self.need([Value(number, 0)], stage, None)

    def _source(self, value: Value, stage: int) -> int | None:
        """The stage that a value comes from; ``None`` if it has to be made out of what several stages have."""
        call = self._calls[value.call]
        if call.unit is not None:
            home = self._stage_of[call.unit]
            return home if home <= stage else None
        if value in call.written.values() and not call.is_in_place:  # those who compute the call anyway have it
            for earlier in range(stage + 1):
                if value.call in self.routes[earlier].computed:
                    return earlier
        # A hook on a gradient has to see all of it, so the tensor is made once, and others get it from there.
        if self._makes(value.call, stage) and (value.call not in self._hooked or call.is_in_place):
            return stage
        if call.is_in_place:  # the tensor itself has to be here
            return None
        # Of several stages that have a parameter the nearest one: what is between does not have it.
        is_parameter = self._graph.parameter_of(value) is not None
        others = range(stage)[::-1] if is_parameter else range(stage + 1)
        source = next((each for each in others if self._makes(value.call, each)), None)
        return self._collector(value, stage) if source is None else source

    def _find_ready(self) -> dict[int, int]:
        """Return the first stage where all operands of a call can be, for calls of parameters and the batch alone."""
        reads = enumerate(self._graph.reads, len(self._graph.calls))
        ready = {number: min(min(self._holders[name]) for name in call.parameters) for number, call in reads}
        for number, call in enumerate(self._graph.calls):
            is_value = call.is_absent and call.unit is None and not (call.old or call.written or call.rewritten)
            if is_value and number not in self._hooked and all(value.call in ready for value in call.operands):
                ready[number] = max((ready[value.call] for value in call.operands), default=0)
        return ready

    def _collector(self, value: Value, stage: int) -> int | None:
        """Return the earlier stage that makes a value of what stages up to it have, if less is sent then.

        A sum over all parameters is added up on the way, instead of each of its terms being sent to the last stage.
        """
        call, source = self._calls[value.call], self._ready.get(value.call, stage)
        if source >= stage or call.unit is not None:
            return None
        sent = [each for each in call.operands if not self._makes(each.call, stage)]
        is_less = call.num_bytes(value) <= sum(self._calls[each.call].num_bytes(each) for each in sent)
        return source if is_less else None

    def _makes(self, number: int, stage: int) -> bool:
        """Whether a stage can make what a call returns."""
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
        """Whether a parameter lives on a stage, among others."""
        return stage in self._holders.get(name, (stage,))

    def fetch_parameters(self, *, allowed: bool) -> None:
        """What no stage before has of parameters comes from later ones.

        Args:
            allowed: Whether it may: their gradients could not go back there.
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
        """A parameter that the step writes does not travel: each stage would have another value."""
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
        for through in range(source, stage):
            self.routes[through].sent[value] = None
            self.routes[through + 1].received[value] = None
            self._can[through + 1].clear()

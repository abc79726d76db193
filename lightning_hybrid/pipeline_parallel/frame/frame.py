"""Pipeline stages for any model: the user's step runs on every stage, and each stage makes only the calls it needs.

A *unit* is a module that runs on exactly one stage; all other code of the step and of the model is code *around* the
units. A *trace* runs the step with fake tensors (tensors without values) to record its calls. A *plan* tells each stage
which calls to make, and which tensors to send. A *mode* (`StepMode`) receives the calls while a step is traced or runs.
A tensor is *absent* in a trace if only some stages will have its values.

`FrameProgram`, the step program of models whose layers any code may call, makes one :class:`FrameCut` for each run of
the trainer and uses it in each training and evaluation step::

    with cut():                            redirects calls of units to the running step
        plan = cut.find_plan(...)          traces the step and plans it, if no remembered plan fits
        cut.run(plan, stage, ...)          runs the part of one stage, for each microbatch and stage of the rank
        cut.run_in_lockstep(...)           instead, for evaluation steps that cannot be traced

`tuning.dry_run` uses one to find the stages of parameters in a single process. `ChainUse` and `ChainCalls` in
`pipeline_parallel.chain` are subclasses that only trace. Layers of one `nn.Sequential` that a step calls once, as a
whole, need no plan (`BodyCut`). Other models call layers in loops, with several arguments, and use tensors around the
layers. Without this file, users would have to rewrite them as a sequence of stages.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count, groupby
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.distributed.taps import Tap, is_own_hook
from lightning_hybrid.distributed.watch.collector import without_collector
from lightning_hybrid.pipeline_parallel.frame.discovery import Discovery
from lightning_hybrid.pipeline_parallel.frame.fake_module import fake_module
from lightning_hybrid.pipeline_parallel.frame.fake_tensors import AbsentValueError, absent_text
from lightning_hybrid.pipeline_parallel.frame.graph import Call, Graph
from lightning_hybrid.pipeline_parallel.frame.lockstep import Exchange, Lockstep
from lightning_hybrid.pipeline_parallel.frame.path_change import PathChangedError
from lightning_hybrid.pipeline_parallel.frame.pinned_call import call_pinned
from lightning_hybrid.pipeline_parallel.frame.plan import FramePlan, find_kept, make_part
from lightning_hybrid.pipeline_parallel.frame.reentrant import without_reentrant
from lightning_hybrid.pipeline_parallel.frame.routes import (
    KEEP_TEXT,
    OrderError,
    Route,
    StateError,
    find_routes,
    find_travels,
    lives_on_text,
)
from lightning_hybrid.pipeline_parallel.frame.running import (
    InvariantCalls,
    LateParameterError,
    LateUnitError,
    OtherPathError,
    Running,
    Unwind,
    undoing_assigned,
)
from lightning_hybrid.pipeline_parallel.frame.stage_states import StatesOfStages, copied_arguments
from lightning_hybrid.pipeline_parallel.frame.step_mode import StepMode
from lightning_hybrid.pipeline_parallel.frame.unit_attributes import GENERATION, NOTHING_HIDDEN, HiddenAttributes
from lightning_hybrid.pipeline_parallel.frame.writes import Writes, find_writes
from lightning_hybrid.pipeline_parallel.placeholders import without_value_text
from lightning_hybrid.pipeline_parallel.schedules import Placement
from lightning_hybrid.torch_internals import (
    COMPILED_CALL,
    FakeTensor,
    forward_hooks,
    forward_pre_hooks,
    may_have_compiled,
)

_log = logging.getLogger(__name__)

# The most plans that are remembered for one signature (name, shapes and mode of a step), and in total.
_MOST_OF_KEY, _MOST_PLANS = 32, 512
_FIRST_OF_SHAPES = (
    "In evaluation, the strategy expects later batches of the same shapes to take the same path as the first one, which"
    " called no layer at this point. Set HybridStrategy(dynamic_shapes=True) to trace every batch."
)
_END = "the end of the step"
# With this number of paths for one signature, a step probably reads a different value each time.
_MANY = 8


class FrameCut:
    """The user's step, split at the calls of units.

    A stage other than the last one leaves the step (*unwinds*) when it has all tensors for later stages::

        stage 0      code around the units, own units                     -> unwind     value: a list of tensors
        stage s      code around the units, received tensors, own units   -> unwind     value: a list of tensors
        last stage   code around the units, received tensors, own units, loss           value: the result of the step

    A unit is a pipelined layer, or a *pinned* module: a module around the layers that became a unit during a trace,
    because it needs values that only one stage has. The code around the units is all other code of the step and of the
    model. It makes the same calls in the same order on every stage, so a call is identified by its number. A stage
    makes the calls that it needs. Its other calls return tensors that an earlier stage has sent, or fake tensors with
    the shapes from the trace.

    Args:
        module: The user's module.
        units: The pipelined layers with their names, in the order of the stages.
        stages: The positions of the units of each stage.
        placement: The rank of each stage.
        device: The device of this rank.
        holders: The stages of parameters outside the units that not every stage has, by name.
        remembers: If True, plans are kept for later steps. If False, every step is traced, because its shapes may
            depend on values.
        around_discovery: Returns a context for traces, in which logs are dropped and layers have full parameters.
        leaf_modules: Modules outside the units, with their names, whose calls are made as a whole or not at all,
            because tensor-parallel ranks communicate in them.
        compare: Called with texts for the calls of a trace, to check that they are equal on every rank of the model
            group; it raises an error otherwise. All these ranks call it.
        once: The reason why no layer may be called twice in a step, with advice; ``None`` if it may.
        agrees: Returns True if a number is equal on every rank of the model group. All these ranks call it.
        metrics: Modules whose state counts only on the last stage, so that the step may update it at any time.

    Attributes:
        holders: The stages of parameters outside the units that not every stage has, by name.
        num_followed: The number of steps that :meth:`find_plan` has traced. `trainer.redo` compares it to learn whether
            a step was traced.
    """

    # Settings of traces, which subclasses can switch off: `tries_zeros` of :class:`Discovery`; and if hooks that have
    # kept tensors of units are called as code around the units.
    _tries_zeros = _taps_hooks = True

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[tuple[str, nn.Module]],
        stages: Sequence[range],
        placement: Placement,
        device: torch.device,
        *,
        holders: Mapping[str, Collection[int]],
        remembers: bool,
        around_discovery: Callable[[], AbstractContextManager[object]],
        leaf_modules: Sequence[tuple[str, nn.Module]] = (),
        compare: Callable[[list[str]], None] = lambda calls: None,
        once: str | None = None,
        agrees: Callable[[int], bool] = lambda number: True,
        metrics: Sequence[nn.Module] = (),
    ) -> None:
        self._metrics = metrics
        self._compare, self._agrees = compare, agrees
        self._once = once
        self._around_discovery = around_discovery
        self._module = module
        self._units, self._num_layers, self._leaf_modules = list(units), len(units), list(leaf_modules)
        self._stage_of = {unit: stage for stage, positions in enumerate(stages) for unit in positions}
        self._num_stages, self._placement = len(stages), placement
        of_units = {part for _, unit in units for part in unit.modules()}
        # Calls in compiled code would not reach the mode.
        self._compiled_around = [
            part for part in module.modules() if part not in of_units and vars(part).get(COMPILED_CALL) is not None
        ]
        self._device = device
        self._remembers, self.num_followed = remembers, 0
        self._plans: dict[Hashable, list[FramePlan]] = {}
        self._graphs: dict[Hashable, list[Graph]] = {}  # of plans that `place_parameters` has forgotten
        self.holders = holders
        self._all_holders: dict[str, Collection[int]] | None = None
        self._numbers = count()
        self._warned = False
        self._mode: StepMode | None = None
        self._states: StatesOfStages | None = None  # of the running step, if a rank has several stages
        self._invariant: defaultdict[int, InvariantCalls] | None = None  # by plan, if the running step repeats
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []
        self._free = set[nn.Module]()  # modules that need values and cannot become units

    @contextmanager
    def __call__(self, *, repeats: bool = True) -> Iterator[None]:
        """Redirect calls of units and of leaf modules to this object while entered.

        The context is entered once for each batch. While entered, `forward` of these modules is replaced. Results of
        invariant calls (equal for all microbatches) and states of stages are kept until it ends.

        Args:
            repeats: True if the user's step runs several times, once for each microbatch.
        """
        self._invariant = defaultdict(InvariantCalls) if repeats and self._remembers else None
        try:
            for module in self._compiled_around:
                self._replace(module, COMPILED_CALL, None)
            for index, (_, unit) in enumerate(self._units[: self._num_layers]):
                self._redirect(unit, lambda mode, *call, index=index: mode.call_unit(index, *call))
            for index in range(self._num_layers, len(self._units)):
                self._redirect_pinned(index)
            for name, module in self._leaf_modules:
                self._redirect(module, lambda mode, *call, at=(name, module): mode.call_module(*at, *call))
            with without_reentrant(lambda: self._mode is not None):
                yield
        finally:
            self._states = self._invariant = None
            self._put_back(0)

    def _put_back(self, count: int) -> None:
        """Restore replaced attributes, except the first ``count`` that were replaced."""
        while len(self._replaced) > count:
            table, name, before = self._replaced.pop()
            if before is None:
                del table[name]
            else:
                table[name] = before

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        """Replace an attribute of a module until the context of :meth:`__call__` ends."""
        table = vars(module)
        self._replaced.append((table, name, table.get(name)))
        table[name] = value

    def _redirect_pinned(self, index: int) -> None:
        """Redirect calls of a pinned module, with its parameters and buffers as arguments."""
        module = self._units[index][1]
        self._redirect(module, lambda mode, *call: call_pinned(partial(mode.call_unit, index), module, *call))

    def _redirect(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Redirect calls of a module to the mode of the step that is running.

        Args:
            module: A unit or a leaf module.
            call: Makes a call; it takes the mode, a function that runs the module (its `forward` or its compiled
                call), the arguments and the keyword arguments.
        """
        before, compiled = vars(module).get("forward"), vars(module).get(COMPILED_CALL)
        hooks = [*forward_pre_hooks(module).values(), *forward_hooks(module).values()]
        # Recomputation in a replaced `forward` would be compiled again for each call. Hooks of the user are code around
        # the layer, but a compiled call contains them.
        if compiled is not None and (before is not None or not all(map(is_own_hook, hooks))):
            self._replace(module, COMPILED_CALL, None)
            compiled = None

        def forward(*args: Any, **kwargs: Any) -> Any:
            # The class is looked up at each call: in a trace, tensor-parallel layers have their original class.
            return type(module).forward(module, *args, **kwargs) if before is None else before(*args, **kwargs)

        run = forward if compiled is None else compiled

        def redirected(*args: Any, **kwargs: Any) -> Any:
            mode = self._mode
            if mode is None:  # inside another unit, or recomputed in backward
                return run(*args, **kwargs)
            self._mode = None
            try:
                return call(mode, run, args, kwargs)
            finally:
                self._mode = mode

        redirected.is_redirected = True  # type: ignore[attr-defined]
        # A compiled call uses `forward`, which must therefore not be replaced.
        self._replace(module, "forward" if compiled is None else COMPILED_CALL, redirected)

    @contextmanager
    def unfollowed(self) -> Iterator[None]:
        """Pause the mode while entered, for code inside the user's step that is not part of it, such as `self.log`."""
        mode = self._mode
        if mode is None or mode.is_answering:  # the mode is off while it handles a call
            yield
            return
        with mode.paused():
            yield

    def place_parameters(self, holders: Mapping[str, Collection[int]]) -> None:
        """Set the stages of the parameters outside the units, and forget the plans.

        It is called after the first training batch has shown which stages use the parameters. The graphs of known steps
        are kept, so that :meth:`find_plan` can plan these steps again without a trace.

        Args:
            holders: The stages of the parameters that not every stage has, by name.
        """
        self.holders = holders
        self._all_holders = None
        self._graphs = {key: [plan.graph for plan in known] for key, known in self._plans.items()}
        self._plans.clear()

    def _forget_plans(self) -> None:
        """Forget all plans and graphs, because a module has become a unit."""
        self._plans.clear()
        self._graphs.clear()

    @property
    def all_holders(self) -> Mapping[str, Collection[int]]:
        """Return the stages of all parameters that not every stage has, including parameters of layers, by name."""
        if self._all_holders is None:
            of_unit = {
                id(part): stage
                for unit, stage in self._stage_of.items()
                if unit < self._num_layers  # parameters of pinned modules may be on several stages
                for part in self._units[unit][1].modules()
            }
            stages: dict[int, set[int] | None] = {}
            for part in self._module.modules():
                for parameter in part.parameters(recurse=False):
                    known = stages.setdefault(id(parameter), set())
                    if id(part) not in of_unit:  # outside the layers: see `holders`
                        stages[id(parameter)] = None
                    elif known is not None:
                        known.add(of_unit[id(part)])
            of_units = {name: stages[id(each)] for name, each in self._module.named_parameters()}
            self._all_holders = {name: each for name, each in of_units.items() if each is not None} | {**self.holders}
        return self._all_holders

    @property
    def _stages_of_unit(self) -> dict[str, Collection[int]]:
        """Return the stages of the parameters that only pipelined layers contain, by name."""
        return {name: stages for name, stages in self.all_holders.items() if name not in self.holders}

    @property
    def _units_of(self) -> dict[str, list[int]]:
        """Return the positions of the units that contain each parameter, by its name."""
        units: dict[int, list[int]] = {}
        for index, (_, unit) in enumerate(self._units):
            for parameter in unit.parameters():
                units.setdefault(id(parameter), []).append(index)
        return {name: units.get(id(each), []) for name, each in self._module.named_parameters()}

    @property
    def layers(self) -> list[nn.Module]:
        """Return the pipelined layers: the units without pinned modules."""
        return [unit for _, unit in self._units[: self._num_layers]]

    @property
    def plans(self) -> list[FramePlan]:
        """Return the remembered plans, of training and of evaluation steps."""
        return [plan for known in self._plans.values() for plan in known]

    def find_plan(
        self,
        key: Hashable,
        step: Callable[..., Any],
        arguments: Sequence[Any],
        seed: Callable[[int], None],
        before: Callable[[], None] = lambda: None,
        choice: int | None = None,
    ) -> FramePlan:
        """Return the plan of a step. If no remembered plan fits, plan a known graph again, or trace the step.

        If several plans fit the arguments, the plan that was used last is returned. This is a collective operation of
        the model group, because a trace is compared over the ranks. It seeds the generators and calls the user's code.

        Args:
            key: The signature of the step. Steps with equal keys have arguments of equal shapes, and take the same path
                unless they read values.
            step: The user's step.
            arguments: The arguments of the step.
            seed: Seeds the generators for the call with a number.
            before: Called before the step is traced.
            choice: The number of a plan, or `path_change.FOLLOW` to trace the step; equal on every rank. ``None`` to
                search for a plan that fits.

        Raises:
            WrongUseError: If the step cannot be split into stages, or if ranks make different calls.
            Exception: Any error of the user's code in a trace.
        """
        known = self._plans.setdefault(key, []) if self._remembers else []
        plan = self._choose(known, arguments, seed) if choice is None else None
        plan = plan or next((each for each in known if each.number == choice), None)
        if plan is not None:
            known.remove(plan)
            known.append(plan)
            return plan
        graph = self._known_graph(key, arguments, seed) if choice is None else None
        begin, how = time.perf_counter(), "traced" if graph is None else "planned again"
        if graph is None:
            self.num_followed += 1
            before()
        while plan is None:
            if graph is None:
                graph = self._discover_all(step, arguments, seed)
                self._compare(graph.texts())
            graph.read(self.all_holders.keys())
            try:
                plan = self._make_plan(graph)
            except StateError as error:
                if not self._pin_writer(graph, error.state):
                    raise
                graph = None
        known = self._plans.setdefault(key, []) if self._remembers else []  # cleared if a module was pinned
        _log.debug(
            "`%s` was %s in %.0f ms: %d calls; numbers of tensors sent from each stage to the next: %s",
            getattr(step, "__name__", type(step).__name__),
            how,
            1e3 * (time.perf_counter() - begin),
            len(plan.graph.calls),
            [len(part.sent) for part in plan.parts[:-1]],
        )
        self._remember(known, plan, getattr(step, "__name__", type(step).__name__))
        return plan

    def _choose(
        self, known: Sequence[FramePlan], arguments: Sequence[Any], seed: Callable[[int], None]
    ) -> FramePlan | None:
        """Return the plan that was used last among the plans that fit; ``None`` if none fits or if ranks disagree.

        If a decision depends on tensors of the module, all ranks of the model group compare their plans.
        """
        with torch.no_grad():
            plan = next((each for each in reversed(known) if each.graph.decisions.hold(arguments, seed)), None)
        if any(each.graph.decisions.read_states for each in known):  # a hook may have changed the states on one rank
            plan = plan if self._agrees(-1 if plan is None else plan.number) else None
        return plan

    def _known_graph(self, key: Hashable, arguments: Sequence[Any], seed: Callable[[int], None]) -> Graph | None:
        """Return and forget the graph of a step that was traced before parameters were placed.

        Return ``None`` if there is none, or if its decisions depend on tensors of the module.
        """
        known = self._graphs.get(key, [])
        with torch.no_grad():
            graph = next((each for each in reversed(known) if each.decisions.hold(arguments, seed)), None)
        if graph is None or graph.decisions.read_states:  # a hook may have changed the states on one rank
            return None
        self._graphs[key] = [each for each in known if each is not graph]
        return graph

    def other_plans(self, plan: FramePlan) -> list[FramePlan]:
        """Return the other plans for the signature of a plan, the plan that was used last first; for `trainer.redo`."""
        known = next((known for known in self._plans.values() if plan in known), [])
        return [each for each in reversed(known) if each is not plan]

    def _discover_all(self, step: Callable[..., Any], arguments: Sequence[Any], seed: Callable[[int], None]) -> Graph:
        """Trace a step; pin modules that need values of absent tensors if units are called after them.

        An example is a codebook that searches for unused codes. Such a module is a unit in all later traces, and known
        plans are forgotten.
        """
        graph = self._discover(step, arguments, seed)
        while graph.needed is not None:
            names = {part: name for name, part in self._module.named_modules()}
            module = next((part for part in graph.needed_in if self._can_pin(part)), None)
            if module is None or module in self._free or module not in names:
                return graph
            num_replaced = len(self._replaced)
            stage = self._pin(names[module], module, graph.calls)
            with contextlib.suppress(Exception):  # the user's code may fail in any way with zeros
                beyond = self._discover(step, arguments, seed)
                first = next(at for at, call in enumerate(beyond.calls) if call.unit == len(self._units) - 1)
                if any(call.unit is not None for call in beyond.calls[first + 1 :]):
                    rank_zero_info(
                        f"{names[module]!r} reads values that layers compute, so the whole module runs on stage"
                        f" {stage}."
                    )
                    self._forget_plans()
                    graph = beyond
                    continue
            self._free.add(module)
            del self._stage_of[len(self._units) - 1], self._units[-1]
            self._put_back(num_replaced)
        return graph

    def _can_pin(self, module: nn.Module) -> bool:
        """Return True if a module can become a unit: it can be called, and contains no unit and no leaf module."""
        others = {part for _, part in (*self._units, *self._leaf_modules)}
        is_called = type(module).forward is not nn.Module.forward
        return is_called and module is not self._module and others.isdisjoint(module.modules())

    def _pin(self, name: str, module: nn.Module, before: Sequence[Call]) -> int:
        """Make a module a unit on the latest stage whose units were called before it, and return this stage.

        Args:
            name: The dotted name of the module.
            module: The module.
            before: The calls before the call of the module. Without units among them, the stage is 0.
        """
        self._stage_of[len(self._units)] = stage = max(
            (self._stage_of[call.unit] for call in before if call.unit is not None), default=0
        )
        self._units.append((name, module))
        self._redirect_pinned(len(self._units) - 1)
        return stage

    def _pin_writer(self, graph: Graph, state: int) -> bool:
        """Pin a module that writes a buffer of its own, on the latest stage whose units are called before it.

        The module is the innermost module that has the buffer and is called, such as a codebook or custom running
        statistics. Its parameters are kept on the stages that use them, as parameters outside the units. Other stages
        receive its new buffers from its stage.

        Args:
            graph: A trace in which the module was not a unit.
            state: The `id()` of the buffer.

        Returns:
            True if there is such a module.
        """
        buffer = next((name for name, each in self._module.named_buffers() if id(each) == state), None)
        first = next(number for number, call in enumerate(graph.calls) if state in call.states)
        names = {part: name for name, part in self._module.named_modules()}
        for module in graph.calls[first].inside if buffer is not None else ():
            if self._can_pin(module) and any(each is graph.states[state] for each in module.buffers()):
                stage = self._pin(names[module], module, graph.calls[:first])
                self._forget_plans()
                rank_zero_info(
                    f"{names[module]!r} uses the values that it writes into {buffer!r}, so the whole module runs on"
                    f" stage {stage}."
                )
                return True
        return False

    def _remember(self, known: list[FramePlan], plan: FramePlan, step: str) -> None:
        """Keep a plan, and warn once about a step with many paths.

        If there are too many plans, forget the plan of this signature that was not used for the longest time, or all
        plans of the oldest signature.
        """
        known.append(plan)
        if len(known) > _MOST_OF_KEY:
            del known[0]
        while sum(map(len, self._plans.values())) > _MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        reader = known[0].graph.decisions.different if len(known) == _MANY else None
        if reader is not None and not self._warned:
            self._warned = True
            what = reader if isinstance(reader, str) else known[0].graph.calls[reader]
            rank_zero_warn(
                f"`{step}` has taken {_MANY} different paths for batches of the same shapes, because it reads a value"
                f" from the batch that is different each time: {what}. Each path is traced once, which takes 10 to 200"
                " ms. Read this value inside one layer of the body. Alternatively, restrict it to a few values, for"
                " example by rounding lengths up to multiples of 64, or keep it in a tensor, for example by using a"
                " mask instead of a slice."
            )

    def _discover(self, step: Callable[..., Any], arguments: Sequence[Any], seed: Callable[[int], None]) -> Graph:
        """Trace a step, again with other settings as long as a trace shows that they are needed.

        - If the step writes absent tensors into tensors of the module, the next trace treats these as absent from the
          start.
        - If hooks inside units have kept tensors, the next trace calls these hooks as code around the units.
        - If no unit is called after the first function whose result shapes depend on values, such as the
          lengths of sequences, the next trace ends at this function. The last stage then runs the function with any
          lengths, and one plan is enough.
        - If the step has created tensors for later steps, the next trace has these tensors.

        Raises:
            WrongUseError: If the step cannot be traced.
            Exception: Any error of the user's code, unless another setting may avoid it.
        """
        passes_lengths = self._tries_zeros
        states: frozenset[int] = frozenset()
        taps: frozenset[tuple[int, Tap]] = frozenset()
        while True:
            parameters = {id(parameter): name for name, parameter in self._module.named_parameters()}
            discovery = Discovery(
                self._device,
                self._units,
                seed,
                parameters,
                states,
                tries_zeros=self._tries_zeros,
                passes_lengths=passes_lengths,
                taps=taps,
                num_layers=self._num_layers,
            )
            try:
                graph, kept = self._follow(discovery, step, arguments)
            except Exception:
                if not (discovery.escaped and self._taps_hooks) and not discovery.has_passed_in_vain:
                    raise
            if discovery.escaped and self._taps_hooks:
                taps |= discovery.escaped
                continue
            if discovery.has_passed_in_vain:
                passes_lengths = False
                continue
            read = {state for call in graph.calls if not call.is_absent for state in call.states}
            if not kept and not (graph.state_writes.keys() & read) - states:
                return graph
            states |= graph.state_writes.keys()

    def _follow(self, discovery: Discovery, step: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Graph, bool]:
        """Trace a step once; return the graph, and True if the step has created tensors that later steps use.

        The text that the step prints is dropped.
        """
        units = self.layers
        self._mode = discovery
        try:
            with (
                torch.inference_mode(mode=False),
                torch.set_grad_enabled(torch.is_grad_enabled()),
                self._around_discovery(),
                _uncompiled(),
                # Otherwise the number of objects on a rank would decide which tensors still exist. A collection of all
                # objects of the process also takes 0.2 s.
                without_collector(),
                fake_module(self._module, units, arguments, discovery) as finish,
                contextlib.redirect_stdout(io.StringIO()),
            ):
                graph = discovery.run(self._module, step, arguments)
                return graph, finish()
        finally:
            self._mode = None
            discovery.fakes.is_over = True

    def _make_plan(self, graph: Graph) -> FramePlan:
        """Plan a traced step: find the routes, and the part of each stage. All ranks plan all stages.

        Raises:
            WrongUseError: If the step cannot be split into stages, or if a layer is called twice but must not be.
            StateError: If a tensor of the module is written on one stage and read on another.
        """
        calls = Counter(call.unit for call in graph.calls if call.unit is not None and call.unit < self._num_layers)
        if self._once is not None and calls and max(calls.values()) > 1:
            (unit, times), *_ = calls.most_common()
            raise WrongUseError(
                f"The layer {self._units[unit][0]!r} is called {times} times in a step, {self._once} [LH435]"
            )
        try:
            fetches = not torch.is_grad_enabled()
            routes = find_routes(graph, self._stage_of, self._num_stages, self.all_holders, fetches=fetches)
        except OrderError as error:
            raise WrongUseError(self._order_text(graph, *error.args)) from None
        sizes = {name: each.numel() * each.element_size() for name, each in self._module.named_parameters()}
        travels = find_travels(graph, routes, sizes)
        self._check_shared(graph, routes)
        last = self._num_stages - 1
        parts, writes = [], find_writes(graph, self._units_of)
        for stage, route in enumerate(routes):
            own = self._placement.stages_of(self._placement.ranks[stage])
            later = [other for other in own if other > stage]
            made_here = set().union(*(routes[each].computed for each in own))
            made_later = set().union(*(routes[each].computed for each in later))
            lacks = any(stage not in stages for stages in self.holders.values())
            parts.append(
                make_part(
                    graph,
                    route,
                    made_here,
                    made_later,
                    writes.limited,
                    again=bool(later),
                    is_last=stage == last,
                    lacks=lacks,
                )
            )
        fetched = {name: min(self.all_holders[name]) for route in routes for name in sorted(route.fetched)}
        used, kept = self._parameters_of(graph, routes, writes), find_kept(graph, routes, _tensors(self._metrics))
        return FramePlan(
            next(self._numbers), graph, tuple(parts), used, travels, fetched, kept, writes, self._of_layers(graph)
        )

    def _of_layers(self, graph: Graph) -> dict[str, Call]:
        """Return the parameters of units that the code around the units uses, by name, each with its first use."""
        names = self._stages_of_unit.keys()
        around = [call for call in reversed(graph.calls) if call.unit is None]
        return {name: call for call in around for name in sorted(call.parameters & names)}

    def _check_shared(self, graph: Graph, routes: Sequence[Route]) -> None:
        """Raise an error if a parameter of a leaf module is sent: only this module can use a tensor-parallel shard."""
        leaves = {id(each): name for name, module in self._leaf_modules for each in module.parameters()}
        travelling = [graph.parameter_of(value) for route in routes for value in route.received]
        for name in [*filter(None, travelling), *(name for route in routes for name in sorted(route.fetched))]:
            leaf = leaves.get(id(self._module.get_parameter(name)))
            if leaf is not None:
                raise WrongUseError(
                    f"The parameter {name!r} {lives_on_text(self.holders[name])}. It cannot be sent to the stage that"
                    f" uses it now, because {leaf!r} is sharded over tensor-parallel ranks. {KEEP_TEXT} [LH408]"
                )

    def _parameters_of(self, graph: Graph, routes: Sequence[Route], writes: Writes) -> tuple[frozenset[str], ...]:
        """Return the names of the parameters outside the units that each stage has and uses; writes are not uses.

        A written parameter brings the parameters of its new value to its stage. If the trace ended before the end of
        the step, the last stage counts as a user of all parameters.
        """
        calls = graph.all_calls
        used = [
            set().union(*(calls[number].parameters for number in route.computed - writes.serving)) for route in routes
        ]
        for name, sources in writes.sources.items():
            stages = [stage for stage, names in enumerate(used) if name in names] or [self._num_stages - 1]
            for stage in self._stages_of_unit.get(name, stages):
                used[stage] |= sources
        if graph.needed is not None:  # the remaining calls are unknown
            used[-1] |= {name for name, _ in self._module.named_parameters()}
        of_units = self._stages_of_unit.keys()
        return tuple(
            frozenset(name for name in names - of_units if stage in self.holders.get(name, (stage,)))
            for stage, names in enumerate(used)
        )

    def _order_text(self, graph: Graph, early: Call | None, late: Call) -> str:
        """Return the error message for units that are not called in the order of the stages."""
        order = list(dict.fromkeys(call.unit for call in graph.calls if call.unit is not None))
        names = [self._units[index][0] for index in order]
        assert late.unit is not None
        assert early is not None
        assert early.unit is not None
        first, second = self._units[early.unit][0], self._units[late.unit][0]
        again = len([call for call in graph.calls if call.unit == early.unit]) > 1
        remedy = (
            f"{first!r} is called more than once in a step, each time with results of the previous call, but a step"
            " passes through the pipeline only once. Use HybridStrategy(zero_stage=...) or"
            " HybridStrategy(tensor_parallel_size=...) without a pipeline. Alternatively, split only layers that are"
            f" called once: HybridStrategy(body=[...]). {GENERATION} [LH435]"
            if again
            else (f"Name the layers in the order of their calls:\n    HybridStrategy(body={_folded(names)!r}) [LH436]")
        )
        return (
            f"At {early.where}, {first!r} on stage {self._stage_of[early.unit]} needs the result of {second!r} on stage"
            f" {self._stage_of[late.unit]}. {remedy}"
        )

    def run(
        self,
        plan: FramePlan,
        stage: int,
        step: Callable[..., Any],
        arguments: Sequence[Any],
        inputs: Sequence[Tensor] | None,
        *,
        seed: Callable[[int], None],
        random: Callable[[int], AbstractContextManager[None]],
        fetched: Mapping[str, Tensor] | None = None,
        skipped: Collection[int] = (),
    ) -> Any:
        """Run a stage's part of a step, without communication.

        If a later stage of this rank runs the step too, the step gets copies of the arguments that it writes, and the
        module has the state of this stage while it runs.

        Args:
            plan: The plan.
            stage: A stage of this rank.
            step: The user's step.
            arguments: The arguments of the step.
            inputs: The tensors from the previous stage; ``None`` on the first stage.
            seed: Seeds the generators for the call with a number.
            random: Returns a context for a unit that draws random numbers from numpy or `random`, by the number of the
                call.
            fetched: The values of parameters that only later stages have, by name.
            skipped: The numbers of calls that write parameters and that another microbatch makes.

        Returns:
            A list of tensors for the next stage; on the last stage, the result of the step.

        Raises:
            PathChangedError: If the step takes another path than its plan.
            WrongUseError: If the step does something after the end of the trace that the last stage cannot do alone, if
                a unit returns or changes something that other stages do not see, or if a stage changes a container that
                another stage of this rank uses.
        """
        run = partial(self._run, plan, stage, step, inputs=inputs, seed=seed, random=random, skipped=skipped)
        run = partial(run, fetched=fetched or {})
        if stage == self._placement.stages_of(self._placement.ranks[stage])[-1]:
            return run(arguments)
        if self._states is None:
            self._states = StatesOfStages(self._module, [unit for _, unit in self._units])
        part = plan.parts[stage]
        rewritten = [self._module.get_parameter(name) for name in part.rewritten]
        with (
            self._states.of(stage, part.places, rewritten),
            copied_arguments(arguments, plan.graph.written_inputs) as copied,
        ):
            return run(copied)

    def _run(
        self,
        plan: FramePlan,
        stage: int,
        step: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        inputs: Sequence[Tensor] | None,
        seed: Callable[[int], None],
        random: Callable[[int], AbstractContextManager[None]],
        fetched: Mapping[str, Tensor],
        skipped: Collection[int],
    ) -> Any:
        """Run a stage's part of a step with the current state of the module; the arguments are those of :meth:`run`."""
        part = plan.parts[stage]
        parameters = {name: self._module.get_parameter(name) for name in part.parameters}
        invariant = None if self._invariant is None else self._invariant[plan.number]
        hidden = self._hidden_attributes(plan, stage)
        values = inputs or (), parameters, fetched
        running = Running(part, *values, self._device, seed, random, invariant, skipped, hidden)
        if not part.is_last and not running.missing and not part.leaves_from:
            return running.sent
        present = _tensors(self._module.modules()) if part.is_last and plan.kept else set()
        if present:
            running.watch([tensor for tensor, _ in plan.kept])
        self._mode = running
        try:
            with hidden, undoing_assigned(() if part.is_last else plan.graph.assigned), running:
                value = step(*arguments)
        except Unwind:
            return running.sent
        except OtherPathError as error:
            number, found, called = error.args
            raise PathChangedError(self._path_text(plan, number, found), plan, number, called) from None
        except AbsentValueError as error:  # another plan may have the same calls with other values
            raise PathChangedError(str(error), plan, running.number, is_same=True) from error
        except LateParameterError as error:
            raise WrongUseError(self._parameter_text(plan, *error.args)) from None
        except LateUnitError as error:
            if plan.graph.needed is None:
                text = self._path_text(plan, len(plan.graph.calls), *error.args)
                raise PathChangedError(text, plan, part.free_from, *error.args) from None
            raise WrongUseError(self._late_text(plan, *error.args)) from None
        finally:
            self._mode = None
        if not part.is_last and not running.missing:
            return running.sent
        if any(isinstance(leaf, FakeTensor) for leaf in flatten(value)[0]):
            text = absent_text(f"The result of {type(self._module).__name__}")
            raise PathChangedError(text, plan, running.number, is_same=True)
        if running.number < part.free_from:
            text = self._path_text(plan, running.number, _END)
            raise PathChangedError(text, plan, running.number)
        if present:
            gone = present - _tensors(self._module.modules())
            for position, (tensor, _) in enumerate(plan.kept):
                if position in running.written() or id(tensor) in gone:
                    raise WrongUseError(self._written_text(plan, position))
        return value

    def _hidden_attributes(self, plan: FramePlan, stage: int) -> HiddenAttributes:
        """Return a context in which the last stage cannot use attributes that lack tensors of other stages."""
        if not plan.parts[stage].is_last or not plan.graph.kept:
            return NOTHING_HIDDEN
        present = [unit for unit, at in self._stage_of.items() if at == stage]
        return HiddenAttributes(plan.graph.kept, present, self._module, [unit for _, unit in self._units])

    def run_in_lockstep(
        self,
        step: Callable[..., Any],
        arguments: Sequence[Any],
        rank: int,
        exchange: Exchange,
        *,
        random: Callable[[int], AbstractContextManager[None]],
        plain: Callable[[Any], Any],
        is_tensor_parallel: bool,
    ) -> Any:
        """Run an evaluation step in lockstep, and return its result on every rank; see :class:`Lockstep`.

        This is a collective operation of the model group. The caller switches gradients off.

        Args:
            step: The user's step.
            arguments: The arguments of the step.
            rank: This pipeline rank.
            exchange: See :class:`Lockstep`.
            random: See :class:`Lockstep`.
            plain: See :class:`Lockstep`.
            is_tensor_parallel: See :class:`Lockstep`.

        Raises:
            WrongUseError: If ranks make different calls, or if a call needs values that cannot be sent.
        """
        ranks, rank_of = range(self._placement.num_ranks), self._placement.ranks
        held = {name: frozenset(rank_of[stage] for stage in stages) for name, stages in self.all_holders.items()}
        holders = {
            id(parameter): (parameter, held[name])
            for name, parameter in self._module.named_parameters()
            if len(held.get(name, ranks)) < len(ranks)
        }
        layer_ranks = [rank_of[self._stage_of[index]] for index in range(self._num_layers)]
        given = exchange, rank, self.layers, layer_ranks, holders, self._device
        self._mode = lockstep = Lockstep(*given, random=random, plain=plain, is_tensor_parallel=is_tensor_parallel)
        try:
            with lockstep:
                value = step(*arguments)
        finally:
            self._mode = None
        exchange.end(lockstep.checksum)
        return value

    def _path_text(self, plan: FramePlan, number: int, found: str | int) -> str:
        """Return the error message for a step that takes another path than its plan."""
        calls = plan.graph.calls
        expected = str(calls[number]) if number < len(calls) else _END
        found = repr(self._units[found][0]) if isinstance(found, int) else found
        return (
            f"The step took a different path than when it was traced for a batch with the same shapes: call {number} of"
            f" {type(self._module).__name__} is now {found}, but was {expected}. All stages must take the same path."
            " The path is allowed to depend on the batch, on `self.training` and on `requires_grad`. If it depends on"
            " anything else, set HybridStrategy(dynamic_shapes=True), which traces every step. [LH431]"
        )

    def _written_text(self, plan: FramePlan, position: int) -> str:
        """Return the error message for a tensor of the module that is written after the end of the trace."""
        tensor, reader = plan.kept[position]
        name = next((repr(name) for name, each in self._module.named_buffers() if each is tensor), "a tensor")
        return (
            f"The step updates {name} of {type(self._module).__name__} after {plan.graph.needed} has read a value that"
            f" only the last stage has. From this point on, only that stage runs the step, but {reader} reads {name} on"
            f" every stage. Update {name} before this point, or in a hook, such as `on_train_batch_end`. [LH473]"
        )

    def _parameter_text(self, plan: FramePlan, placeholder: Tensor) -> str:
        """Return the error message for a parameter of another stage that is used after the end of the trace."""
        name = next((name for name, each in self._module.named_parameters() if each is placeholder), None)
        if name is None or name not in self.holders:
            return without_value_text(f"code after {plan.graph.needed}")
        return (
            f"The step uses the parameter {name!r} after {plan.graph.needed} has read a value that another stage"
            f" computes, so tracing the step could not find this use. {name!r} {lives_on_text(self.holders[name])}."
            f" {KEEP_TEXT} [LH409]"
        )

    def _late_text(self, plan: FramePlan, index: int) -> str:
        """Return the error message for a unit of another stage that is called after the end of the trace."""
        again = any(call.unit == index for call in plan.graph.calls)
        dynamic = "" if torch.is_grad_enabled() else f" {_FIRST_OF_SHAPES}"
        return (
            f"{plan.graph.needed} reads the value of a tensor that another pipeline stage computes, and the layer"
            f" {self._units[index][0]!r} is called{' again' * again} afterward. Code between pipelined layers cannot"
            " depend on activation values. Make the decision depend only on the batch. Alternatively, move the decision"
            " and the layers after it into one layer of the body, which processes one microbatch at a"
            f" time.{f' {GENERATION}' * again}{dynamic} [LH406]"
        )


def _uncompiled() -> AbstractContextManager[object]:
    """Return a context in which compiled functions run uncompiled, as they cannot be compiled for fake tensors."""
    return torch.compiler.set_stance("force_eager") if may_have_compiled() else contextlib.nullcontext()


def _tensors(modules: Iterable[nn.Module]) -> set[int]:
    """Return the `id()` of the tensors in attributes and buffers of modules, also in lists, tuples and dictionaries."""
    values = [value for module in modules for table in (vars(module), module._buffers) for value in table.values()]
    held = [value for value in values if isinstance(value, Tensor) or type(value) in (list, tuple, dict)]
    return {id(leaf) for leaf in flatten(held)[0] if isinstance(leaf, Tensor)}


def _folded(names: Sequence[str]) -> list[str]:
    """Replace names by one pattern where they are all members of a numbered list, in its order."""
    folded: list[str] = []
    for parent, group in groupby(names, key=lambda name: name.rpartition(".")[0]):
        row = list(group)
        is_row = row == [f"{parent}.{number}" for number in range(len(row))]
        folded += [f"{parent}.*"] if is_row and len(row) > 1 else row
    return folded if len(set(folded)) == len(folded) else list(names)

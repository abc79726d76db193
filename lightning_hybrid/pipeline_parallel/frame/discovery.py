"""The trace of a step: a run of the user's code with fake parameters, which records the calls and their operands.

A *unit* is a module that runs on exactly one stage: a pipelined layer, or a *pinned* module, which became a unit during
a trace because it needs values that only one stage has. A tensor is *absent* if it depends on parameters or on the
result of a unit: only some stages have its values, and the trace has a fake tensor, which has no values. A tensor is
*real* if every stage has its values. A call is absent if its result is.

:class:`FrameCut` makes a :class:`Discovery` for each trace: before the first step with new shapes or a new path, on all
ranks of a model group. The batch is real, so that code may read it and choose a path; with fake tensors alone, the
trace would end there. The user's code runs unchanged. It is not compiled, so it may use any Python, such as logs and
objects of the user.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.messages.lazy_tensor import peek
from lightning_hybrid.distributed.pytree import TreeSpec, flatten, unflatten
from lightning_hybrid.distributed.random import generator_marks
from lightning_hybrid.distributed.taps import HookWatch, Tap, Taps, find_taps
from lightning_hybrid.distributed.tensor_bytes import as_bytes
from lightning_hybrid.distributed.tensor_metadata import METADATA
from lightning_hybrid.distributed.watch.watched_thread import READING
from lightning_hybrid.pipeline_parallel.frame.alike import RepeatedUnits
from lightning_hybrid.pipeline_parallel.frame.decisions import (
    Decisions,
    Input,
    Made,
    RealCall,
    apply,
    integers_of,
    may_be_invariant,
    outcome_of,
    read_values,
)
from lightning_hybrid.pipeline_parallel.frame.fake_tensors import (
    as_parameter,
    collect_new,
    fake_like,
    fake_mode,
    is_whole,
    run_on_zeros,
    without_torchs_errors,
)
from lightning_hybrid.pipeline_parallel.frame.graph import (
    DERIVATIVES,
    DETACHES,
    GIVES_MEMORY,
    MOST_KEPT,
    OF_LENGTHS,
    READS,
    AbsentTensor,
    Argument,
    Call,
    Graph,
    Value,
    call_unit,
    check_backward,
    find_checkpoint,
    function_name,
    gives_back,
    running_modules,
    users_line,
)
from lightning_hybrid.pipeline_parallel.frame.operators import SETS_DATA, Operators, Seen, memory_of, num_bytes
from lightning_hybrid.pipeline_parallel.frame.stage_states import (
    Contents,
    find_owners,
    find_places,
    held_tensors,
    replace_tensors,
)
from lightning_hybrid.pipeline_parallel.frame.step_mode import StepMode
from lightning_hybrid.pipeline_parallel.frame.unit_attributes import (
    GENERATION,
    KeptTensorError,
    find_kept_attributes,
    kept_text,
)
from lightning_hybrid.pipeline_parallel.frame.writes import call_each, is_foreach
from lightning_hybrid.torch_internals import FakeTensor

_PLAIN = frozenset({bool, int, float, str, complex, torch.dtype, torch.device})
# First leaf numbers of tensors that a call wrote and that are not leaves of its result: real arguments, tensors that
# share their memory (with an offset of _MANY if found by memory only), and absent tensors, also through views.
_WRITTEN, _ALIASES, _CHANGED, _MANY = 1_000_000, 2_000_000, 3_000_000, 500_000


class ValueNeeded(BaseException):
    """The code around the units needs the value of an absent tensor, so the trace ends.

    :meth:`Discovery.run` catches it. It is not an `Exception`, so that `except Exception` in the user's code does not.
    """


class Discovery(StepMode):
    """A mode that traces one run of the user's step, in which parameters and the results of units are fake tensors.

    ::

        batch, buffers     real tensors     a call of real tensors only is made, and its result has values
        parameters         fake tensors     a call with a parameter, or with the result of such a call, is absent
        units              run on fake tensors, or on zeros if they read values; their results are absent

    Each call has a number. Absent tensors are identified as Python objects, for as long as the user's code holds them.
    The last stage needs the absent tensors that still exist at the end of the step.

    Absent calls are made with gradients off, so that no autograd graph keeps objects alive. The trace computes
    separately whether a result would require a gradient. Integer results of units that depend only on integers of the
    batch (lengths) are absent too, but the trace knows their values.

    Args:
        device: The device of this rank.
        units: The units with their names: the pipelined layers, then the pinned modules.
        seed: Seeds the generators for the call with a number.
        names: The name of each parameter of the module, by its `id()`.
        absent_states: The `id()` of tensors of the module that the step writes with absent tensors, and that are
            therefore absent.
        tries_zeros: True if a unit that reads values may run on zeros. If False, the error of the unit is raised.
        passes_lengths: True if a function around the units may run on zeros if its result shapes depend only on real
            integers or masks. If False, the trace ends at such a function.
        taps: Forward hooks inside units that are called as code around the units, each with the position of its unit.
        num_layers: The number of units that are pipelined layers; ``None`` if all are. The other units are pinned
            modules: their parameters and buffers are arguments of their calls.

    Attributes:
        graph: The calls found so far.
        fakes: The mode of the fake tensors.
        escaped: Hooks inside units that should be in `taps`, as they pass tensors out of the unit: a tensor that a hook
            received still exists after the unit has returned, or code around the units uses a tensor of a unit that the
            unit did not return.
    """

    def __init__(
        self,
        device: torch.device,
        units: Sequence[tuple[str, nn.Module]],
        seed: Callable[[int], None],
        names: Mapping[int, str],
        absent_states: Collection[int] = (),
        *,
        tries_zeros: bool = True,
        passes_lengths: bool = True,
        taps: Collection[tuple[int, Tap]] = (),
        num_layers: int | None = None,
    ) -> None:
        super().__init__()
        self._units, self._num_layers = list(units), len(units) if num_layers is None else num_layers
        self._repeats = RepeatedUnits(self._units[: self._num_layers], self.fake)
        self._trains = [any(each.requires_grad for each in unit.parameters()) for _, unit in units]
        self.graph = Graph()
        self.fakes = fake_mode()
        self._device = device
        self._seed = seed
        self._operators = Operators()
        self._stand_ins: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._names: dict[int, tuple[weakref.ref[Tensor], Value]] = {}
        self._absent_states, self._tries_zeros = absent_states, tries_zeros
        self._passes_lengths = passes_lengths
        self._passed: int | None = None  # the number of the first function that ran on zeros
        self._taps, self._watches = taps, dict[int, HookWatch]()
        self._hidden: list[tuple[int, Tensor]] = []  # in place of tensors that units have stored in attributes, by unit
        self.escaped: set[tuple[int, Tap]] = set()
        self._checkpoints: dict[int, tuple[Any, int]] = {}
        self._parameters: dict[int, Tensor] = {}
        self._parameter_names = dict(names)
        self._parameters_in: dict[int, set[str]] = {}  # names by memory
        self._originals: dict[int, tuple[Tensor, Tensor]] = {}
        self._inputs: dict[int, tuple[Tensor, int]] = {}
        self._made: dict[int, tuple[weakref.ref[Tensor], Made]] = {}
        self._lengths: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # that units return: fake tensors and values
        self._real_calls: dict[int, RealCall] = {}
        self._outcomes: dict[int, list[Any]] = {}
        self._written: set[int] = set()  # written memory of real tensors
        self._invariant: dict[int, list[tuple[Tensor, Tensor]]] = {}  # operands and results of calls, with copies

    def fake(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor with the shape, strides and dtype of a tensor, which may have no values on this rank."""
        return fake_like(self.fakes, tensor, self._device)

    def parameter(self, parameter: Tensor) -> nn.Parameter:
        """Return a new fake parameter for a parameter, and record the name of the parameter for it."""
        fake = as_parameter(self.fake(parameter), requires_grad=parameter.requires_grad)
        self._parameters[id(parameter)] = self._parameters[id(fake)] = fake
        if id(parameter) in self._parameter_names:
            self._parameter_names[id(fake)] = name = self._parameter_names[id(parameter)]
            self._parameters_in.setdefault(memory_of(fake), set()).add(name)
        return fake

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a real tensor of the module, which the step may change, and record its original."""
        copied = tensor.detach().clone()
        self._originals[id(copied)] = copied, tensor
        return copied

    def run(self, module: nn.Module, step: Callable[..., Any], arguments: Sequence[Any]) -> Graph:
        """Trace a step, inside :func:`without_collector` and :func:`fake_module`.

        Args:
            module: The user's module.
            step: The user's step.
            arguments: The arguments of the step, of which the first is the batch; tensors among them are copied.

        Returns:
            The graph of the step. `Graph.needed` is set if the trace ended before the end of the step.

        Raises:
            WrongUseError: If the step uses absent tensors in a way that cannot be traced.
            Exception: Any error of the user's code, which may be caused by fake tensors.
        """
        leaves, spec = flatten(list(arguments))
        copies = [peek(leaf).clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._inputs = {id(leaf): (leaf, place) for place, leaf in enumerate(copies) if isinstance(leaf, Tensor)}
        try:
            with self:
                kept = step(*unflatten(copies, spec))
        except (ValueNeeded, Exception) as error:
            self.graph.kept = find_kept_attributes(module, [unit for _, unit in self._units], self._hidden)
            if not isinstance(error, ValueNeeded):
                raise
            kept = error
        self._checkpoints.clear()  # frames of the user's code keep tensors alive
        collect_new()
        gone = [key for key, (reference, _) in self._stand_ins.items() if reference() is None]
        for key in gone:  # otherwise the reuse of an `id()` would decide which fake tensors remain
            del self._stand_ins[key]
        # Fake parameters are not counted: each stage has its own parameters, and writes them.
        held = ((reference(), value) for reference, value in self._names.values())
        alive = {value for tensor, value in held if tensor is not None and id(tensor) not in self._parameters}
        self.graph.wanted += sorted(alive - set(self.graph.wanted))
        for copied, original in self._originals.values():
            value = self.name_of(copied)
            if value is not None:
                self.graph.state_writes[id(original)] = value
        del kept
        self.graph.decisions = Decisions(self._real_calls, self._outcomes, integers_of(arguments[0]))
        self.graph.invariant = self._unwritten()
        return self.graph

    def note_assigned(self, owner: Any, name: str, before: Any, now: Tensor) -> None:
        """Note that an attribute is another tensor after the step.

        Args:
            owner: A module, or an object of the user.
            name: The name of the attribute or buffer.
            before: The value before the step: a fake tensor, a copy of :meth:`copy`, or ``None`` for a new attribute.
            now: The value after the step.
        """
        value = self.name_of(now)
        if value is not None and id(before) in self._originals:
            self.graph.state_writes[id(self._originals[id(before)][1])] = value
        if not self.has_values(now):
            self.graph.assigned.append((owner, name))

    def has_values(self, tensor: Tensor) -> bool:
        """Return True if a tensor has values on every stage."""
        return not isinstance(tensor, FakeTensor) and self.name_of(tensor) is None

    @property
    def has_passed_in_vain(self) -> bool:
        """Return True if a function ran on zeros because of `passes_lengths`, but no unit was called after it.

        Then the trace should have ended at this function: the last stage can run the function with any lengths.
        """
        return self._passed is not None and all(call.unit is None for call in self.graph.calls[self._passed :])

    # Calls of torch functions.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Trace a call of a torch function; functions that read only metadata are not traced."""
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        self.is_answering = True
        try:
            if is_foreach(func):
                return call_each(self._call_function, func, args, kwargs)
            return self._call_function(func, args, kwargs)
        finally:
            self.is_answering = False

    def _call_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._call(Call(func, None, f"`{function_name(func)}`", users_line()), func, args, kwargs)

    def call_module(self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Trace a call of a leaf module as one call of a function that takes the module's parameters."""
        call = Call(module, None, repr(name), users_line())
        with self.paused():
            return self._call(call, forward, args, kwargs, list(module.parameters()))

    def _call(
        self, call: Call, func: Callable[..., Any], args: Any, kwargs: Any, parameters: Sequence[Tensor] = ()
    ) -> Any:
        """Trace a call of a function. The mode is off, so calls inside the function are not traced.

        Args:
            call: The call, which is filled in.
            func: The function, or the `forward` of a leaf module.
            args: The arguments of the call.
            kwargs: The keyword arguments of the call.
            parameters: Parameters that the function uses in addition to its arguments.

        Returns:
            The result: of a real call, as it is; of an absent call, with fake tensors.
        """
        leaves, spec = flatten((args, kwargs))
        count = len(leaves)
        leaves += parameters
        number = len(self.graph.calls)
        self.graph.calls.append(call)
        self._note_states(call, leaves)
        if any(isinstance(leaf, Tensor) and self._is_absent(leaf) for leaf in leaves):
            if func in DERIVATIVES:
                raise WrongUseError(
                    f"{call} computes derivatives through layers on several stages, but no rank has the full"
                    " autograd graph. Compute the derivatives inside one layer, or use a layout without a"
                    " pipeline. [LH407]"
                )
            return self._absent(number, call, leaves, lambda fakes: apply(func, *unflatten(fakes[:count], spec)))
        self._seed(number)
        memory = memory_of(leaves[0]) if leaves and isinstance(leaves[0], Tensor) else 0
        with self._operators.watch() as seen:
            result = func(*args, **kwargs)
        if func == SETS_DATA:  # this write uses no operator
            seen.written |= {memory, memory_of(leaves[0])}
        call.draws = seen.draws
        call.counts = self._note_writes(seen.written)
        self._check_checkpoint(call)
        self._remember(number, call, leaves, spec, result, seen)
        return result

    def _note_states(self, call: Call, leaves: Sequence[Any]) -> None:
        """Note the tensors of the module among the arguments of a call, and the modules whose `forward` is running."""
        states = [self._originals[id(leaf)][1] for leaf in leaves if id(leaf) in self._originals]
        call.states = tuple(map(id, states))
        self.graph.states.update(zip(call.states, states, strict=True))
        call.inside = running_modules() if states else ()

    def call_unit(self, index: int, unit: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Trace a call of a unit, which runs on fake tensors unless a unit of the same kind ran with like arguments.

        Hooks inside the unit that are in `taps` are called after the unit, as code around the units.
        """
        leaves, spec = flatten((args, kwargs))
        name, module = self._units[index]
        call = Call(None, index, repr(name), users_line())
        number = len(self.graph.calls)
        self.graph.calls.append(call)
        self._note_states(call, leaves)
        hooks = find_taps(module)
        taps = Taps(module, [tap for tap in hooks if (index, tap) in self._taps])
        watch = HookWatch(module, [tap for tap in hooks if (index, tap) not in self._taps])
        if len(taps):
            call.taps = taps

        ran = call
        drawn = elsewhere = False
        held: list[Tensor] | None = (
            None  # the tensors in attributes of the unit before it ran; ``None`` if it did not run
        )

        def run(fakes: list[Any]) -> Any:
            nonlocal ran

            def call_it() -> Any:
                nonlocal drawn, elsewhere, held
                held = held_tensors(find_owners([module]).values()) if held is None else held
                before = generator_marks(self._device)
                with taps.recording() as tapped, watch.watching():
                    result = call_unit(call, unit, *unflatten(fakes, spec))
                after = generator_marks(self._device)
                elsewhere |= after.elsewhere != before.elsewhere
                drawn |= elsewhere or after.torch != before.torch
                return (result, tapped) if len(taps) else result

            if hooks and self._taps:  # each hook has to run
                return call_it()
            result, ran = self._repeats(call, fakes, spec, call_it, lambda: self._operators.seen)
            return result

        with self.paused():
            result = self._absent(number, call, leaves, run, trains=self._trains[index])
        call.draws_elsewhere = elsewhere or ran.draws_elsewhere
        call.draws |= drawn or ran.draws
        self._note_escaped(index, watch)
        if held is not None:
            with self.paused():
                self._hide_kept(index, module, held)
        if any(at == index for at, _ in self.escaped):
            self._repeats.forget(call)
        if len(taps):
            result, tapped = result
            taps.replay(tapped)
        return result

    def _hide_kept(self, index: int, unit: nn.Module, held: Sequence[Tensor]) -> None:
        """Replace tensors that a call of a unit has stored in attributes by fake tensors without names.

        A tensor that the unit also returned has a name, so code around the units could use it. But the attribute has
        the tensor only on the stage of the unit, and other stages would use the value of an earlier step.

        Args:
            index: The position of the unit.
            unit: The unit.
            held: The tensors that the unit held before the call.
        """
        known = {id(tensor) for tensor in held}

        def hidden(tensor: Tensor) -> Tensor:
            is_kept = isinstance(tensor, FakeTensor) and id(tensor) not in known
            if not is_kept or isinstance(tensor, nn.Parameter):
                return tensor
            fake = self.fake(tensor)
            self._hidden.append((index, fake))
            return fake

        replace_tensors(find_owners([unit]).values(), hidden)

    def _note_escaped(self, index: int, watch: HookWatch) -> None:
        """Note hooks inside a unit that have kept tensors after the unit has returned."""
        self._watches[index] = watch
        known = {id(fake) for _, fake in self._stand_ins.values()} | self._parameters.keys() | self._originals.keys()
        with READING:  # a watcher keeps objects on the stack that it reads alive
            escaped = watch.escaped(lambda tensor: self.name_of(tensor) is not None or id(tensor) in known)
        self.escaped |= {(index, tap) for tap in escaped}

    def _absent(
        self, number: int, call: Call, leaves: list[Any], run: Callable[[list[Any]], Any], *, trains: bool = False
    ) -> Any:
        """Compute the result of an absent call with fake tensors, and record the call's operands and effects.

        Args:
            number: The number of the call.
            call: The call, which is filled in.
            leaves: The leaves of the arguments.
            run: Makes the call; it takes the leaves, with a fake tensor for each tensor.
            trains: True if a unit has parameters that require a gradient.

        Returns:
            The result.

        Raises:
            ValueNeeded: If a function around the units needs values, so that the trace ends.
            KeptTensorError, WrongUseError: If an argument is a tensor that a unit computed but did not return.
            Exception: Any error of a unit on zeros, or of a unit on fake tensors if `tries_zeros` is False.
        """
        call.is_absent = True
        fakes, real = list(leaves), {}
        requires_grad = trains
        operands: dict[Value, None] = {}
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            requires_grad |= leaf.requires_grad
            value = self.name_of(leaf)
            if value is not None:
                operands[value] = None
            elif isinstance(leaf, FakeTensor) and id(leaf) not in self._parameters:
                if not self.escaped:  # a hook computed it from a tensor that it received
                    watches = self._watches.items()
                    self.escaped |= {(index, tap) for index, watch in watches for tap in watch.called()}
                units = find_owners(unit for _, unit in self._units)
                if find_places(units, {id(leaf)}):
                    raise KeptTensorError(kept_text(str(call)))
                raise WrongUseError(
                    f"{call} uses a tensor that a layer of the body computed but did not return. A layer must return"
                    f" every tensor that code around the layers uses, instead of storing it in an attribute."
                    f" {GENERATION} [LH414]"
                )
            if id(leaf) in self._parameter_names:
                call.parameters |= {self._parameter_names[id(leaf)]}
            fakes[place] = self._parameters.get(id(leaf), leaf)
            if not isinstance(fakes[place], FakeTensor):
                fakes[place] = real[place] = self._stand_in(leaf)
                call.has_data = True
                call.has_batch = call.has_batch or self._is_of_batch(leaf)
        call.operands = tuple(operands)
        objects = Contents(leaves if call.unit is not None and self._tries_zeros else ())
        # The fake mode is not entered, so that tensors which a layer creates (a table in a cache) are real.
        with torch.no_grad(), without_torchs_errors(), self._operators.watch() as seen:
            try:
                result, failure = run(fakes), None
            except Exception as error:
                if call.unit is not None and not self._tries_zeros:
                    raise
                result, failure = None, error
        given = {id(fake): leaves[place] for place, fake in real.items()} | self._known_lengths(leaves)
        if call.unit is not None:
            unit, is_own = self._units[call.unit][1], call.unit >= self._num_layers
            if failure is not None:
                result, seen = self._run_on_zeros(number, unit, fakes, given, run, objects, is_own=is_own)
            elif self._tries_zeros and _returns_lengths(result, fakes, given):
                with suppress(Exception):  # then the values of the lengths remain unknown
                    result, seen = self._run_on_zeros(number, unit, fakes, given, run, objects, is_own=is_own)
        elif failure is not None:
            try:
                result, seen = self._run_on_lengths(number, call, fakes, given, run)
            except Exception:
                self._stop(number, call, operands, failure)
        call.draws = seen.draws
        self._check_checkpoint(call)
        requires_grad &= torch.is_grad_enabled() and call.function not in DETACHES
        lost = self._lose(seen.written)
        for place, fake in real.items():
            if memory_of(fake) in seen.written:
                call.written[place] = Value(number, _WRITTEN + place)
                self._name(leaves[place], call.written[place])
                aliases = self._aliases(leaves[place])
                for position, alias in enumerate(aliases):
                    self._name(alias, Value(number, _ALIASES + 100 * place + position))
                is_own = call.unit is not None and call.unit >= self._num_layers  # its buffers have no gradient
                has_grad = requires_grad and not is_own and memory_of(fake) not in seen.statistics
                call.is_in_place |= bool(aliases) or has_grad
        self._name_own(number, call, seen.written)
        call.fills = self._note_writes(lost)
        outputs = self._name_results(number, call, leaves, fakes, result, seen.written, requires_grad=requires_grad)
        for leaf, position in enumerate(seen.known if call.unit is not None else ()):
            made, known = flatten(outputs)[0][position], seen.known[position]
            self._lengths[id(made)] = weakref.ref(made), known
            self._made[id(known)] = weakref.ref(known), Made(number, leaf)
        self._rename(number, call, seen.written)
        if call.unit is None:
            self._note_parameters(call, leaves, fakes, result, seen.written)
        return outputs

    def _run_on_zeros(
        self,
        number: int,
        unit: nn.Module,
        fakes: list[Any],
        given: Mapping[int, Tensor],
        run: Callable[[list[Any]], Any],
        objects: Contents,
        *,
        is_own: bool,
    ) -> tuple[Any, Seen]:
        """Run a unit on zeros, and on the values of operands that every stage has.

        If ones in place of integer operands change the shapes of the results, the shapes depend on lengths: a batch
        with other lengths then gets another plan. The result shapes of a pinned module must not depend on other values.

        Args:
            number: The number of the call.
            unit: The unit.
            fakes: The leaves of the arguments.
            given: The operands whose values are known, because every stage has them or they are lengths, by the `id()`
                of their fake tensors.
            run: Makes the call.
            objects: The contents of objects among the arguments before the first attempt.
            is_own: True if the unit is a pinned module.

        Returns:
            The result with fake tensors, and the effects of the operators; see :func:`run_on_zeros`.

        Raises:
            WrongUseError: If the result shapes of a pinned module depend on values of other operands.
        """

        def attempt(value: Callable[[Tensor], Tensor], fill: Callable[..., Tensor] = torch.zeros) -> tuple[Any, Seen]:
            known = {key: value(tensor.detach()) for key, tensor in given.items()}
            return run_on_zeros(unit.modules(), fakes, run, self._operators, self.fake, objects, known, fill=fill)

        whole = [tensor for tensor in given.values() if is_whole(tensor)]
        shapes: list[Any] = []
        with suppress(Exception):  # ones may be invalid where the values of the batch are valid
            if whole:
                shapes = _shapes(attempt(lambda each: torch.ones_like(each) if is_whole(each) else each.clone())[0])
        if is_own and _shapes(attempt(torch.clone, _counted)[0]) != _shapes(attempt(torch.clone)[0]):
            raise WrongUseError(
                f"The output shapes of {type(unit).__name__} depend on the values of its inputs. Move the code that"
                " depends on these values into the layer that uses the output, or set"
                " HybridStrategy(dynamic_shapes=True). [LH446]"
            )
        result, seen = attempt(torch.clone)
        if whole and (seen.known or shapes != _shapes(result)):
            _, spec = flatten((tuple(whole), {}))
            touched, reads = frozenset(map(memory_of, whole)), _reading_again(seen.known.values())
            self._real_calls[number] = RealCall(
                reads, [*map(self._source, whole)], spec, draws=False, touched=touched, written=frozenset()
            )
            if shapes != _shapes(result):
                self._outcomes[number] = outcome_of(reads(*whole))
        return result, seen

    def _known_lengths(self, leaves: Sequence[Any]) -> dict[int, Tensor]:
        """Return the values of lengths that units have returned, by the `id()` of their fake tensors."""
        entries = [(leaf, self._lengths[id(leaf)]) for leaf in leaves if id(leaf) in self._lengths]
        return {id(leaf): value for leaf, (reference, value) in entries if reference() is leaf}

    def _run_on_lengths(
        self,
        number: int,
        call: Call,
        fakes: list[Any],
        given: Mapping[int, Tensor],
        run: Callable[[list[Any]], Any],
    ) -> tuple[Any, Seen]:
        """Run a function around the units on zeros if its result shapes depend only on real lengths or on a real mask.

        A batch with other lengths or another mask gets another plan. Arguments and results are as in
        :meth:`_run_on_zeros`.

        Raises:
            ValueError: If `passes_lengths` is False, if no operand is a real integer tensor or mask, or if the result
                shapes depend on values of absent tensors.
        """
        whole = {place: given[id(fake)] for place, fake in enumerate(fakes) if id(fake) in given}
        whole = {place: tensor for place, tensor in whole.items() if is_whole(tensor)}
        absent = [fake for fake in fakes if isinstance(fake, FakeTensor) and id(fake) not in given]
        if not (self._passes_lengths and whole) or any(map(is_whole, absent)):
            raise ValueError("the values of fake tensors are needed")
        assert call.function is not None
        keeps = OF_LENGTHS.get(function_name(call.function), ())

        def attempt(fill: Callable[..., Tensor]) -> tuple[Any, Seen]:
            known = {key: tensor.detach().clone() for key, tensor in given.items()}
            return run_on_zeros((), fakes, run, self._operators, self.fake, Contents(()), known, fill=fill, keeps=keeps)

        (result, seen), (other, _) = attempt(torch.zeros), attempt(_counted)
        outputs = flatten(result)[0]
        if not all(isinstance(leaf, Tensor) for leaf in outputs) or _shapes(result) != _shapes(other):
            raise ValueError("the values of fake tensors are needed")
        self._passed = number if self._passed is None else self._passed
        tensors = tuple(whole.values())
        touched, sources = frozenset(map(memory_of, tensors)), [*map(self._source, tensors)]
        reads = _reading_lengths(run, fakes, list(whole), keeps)
        self._real_calls[number] = RealCall(
            reads, sources, flatten((tensors, {}))[1], draws=False, touched=touched, written=frozenset()
        )
        self._outcomes[number] = outcome_of(reads(*tensors))
        for leaf, position in enumerate(keeps):
            self._made[id(outputs[position])] = weakref.ref(outputs[position]), Made(number, leaf)
        return result, seen

    def _lose(self, written: set[int]) -> set[int]:
        """Note and return the memory of the real tensors that an absent call has written.

        References to these tensors that were kept to find invariant calls are dropped: a tensor that is alive at the
        end of the step would count as needed by the last stage.

        Args:
            written: The memory that the call has written; for real tensors, the memory of their fake tensors.
        """
        if not written:
            return set()
        known = [(reference(), fake) for reference, fake in self._stand_ins.values() if memory_of(fake) in written]
        lost = {memory_of(own) for own, _ in known if own is not None}
        self._written |= lost
        kept = self._invariant.items()
        self._invariant = {
            number: tensors for number, tensors in kept if lost.isdisjoint(memory_of(each) for each, _ in tensors)
        }
        return lost

    def _note_writes(self, written: set[int]) -> tuple[int, ...]:
        """Return the `id()` of the module's tensors in some written memory, and note written arguments of the step."""
        if not written:
            return ()
        inputs = self._inputs.values()
        self.graph.written_inputs |= {place for copied, place in inputs if memory_of(copied) in written}
        return tuple(id(tensor) for copied, tensor in self._originals.values() if memory_of(copied) in written)

    def _name_own(self, number: int, call: Call, written: set[int]) -> None:
        """Make real tensors absent if a call has written them through another tensor that shares their memory.

        Real tensors that an earlier call has made absent get the name of this call.
        """
        for position, (reference, fake) in enumerate(list(self._stand_ins.values())):
            tensor = reference()
            if written and tensor is not None and memory_of(fake) in written:
                value = self.name_of(tensor)
                if value is None or value.call != number:
                    if value is not None:
                        call.old[value] = Value(number, _ALIASES + _MANY + position)
                    self._name(tensor, Value(number, _ALIASES + _MANY + position))
                    call.is_in_place = True

    def _name_results(
        self,
        number: int,
        call: Call,
        leaves: list[Any],
        fakes: list[Any],
        result: Any,
        written: set[int],
        *,
        requires_grad: bool,
    ) -> Any:
        """Give names to the absent tensors in a result, describe its leaves in ``call.outputs``, and return the result.

        Args:
            number: The number of the call.
            call: The call.
            leaves: The leaves of the arguments.
            fakes: The leaves of the arguments, with a fake tensor for each tensor.
            result: The result of the call with fake tensors.
            written: The memory that the call has written.
            requires_grad: True if floating-point results require a gradient.
        """
        outputs, spec = flatten(result)
        given = [*enumerate(leaves), *enumerate(fakes)]
        places = {id(leaf): place for place, leaf in reversed(given) if leaf is not None and type(leaf) not in _PLAIN}
        call.spec = spec
        is_given_back = gives_back(call, outputs, places)
        firsts: dict[int, int] = {}
        for position, leaf in enumerate(list(outputs)):
            place = places.get(id(leaf))
            if self._is_made(leaf, number):  # lengths with values
                call.outputs.append(leaf)
                continue
            first = firsts.setdefault(id(leaf), position) if isinstance(leaf, Tensor) else position
            if first != position and place is None:  # received by two hooks, or by a hook and returned
                call.aliases[position], outputs[position] = first, outputs[first]
                call.outputs.append(call.outputs[first])
                continue
            if is_given_back and isinstance(leaf, Tensor) and memory_of(leaf) not in written:
                # A call that returns its argument now may return a new tensor later (a skipped layer), so the result
                # gets its own name; it is a view.
                place, leaf = None, (leaf if isinstance(leaf, FakeTensor) else self._stand_in(leaf)).detach()
                outputs[position] = leaf
            if call.unit is not None and place is not None and self._is_written_real(leaves[place], leaf, written):
                # Stages that do not call the unit use the received tensor as the result, not as the argument.
                place, leaf = None, self.fake(leaf)
                outputs[position] = leaf
            if isinstance(leaf, Tensor) and (place is None or memory_of(leaf) in written):
                if not isinstance(leaf, FakeTensor):
                    leaf = outputs[position] = self._stand_in(leaf)
                if requires_grad and (leaf.is_floating_point() or leaf.is_complex()):
                    leaf.requires_grad_()
                old = self.name_of(leaf)
                value = Value(number, position)
                if old is not None and place is not None:
                    call.old[old] = value
                    call.is_in_place |= call.unit is None
                if place is None or leaf is leaves[place]:
                    self._name(leaf, value)
            if place is not None:
                outputs[position] = leaves[place]
                call.outputs.append(Argument(place))
            else:
                call.outputs.append(AbsentTensor(self._like(leaf)) if isinstance(leaf, Tensor) else leaf)
        has_values = any(isinstance(leaf, AbsentTensor) for leaf in call.outputs)
        call.is_effect = call.unit is None and not has_values and not call.written
        return unflatten(outputs, spec)

    def _is_made(self, leaf: Any, number: int) -> bool:
        """Return True if a leaf that an absent call returns is a tensor with values on every stage."""
        made = self._made.get(id(leaf))
        return made is not None and made[0]() is leaf and made[1].call == number

    def _is_written_real(self, given: Any, fake: Any, written: set[int]) -> bool:
        """Return True if an argument is a real tensor that was written."""
        return isinstance(given, Tensor) and not isinstance(given, FakeTensor) and memory_of(fake) in written

    def _like(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor that other stages return in place of an absent tensor."""
        like = self.fake(tensor)
        return like.requires_grad_() if tensor.requires_grad else like

    def _rename(self, number: int, call: Call, written: set[int]) -> None:
        """Give new names to absent tensors that a call has written, also through a view."""
        for key, (reference, value) in list(self._names.items()):
            tensor = reference()
            if tensor is None:
                del self._names[key]
            elif written and value.call != number:
                fake = tensor if isinstance(tensor, FakeTensor) else self._stand_in(tensor)
                if memory_of(fake) in written:
                    call.old[value] = Value(number, _CHANGED + len(call.old))
                    call.is_in_place = True
                    self._name(tensor, call.old[value])

    def _note_parameters(self, call: Call, leaves: list[Any], fakes: list[Any], result: Any, written: set[int]) -> None:
        """Note the parameters that a call writes, and the parameters whose values it reads.

        Raises:
            WrongUseError: If the call assigns to `data` of a tensor that is not a parameter.
        """
        given = {memory_of(fake) for fake in fakes if isinstance(fake, Tensor)}
        names = set().union(*(self._parameters_in[memory] for memory in given & self._parameters_in.keys()))
        made = {memory_of(leaf) for leaf in flatten(result)[0] if isinstance(leaf, Tensor)} if names else given
        if written or not made or not made <= given:
            call.computes_with = frozenset(names)
        known = self._parameters.keys() if written else ()
        rewritten = {key for key in known if memory_of(self._parameters[key]) in written}
        if call.function == SETS_DATA and isinstance(leaves[0], Tensor):
            rewritten = {id(leaves[0])} & self._parameters.keys()
            if not rewritten:
                raise WrongUseError(
                    f"{call} sets an attribute of a tensor that is on another stage. Create a new tensor"
                    " instead. [LH422]"
                )
            for key in rewritten & self._parameter_names.keys():  # its memory is now the memory of the assigned tensor
                name = self._parameter_names[key]
                for names_there in self._parameters_in.values():  # its old memory may be used again
                    names_there.discard(name)
                self._parameters_in.setdefault(memory_of(self._parameters[key]), set()).add(name)
        call.rewritten = frozenset(self._parameter_names.get(key, "") for key in rewritten)

    def _check_checkpoint(self, call: Call) -> None:
        """Note if `torch.utils.checkpoint` recomputes a call; raise an error if it would draw other random numbers.

        A checkpoint of a single unit draws the same numbers, because the random stream of the unit starts where the
        checkpoint starts.

        Raises:
            WrongUseError: If a checkpoint contains several units, or code around the units that draws.
        """
        if call.unit is None and not call.draws and not call.parameters:
            return
        frame = find_checkpoint()
        call.is_made_again = frame is not None
        if frame is None or (call.unit is None and not call.draws):
            return
        self._checkpoints[id(frame)] = frame, self._checkpoints.get(id(frame), (frame, 0))[1] + 1
        if self._checkpoints[id(frame)][1] > 1 or call.unit is None:
            raise WrongUseError(
                f"`torch.utils.checkpoint` recomputes {call} together with other layers, or together with code outside"
                " the layers that draws random numbers. Checkpoint each layer separately, or use"
                " HybridStrategy(recompute=...). [LH440]"
            )

    def _stop(
        self, number: int, call: Call, operands: Sequence[Value] | dict[Value, None], error: Exception
    ) -> NoReturn:
        """End the trace at a call that needs values of absent tensors. Only the last stage runs the remaining step.

        Raises:
            ValueNeeded: Always.
        """
        del self.graph.calls[number:]
        self.graph.wanted += list(operands)
        reads = type(error).__name__.startswith("DataDependent")  # of torch's fake tensors
        self.graph.needed_in = running_modules()
        self.graph.needed = str(call) if reads else f"{call} ({type(error).__name__}: {error})"
        raise ValueNeeded from error

    # Names of absent tensors.

    def _is_absent(self, tensor: Tensor) -> bool:
        """Return True if a tensor is absent."""
        if id(tensor) in self._parameters or self.name_of(tensor) is not None or isinstance(tensor, FakeTensor):
            return True
        return id(tensor) in self._originals and id(self._originals[id(tensor)][1]) in self._absent_states

    def name_of(self, tensor: Tensor) -> Value | None:
        """Return the name of an absent tensor; ``None`` for real tensors, and for parameters that no call has written.

        Raises:
            WrongUseError: If the tensor has a backward; see :func:`check_backward`.
        """
        entry = self._names.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            return None
        check_backward(tensor)
        return entry[1]

    def _name(self, tensor: Tensor, value: Value) -> None:
        """Give a tensor a name, which makes it absent."""
        self._names[id(tensor)] = weakref.ref(tensor), value

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor that replaces a real tensor in absent calls. It is the same object for each call."""
        known = self._stand_ins.get(id(tensor))
        if known is None or known[0]() is not tensor:
            known = self._stand_ins[id(tensor)] = weakref.ref(tensor), self.fakes.from_tensor(tensor)
        return known[1]

    def _aliases(self, tensor: Tensor) -> list[Tensor]:
        """Return other real tensors that share the memory of a tensor."""
        known = [reference() for reference, _ in self._made.values()]
        known += [copied for copied, _ in self._originals.values()] + [given for given, _ in self._inputs.values()]
        memory = memory_of(tensor)
        others = [each for each in known if each is not None and each is not tensor]
        return [each for each in others if not isinstance(each, FakeTensor) and memory_of(each) == memory]

    # Calls of real tensors, which may have to be made again to check decisions for another batch.

    def _remember(self, number: int, call: Call, leaves: list[Any], spec: TreeSpec, result: Any, seen: Seen) -> None:
        """Record a call of real tensors, so that it can be made again for another batch."""
        assert call.function is not None
        sources = [self._source(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        written = frozenset(seen.written)
        self._written |= written
        if call.function in GIVES_MEMORY:
            self._written |= {memory_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        touched = frozenset(memory_of(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        self._real_calls[number] = RealCall(call.function, sources, spec, seen.draws, touched, written)
        if may_be_invariant(self._real_calls[number], self._invariant):
            tensors = [leaf for leaf in (*leaves, *flatten(result)[0]) if isinstance(leaf, Tensor)]
            if sum(map(num_bytes, tensors)) <= MOST_KEPT:
                self._invariant[number] = [(tensor, tensor.detach().clone()) for tensor in tensors]
        if seen.reads or seen.shapes or call.function in READS:
            self._outcomes[number] = outcome_of(result)
        for position, leaf in enumerate(flatten(result)[0]):
            if isinstance(leaf, Tensor):
                self._made[id(leaf)] = weakref.ref(leaf), Made(number, position)

    def _unwritten(self) -> frozenset[int]:
        """Return the calls that do not depend on the batch, and whose operands and results were not written.

        Writes by code other than torch operators (collectives, extensions) are detected only if they change values.
        """
        found: set[int] = set()
        for number, tensors in self._invariant.items():
            is_written = any(
                memory_of(tensor) in self._written or not torch.equal(as_bytes(tensor), as_bytes(copied))
                for tensor, copied in tensors
            )
            if not is_written and may_be_invariant(self._real_calls[number], found):
                found.add(number)
        self._invariant.clear()
        return frozenset(found)

    def _is_of_batch(self, tensor: Tensor) -> bool:
        """Return True if a real tensor was computed from an argument of the step."""
        waiting, seen = [self._source(tensor)], set[int]()
        while waiting:
            source = waiting.pop()
            if type(source) is Input:
                return True
            if type(source) is Made and source.call not in seen:
                seen.add(source.call)
                waiting += self._real_calls[source.call].sources
        return False

    def _source(self, tensor: Tensor) -> Any:
        """Return the source of an operand: an argument of the step, an earlier call, or the tensor itself."""
        made = self._made.get(id(tensor))
        if made is not None and made[0]() is tensor:
            return made[1]
        if id(tensor) in self._inputs:
            return Input(self._inputs[id(tensor)][1])
        return self._originals.get(id(tensor), (None, tensor))[1]


def _returns_lengths(result: Any, fakes: Sequence[Any], given: Mapping[int, Tensor]) -> bool:
    """Return True if a unit that received lengths returns new tensors that may be lengths: one row of integers."""
    if not any(map(is_whole, given.values())):
        return False
    arguments = set(map(id, fakes))
    made = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor) and id(leaf) not in arguments]
    return any(leaf.ndim == 1 and is_whole(leaf) for leaf in made)


def _reading_again(made: Iterable[Tensor]) -> Callable[..., Any]:
    """Return a function of lengths that returns the lengths' values, and tensors computed from the lengths.

    The tensors are always the same: with other lengths the returned values differ, and the plan does not fit.
    """
    kept = list(made)
    return lambda *lengths: [kept, read_values(*lengths)]


def _reading_lengths(
    run: Callable[[list[Any]], Any], fakes: Sequence[Any], places: Sequence[int], keeps: Sequence[int]
) -> Callable[..., Any]:
    """Return a function of lengths: it returns the results of a call that depend only on them, and their values.

    Args:
        run: Makes the call; it takes the leaves of the arguments.
        fakes: The leaves of the arguments.
        places: The positions of the lengths among these leaves.
        keeps: The positions of these results among the leaves of the result.
    """
    if not keeps:
        return read_values
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in fakes]
    looks = {place: (leaf.shape, leaf.dtype) for place, leaf in enumerate(fakes) if isinstance(leaf, Tensor)}

    def function(*lengths: Tensor) -> Any:
        leaves = list(others)
        for place, (shape, dtype) in looks.items():
            leaves[place] = torch.zeros(shape, dtype=dtype)
        for place, each in zip(places, lengths, strict=True):
            leaves[place] = each
        made = flatten(run(leaves))[0]
        return [made[position] for position in keeps], read_values(*lengths)

    return function


def _counted(shape: torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor with the values 1, 2, 3, ...: all are different, and none is zero."""
    return torch.arange(1, shape.numel() + 1, dtype=dtype, device=device).view(shape)


def _shapes(result: Any) -> list[torch.Size]:
    """Return the shapes of the tensors in a result."""
    return [leaf.shape for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]

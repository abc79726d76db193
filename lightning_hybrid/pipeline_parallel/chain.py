"""Code of the user's step around a chain: which parameters it uses on which stage, and how it calls the chain.

A *chain* is an `nn.Sequential` body that the step calls once, as a whole. Only the first and the last stage run the
code around it, so each parameter outside the chain can be on one of these two stages, or on both. `ChainProgram` uses
the classes of this file, in this order:

1. :class:`ChainCalls` traces each of the user's steps once, before its first run, on the first pipeline rank only. It
   finds out whether the step calls the chain as a whole. If not, `ChainProgram` opens the chain, which ends the use of
   this file, or the step raises an error.
2. :class:`ChainUse` traces the sanity check and the first training batch, on the first and the last rank. It finds the
   stages that use each parameter outside the chain. Then the parameters move to these stages.
3. :class:`CodeBefore` is active in each later step, on a rank that lacks some of these parameters.

To *trace* a step is to run it on fake tensors, which have shapes but no values. Both tracers are subclasses of
:class:`~.frame.frame.FrameCut`, which records the calls of the step as a graph. In a graph, a *unit* is a module that
runs on one stage: :class:`ChainUse` treats the whole chain as a unit, :class:`ChainCalls` each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.messages.lazy_tensor import LazyTensor
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.distributed.replaced import MISSING, replaced_attributes, replaced_entries
from lightning_hybrid.distributed.taps import is_own_hook
from lightning_hybrid.distributed.tensor_metadata import METADATA, getters
from lightning_hybrid.pipeline_parallel.frame.decisions import apply
from lightning_hybrid.pipeline_parallel.frame.discovery import Discovery
from lightning_hybrid.pipeline_parallel.frame.fake_tensors import fake_like, fake_mode
from lightning_hybrid.pipeline_parallel.frame.frame import FrameCut
from lightning_hybrid.pipeline_parallel.frame.graph import Graph, Value, function_name
from lightning_hybrid.pipeline_parallel.frame.operators import Operators, memory_of
from lightning_hybrid.pipeline_parallel.frame.routes import find_routes_around
from lightning_hybrid.pipeline_parallel.frame.unit_attributes import KeptAttribute, KeptTensorError
from lightning_hybrid.pipeline_parallel.frame.writes import Writes
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder
from lightning_hybrid.pipeline_parallel.schedules import Placement
from lightning_hybrid.torch_internals import DRAWS_BY_VALUE, FakeTensor, forward_hooks

_DEVICE = getters("device")
# Rejection sampling: how many random numbers these functions draw depends on the values of their arguments.
_BY_VALUE = frozenset({"poisson", "binomial", *DRAWS_BY_VALUE})


class NotFollowedError(Exception):
    """Error: a trace of a step does not show which stage uses each parameter."""


class ChainUse(FrameCut):
    """Trace of a step that finds out which parameters outside a chain the first and the last stage use.

    ::

                     code that runs                                  parameters, for example
        stage 0      code before, as far as the chain needs it       an embedding
        stage s      only layers                                     none
        last stage   code before, as far as code after needs it,     a head, and parameters that stage 0 also uses
                     and code after

    Args:
        module: The user's module.
        name: The dotted name of the chain.
        chain: The chain.
        num_stages: The number of stages.
        device: The device on which this rank computes.
        arguments: Other arguments of :class:`FrameCut`. `holders` contains the current stages of all parameters outside
            the chain, by name.
    """

    _tries_zeros = False  # a run on zeros could need memory for the whole model
    _taps_hooks = False  # values that hooks take from a layer stay on the stage of the layer

    def __init__(
        self,
        module: nn.Module,
        name: str,
        chain: nn.Sequential,
        num_stages: int,
        device: torch.device,
        **arguments: Any,
    ) -> None:
        # No rank runs the step for two stages, so each stage can be treated as a separate rank.
        stages = [*[range(0)] * (num_stages - 1), range(1)]
        super().__init__(module, [(name, chain)], stages, Placement.in_turns(num_stages), device, **arguments)
        self._chain = chain

    def find(
        self, step: Callable[..., Any], arguments: Sequence[Any], seed: Callable[[int], None]
    ) -> tuple[frozenset[str], ...]:
        """Return, for each stage, the names of the parameters outside the chain that it uses. No communication.

        Args:
            step: The user's step.
            arguments: The arguments of the step.
            seed: A function that seeds the random generators for the call with a given number.

        Raises:
            NotFollowedError: If the step cannot be traced, does not call the chain exactly once, recomputes code before
                the chain, or if the last stage needs a result of the first stage other than the output of the chain.
        """
        try:
            with replaced_entries([(vars(self._chain), {"forward": MISSING})]), self():
                graph = self._discover(step, arguments, seed)
            numbers = [number for number, call in enumerate(graph.calls) if call.unit is not None]
            if len(numbers) != 1:
                reads = f"{graph.needed} reads a value before the layers are called"
                raise WrongUseError(reads if graph.needed else "the layers are not called exactly once")
            if any(call.is_made_again for call in graph.calls[: numbers[0]]):
                raise WrongUseError("`torch.utils.checkpoint` recomputes code that runs before the layers")
            graph.read(self.holders.keys())
            routes = find_routes_around(graph, numbers[0], self._num_stages, self.holders)
            sent = next(iter(routes[0].sent), None)
            if sent is not None:
                raise WrongUseError(
                    f"the last stage needs the result of {graph.all_calls[sent.call]}, which is on the first stage"
                )
        except Exception as error:  # if the user's code has raised it, the step raises it again when it runs
            raise NotFollowedError(" ".join(f"{error}".split())) from error
        return self._parameters_of(graph, routes, Writes())


class ChainCalls(FrameCut):
    """Trace of a step that finds out how the step calls a chain: once and as a whole, or in another way.

    Args:
        module: The user's module.
        names: The dotted names of the layers.
        chain: The chain.
        device: The device on which this rank computes.
        around_discovery: A function that returns the context in which the step is traced.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        chain: nn.Sequential,
        device: torch.device,
        around_discovery: Callable[[], AbstractContextManager[object]],
    ) -> None:
        units = list(zip(names, chain, strict=True))
        arguments: dict[str, Any] = {"holders": {}, "remembers": False, "around_discovery": around_discovery}
        super().__init__(module, units, [range(len(units))], Placement.in_turns(1), device, **arguments)
        self._chain = chain
        self._whole = self._single = 0  # number of calls of the chain, and of its layers by other code
        self._is_inside = False
        self._returned = set[Value | None]()  # the tensors in the result of the chain
        self._kept: list[KeptAttribute] = []  # of the last trace

    def look(
        self, step: Callable[..., Any], arguments: Sequence[Any], seed: Callable[[int], None]
    ) -> tuple[tuple[bool, bool, bool, bool], list[KeptAttribute]]:
        """Trace a step, and report how it calls the chain. This rank needs all parameters outside the chain.

        Calls count even if the step fails later, because a step that cannot be traced may still call the chain as a
        whole.

        Args:
            step: The user's step.
            arguments: The arguments of the step.
            seed: A function that seeds the random generators for the call with a given number.

        Returns:
            Four booleans: True if the step calls the chain several times or calls its layers one by one, True if the
            step writes parameters, True if layers or their hooks keep tensors for code around the chain, and True if
            the trace stopped before the end of the step. If it stopped or failed, also the attributes in which layers
            store tensors.
        """
        writes, uses_inside, stops = False, False, True
        self._kept = []
        try:
            with replaced_entries([(vars(self._chain), {"forward": self._call_whole})]), self():
                graph = self._discover(step, arguments, seed)
                writes = any(call.rewritten for call in graph.calls)
                uses_inside = self._uses_inside(graph)
                stops = graph.needed is not None
        except KeptTensorError:
            uses_inside = True
        except Exception:  # if the user's code has raised it, the step raises it again when it runs
            pass
        return (self._whole > 1 or self._single > 0, writes, uses_inside, stops), self._kept

    def _follow(self, discovery: Discovery, *arguments: Any) -> tuple[Graph, bool]:
        """Trace the step once, and record its calls of the chain and of single layers.

        A step that writes states of the module is traced several times, so each trace starts at zero.
        """
        self._whole = self._single = 0
        self._returned.clear()
        try:
            return super()._follow(discovery, *arguments)
        finally:
            self._kept = discovery.graph.kept

    def _call_whole(self, x: Any) -> Any:
        """Count a call of the whole chain, and run it."""
        self._whole += 1
        self._is_inside = True
        try:
            result = type(self._chain).forward(self._chain, x)  # type: ignore[no-untyped-call]
        finally:
            self._is_inside = False
        if isinstance(self._mode, Discovery):
            leaves = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
            self._returned |= {self._mode.name_of(leaf) for leaf in leaves}
        return result

    def _redirect(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Redirect calls of a layer, as in the base class, and count calls from outside the chain."""

        def counted(*given: Any) -> Any:
            self._single += not self._is_inside
            return call(*given)

        super()._redirect(module, counted)

    def _uses_inside(self, graph: Graph) -> bool:
        """Return True if a hook has kept tensors of layers for code around the chain.

        The graph then contains a hook inside a layer (`Call.taps`), or a call around the chain that uses a tensor from
        an inner layer. Only the stage of such a layer has the tensors. In an evaluation, it has only the tensors of the
        last microbatch. Hooks on the last layer are not found, because its output is the result of the chain.

        A tensor that later layers pass on to the end of the chain is also part of the result. If an inner layer has
        hooks, it is unknown where the code around the chain has it from.
        """
        layers = list(self._chain)[:-1]
        has_hooks = any(not is_own_hook(hook) for layer in layers for hook in forward_hooks(layer).values())
        returned = set[Value | None]() if has_hooks else self._returned
        inside = {number for number, call in enumerate(graph.calls) if call.unit is not None}
        inside.discard(max(inside, default=-1))
        outside = (call.operands for call in graph.calls if call.unit is None)
        used = {value for operands in (*outside, graph.wanted) for value in operands if value.call in inside}
        return not used <= returned or any(call.taps for call in graph.calls)


class CodeBefore(TorchFunctionMode):
    """Mode in which a stage that lacks some of the parameters outside the chain runs the user's step.

    ::

        batch, parameters of this stage     have values      calls that use only these tensors run
        other parameters                    have no values   calls that use them, directly or not, do not run

    The table is for the code before the chain. It may take a different path in each step, so nothing is remembered. A
    call that does not run returns fake tensors, and still advances the random generators, so that later calls draw the
    same random numbers as on the other stage. Layers run outside of the mode. After them, all calls run, and a call
    that uses a tensor without values raises an error.

    `BodyCut` enters the mode around each step, if this stage lacks parameters.

    Args:
        device: The device on which this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._is_over = self._is_paused = False

    def __enter__(self) -> Any:
        """Begin a step."""
        self._is_over = False
        vars(self).pop("_fakes", None)
        return super().__enter__()  # type: ignore[no-untyped-call]

    @cached_property
    def _fakes(self) -> Any:
        """The fake mode of the current step.

        It is created at the first call that does not run, because creating it takes as long as several calls.
        """
        return fake_mode()

    @contextmanager
    def at_layers(self, x: Any) -> Iterator[None]:
        """Leave this mode while the layers of the chain run. Afterward, no code can use tensors without values.

        Args:
            x: The input of the layers of this stage.

        Raises:
            WrongUseError: If the input has no values.
        """
        self._is_over = True
        fakes = vars(self).pop("_fakes", None)
        if fakes is not None:
            fakes.is_over = True
        if any(isinstance(leaf, FakeTensor) for leaf in flatten(x)[0]):
            raise WrongUseError(_text("the input to the body", "is computed from"))
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__enter__()  # type: ignore[no-untyped-call]

    def paused(self) -> AbstractContextManager[None]:
        """Return a context for code that is not part of the user's step: all calls in it run."""
        return replaced_attributes(self, _is_paused=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, or compute only the shape of its result."""
        kwargs = kwargs or {}
        if func in METADATA:
            return self._device if func in _DEVICE and is_placeholder(args[0]) else func(*args, **kwargs)
        if self._is_over or self._is_paused:
            return self._after(func, args, kwargs)
        leaves, spec = flatten((args, kwargs))
        if not any(isinstance(leaf, FakeTensor) or is_placeholder(leaf) for leaf in leaves):
            return func(*args, **kwargs)
        return self._absent(func, leaves, spec)

    def _after(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function, and explain an error that is caused by a tensor without values."""
        try:
            return func(*args, **kwargs)
        except (RuntimeError, WrongUseError) as error:  # placeholders raise a WrongUseError from a RuntimeError
            is_of_torch = isinstance(error, RuntimeError) or isinstance(error.__cause__, RuntimeError)
            if not is_of_torch or not any(map(_is_meta, flatten((args, kwargs))[0])):
                raise
            raise WrongUseError(_text(f"`{function_name(func)}`", "uses")) from error

    def _absent(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        """Return the result of a call that does not run, as fake tensors.

        Args:
            func: The function of torch.
            leaves: The leaves of its arguments.
            spec: The structure of its arguments.

        Raises:
            WrongUseError: If the function needs values, or would update a tensor with values.
        """
        fakes, real = [], []
        for leaf in leaves:
            is_given = isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)
            fakes.append(self._fake(leaf) if is_given else leaf)
            if is_given and not is_placeholder(leaf):
                real.append(fakes[-1])
        name = f"`{function_name(func)}`"
        try:
            # In the fake mode, so that the function itself draws nothing, such as a dropout mask: `_draw` does.
            with torch.no_grad(), self._fakes, Operators().watch() as seen:
                result = apply(func, *unflatten(fakes, spec))
            if seen.draws:
                self._draw(func, fakes, spec)
        except Exception as error:
            raise WrongUseError(_text(name, f"({type(error).__name__}) needs the values of")) from error
        if any(memory_of(fake) in seen.written for fake in real):
            raise WrongUseError(_text(name, "updates a tensor of every stage with a value computed from"))
        if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in fakes):
            for leaf in flatten(result)[0]:
                if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                    leaf.requires_grad_()
        return result

    def _draw(self, func: Any, fakes: list[Any], spec: Any) -> None:
        """Draw the random numbers that a call would have drawn.

        Their count depends on shapes and strides, not on values, so the call runs on ones, or on zeros if a tensor is
        not floating-point.

        Raises:
            ValueError: If the count depends on values.
        """
        if function_name(func) in _BY_VALUE:
            raise ValueError("the number of random numbers that it draws depends on values")
        ones = [
            torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device).fill_(
                1 if fake.is_floating_point() else 0
            )
            if isinstance(fake, FakeTensor)
            else fake
            for fake in fakes
        ]
        with torch.no_grad():
            apply(func, *unflatten(ones, spec))

    def _fake(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor with the metadata of a tensor."""
        if not is_placeholder(tensor) and not isinstance(tensor, LazyTensor):
            return self._fakes.from_tensor(tensor)  # type: ignore[no-any-return]
        return fake_like(self._fakes, tensor, self._device).requires_grad_(tensor.requires_grad)


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def _text(what: str, how: str) -> str:
    """Return the error message for a use of a parameter that is on another stage."""
    use = f"{what} {how}"
    return (
        f"In this step, {use} a parameter outside the layers, but this parameter is on another stage, where the first"
        " training batch used it. Also use the parameter at this point, either in the first training batch or in the"
        " sanity check before training, for example by adding `0 * parameter.sum()` to a tensor. Alternatively, set"
        " HybridStrategy(dynamic_shapes=True), which keeps the parameters outside an `nn.Sequential` on the first and"
        " the last stage. [LH410]"
    )


def stays_text(step: str, error: NotFollowedError) -> str:
    """Return the message for a step that cannot be traced.

    Args:
        step: The name of the step.
        error: The reason.
    """
    return (
        f"`{step}` cannot be traced without values, so both the first and the last stage keep the parameters outside"
        f" the body and sum their gradients. Reason: {error}"
    )

"""Around a chain of layers that is called as a whole: which parameters the first and the last stage use."""

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
from lightning_hybrid.distributed.tensor_metadata import METADATA, getters
from lightning_hybrid.pipeline_parallel.frame.decisions import apply
from lightning_hybrid.pipeline_parallel.frame.fake_tensors import fake_like, fake_mode
from lightning_hybrid.pipeline_parallel.frame.frame import FrameCut
from lightning_hybrid.pipeline_parallel.frame.graph import Graph, function_name
from lightning_hybrid.pipeline_parallel.frame.operators import Operators, memory_of
from lightning_hybrid.pipeline_parallel.frame.routes import find_routes_around
from lightning_hybrid.pipeline_parallel.frame.writes import Writes
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder
from lightning_hybrid.pipeline_parallel.schedules import Placement
from lightning_hybrid.torch_internals import DRAWS_BY_VALUE, FakeTensor

_DEVICE = getters("device")
# They reject numbers until they have the right ones.
_BY_VALUE = frozenset({"poisson", "binomial", *DRAWS_BY_VALUE})


class NotFollowedError(Exception):
    """A step does something that cannot be followed."""


class ChainUse(FrameCut):
    """Finds out, without values, which parameters the first and the last stage use in a step around a chain.

    ::

        stage 0      code before, what the chain is called with        an embedding
        stage s      only layers                                       nothing
        last stage   code before, as far as it is used after the
                     chain; code after                                 a head; what both use

    Args:
        module: The user's module.
        name: The dotted name of the chain.
        chain: The chain.
        num_stages: The number of stages.
        device: Where this rank computes.
        arguments: Others of :class:`FrameCut`; `holders` are the stages of all parameters outside of the chain.
    """

    _tries_zeros = False  # the chain may be all of the model
    _taps_hooks = False  # nothing of it leaves the stage of a layer but what the layer hands on

    def __init__(
        self,
        module: nn.Module,
        name: str,
        chain: nn.Sequential,
        num_stages: int,
        device: torch.device,
        **arguments: Any,
    ) -> None:
        # No rank runs the step for two stages, so each stage may as well be a rank of its own.
        stages = [*[range(0)] * (num_stages - 1), range(1)]
        super().__init__(module, [(name, chain)], stages, Placement.in_turns(num_stages), device, **arguments)
        self._chain = chain

    def find(
        self, step: Callable[..., Any], arguments: Sequence[Any], seed: Callable[[int], None]
    ) -> tuple[frozenset[str], ...]:
        """The names of the parameters outside of the chain that each stage uses.

        Args:
            step: The user's step.
            arguments: Its arguments.
            seed: Seeds the generators for the call of a number.

        Raises:
            NotFollowedError: If the step cannot be followed, or its stages need more of each other than the chain
                hands on.
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
        except Exception as error:  # of the user's code too, which shows itself again when the step runs
            raise NotFollowedError(" ".join(f"{error}".split())) from error
        return self._parameters_of(graph, routes, Writes())


class ChainCalls(FrameCut):
    """Finds out, without values, how a step calls a chain: once and as a whole, or in any other way.

    Args:
        module: The user's module.
        names: The dotted names of the layers.
        chain: The chain.
        device: Where this rank computes.
        around_discovery: Around a step that is followed.
    """

    _tries_zeros = False

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
        self._whole = self._single = 0  # calls of the chain, and of its layers by other code
        self._is_inside = False

    def look(
        self, step: Callable[..., Any], arguments: Sequence[Any], seed: Callable[[int], None]
    ) -> tuple[bool, bool, bool]:
        """Return whether a step calls the chain more than once, or its layers one by one; and if it writes parameters.

        What a step has called before it fails counts: a step that cannot be followed may call the chain as a whole.
        The last value says whether the step could not be followed to its end.

        Args:
            step: The user's step.
            arguments: Its arguments.
            seed: Seeds the generators for the call of a number.
        """
        writes, stops = False, True
        try:
            with replaced_entries([(vars(self._chain), {"forward": self._call_whole})]), self():
                graph = self._discover(step, arguments, seed)
                writes = any(call.rewritten for call in graph.calls)
                stops = graph.needed is not None
        except Exception:  # of the user's code too, which shows itself again when the step runs
            pass
        return self._whole > 1 or self._single > 0, writes, stops

    def _follow(self, *arguments: Any) -> tuple[Graph, bool]:
        """Follow the step once, and count its calls; a step that writes states of the module is followed again."""
        self._whole = self._single = 0
        return super()._follow(*arguments)

    def _call_whole(self, x: Any) -> Any:
        self._whole += 1
        self._is_inside = True
        try:
            return type(self._chain).forward(self._chain, x)  # type: ignore[no-untyped-call]
        finally:
            self._is_inside = False

    def _redirect(self, module: nn.Module, call: Callable[..., Any]) -> None:
        def counted(*given: Any) -> Any:
            self._single += not self._is_inside
            return call(*given)

        super()._redirect(module, counted)


class CodeBefore(TorchFunctionMode):
    """The code before a chain, on a stage that lacks some of the parameters around it.

    ::

        batch, parameters of this stage     real      calls of them alone are made
        other parameters                    absent    calls with one of these, or with what such a call made, are not

    So it may take any path, another one in each step. A call that is not made draws its random numbers all the same, so
    that those after it are the ones that the other stage draws.

    Args:
        device: Where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._is_over = self._is_paused = False

    def __enter__(self) -> Any:
        """A step begins."""
        self._is_over = False
        vars(self).pop("_fakes", None)
        return super().__enter__()  # type: ignore[no-untyped-call]

    @cached_property
    def _fakes(self) -> Any:
        """Made where something is absent: to make it takes as long as some calls."""
        return fake_mode()

    @contextmanager
    def at_layers(self, x: Any) -> Iterator[None]:
        """The chain is called: its layers are no code around it, and what is absent is used no more.

        Args:
            x: What the layers of this stage are given.

        Raises:
            WrongUseError: If that has no value.
        """
        self._is_over = True
        fakes = vars(self).pop("_fakes", None)
        if fakes is not None:
            fakes.is_over = True
        if any(isinstance(leaf, FakeTensor) for leaf in flatten(x)[0]):
            raise WrongUseError(_text("The input to the body", "is computed from"))
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__enter__()  # type: ignore[no-untyped-call]

    def paused(self) -> AbstractContextManager[None]:
        """Take nothing that runs for a part of the user's step while entered."""
        return replaced_attributes(self, _is_paused=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A call."""
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
        """A call of other code, which is made whatever it is."""
        try:
            return func(*args, **kwargs)
        except (RuntimeError, WrongUseError) as error:  # a placeholder makes the second one of the first
            is_of_torch = isinstance(error, RuntimeError) or isinstance(error.__cause__, RuntimeError)
            if not is_of_torch or not any(map(_is_meta, flatten((args, kwargs))[0])):
                raise
            raise WrongUseError(_text(f"`{function_name(func)}`", "uses")) from error

    def _absent(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        """What a call returns that is not made, without values."""
        fakes, real = [], []
        for leaf in leaves:
            is_given = isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)
            fakes.append(self._fake(leaf) if is_given else leaf)
            if is_given and not is_placeholder(leaf):
                real.append(fakes[-1])
        name = f"`{function_name(func)}`"
        try:
            # In the fake mode, so that what the function makes by itself, such as a mask of dropout, is drawn once.
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
        """Draw what a call would have drawn: how many numbers depends on shapes and strides, not on values."""
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
        if not is_placeholder(tensor) and not isinstance(tensor, LazyTensor):
            return self._fakes.from_tensor(tensor)  # type: ignore[no-any-return]
        return fake_like(self._fakes, tensor, self._device).requires_grad_(tensor.requires_grad)


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def _text(what: str, how: str) -> str:
    return (
        f"{what} {how} a parameter outside the layers, but this parameter is on another stage, where the first training"
        " batch used it. Also use the parameter at this point, either in the first training batch or in the sanity"
        " check before training, for example by adding `0 * parameter.sum()` to a tensor. Alternatively, set"
        " HybridStrategy(dynamic_shapes=True), which keeps the parameters outside an `nn.Sequential` on the first and"
        " the last stage. [LH410]"
    )


def stays_text(step: str, error: NotFollowedError) -> str:
    """The text for a step that cannot be followed.

    Args:
        step: The name of the step.
        error: Why not.
    """
    return (
        f"`{step}` cannot be traced without values, so both the first and the last stage keep the parameters outside"
        f" the body and sum their gradients. Reason: {error}"
    )

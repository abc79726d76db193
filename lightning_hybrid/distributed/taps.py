"""Forward hooks of the user inside a layer, which the package calls later or with other tensors.

User code registers hooks on modules inside a layer, for example to collect the logits of routers for a loss. In a
pipeline, only one stage runs the layer, but the code that uses the collected tensors may run on other stages. In
context parallelism, the layer computes on sequence shards, but the hook expects full sequences. So torch must not call
such a hook where the layer runs. Tracing of a step (`pipeline_parallel.frame.discovery`) finds hooks whose tensors
leave the layer by :class:`HookWatch`. Step programs and context-parallel layers then call these hooks through
:class:`Taps`.

A *layer* is a module that runs on one stage as a whole. A *tap* is the name of one hook inside a layer.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.torch_internals import forward_hooks, version_counter

Hook = Callable[..., Any]


class Tap(NamedTuple):
    """The name of a forward hook inside a layer; the same on every rank.

    Attributes:
        module: The dotted name of the hook's module within the layer.
        position: The position among the hooks of this module, not counting hooks of this package.
    """

    module: str
    position: int


class TappedCall(NamedTuple):
    """A recorded call of a hook inside a layer, which is made later.

    Attributes:
        tap: The hook.
        given: The arguments of the hook after its module: the inputs, the keyword arguments if the hook receives them,
            and the output.
    """

    tap: Tap
    given: tuple[Any, ...]


def is_own_hook(hook: Hook) -> bool:
    """Return True if a hook belongs to this package and not to the user's step."""
    return _module_of(hook).startswith("lightning_hybrid.")


def runs_in_traces(hook: Hook) -> bool:
    """Return True if a trace calls a hook: a hook of the user, or a hook of this package that changes arguments."""
    return not is_own_hook(hook) or getattr(hook, "runs_in_traces", False)


def find_taps(layer: nn.Module, *, of_torch: bool = True) -> list[Tap]:
    """Return the taps of the modules inside a layer, without hooks on the layer itself or hooks of this package.

    Args:
        layer: The layer.
        of_torch: If False, omit hooks of torch, such as hooks that shard the output of a module.
    """
    inside = ((name, module) for name, module in layer.named_modules() if name and forward_hooks(module))
    return [
        Tap(name, position)
        for name, module in inside
        for position, (_, hook) in enumerate(_foreign(module))
        if of_torch or not _module_of(hook).startswith("torch.")
    ]


class Taps:
    """Hooks inside a layer that this package calls instead of torch: later, or with other tensors.

    A rank without the layer also calls the hooks, with tensors of the rank that has the layer. So code around layers
    that collects tensors in hooks, such as the logits of routers for a loss, works on every rank. If the layer computes
    on sequence shards, its hooks receive the full sequence.

    Args:
        layer: The layer.
        taps: The taps of the hooks.

    Attributes:
        names: The taps of the hooks.
    """

    def __init__(self, layer: nn.Module, taps: Collection[Tap]) -> None:
        self._layer = layer
        self.names = frozenset(taps)

    def __len__(self) -> int:
        """Return the number of hooks."""
        return len(self.names)

    @contextmanager
    def recording(self) -> Iterator[list[TappedCall]]:
        """Record calls of the hooks while entered, instead of making the calls."""
        calls: list[TappedCall] = []

        def noting(tap: Tap, hook: Hook) -> Hook:
            def note(module: nn.Module, *given: Any) -> None:
                calls.append(TappedCall(tap, given))

            return note

        with _replaced(self._layer, self.names, noting):
            yield calls

    @contextmanager
    def calling(self, call: Callable[..., Any]) -> Iterator[None]:
        """Replace the call of each hook while entered.

        Args:
            call: The replacement. It receives the tap, the hook, the module and the hook's other arguments, and returns
                the result of the hook.
        """
        with _replaced(self._layer, self.names, lambda tap, hook: partial(call, tap, hook)):
            yield

    def replay(self, calls: Sequence[TappedCall]) -> None:
        """Make recorded calls, in their order.

        Args:
            calls: The recorded calls. On ranks without the layer, they have other tensors in place of the layer's
                tensors.

        Raises:
            WrongUseError: If a hook changes the output of its module, which is too late here.
        """
        for (name, position), given in calls:
            module = self._layer.get_submodule(name)
            if _foreign(module)[position][1](module, *given) is not None:
                raise WrongUseError(
                    f"A forward hook changes the output of {name!r} in {type(self._layer).__name__}, but did not change"
                    " it when the step was first traced. Code outside the layers uses tensors that the hook reads, so"
                    " the hook runs after the layer has finished and can no longer change the output. Change the output"
                    " either in every step or in no step. [LH444]"
                )


class HookWatch:
    """A watch that finds hooks inside a layer that pass tensors out of the layer. The hooks are called as usual.

    Args:
        layer: The layer.
        taps: The taps of the hooks.
    """

    def __init__(self, layer: nn.Module, taps: Collection[Tap]) -> None:
        self._layer, self._taps = layer, frozenset(taps)
        self._changing: set[Tap] = set()
        self._called: set[Tap] = set()
        self._keeping: set[Tap] = set()
        self._seen: list[tuple[Tap, weakref.ref[Tensor], int]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch calls of the hooks while entered."""
        with _replaced(self._layer, self._taps, self._watched):
            yield

    def _watched(self, tap: Tap, hook: Hook) -> Hook:
        def watched(module: nn.Module, *given: Any) -> Any:
            self._called.add(tap)
            tensors = [leaf for leaf in flatten(given)[0] if _is_tensor(leaf)]
            self._seen += [(tap, weakref.ref(leaf), version_counter(leaf)) for leaf in tensors]
            before = list(map(sys.getrefcount, tensors))
            result = hook(module, *given)
            # If the layer returns the tensor, only the reference count shows that the hook has kept the tensor.
            if any(map(operator.gt, map(sys.getrefcount, tensors), before)):
                self._keeping.add(tap)
            if result is not None:
                self._changing.add(tap)
            return result

        return watched

    def called(self) -> set[Tap]:
        """Return the hooks that were called and could as well be called later.

        These hooks did not change an output, and the tensors that they received were not modified in place afterwards.
        """
        stale = {tap for tap, reference, version in self._seen if _is_written(reference(), version)}
        return self._called - self._changing - stale

    def escaped(self, is_known: Callable[[Tensor], bool]) -> set[Tap]:
        """Return the hooks of :meth:`called` that have kept a tensor, or received a tensor that is still alive.

        It is called after the layer has returned.

        Args:
            is_known: Returns True for a tensor that is alive for another reason: it is an input or output of the layer.
        """
        alive = {tap for tap, reference, _ in self._seen if _is_alive(reference(), is_known)}
        return (alive | self._keeping) & self.called()


def _module_of(hook: Hook) -> str:
    return getattr(hook, "__module__", None) or type(hook).__module__


def _foreign(module: nn.Module) -> list[tuple[int, Hook]]:
    return [(key, hook) for key, hook in forward_hooks(module).items() if not is_own_hook(hook)]


@contextmanager
def _replaced(layer: nn.Module, taps: Collection[Tap], replace: Callable[[Tap, Hook], Hook]) -> Iterator[None]:
    """Replace each hook while entered. The replacement is called like the hook: with keyword arguments or without."""
    replaced: list[tuple[Any, int, Hook]] = []
    for name in sorted({tap.module for tap in taps}):
        hooks = forward_hooks(layer.get_submodule(name))
        for position, (key, hook) in enumerate(_foreign(layer.get_submodule(name))):
            if Tap(name, position) in taps:
                replaced.append((hooks, key, hook))
                # The wrapper keeps the hook's `__module__`, by which a second replacement finds it.
                hooks[key] = update_wrapper(replace(Tap(name, position), hook), hook)
    try:
        yield
    finally:
        for hooks, key, hook in replaced:
            if key in hooks:  # otherwise it has been removed meanwhile
                hooks[key] = hook


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and not leaf.is_inference()


def _is_alive(tensor: Tensor | None, is_known: Callable[[Tensor], bool]) -> bool:
    return tensor is not None and not is_known(tensor)


def _is_written(tensor: Tensor | None, version: int) -> bool:
    return tensor is not None and version_counter(tensor) != version

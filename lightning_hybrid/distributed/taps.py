"""Forward hooks of the user's inside a layer: what they see leaves the layer beside its result."""

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
        module: The dotted name of its module in the layer.
        position: Among the hooks of that module that are not this package's.
    """

    module: str
    position: int


class TappedCall(NamedTuple):
    """One call of such a hook, to be made later.

    Attributes:
        tap: The hook.
        given: The arguments of the hook after its module.
    """

    tap: Tap
    given: tuple[Any, ...]


def is_own_hook(hook: Hook) -> bool:
    """Return whether a hook is one of this package, and no part of the user's step."""
    return _module_of(hook).startswith("lightning_hybrid.")


def find_taps(layer: nn.Module, *, of_torch: bool = True) -> list[Tap]:
    """Return the hooks of others than this package on the modules inside a layer, but not on itself.

    Args:
        layer: The layer.
        of_torch: If False, leave out hooks of torch, such as those that shard what a module returns.
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

    A rank that does not have the layer calls them too, with tensors of the rank that has it. So code around layers
    that collects what hooks see (the logits of routers, for their loss) works on every rank. Where ranks divide a
    sequence in the layer, hooks receive the whole sequence.

    Args:
        layer: The layer.
        taps: The hooks.

    Attributes:
        names: The hooks, as passed.
    """

    def __init__(self, layer: nn.Module, taps: Collection[Tap]) -> None:
        self._layer = layer
        self.names = frozenset(taps)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.names)

    @contextmanager
    def recording(self) -> Iterator[list[TappedCall]]:
        """Inside, calls of the hooks are noted instead of made."""
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
            call: The replacement. It receives the name of the hook, the hook, the module and the hook's other
                arguments, and returns the result of the hook.
        """
        with _replaced(self._layer, self.names, lambda tap, hook: partial(call, tap, hook)):
            yield

    def replay(self, calls: Sequence[TappedCall]) -> None:
        """Make the calls, in their order.

        Args:
            calls: What was noted; on other ranks with tensors that take the place of the layer's.

        Raises:
            WrongUseError: If a hook wants to change what its module returns, which is too late.
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
    """Notes which hooks inside a layer let tensors out of it; they are called as ever.

    Args:
        layer: The layer.
        taps: The hooks.
    """

    def __init__(self, layer: nn.Module, taps: Collection[Tap]) -> None:
        self._layer, self._taps = layer, frozenset(taps)
        self._changing: set[Tap] = set()
        self._called: set[Tap] = set()
        self._keeping: set[Tap] = set()
        self._seen: list[tuple[Tap, weakref.ref[Tensor], int]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, calls of the hooks are watched."""
        with _replaced(self._layer, self._taps, self._watched):
            yield

    def _watched(self, tap: Tap, hook: Hook) -> Hook:
        def watched(module: nn.Module, *given: Any) -> Any:
            self._called.add(tap)
            tensors = [leaf for leaf in flatten(given)[0] if _is_tensor(leaf)]
            self._seen += [(tap, weakref.ref(leaf), version_counter(leaf)) for leaf in tensors]
            before = list(map(sys.getrefcount, tensors))
            result = hook(module, *given)
            # Of a tensor that the layer returns, only this tells that the hook has kept it.
            if any(map(operator.gt, map(sys.getrefcount, tensors), before)):
                self._keeping.add(tap)
            if result is not None:
                self._changing.add(tap)
            return result

        return watched

    def called(self) -> set[Tap]:
        """Return the hooks that were called and could be called later: they change neither outputs nor see old ones."""
        stale = {tap for tap, reference, version in self._seen if _is_written(reference(), version)}
        return self._called - self._changing - stale

    def escaped(self, is_known: Callable[[Tensor], bool]) -> set[Tap]:
        """Return those of them that have kept a tensor, or seen one that is still there once the layer has returned.

        Args:
            is_known: Whether a tensor is there for another reason: the layer was given it, or returned it.
        """
        alive = {tap for tap, reference, _ in self._seen if _is_alive(reference(), is_known)}
        return (alive | self._keeping) & self.called()


def _module_of(hook: Hook) -> str:
    return getattr(hook, "__module__", None) or type(hook).__module__


def _foreign(module: nn.Module) -> list[tuple[int, Hook]]:
    return [(key, hook) for key, hook in forward_hooks(module).items() if not is_own_hook(hook)]


@contextmanager
def _replaced(layer: nn.Module, taps: Collection[Tap], replace: Callable[[Tap, Hook], Hook]) -> Iterator[None]:
    """Inside, something else is called in the place of each hook, as it is called: with keywords or without."""
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
            if key in hooks:  # else it was removed in between
                hooks[key] = hook


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and not leaf.is_inference()


def _is_alive(tensor: Tensor | None, is_known: Callable[[Tensor], bool]) -> bool:
    return tensor is not None and not is_known(tensor)


def _is_written(tensor: Tensor | None, version: int) -> bool:
    return tensor is not None and version_counter(tensor) != version

"""Contexts in which `torch.utils.checkpoint` recomputes functions in backward.

`ContextParallel.around` enters :func:`again_in` around the forwards of a step. A layer that is recomputed in backward
must shard sequences and draw random numbers as in forward, but the code that calls `checkpoint` belongs to the user, to
a library, or to the activation checkpointing of this package, and passes no context. So torch's module is changed
inside the context.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from torch.utils import checkpoint

from lightning_hybrid.distributed.replaced import replaced_entries

_Enter = Callable[[], AbstractContextManager[None]]


@contextmanager
def again_in(here: Callable[[], _Enter]) -> Iterator[None]:
    """Give calls of `torch.utils.checkpoint.checkpoint` inside this context a context for their recomputation.

    ::

        forward      here() --> enter         function(x)
        backward                enter()  -->  function(x), recomputed, possibly several times

    Calls with a `context_fn` of their own are not changed. Calls with ``use_reentrant=True`` are included.

    Args:
        here: Called at each call, before its function. Returns a function that makes the context of the recomputation.
    """
    # `checkpoint` is often imported by name, so a replacement in its module would miss calls. A new default argument
    # reaches all calls. The function compares `context_fn` with the `noop_context_fn` of its module, and rejects any
    # other with use_reentrant=True, so this name must refer to the same object. Such a call never enters the context,
    # but looks up `CheckpointFunction` in the module, which is therefore replaced too.
    defaults: Any = inspect.unwrap(checkpoint.checkpoint).__kwdefaults__
    names: Any = vars(checkpoint)
    function = names["CheckpointFunction"]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _Reentered(here())

    def apply(run: Callable[..., Any], *rest: Any) -> Any:
        return function.apply(_Again(run, here()), *rest)

    in_module = {"noop_context_fn": contexts, "CheckpointFunction": SimpleNamespace(apply=apply)}
    with replaced_entries([(defaults, {"context_fn": contexts}), (names, in_module)]):
        yield


class _Reentered(AbstractContextManager[None]):
    """A context that can be entered several times."""

    def __init__(self, enter: _Enter) -> None:
        self._enter = enter

    def __enter__(self) -> None:
        self._entered = self._enter()
        self._entered.__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.__exit__(*exception)


class _Again:
    """A function whose first call is unchanged, and whose later calls run in a context."""

    def __init__(self, run: Callable[..., Any], enter: _Enter) -> None:
        self._run, self._enter = run, enter
        self._has_run = False

    def __call__(self, *args: Any) -> Any:
        with self._enter() if self._has_run else nullcontext():
            self._has_run = True
            return self._run(*args)

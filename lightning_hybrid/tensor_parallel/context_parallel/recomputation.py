"""What `torch.utils.checkpoint` runs again in backward does so in a context that was made where it ran before."""

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
    """Inside, calls of `torch.utils.checkpoint.checkpoint`, whoever makes them, run again in a context.

    ::

        forward      here() --> enter         function(x)
        backward                enter()  -->  function(x), again, perhaps several times

    That of a call that brings a `context_fn` of its own is not changed.

    Args:
        here: Called at each call, before its function; returns what is entered around it when it runs again.
    """
    # `checkpoint` is often imported by its name, so a replacement in its module would miss calls. Its default argument
    # reaches all of them. The function compares `context_fn` with what its module calls `noop_context_fn`, and refuses
    # any other with use_reentrant=True, so that name has to lead to the same object; such a call then never enters it,
    # but looks up `CheckpointFunction` in the module, which is replaced for it.
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
    """What can be entered again and again."""

    def __init__(self, enter: _Enter) -> None:
        self._enter = enter

    def __enter__(self) -> None:
        self._entered = self._enter()
        self._entered.__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.__exit__(*exception)


class _Again:
    """A function that is called first where it is, and then in a context."""

    def __init__(self, run: Callable[..., Any], enter: _Enter) -> None:
        self._run, self._enter = run, enter
        self._has_run = False

    def __call__(self, *args: Any) -> Any:
        with self._enter() if self._has_run else nullcontext():
            self._has_run = True
            return self._run(*args)

"""Tensors that units store in their attributes, so that only the stage of the unit has them.

A *unit* is a module that runs on exactly one stage, such as a pipelined layer. If a layer stores a penalty in an
attribute, and the user's step adds it to the loss, the last stage would read a value from before the run: it never runs
the layers of other stages. Such a step is refused::

    in a trace       :class:`.Discovery` raises a :class:`KeptTensorError` at the call that uses the tensor
    after its end    the step may use any attribute: :class:`HiddenAttributes` replaces them on the last stage by
                     objects that raise the same error

The module, or an object of the user, may hold such an attribute too: layers often append to a list of the module. The
units of the last stage use the list while they run, but the code around them would read only part of it::

    code around the units    unit      code around the units
    ---- hidden ------------ shown ---- hidden --------------

A trace ends early if the step needs a value that a unit computes, as `float(loss)` does. It fails if code of the user
does not take the fake tensors of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.replaced import MISSING, table_of
from lightning_hybrid.pipeline_parallel.frame.stage_states import find_attributes, find_owners

#: Advice for token generation, the usual reason why layers are called again with their own results.
GENERATION = (
    "Token generation, which feeds each token back to the first stage, works only in `validation_step`, `test_step` or"
    " `predict_step`, without gradients and without `context_parallel_size`. Alternatively, generate tokens after the"
    " run, once you have called `trainer.strategy.gather_module()`."
)


class KeptTensorError(WrongUseError):
    """Code around the layers uses a tensor that a layer keeps in an attribute.

    Such a step cannot run in lockstep either, so `FrameProgram` does not try this after the error.
    """


def kept_text(use: str) -> str:
    """Return the error message for a use of such a tensor.

    Args:
        use: The call that uses it.
    """
    return (
        f"{use} uses a tensor that a layer of the body stores in an attribute. Only the stage of the layer has this"
        f" tensor. Let the layer return the tensor, and use the result of the layer. {GENERATION} [LH414]"
    )


class KeptAttribute(NamedTuple):
    """An attribute in which units store tensors.

    Attributes:
        units: The positions of the units that have stored a tensor in it.
        root: The position of the unit that holds the owner; ``None`` if only the module holds it.
        path: The path from this unit, or from the module, to the owner, as in :func:`.find_owners`; equal on every
            rank.
        name: The name of the attribute.
    """

    units: frozenset[int]
    root: int | None
    path: str
    name: str


def find_kept_attributes(
    module: nn.Module, units: Sequence[nn.Module], tensors: Iterable[tuple[int, Tensor]]
) -> list[KeptAttribute]:
    """Return the attributes of units, of the module, and of objects in their attributes, that hold some tensors.

    Args:
        module: The user's module.
        units: The units. A unit's reference to another unit is not followed.
        tensors: The tensors, each with the position of the unit that has stored it. They may also be inside containers.
    """
    stored_by = {id(tensor): unit for unit, tensor in tensors}
    found: dict[tuple[int, str], KeptAttribute] = {}  # by owner and name
    for root in (*range(len(units)), None) if stored_by else ():
        owners = _owners_of(root, module, units)
        for path, name, ids in find_attributes(owners, stored_by.keys()):
            kept = KeptAttribute(frozenset(stored_by[each] for each in ids), root, path, name)
            found.setdefault((id(owners[path]), name), kept)
    return list(found.values())


class HiddenAttributes:
    """Context in which uses of attributes that lack tensors raise a :class:`KeptTensorError`, except while a unit runs.

    Args:
        attributes: Attributes in which units store tensors. They need not exist on this rank, whose units may never
            have run.
        present: The positions of the units whose tensors this stage has.
        module: The user's module.
        units: The units.
    """

    def __init__(
        self,
        attributes: Iterable[KeptAttribute],
        present: Container[int],
        module: nn.Module,
        units: Sequence[nn.Module],
    ) -> None:
        self._tables: list[tuple[dict[str, Any], str]] = []
        self._values: list[Any] = []
        owners: dict[int | None, dict[str, Any]] = {}
        for each in attributes:
            if all(unit in present for unit in each.units):
                continue
            if each.root not in owners:
                owners[each.root] = _owners_of(each.root, module, units)
            owner = owners[each.root].get(each.path)
            if owner is not None:
                self._tables.append((table_of(owner, each.name), each.name))

    def __enter__(self) -> Self:
        """Hide the attributes."""
        self._values = [table.get(name, MISSING) for table, name in self._tables]
        for table, name in self._tables:
            table[name] = _HIDDEN
        return self

    def __exit__(self, *exception: object) -> None:
        """Show the attributes, except attributes that the step has assigned or deleted in the meantime."""
        for (table, name), value in zip(self._tables, self._values, strict=True):
            if table.get(name) is _HIDDEN:
                del table[name]
                if value is not MISSING:
                    table[name] = value

    def showing(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs units, with the attributes shown to them.

        Args:
            run: The function. It takes any arguments.
        """
        return partial(self._run_shown, run) if self._tables else run

    def _run_shown(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.__exit__()
        try:
            return run(*args, **kwargs)
        finally:
            self.__enter__()


def _owners_of(root: int | None, module: nn.Module, units: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the modules and objects that a unit or the module holds, by path, unless only other units hold them."""
    start = module if root is None else units[root]
    return find_owners([start], [other for other in units if other is not start])


class _Hidden(Tensor):
    """Object in place of an attribute; every function of torch, and every use of a method or attribute, is an error."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise the error.

        Raises:
            KeptTensorError: Always.
        """
        raise KeptTensorError(kept_text(f"`{getattr(func, '__name__', func)}`"))

    def __getattr__(self, name: str) -> NoReturn:
        """Raise the error for attributes that tensors do not have: in other steps this may be a container.

        Raises:
            KeptTensorError: If the attribute is not a special one.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        raise KeptTensorError(kept_text(f"`.{name}`"))


_HIDDEN = torch.empty(0).as_subclass(_Hidden)

#: The context for a step in which no attribute is hidden. It is one object, because each forward of a stage enters it.
NOTHING_HIDDEN = HiddenAttributes((), (), nn.Module(), ())

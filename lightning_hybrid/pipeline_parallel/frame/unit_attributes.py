"""Tensors that units store in their attributes, so that only the stage of the unit has them.

A *unit* is a module that runs on exactly one stage, such as a pipelined layer. If a layer stores a penalty in an
attribute, and the user's step adds it to the loss, the last stage would read a value from before the run: it never runs
the layers of other stages. Such a step is refused::

    in a trace       :class:`.Discovery` raises a :class:`KeptTensorError` at the call that uses the tensor
    after its end    the step may use any attribute: :func:`hidden_attributes` replaces them on the last stage by
                     objects that raise the same error

A trace ends early if the step needs a value that a unit computes, as `float(loss)` does. It fails if code of the user
does not take the fake tensors of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.replaced import replaced_entries, table_of
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
        units: The positions of the units that hold the owner; usually one.
        path: The path from the first of these units to the owner, as in :func:`.find_owners`; equal on every rank.
        name: The name of the attribute.
    """

    units: frozenset[int]
    path: str
    name: str


def find_kept_attributes(units: Sequence[nn.Module], tensors: Collection[Tensor]) -> list[KeptAttribute]:
    """Return the attributes of units, and of objects in their attributes, that hold some tensors.

    Args:
        units: The units. A unit's reference to another unit is not followed.
        tensors: The tensors. They may also be inside containers.
    """
    ids = {id(tensor) for tensor in tensors}
    found: dict[tuple[int, str], tuple[str, set[int]]] = {}  # by owner and name: the first path, and the units
    for position, unit in enumerate(units if ids else ()):
        owners = _owners_of(unit, units)
        for path, name in find_attributes(owners, ids):
            found.setdefault((id(owners[path]), name), (path, set()))[1].add(position)
    return [KeptAttribute(frozenset(holders), path, name) for (_, name), (path, holders) in found.items()]


def hidden_attributes(attributes: Iterable[KeptAttribute], units: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Return a context in which uses of some attributes of units raise a :class:`KeptTensorError`.

    Args:
        attributes: The attributes. They need not exist on this rank, whose layers may never have run.
        units: The units.
    """
    owners: dict[int, dict[str, Any]] = {}
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for holders, path, name in attributes:
        first = min(holders)
        owners[first] = owners.get(first) or _owners_of(units[first], units)
        owner = owners[first].get(path)
        if owner is not None:
            tables.append((table_of(owner, name), {name: _HIDDEN}))
    return replaced_entries(tables)


def _owners_of(unit: nn.Module, units: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the modules and objects that a unit holds, by path, unless only other units hold them."""
    return find_owners([unit], [other for other in units if other is not unit])


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

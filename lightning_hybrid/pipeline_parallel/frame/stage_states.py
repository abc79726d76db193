"""State that modules and objects hold in addition to parameters: its places, copies of it, and states per stage.

Under a pipeline, the user's step runs on every stage, and again if it is traced or repeated. Each run changes
attributes, buffers, containers and objects of the user, but must count only once. This file finds these places, and
copies and restores them::

    find_owners, find_places     where modules and objects of the user hold something
    Copies                       copies for a trace (`fake_module`, `trainer.losses.rehearsal`) and for earlier stages
    Contents                     saved contents of a step that may be repeated (`trainer.redo`)
    StatesOfStages               a state for each stage, if a rank has several stages (:meth:`FrameCut.run`)

`copy.deepcopy` of the module does not fit: it would copy parameters, and the user's code would still refer to the
original objects.
"""

from __future__ import annotations

import io
import operator
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.module_names import join_names
from lightning_hybrid.distributed.pytree import flatten, unflatten, walk
from lightning_hybrid.distributed.replaced import Preserved, preserved_values, refill, restore, tables_of

ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
CONTAINERS = frozenset({list, dict, set, deque, Counter, OrderedDict, defaultdict})
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
# Packages whose objects are not state of a step: trainers, optimizers, generators, files, locks.
_OF_OTHERS = sys.stdlib_module_names | {
    *("torch", "numpy", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_utilities", "lightning_hybrid")
}


def is_object(value: Any) -> bool:
    """Return True if a value is an object of the user, which may hold state in attributes as modules do.

    Its class is neither from the standard library (except simple namespaces), torch, numpy, Lightning or this package,
    nor a module or a dataset.
    """
    kind = type(value)
    if kind in (SimpleNamespace, Namespace):
        return True
    if str(kind.__module__).partition(".")[0] in _OF_OTHERS or isinstance(value, (type, nn.Module, Dataset)):
        return False
    return type(getattr(value, "__dict__", None)) is dict and not isinstance(value, (Tensor, np.ndarray))


def find_owners(
    values: Iterable[Any], outside: Collection[nn.Module] = (), *, most: int | None = None
) -> dict[str, Any]:
    """Return the modules and objects of the user among some values, in their attributes and in containers.

    Args:
        values: The values to search.
        outside: Modules that are left out, with everything that only they hold.
        most: Containers with more entries are not searched; ``None`` to search all.

    Returns:
        The modules and objects, by the path to each: dotted names of attributes, and keys in brackets; ``""`` for one
        of the values. Each object is returned once.
    """
    owners: dict[str, Any] = {}
    seen: set[int] = set(map(id, outside))
    waiting: list[tuple[str, Any]] = [("", value) for value in values]
    while waiting:
        path, value = waiting.pop()
        if type(value) in ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        entries: Iterable[tuple[str, Any]] = ()
        if isinstance(value, nn.Module) or is_object(value):
            owners[path if path not in owners else f"{path}#{len(owners)}"] = value
            entries = ((join_names(path, name), entry) for name, entry in _attributes(value))
        elif isinstance(value, (tuple, list, set, deque)):
            if most is None or len(value) <= most:
                entries = ((f"{path}[{position}]", entry) for position, entry in enumerate(value))
        elif type(value) in CONTAINERS and (most is None or len(value) <= most):
            entries = ((f"{path}[{key!r}]", entry) for key, entry in value.items())
        waiting += reversed(list(entries))
    return owners


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """Return the attributes of a module or an object by name, without a module's parameters and buffers."""
    is_module = isinstance(owner, nn.Module)
    yield from (entry for entry in vars(owner).items() if not is_module or entry[0] not in _INTERNAL)
    yield from owner._modules.items() if is_module else ()


def find_places(owners: Mapping[str, Any], ids: Collection[int]) -> dict[int, list[str]]:
    """Return the paths of the attributes and buffers that hold some tensors, arrays and containers.

    Args:
        owners: The modules and objects to search, by path.
        ids: The `id()` of the tensors, arrays and containers.

    Returns:
        The paths by `id()`.
    """
    found: dict[int, list[str]] = {}
    for path, owner in owners.items() if ids else ():
        for _, name, value in _entries(owner):
            for inner in _inside(value):
                if id(inner) in ids:
                    found.setdefault(id(inner), []).append(join_names(path, name))
    return found


def find_attributes(owners: Mapping[str, Any], ids: Collection[int]) -> list[tuple[str, str, set[int]]]:
    """Return the attributes and buffers that hold some tensors, also inside containers.

    Args:
        owners: The modules and objects to search, by path.
        ids: The `id()` of the tensors.

    Returns:
        The path of the owner, the name of the attribute or buffer, and the `id()` of the tensors in it.
    """
    entries = ((path, name, value) for path, owner in owners.items() for _, name, value in _entries(owner))
    found = ((path, name, {id(inner) for inner in _inside(value)} & set(ids)) for path, name, value in entries)
    return [each for each in found if each[-1]]


def held_tensors(owners: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in the attributes and buffers of modules and objects, also inside containers."""
    values = (value for owner in owners for _, _, value in _entries(owner))
    return [inner for value in values for inner in _inside(value) if isinstance(inner, Tensor)]


def replace_tensors(owners: Iterable[Any], replace: Callable[[Tensor], Tensor]) -> None:
    """Replace tensors in the attributes and buffers of modules and objects, also inside containers, in place.

    Entries of sets are not replaced.

    Args:
        owners: The modules and objects.
        replace: Returns the new tensor, or the tensor itself.
    """
    seen = set[int]()

    def replaced(value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            return replace(value)
        if kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            entries = [replaced(entry) for entry in value]
            if any(map(operator.is_not, entries, value)):
                return tuple(entries) if kind is tuple else kind(*entries)
        elif kind in CONTAINERS and not isinstance(value, set) and id(value) not in seen:
            seen.add(id(value))
            put(value, value.items() if isinstance(value, dict) else enumerate(value))
        return value

    def put(container: Any, entries: Iterable[tuple[Any, Any]]) -> None:
        for key, entry in list(entries):
            new = replaced(entry)
            if new is not entry:
                container[key] = new

    for owner in owners:
        for table, name, value in _entries(owner):
            put(table, [(name, value)])


def _entries(owner: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Return the attributes and buffers of a module, or the attributes of an object: table, name and value."""
    attributes = [(vars(owner), *entry) for entry in _attributes(owner)]
    buffers = owner._buffers.items() if isinstance(owner, nn.Module) else ()
    return attributes + [(owner._buffers, *entry) for entry in buffers]


def _inside(value: Any, most: int | None = None) -> Iterator[Any]:
    """Return a value and everything in it, except the entries of containers with more than ``most`` entries."""

    def held(container: Any) -> Sequence[Any] | None:
        kind = type(container)
        if kind in ATOMS:
            return None
        is_container = isinstance(container, (list, tuple)) or kind in CONTAINERS
        if not is_container or (most is not None and len(container) > most):
            return ()
        entries = container.values() if isinstance(container, dict) else container
        return [entry for entry in entries if type(entry) not in ATOMS]

    return walk([value], held)


def containers_in(owners: Sequence[Any]) -> list[Any]:
    """Return the containers in the attributes of modules and objects, including the dictionaries of buffers."""
    buffers = [owner._buffers for owner in owners if isinstance(owner, nn.Module)]
    held = (inner for owner in owners for _, value in _attributes(owner) for inner in _inside(value))
    return buffers + [inner for inner in held if type(inner) in CONTAINERS]


class Copies:
    """Copies of values that attributes hold. One object in two places has one copy, so ties between tensors remain."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}
        self._kinds: dict[type, bool] = {}  # by type, True if values are copied

    def __call__(self, value: Any, tensor: Callable[[Tensor], Tensor]) -> Any:
        """Return a copy of a container, an array or a tensor; a value of another type is returned itself.

        Entries are copied too, except the entries of sets. Iterators are
        replaced by objects that raise an error when the step reads them.

        Args:
            value: The value of an attribute.
            tensor: Copies a tensor. It is called once for each tensor.
        """
        kind = type(value)
        if kind not in self._kinds:
            self._kinds[kind] = _is_copied(kind)
        if not self._kinds[kind]:
            return value
        if id(value) in self._known:
            return self._known[id(value)][1]
        other: Any = value
        if isinstance(value, Tensor):
            other = tensor(value)
        elif kind is np.ndarray:
            other = value.copy()
        elif kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            entries = [self(entry, tensor) for entry in value]
            if any(map(operator.is_not, entries, value)):
                other = tuple(entries) if kind is tuple else kind(*entries)
        elif kind in CONTAINERS:
            other = value.copy()
            self._known[id(value)] = value, other
            if not isinstance(other, set):
                for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
                    other[key] = self(entry, tensor)
        elif isinstance(value, Iterator) and not is_object(value):
            other = _NotTaken(value)
        self._known[id(value)] = value, other
        return other

    def changed(self) -> set[int]:
        """Return the `id()` of the containers and arrays whose copies have been changed."""
        return {id(value) for value, other in list(self._known.values()) if self._is_changed(value, other)}

    def _is_changed(self, value: Any, other: Any) -> bool:
        """Return True if a copy differs from its original by more than the copies of entries."""
        if type(value) is np.ndarray:
            return bool(value.tobytes() != other.tobytes())
        if type(value) not in CONTAINERS or not (value or other):
            return False
        if isinstance(value, set):
            return bool(value != other)
        if isinstance(value, dict):
            if list(value) != list(other):
                return True
            value, other = value.values(), other.values()
        pairs = zip(value, other, strict=False)
        return len(value) != len(other) or any(self._known.get(id(a), (a, a))[1] is not b for a, b in pairs)


def _is_copied(kind: type) -> bool:
    """Return True if values of a type are copied (tensors, arrays, containers) or replaced (iterators)."""
    if issubclass(kind, (Tensor, np.ndarray, tuple)) or kind in CONTAINERS:
        return True
    return issubclass(kind, Iterator) and not issubclass(kind, io.IOBase)


class Contents:
    """The contents of modules and of objects of the user, saved so that they can be restored.

    `trainer.redo.step_state` saves the contents of a step that may be repeated, and a trace saves the contents of
    objects that a unit receives, such as a key-value cache. The values of arrays are restored; the values of tensors
    are not.

    Args:
        values: The values to search for objects.
        modules: Modules whose attributes and buffers are restored too, with the objects and containers in them.
        outside: Modules that are not searched for objects.
        most: Containers with more entries are not copied: only entries that were appended to a list are removed.
            ``None`` to copy all containers.

    Attributes:
        tensors: The tensors in these contents, by `id()`. Their values are not restored.
    """

    def __init__(
        self,
        values: Sequence[Any],
        modules: Iterable[nn.Module] = (),
        *,
        outside: Collection[nn.Module] = (),
        most: int | None = None,
    ) -> None:
        self._outside, self._most = outside, most
        self._modules = [_ModuleTable(table) for module in modules for table in tables_of(module)]
        self.renew(values)

    def renew(self, values: Sequence[Any]) -> None:
        """Save the current contents in place of the saved contents.

        Args:
            values: The values to search for objects, instead of the previous values.
        """
        self._values = values
        for each in self._modules:
            each.renew()
        of_modules, most = [value for each in self._modules for value in each.values], self._most
        self._tables = [(table, dict(table)) for table in self._find_tables(of_modules)]
        of_objects = [value for _, table in self._tables for value in table.values()]
        held = [inner for value in (*of_modules, *of_objects) for inner in _inside(value, most)]
        containers = [value for value in held if type(value) in CONTAINERS]
        self._large = [(each, len(each)) for each in containers if most is not None and len(each) > most]
        self._containers = [(each, each.copy()) for each in containers if most is None or len(each) <= most]
        self._arrays = [(value, value.copy()) for value in held if type(value) is np.ndarray]
        self.tensors = {id(value): value for value in held if isinstance(value, Tensor)}

    def put_back(self) -> None:
        """Restore the contents, as far as :attr:`can_be_put_back` is True."""
        for each in self._modules:
            restore(each.table, each.before)
        for table, before in self._tables:
            restore(table, before)
        for container, before in self._containers:
            refill(container, before)
        for array, before in self._arrays:
            array[...] = before
        for container, length in self._large:
            if type(container) is list:
                del container[length:]

    @property
    def can_be_put_back(self) -> bool:
        """Return True if each large container has its number of entries, or is a list with new entries at the end."""
        return all(len(each) == length or (type(each) is list and len(each) > length) for each, length in self._large)

    def release(self) -> None:
        """Forget everything except the attributes of modules, to free memory."""
        self._values, self._tables, self._containers, self._large, self._arrays, self.tensors = (), [], [], [], [], {}

    def keep_new(self, excluded: Collection[str]) -> None:
        """Add to the saved contents: attributes and buffers of modules that were missing or ``None`` before.

        Args:
            excluded: The names of attributes that are not kept.
        """
        for each in self._modules:
            for name, value in each.table.items():
                if name not in excluded and each.before.get(name) is None:
                    each.before[name] = value

    def replace_new(self, tensor: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor in the objects, but not in modules, that was added since the contents were saved.

        Args:
            tensor: Returns the replacement of a tensor.
        """
        copies = Copies()
        for table in self._find_tables():
            for name, value in table.items():
                table[name] = copies(value, lambda each: each if id(each) in self.tensors else tensor(each))

    def _find_tables(self, of_modules: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return the attribute dictionaries of the user's objects."""
        owners = find_owners([*self._values, *of_modules], self._outside, most=self._most).values()
        return [vars(owner) for owner in owners if not isinstance(owner, nn.Module)]


class _ModuleTable:
    """The saved attributes or buffers of a module. They are searched again only if one is another object than before.

    Attributes:
        table: The dictionary of attributes or buffers.
        before: Its saved entries.
        values: Its values that may hold state: containers, arrays, tensors, objects.
    """

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table
        self.before: dict[str, Any] = {}
        self.values: list[Any] = []

    def renew(self) -> None:
        """Save the current entries."""
        table, before = self.table, self.before
        if len(table) == len(before) and all(map(operator.is_, table.values(), before.values())):
            return
        self.before = dict(table)
        self.values = [
            value
            for name, value in table.items()
            if type(value) not in ATOMS and name not in _INTERNAL and _may_hold(value)
        ]


def _may_hold(value: Any) -> bool:
    """Return True if a value may hold state."""
    if isinstance(value, tuple):
        return any(type(entry) not in ATOMS for entry in value)
    return isinstance(value, (Tensor, np.ndarray, list)) or type(value) in CONTAINERS or is_object(value)


class _NotTaken:
    """A replacement of an iterator. It raises an error, because each stage would take different items."""

    def __init__(self, iterator: Any) -> None:
        self._kind = type(iterator).__name__

    def __iter__(self) -> _NotTaken:
        return self

    def __next__(self) -> Any:
        raise WrongUseError(
            f"The step reads from an iterator ({self._kind}) that is an attribute of the module. Every stage runs the"
            " step, so the stages would read different items. Put the data into the batch, for example with a"
            " `CombinedLoader`, which reads several loaders together. [LH451]"
        )


class StatesOfStages:
    """The changes of a step to a module, separate for each stage if a rank has several stages.

    Each stage runs the user's step, so it counts once for each microbatch, and must see only its own counts. The last
    stage of a rank works with the module itself. Earlier stages may be some microbatches ahead, and have their own
    state::

        attributes that the stage assigns       are kept for its next run, and restored in between
        containers, arrays, buffers, tensors    have copies, made when the stage first runs in a step
          that the stage writes in place
        parameters that the stage writes        have its values while it runs, and are restored in between
        the batch                               writes go into a copy (:func:`copied_arguments`)

    :meth:`FrameCut.run` creates it in each batch, so changes by hooks between two batches are visible to all stages.

    Args:
        module: The user's module.
        units: The units. Their state belongs to their own stage, so it is left out.
    """

    def __init__(self, module: nn.Module, units: Collection[nn.Module]) -> None:
        owners = find_owners([module], units)
        tables = [(path, table) for path, owner in owners.items() for table in tables_of(owner)]
        self._tables = [table for _, table in tables]
        self._positions = {
            join_names(path, name): position for position, (path, table) in enumerate(tables) for name in table
        }
        self._containers = {
            id(inner): (inner, join_names(path, name))
            for path, owner in owners.items()
            for name, value in _attributes(owner)
            for inner in _inside(value)
            if type(inner) in CONTAINERS
        }
        self._own: dict[int, list[dict[str, Any]]] = {}
        self._copies: dict[int, Copies] = {}
        self._parameters: dict[tuple[int, int], Tensor] = {}

    @contextmanager
    def of(self, stage: int, places: Iterable[str], parameters: Sequence[Tensor]) -> Iterator[None]:
        """Give the module the state of an earlier stage of this rank while entered.

        Args:
            stage: The stage.
            places: The paths of the attributes and buffers that the stage writes in place; see `Part.places`.
            parameters: The parameters that the stage writes.

        Raises:
            WrongUseError: If the step changes the number of entries of a container that has no copy.
        """
        own = self._own.setdefault(stage, [{} for _ in self._tables])
        self._add_copies(stage, own, places)
        before = [table.copy() for table in self._tables]
        lengths = [len(container) for container, _ in self._containers.values()]
        for table, values in zip(self._tables, own, strict=True):
            table.update(values)
        with self._own_parameters(stage, parameters):
            try:
                yield
            finally:
                for table, values, resting in zip(self._tables, own, before, strict=True):
                    _put_back(table, values, resting)
        for (container, path), length in zip(self._containers.values(), lengths, strict=True):
            if len(container) != length:
                raise WrongUseError(
                    f"The step changes `{path}`, but did not change it when the step was traced for a batch with the"
                    " same shapes. A rank with several stages would therefore change it once for each stage. Change it"
                    " in a hook, such as `on_train_batch_end`, or set HybridStrategy(dynamic_shapes=True), which traces"
                    " every step. [LH472]"
                )

    def _add_copies(self, stage: int, own: list[dict[str, Any]], places: Iterable[str]) -> None:
        """Give a stage copies of the objects that it writes in place, where it has none yet."""
        copies = self._copies.setdefault(stage, Copies())
        for path in places:
            position, name = self._positions.get(path), path.rpartition(".")[2]
            if position is not None and name in self._tables[position] and name not in own[position]:
                own[position][name] = copies(self._tables[position][name], _clone)

    @contextmanager
    def _own_parameters(self, stage: int, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Give parameters the values of a stage while entered, and keep the values that the stage writes."""
        with preserved_values(parameters):
            for parameter in parameters:
                if (stage, id(parameter)) in self._parameters:
                    parameter.data.copy_(self._parameters[stage, id(parameter)])
            yield
            for parameter in parameters:
                self._parameters[stage, id(parameter)] = parameter.detach().clone()


@contextmanager
def copied_arguments(arguments: Sequence[Any], written: Collection[int]) -> Iterator[list[Any]]:
    """Copy the arguments of a step while entered, because a later stage of this rank runs the step with them again.

    Args:
        arguments: The arguments of the step.
        written: The positions of the tensors that the step writes among the leaves of the arguments.

    Yields:
        The arguments with copies of containers and written tensors. The user's objects are the same, but their
        attributes are copies while entered.
    """
    leaves, spec = flatten(list(arguments))
    copies = Copies()
    owners = find_owners(leaves).values()
    with Preserved(owners):
        for owner in owners:
            vars(owner).update({name: copies(value, _clone) for name, value in vars(owner).items()})
        own = [leaf if isinstance(leaf, Tensor) else copies(leaf, _clone) for leaf in leaves]
        for position in written:
            own[position] = own[position].clone()
        yield unflatten(own, spec)


def _clone(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor; a parameter is returned itself, because all stages share it."""
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


def _put_back(table: dict[str, Any], own: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Restore a dictionary of attributes, and keep the entries that the stage has changed now or earlier.

    Args:
        table: The dictionary.
        own: The entries of the stage, which are updated.
        before: The entries to restore.
    """
    if not own and len(table) == len(before) and all(map(operator.is_, table.values(), before.values())):
        return
    for name in before.keys() - table.keys():
        own.pop(name, None)
    for name in [name for name, value in table.items() if name in own or before.get(name, own) is not value]:
        own[name] = table[name]
    restore(table, before)

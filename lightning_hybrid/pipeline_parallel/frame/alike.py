"""Layers that differ only in the values of their tensors: a trace of a step runs one layer of each kind.

A trace runs the user's step with fake tensors, which have shapes but no values. In a model of many equal layers, most
of its time would be spent in layers that give the same result again. :class:`Discovery` makes a :class:`RepeatedUnits`
for each trace, and `tuning.dry_run` calls :func:`first_alike` before it measures a step. A *unit* is a module that runs
on exactly one stage, such as a pipelined layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.distributed.dtensor import to_local
from lightning_hybrid.distributed.pytree import TreeSpec, flatten, unflatten
from lightning_hybrid.distributed.replaced import entries_of, tables_of
from lightning_hybrid.distributed.taps import is_own_hook
from lightning_hybrid.pipeline_parallel.frame.fake_tensors import is_whole
from lightning_hybrid.pipeline_parallel.frame.graph import Call
from lightning_hybrid.pipeline_parallel.frame.operators import Seen, memory_of
from lightning_hybrid.pipeline_parallel.frame.stage_states import CONTAINERS, containers_in, find_owners, is_object
from lightning_hybrid.torch_internals import STATE_DICT_HOOKS, FakeTensor, forward_hooks, forward_pre_hooks

#: Types whose values are compared with `==`.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_DEPTH = 4  # the most levels of nested objects whose attributes are compared


def first_alike(layers: Mapping[str, nn.Module]) -> dict[nn.Module, nn.Module]:
    """Return, for each layer, the first layer that differs from it only in the values of tensors.

    Layers are alike if they have the same classes, their tensors have the same shapes, dtypes and flags, and their
    attributes are equal, including hooks and the variables that hooks capture. Integer keys of dictionaries may differ.
    An integer attribute may differ if it is the position of the layer in its list, as `layer_idx` in transformers.

    Args:
        layers: The layers by dotted name, in order.
    """
    found: dict[nn.Module, nn.Module] = {}
    firsts: list[tuple[int, nn.Module]] = []
    for number, (name, layer) in enumerate(layers.items()):
        position = _position(name, number)
        for first_position, first in firsts:
            if _Comparison(first_position, position).is_alike(first, layer):
                found[layer] = first
                break
        else:
            firsts.append((position, layer))
            found[layer] = layer
    return found


def _position(name: str, number: int) -> int:
    """Return the position of a layer in its list; ``number`` if the last part of its name is not a number."""
    last = name.rpartition(".")[2]
    return int(last) if last.isdecimal() else number


@dataclass
class _Comparison:
    """A comparison of two layers.

    Attributes:
        first: The position of the first layer in its list.
        second: The position of the second layer in its list.
    """

    first: int
    second: int
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def is_alike(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Return True if two objects are equal, except for the values of tensors and the positions of the layers.

        Args:
            one: An object of the first layer.
            other: The object of the second layer.
            depth: The number of nested objects around them, not counting modules; at most ``_DEPTH``.
        """
        if one is other or (id(one), id(other)) in self._seen:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, PLAIN):
            return bool(one == other) or (type(one) is int and (one, other) == (self.first, self.second))
        self._seen.add((id(one), id(other)))
        if isinstance(one, Tensor):
            return _kind_of(one) == _kind_of(other)
        if isinstance(one, nn.Module):
            return self._are_alike(vars(one), vars(other), depth)
        if isinstance(one, Mapping):  # the integer keys of hooks differ
            keys = [[key for key in each if not isinstance(key, int)] for each in (one, other)]
            return keys[0] == keys[1] and self._all_alike(one.values(), other.values(), depth)
        if isinstance(one, (list, tuple)):
            return self._all_alike(one, other, depth)
        if isinstance(one, partial):
            pairs = (one.func, one.args, one.keywords), (other.func, other.args, other.keywords)
            return self._all_alike(*pairs, depth)
        if callable(one) and hasattr(one, "__qualname__"):
            same = one.__qualname__ == other.__qualname__ and one.__module__ == other.__module__
            return same and (is_own_hook(one) or self._all_alike(_captured(one), _captured(other), depth))
        if depth < _DEPTH and hasattr(one, "__dict__"):
            return self._are_alike(vars(one), vars(other), depth + 1)
        if isinstance(one, np.ndarray):
            return np.array_equal(one, other)
        if isinstance(one, weakref.ref):  # recurrent layers have these to their weights
            return self.is_alike(one(), other(), depth)
        return (one == other) is True

    def _all_alike(self, one: Collection[Any], other: Collection[Any], depth: int) -> bool:
        """Return True if two collections have the same length, and their items are alike."""
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(self.is_alike(*pair, depth) for pair in pairs)

    def _are_alike(self, one: Mapping[Any, Any], other: Mapping[Any, Any], depth: int) -> bool:
        """Return True if two dictionaries of attributes have the same names, and their values are alike."""
        return one.keys() == other.keys() and all(
            name in STATE_DICT_HOOKS  # `forward` does not call these hooks
            or _are_empty(one[name], other[name])
            or self.is_alike(one[name], other[name], depth)
            for name in one
        )


def _are_empty(one: Any, other: Any) -> bool:
    """Return True if both values are empty dictionaries of the same type, as most attributes of a module are."""
    return isinstance(one, dict) and type(one) is type(other) and not one and not other


def _captured(function: Any) -> list[Any]:
    """Return the object of a bound method and the values of the variables in a closure."""
    cells = getattr(function, "__closure__", None) or ()
    return [getattr(function, "__self__", None), *(cell.cell_contents for cell in cells)]


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the class, shapes, dtype and flags of a tensor: all that is compared."""
    local = to_local(tensor) if isinstance(tensor, DTensor) else tensor
    return type(tensor), tensor.shape, local.shape, tensor.dtype, tensor.requires_grad, tensor.is_meta


class _Outcome(NamedTuple):
    """The result of a call of the first unit of a kind.

    Attributes:
        call: The call.
        outputs: The leaves of the result: fake tensors, :class:`_Argument`, or plain values.
        spec: The tree of the result.
    """

    call: Call
    outputs: list[Any]
    spec: TreeSpec


class _Argument(int):
    """The position of an argument that a call returned."""


class RepeatedUnits:
    """Results of units that need not run in a trace, because a unit of the same kind ran with like arguments.

    ::

        h.0(x)    runs on fake tensors           returns fake tensors, writes nothing, keeps nothing
        h.1(x)    alike, x looks the same        new fake tensors like the results of h.0
        h.2(x)    alike, x has another shape     runs

    A call is repeated only if its result is its only effect: it wrote no argument, parameter or buffer, changed no
    attribute of the unit, received only fake tensors and plain values, and returned only arguments, plain values and
    new floating-point tensors with memory of their own.

    Args:
        units: The pipelined layers with their names; calls of other units always run. While a step is traced, the
            tensors of these layers are fake.
        fake: Returns a fake tensor that looks like another tensor.
    """

    def __init__(self, units: Sequence[tuple[str, nn.Module]], fake: Callable[[Tensor], Tensor]) -> None:
        self._units, self._fake = units, fake
        self._firsts: dict[nn.Module, nn.Module] = {}
        self._by_class: dict[type, list[tuple[int, nn.Module]]] = {}
        self._outcomes: dict[Hashable, _Outcome] = {}

    def __call__(
        self, call: Call, leaves: Sequence[Any], spec: TreeSpec, run: Callable[[], Any], seen: Callable[[], Seen]
    ) -> tuple[Any, Call]:
        """Return the result of a unit, and the call that ran: this call, or an earlier call of a unit of the same kind.

        Args:
            call: The call of the unit. It runs if any tensor among its arguments is not fake.
            leaves: The leaves of the arguments.
            spec: The tree of the arguments.
            run: Makes the call.
            seen: Returns the effects of the operators since the call began.
        """
        assert call.unit is not None
        key = self._key_of(call.unit, leaves, spec) if call.unit < len(self._units) else None
        known = None if key is None else self._outcomes.get(key)
        if known is not None:
            outputs = [
                leaves[leaf] if type(leaf) is _Argument else self._fake(leaf) if isinstance(leaf, Tensor) else leaf
                for leaf in known.outputs
            ]
            return unflatten(outputs, known.spec), known.call
        unit = self._units[call.unit][1] if key is not None else nn.Module()
        before = _contents(unit)
        result = run()
        held = _memories((*leaves, *unit.parameters(), *unit.buffers()))
        if key is not None and held.isdisjoint(seen().written) and _is_same(before, _contents(unit)):
            outputs, returned = flatten(result)
            known_outputs = _without_arguments(outputs, leaves, held)
            if known_outputs is not None:
                # Store copies: a stored result would be alive at the end of the step, as if the last stage needed it.
                like = [self._fake(leaf) if isinstance(leaf, Tensor) else leaf for leaf in known_outputs]
                self._outcomes[key] = _Outcome(call, like, returned)
        return result, call

    def forget(self, call: Call) -> None:
        """Forget the result of a call, because the call has other effects than its result: a hook kept a tensor."""
        self._outcomes = {key: each for key, each in self._outcomes.items() if each.call is not call}

    def _key_of(self, index: int, leaves: Sequence[Any], spec: TreeSpec) -> Hashable | None:
        """Return a key that is equal for calls that may share a result; ``None`` for a call that always runs.

        Args:
            index: The position of the unit.
            leaves: The leaves of the arguments; tensors among them are fake.
            spec: The tree of the arguments.
        """
        memories: dict[int, int] = {}
        parts: list[Hashable] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if not isinstance(leaf, FakeTensor):
                    return None
                memory = memories.setdefault(memory_of(leaf), len(memories))
                parts.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, memory))
            elif isinstance(leaf, PLAIN):
                parts.append((type(leaf), leaf))
            else:
                return None
        return self._first(index), spec, tuple(parts)

    def _first(self, index: int) -> nn.Module:
        """Return the first called unit that is like a unit; the unit itself if there is none."""
        name, unit = self._units[index]
        if unit not in self._firsts:
            firsts, position = self._by_class.setdefault(type(unit), []), _position(name, index)
            alike = (first for number, first in firsts if _Comparison(number, position).is_alike(first, unit))
            self._firsts[unit] = first = next(alike, unit)
            if first is unit:
                firsts.append((position, unit))
        return self._firsts[unit]


def _memories(values: Iterable[Any]) -> set[int]:
    """Return the memory of the tensors among some values; see :func:`memory_of`."""
    return {memory_of(each) for each in values if isinstance(each, Tensor)}


def _without_arguments(outputs: Sequence[Any], leaves: Sequence[Any], held: Collection[int]) -> list[Any] | None:
    """Replace arguments among the outputs by their positions; return ``None`` if the call cannot be repeated.

    Args:
        outputs: The leaves of the result.
        leaves: The leaves of the arguments.
        held: The memory of the tensors that existed before the call.
    """
    places = {id(leaf): place for place, leaf in reversed(list(enumerate(leaves))) if isinstance(leaf, Tensor)}
    memories = set(held)
    found = list[Any]()
    for leaf in outputs:
        if id(leaf) in places:
            found.append(_Argument(places[id(leaf)]))
        elif isinstance(leaf, FakeTensor) and not is_whole(leaf) and memory_of(leaf) not in memories:
            memories.add(memory_of(leaf))
            found.append(leaf)
        elif isinstance(leaf, PLAIN):
            found.append(leaf)
        else:
            return None
    return found


def _contents(unit: nn.Module) -> list[tuple[Any, ...]]:
    """Return the attributes of the modules, objects and hooks of a unit, and the entries of their containers."""
    owners = list(find_owners([unit]).values())
    hooks = [
        hook for part in unit.modules() for hook in (*forward_pre_hooks(part).values(), *forward_hooks(part).values())
    ]
    captured = [value for hook in hooks if not is_own_hook(hook) for value in _captured(hook)]
    of_hooks = [value for value in captured if is_object(value) or isinstance(value, nn.Module)]
    tables = [tuple(table.values()) for owner in (*owners, *of_hooks) for table in tables_of(owner)]
    containers = *containers_in(owners), *(value for value in captured if type(value) in CONTAINERS)
    return tables + [tuple(entries_of(each)) for each in containers]


def _is_same(before: Sequence[tuple[Any, ...]], now: Sequence[tuple[Any, ...]]) -> bool:
    """Return True if the contents of a unit are the same objects as before."""
    return len(before) == len(now) and all(
        len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
        for one, other in zip(before, now, strict=True)
    )

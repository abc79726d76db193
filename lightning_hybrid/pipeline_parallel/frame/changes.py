"""The result of a call and its changes to its arguments, as a message to ranks that have not made the call.

:class:`Lockstep` uses it in evaluation steps, such as text generation, in which all stages run the user's code at once.
One stage calls a layer, and the other ranks of the model group make the same changes to their own objects, such as a
key-value cache. The arguments cannot simply be pickled and replaced: the user's code holds references to the objects,
and large tensors in them must stay on the stage of the layer.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import walk
from lightning_hybrid.distributed.replaced import refill
from lightning_hybrid.pipeline_parallel.frame.stage_states import ATOMS, CONTAINERS, is_object
from lightning_hybrid.pipeline_parallel.placeholders import PlaceholderBuffer, is_placeholder
from lightning_hybrid.torch_internals import version_counter

# Marks in a pickle: an object that the receiver has, a tensor that is sent, a tensor that is kept, and a device.
_KNOWN, _SENT, _KEPT, _DEVICE = "known", "sent", "kept", "device"

_KEPT_TEXT = (
    "A layer reads a tensor that a layer on another stage stored in an object, such as a key-value cache. The tensor"
    " stays on the stage that created it. Return it from the layer that creates it, and pass it as an argument to the"
    " layer that reads it. [LH413]"
)


class Packed(NamedTuple):
    """The result of a call, and its changes to its arguments.

    Attributes:
        payload: The pickle of the result and the changes, without tensors.
        tensors: The tensors that are sent.
        kept: The tensors with more than one element that stay with the sender, because the call stored them in an
            object, such as a key-value cache.
    """

    payload: bytes
    tensors: list[Tensor]
    kept: list[Tensor]


class KeptTensor(PlaceholderBuffer):
    """A placeholder, on the meta device, for a tensor that a layer of another stage has stored in an object."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return results without values.

        Raises:
            WrongUseError: If values are needed.
        """
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except WrongUseError:
            raise WrongUseError(_KEPT_TEXT) from None


def kept_like(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> KeptTensor:
    """Return a placeholder for a tensor that another stage keeps."""
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta").as_subclass(KeptTensor)


class Arguments:
    """The objects, containers and tensors among the arguments of a call, as they were before the call.

    Each rank of a model group makes this object before a call, and finds the same things in the same order. So a number
    identifies each thing that the call changes::

        rank that calls     cache.layers[0].keys = tensor (2, 4, 7, 8)     -->  (3, {"keys": kept (2, 4, 7, 8)})
        other ranks         set `keys` of their object 3 to a tensor without values

    Args:
        values: The arguments.
    """

    def __init__(self, values: Any) -> None:
        self._nodes = list(walk([values], _inside))
        self._numbers = {id(node): number for number, node in enumerate(self._nodes)}
        self._before: list[Any] = []

    def watch(self, is_absent: Callable[[Tensor], bool]) -> None:
        """Start to detect changes, on the rank that makes the call.

        Args:
            is_absent: Returns True if some ranks do not have the values of a tensor. Changes of this tensor are not
                sent.
        """
        nodes = self._nodes
        self._before = [None if isinstance(node, Tensor) and is_absent(node) else _copied(node) for node in nodes]

    def pack(self, result: Any) -> Packed:
        """Return the result of the call with all changes since :meth:`watch`.

        Args:
            result: The result of the call.

        Raises:
            WrongUseError: If the result or a change contains a value that cannot be pickled, or a tensor whose values
                are on another stage.
        """
        changes = [
            (number, _changed(node, before))
            for number, (node, before) in enumerate(zip(self._nodes, self._before, strict=True))
            if before is not None and _is_changed(node, before)
        ]
        sent = self._tensors_of(result) + [value for _, value in changes if isinstance(value, Tensor)]
        if any(map(is_placeholder, sent)):
            raise WrongUseError(_KEPT_TEXT)
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, self._numbers, sent)
        try:
            pickler.dump((len(self._nodes), result, changes))
        except Exception as error:  # the pickle protocol lets classes raise anything
            raise WrongUseError(
                "A layer returned a value that cannot be sent to other stages, or stored such a value in an object:"
                f" {error}"
            ) from error
        return Packed(buffer.getvalue(), pickler.sent, pickler.kept)

    def _tensors_of(self, result: Any) -> list[Tensor]:
        """Return the tensors in a result that the receiver does not have."""
        new = walk([result], lambda value: None if id(value) in self._numbers else _inside(value))
        return [value for value in new if isinstance(value, Tensor)]

    def unpack(self, payload: bytes, tensors: Sequence[Tensor], device: torch.device) -> tuple[Any, list[Tensor]]:
        """Make the changes of another rank on this rank.

        Args:
            payload: The payload of :class:`Packed`.
            tensors: The tensors of :class:`Packed`, as received.
            device: The device of this rank.

        Returns:
            The result of the call, and a placeholder for each tensor that stays with the sender.

        Raises:
            WrongUseError: If the arguments on this rank contain another number of objects, containers and tensors than
                those on the sender.
        """
        unpickler = _Unpickler(io.BytesIO(payload), self._nodes, tensors, device)
        number, result, changes = unpickler.load()
        if number != len(self._nodes):
            raise WrongUseError(
                "A layer received different arguments on different ranks. The rank that has the layer received"
                f" {number} objects, containers and tensors, but this rank received {len(self._nodes)}. Every rank runs"
                " the code around the layers. Make sure that this code passes the same arguments on every rank. [LH433]"
            )
        for position, value in changes:
            _apply(self._nodes[position], value)
        return result, unpickler.kept


class _Pickler(pickle.Pickler):
    """A pickler that replaces tensors, devices, and objects that the receiver has, by marks.

    Args:
        file: The buffer for the pickle.
        numbers: The numbers of the objects that the receiver has, by `id()`.
        sent: The tensors that are sent: those in the result, and the new values of written arguments.

    Attributes:
        sent: The tensors that are sent; tensors with one element that were found in objects are added.
        kept: The tensors that stay with the sender.
    """

    def __init__(self, file: io.BytesIO, numbers: dict[int, int], sent: Sequence[Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers, self.sent, self.kept = numbers, list(sent), list[Tensor]()
        self._positions = {id(tensor): position for position, tensor in reversed(list(enumerate(sent)))}

    def persistent_id(self, value: Any) -> Any:
        """Return the mark for a value; ``None`` if the value is pickled."""
        if isinstance(value, torch.device):
            return _DEVICE, value.type
        if not isinstance(value, Tensor):
            return (_KNOWN, self._numbers[id(value)]) if id(value) in self._numbers else None
        if id(value) in self._positions:
            return _SENT, self._positions[id(value)]
        if id(value) in self._numbers:
            return _KNOWN, self._numbers[id(value)]
        if value.numel() > 1:
            place = next((place for place, each in enumerate(self.kept) if each is value), len(self.kept))
            self.kept += [value] * (place == len(self.kept))
            return _KEPT, place, tuple(value.shape), value.stride(), value.dtype
        self._positions[id(value)] = len(self.sent)  # a single value, such as a length, which code may read
        self.sent.append(value)
        return _SENT, self._positions[id(value)]


class _Unpickler(pickle.Unpickler):
    """An unpickler that replaces the marks of :class:`_Pickler` by values of this rank.

    Attributes:
        kept: The placeholders for tensors that stay with the sender.
    """

    def __init__(self, file: io.BytesIO, nodes: Sequence[Any], tensors: Sequence[Tensor], device: torch.device) -> None:
        super().__init__(file)
        self._nodes, self._tensors, self._device, self.kept = nodes, tensors, device, list[Tensor]()

    def persistent_load(self, token: Any) -> Any:
        """Return the value for a mark of the sender."""
        kind, value = token[:2]
        if kind == _KNOWN:
            return self._nodes[value]
        if kind == _SENT:
            return self._tensors[value]
        if kind == _DEVICE:
            return self._device if value == self._device.type else torch.device(value)
        if value == len(self.kept):
            self.kept.append(kept_like(*token[2:]))
        return self.kept[value]


def _inside(value: Any) -> Sequence[Any] | None:
    """Return the values in an object or a container; ``None`` for values that cannot change.

    Arrays, tensors and sets count as values without contents.
    """
    if type(value) in ATOMS:
        return None
    if isinstance(value, (Tensor, np.ndarray)):
        return ()
    if isinstance(value, (list, tuple, deque)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if type(value) in CONTAINERS:  # a set, which has no order that is equal on all ranks
        return ()
    return list(vars(value).values()) if is_object(value) else None


def _copied(node: Any) -> Any:
    """Return a copy or a version, which later shows whether the node has changed; ``None`` if it cannot change."""
    if isinstance(node, Tensor):
        return node.clone() if node.is_inference() else version_counter(node)
    if is_object(node):
        return dict(vars(node))
    return node.copy() if type(node) in CONTAINERS or isinstance(node, np.ndarray) else None


def _is_changed(node: Any, before: Any) -> bool:
    """Return True if a node differs from the copy or the version that :func:`_copied` returned."""
    if isinstance(node, Tensor):
        return not torch.equal(node, before) if isinstance(before, Tensor) else bool(version_counter(node) != before)
    if isinstance(node, np.ndarray):
        return bool(node.tobytes() != before.tobytes())
    now = vars(node) if is_object(node) else node
    if isinstance(now, dict):
        return list(now) != list(before) or any(now[name] is not value for name, value in before.items())
    if isinstance(now, set):
        return bool(now != before)
    return len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True))


def _changed(node: Any, before: Any) -> Any:
    """Return the new contents of a container, an array or a tensor.

    For an object, return the attributes that differ, and the names of the removed attributes.
    """
    if isinstance(node, Tensor):
        return node.detach()
    if not is_object(node):
        return node.copy()
    now = vars(node)
    new = {name: value for name, value in now.items() if name not in before or before[name] is not value}
    return new, [name for name in before if name not in now]


def _apply(node: Any, value: Any) -> None:
    """Make a change of another rank on this rank, in place."""
    if isinstance(node, Tensor):
        node.copy_(value)
    elif isinstance(node, np.ndarray):
        node[...] = value
    elif is_object(node):
        new, removed = value
        vars(node).update(new)
        for name in removed:
            vars(node).pop(name, None)
    else:
        refill(node, value)

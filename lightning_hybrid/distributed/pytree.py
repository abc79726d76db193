"""Nested containers of values: taken apart, put together, described, and as the bytes of one message between ranks."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Keys and indices from the root of a tree.
TreePath = tuple[Any, ...]


class TreeSpec(NamedTuple):
    """The shape of a tree without its leaves; hashable, comparable and picklable, and all of that at the speed of C.

    Two specs are equal when trees of one can be put together with the leaves of the other.

    Attributes:
        kind: The container's class, or ``None`` for a leaf.
        names: What names the children in that container: keys of a mapping, fields of a dataclass; nothing for
            sequences.
        children: The specs of the children.
        num_leaves: Of the whole tree.
    """

    kind: type | None
    names: tuple[Any, ...]
    children: tuple[TreeSpec, ...]
    num_leaves: int

    @classmethod
    def of(cls, kind: type, names: tuple[Any, ...], children: tuple[TreeSpec, ...]) -> TreeSpec:
        """Return the spec of a container."""
        return cls(kind, names, children, sum([child.num_leaves for child in children]))

    def __repr__(self) -> str:
        """For messages: ``*`` is a leaf."""
        if self.kind is None:
            return "*"
        parts = ", ".join(
            f"{name}: {child!r}" if self.names else repr(child)
            for name, child in zip(self.names or self.children, self.children, strict=True)
        )
        return f"{self.kind.__name__}({parts})"


#: The spec of a single value.
LEAF = TreeSpec(None, (), (), 1)


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Take a tree apart.

    Containers are mappings, lists, tuples (named ones too) and dataclass instances; everything else is a leaf, also
    ``None``, strings and tensors.

    Args:
        tree: Any value.

    Returns:
        The leaves from left to right, and the spec with which :func:`unflatten` puts them together.

    Example:
        >>> flatten({"x": 1, "y": (2, None)})
        ([1, 2, None], dict(x: *, y: tuple(*, *)))
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves)


def _flatten(tree: Any, leaves: list[Any]) -> TreeSpec:
    # Most leaves are tensors, and to ask what else they might be takes ten times as long.
    found = None if type(tree) is Tensor else contents(tree)
    if found is None:
        leaves.append(tree)
        return LEAF
    names, values = found
    before = len(leaves)
    children = tuple([_flatten(value, leaves) for value in values])
    return TreeSpec(type(tree), names, children, len(leaves) - before)


def contents(tree: Any) -> tuple[tuple[Any, ...], Sequence[Any]] | None:
    """Return what is directly in a container: its names, none in a sequence, and the values; ``None`` for a leaf."""
    if isinstance(tree, (list, tuple)):
        return (), tree
    if isinstance(tree, Mapping):
        return tuple(tree), tuple(tree.values())
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = tuple([field.name for field in dataclasses.fields(tree)])
        return names, [getattr(tree, name) for name in names]
    return None


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """Put a tree together; the inverse of :func:`flatten`.

    Args:
        leaves: As many leaves as ``spec.num_leaves``.
        spec: The shape of the tree.

    Raises:
        ValueError: If the number of leaves is not that of the spec.
    """
    if len(leaves) != spec.num_leaves:
        raise ValueError(f"A tree with the structure {spec!r} has {spec.num_leaves} leaves, got {len(leaves)}.")
    return leaves[0] if spec.kind is None else _unflatten(iter(leaves), spec)


def _unflatten(leaves: Any, spec: TreeSpec) -> Any:
    kind = spec.kind
    if kind is None:
        return next(leaves)
    values = [_unflatten(leaves, child) for child in spec.children]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*values)
    if issubclass(kind, (list, tuple)):
        return kind(values)
    if issubclass(kind, Mapping):
        return _mapping(kind, dict(zip(spec.names, values, strict=True)))
    # Not through ``__init__``: it may compute, check or refuse fields.
    instance = object.__new__(kind)
    for name, value in zip(spec.names, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


def _mapping(kind: type, items: dict[Any, Any]) -> Any:
    if kind is dict:
        return items
    try:
        return kind(items)
    except TypeError:  # such as defaultdict, whose first argument is something else
        mapping = kind()
        mapping.update(items)
        return mapping


def is_unchanged(tree: Any, leaves: Sequence[Any], spec: TreeSpec) -> bool:
    """Whether a tree is still what it was when it was taken apart: the same objects in the same places."""
    now, now_spec = flatten(tree)
    return now_spec == spec and all(one is other for one, other in zip(now, leaves, strict=True))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with ``function`` applied to each leaf."""
    leaves, spec = flatten(tree)
    return unflatten([function(leaf) for leaf in leaves], spec)


def flatten_with_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[TreePath, Any]]:
    """The leaves of a tree of dicts, lists and tuples, each with the path from the root to it.

    Other containers are leaves, unlike in :func:`flatten`: each step of a path is a ``tree[key]``, and a mapping that
    is no dict may compute its values, or refuse to.

    Args:
        tree: Any value.
        is_leaf: Says which dicts, lists and tuples are leaves.

    Example:
        >>> flatten_with_path({"x": 1, "y": (2, None)})
        [(('x',), 1), (('y', 0), 2), (('y', 1), None)]
    """
    children = children_by_key(tree)
    if children is None or (is_leaf is not None and is_leaf(tree)):
        return [((), tree)]
    return [((key, *path), leaf) for key, child in children.items() for path, leaf in flatten_with_path(child, is_leaf)]


def children_by_key(tree: Any) -> dict[Any, Any] | None:
    """Return what is directly in a dict, a list or a tuple, by key or index; ``None`` for anything else."""
    if isinstance(tree, dict):
        return tree
    return dict(enumerate(tree)) if isinstance(tree, (list, tuple)) else None


def walk(values: Sequence[Any], inside: Callable[[Any], Sequence[Any] | None]) -> Iterator[Any]:
    """Yield values and everything that they hold, each object once; a value comes before what it holds.

    Args:
        values: The values to begin with.
        inside: Returns what a value holds, or ``None`` to leave the value out.
    """
    waiting, seen = list(reversed(values)), dict[int, Any]()  # which keeps the objects: an identity stays theirs
    while waiting:
        value = waiting.pop()
        held = None if id(value) in seen else inside(value)
        if held is not None:
            seen[id(value)] = value
            yield value
            waiting += reversed(held)


# Types of values that are sent as they are: immutable, and equal when they compare equal. (Not float: NaN differs from
# itself.)
_PLAIN = frozenset({type(None), bool, int, str})


class TensorMeta(NamedTuple):
    """What the receiver must know of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    on_host: bool

    def __str__(self) -> str:
        """For messages, such as ``float32[2, 8] requires_grad``."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{' requires_grad' * self.requires_grad}"


class ValueMeta(NamedTuple):
    """A value that is not a tensor.

    Attributes:
        kind: Its type, because ``True == 1``; ``bytes`` if it is pickled.
        value: The value or its pickle.
    """

    kind: type
    value: Any

    def load(self) -> Any:
        """The value; one that could be changed is a copy of the receiver's own."""
        return decode(self.value) if self.kind is bytes else self.value

    def equals(self, other: Any) -> bool:
        """Whether the values are equal: pickles of equal values may differ."""
        if self == other or not isinstance(other, ValueMeta):
            return bool(self == other)
        ours, theirs = self.load(), other.load()
        try:
            return type(ours) is type(theirs) and bool(ours == theirs)
        except (ValueError, RuntimeError):  # such as arrays, whose comparison is no single truth
            return False

    def __str__(self) -> str:
        """For messages."""
        return repr(self.load())


class TreeMeta(NamedTuple):
    """Tree, shapes, dtypes, ``requires_grad`` and values that are not tensors; hashable and picklable.

    Attributes:
        spec: The tree; ``None`` for a bare list of leaves.
        leaves: One entry per leaf.
    """

    spec: TreeSpec | None
    leaves: tuple[TensorMeta | ValueMeta, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any], spec: TreeSpec | None) -> TreeMeta:
        """The description of a tree.

        Raises:
            TypeError: If a leaf cannot be sent.
        """
        metas = [_tensor_meta(leaf) if isinstance(leaf, Tensor) else _value_meta(leaf) for leaf in leaves]
        return cls(spec, tuple(metas))

    def fits(self, leaves: Sequence[Any], spec: TreeSpec | None) -> bool:
        """Whether this describes a tree, compared without unpickling; pickles of equal values may differ."""
        described = [
            (leaf.shape, leaf.dtype, leaf.requires_grad, leaf.is_cpu) if isinstance(leaf, Tensor) else _value_meta(leaf)
            for leaf in leaves
        ]
        return tuple(described) == self.leaves and (spec is self.spec or spec == self.spec)

    def equals(self, other: TreeMeta) -> bool:
        """Whether two trees differ in nothing but the contents of their tensors."""
        return (
            self.spec == other.spec
            and len(self.leaves) == len(other.leaves)
            and all(
                ours.equals(theirs) if isinstance(ours, ValueMeta) else ours == theirs
                for ours, theirs in zip(self.leaves, other.leaves, strict=True)
            )
        )

    def values(self) -> list[Any]:
        """The leaves that are not tensors, at their positions; ``None`` where tensors belong."""
        return [leaf.load() if isinstance(leaf, ValueMeta) else None for leaf in self.leaves]

    def tensors(self) -> list[tuple[int, TensorMeta]]:
        """The tensors, with their positions among the leaves."""
        return [(index, leaf) for index, leaf in enumerate(self.leaves) if isinstance(leaf, TensorMeta)]

    @property
    def has_values(self) -> bool:
        """Whether there are leaves that are not tensors."""
        return any(isinstance(leaf, ValueMeta) for leaf in self.leaves)

    def __str__(self) -> str:
        """For messages."""
        leaves = ", ".join(map(str, self.leaves))
        return leaves if self.spec is None or self.spec.kind is None else f"{leaves} in {self.spec!r}"


def split_values(leaves: list[Any], spec: TreeSpec) -> tuple[TreeMeta, list[Any]]:
    """What can be the same for many trees, and the values that are not tensors, by position."""
    tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
    return TreeMeta.of(tensors, spec), [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _tensor_meta(leaf: Tensor) -> TensorMeta:
    if leaf.layout is not torch.strided:
        raise TypeError(
            f"a tensor with layout {leaf.layout} cannot be sent to another rank: convert it with `.to_dense()` [LH726]"
        )
    return TensorMeta(leaf.shape, leaf.dtype, leaf.requires_grad, leaf.is_cpu)


def _value_meta(leaf: Any) -> ValueMeta:
    if type(leaf) in _PLAIN:
        return ValueMeta(type(leaf), leaf)
    try:
        return ValueMeta(bytes, encode(leaf))
    except Exception as error:  # the pickle protocol lets classes raise anything
        raise TypeError(
            f"a value of type {type(leaf).__qualname__} cannot be sent to another rank, because it cannot be pickled "
            f"({error}) [LH726]"
        ) from error


#: Bytes of the first part of a message whose length the receiver does not know; fewer bytes take as long.
FIRST_PART = 4096
_HEADER = struct.Struct("qqqq")  # of a message: its code, the bytes of its value and of all of it, and its subject
_ALIGNED = 16  # bytes: the longest number of torch, complex128, which can begin at its multiples


def encode(value: Any) -> bytes:
    """Return a value as bytes, for another rank or process of this job.

    Raises:
        Exception: Anything, if the value cannot be pickled: classes may raise what they like.
    """
    return pickle.dumps(value)


def decode(encoded: bytes) -> Any:
    """Return the value that :func:`encode` was given."""
    return pickle.loads(encoded)


class Message(NamedTuple):
    """A value, and tensors that the receiver has a description of, as the bytes that travel.

    ::

        [code | bytes of the value | bytes of all | subject]  [value]  [tensor]  [tensor] ...  [padding]

    Every message whose length the receiver cannot know has this form, over each kind of connection. The receiver asks
    for as many bytes as both sides know, and then for those that are missing, as the header says.

    Attributes:
        code: The number of the kind of message, on which sender and receiver agree.
        subject: The number of the message's subject, which the receiver compares with the one it expects.
        num_bytes: The length without padding.
        encoded: The bytes of the value; empty without a value.
        parts: All of it as uint8 tensors on the host: the first part, and the rest if there is any.
    """

    code: int
    subject: int
    num_bytes: int
    encoded: bytes
    parts: tuple[Tensor, ...]

    @classmethod
    def make(
        cls,
        encoded: bytes = b"",
        tensors: Sequence[Tensor] = (),
        *,
        code: int = 0,
        subject: int = 0,
        size: int = _HEADER.size,
    ) -> Message:
        """Write a message.

        Args:
            encoded: A value, by :func:`encode`.
            tensors: Tensors of the host.
            code: The number of the kind of message.
            subject: The number of its subject.
            size: The bytes of the first part.
        """
        places = _places(len(encoded), tensors)
        length = places[-1].stop
        header = _HEADER.pack(code, len(encoded), length, subject)
        data = torch.frombuffer(bytearray((header + encoded).ljust(max(length, size), b"\0")), dtype=torch.uint8)
        for tensor, place in zip(tensors, places[1:], strict=True):
            _like(tensor, data[place]).copy_(tensor)
        return cls(code, subject, length, encoded, (data[:size], data[size:]) if length > size else (data,))

    @classmethod
    def read(cls, data: Tensor) -> Message:
        """Read a message, or its first part: then the value is cut off."""
        view = data.numpy().data
        code, num_encoded, length, subject = _HEADER.unpack_from(view)
        return cls(code, subject, length, view[_HEADER.size : _HEADER.size + num_encoded].tobytes(), (data,))

    @classmethod
    def receive(cls, receive: Callable[[int], Tensor], size: int = _HEADER.size) -> Message:
        """Receive a message in one part, or in two if it is longer.

        Args:
            receive: Returns the next so many bytes, a uint8 tensor on the host.
            size: The bytes of the first part.
        """
        message = cls.read(receive(size))
        if message.num_bytes <= size:
            return message
        return cls.read(torch.cat([*message.parts, receive(message.num_bytes - size)]))

    def value(self) -> Any:
        """Return the value; ``None`` if there is none."""
        return decode(self.encoded) if self.encoded else None

    def tensors(self, likes: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of a received message, which share its memory, by others of their dtypes and shapes."""
        [data] = self.parts
        places = _places(len(self.encoded), likes)[1:]
        return [_like(like, data[place]) for like, place in zip(likes, places, strict=True)]


def _places(num_encoded: int, tensors: Sequence[Tensor]) -> list[slice]:
    """Return where the value of a message is, and its tensors, each where any dtype may begin."""
    places = [slice(_HEADER.size, _HEADER.size + num_encoded)]
    for tensor in tensors:
        begin = -(-places[-1].stop // _ALIGNED) * _ALIGNED
        places.append(slice(begin, begin + tensor.nbytes))
    return places


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    """Return bytes as a tensor of another one's dtype and shape: no backend knows every dtype, but bytes are bytes."""
    return data.view(tensor.dtype).view(tensor.shape)


#: Types of values that are not copied, because a layer cannot change them or (tensors) they are handled elsewhere.
_UNCHANGING = (type(None), bool, int, float, str, Tensor, torch.dtype, torch.device)


def copy_object(value: Any, of_tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """Return a copy of an object that a layer may change, such as a cache of keys; return a plain value itself.

    Args:
        value: The object.
        of_tensor: Returns the tensor of the copy for a tensor of the object.
    """
    if isinstance(value, _UNCHANGING) or callable(value):
        return value
    tensors = (each for each in walk([value], _held) if isinstance(each, Tensor))
    return copy.deepcopy(value, {id(tensor): of_tensor(tensor) for tensor in tensors})


def _held(value: Any) -> Sequence[Any] | None:
    """Return what an object holds in itself and in its attributes; nothing for a tensor, ``None`` for a class."""
    if isinstance(value, Tensor):
        return ()
    if isinstance(value, type):
        return None
    held = list(value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ())
    return [*held, *vars(value).values()] if hasattr(value, "__dict__") else held

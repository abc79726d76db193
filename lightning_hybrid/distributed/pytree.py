"""Trees of nested containers: taken apart, put together, described, and encoded as messages between ranks.

Almost all packages use :func:`flatten` and :func:`unflatten` for the arguments and results of layers and steps, and for
batches. Connections between ranks (`distributed.messages`, `pipeline_parallel.p2p`) send the descriptions and messages.
torch's `torch.utils._pytree` is not used: it is private, treats dataclasses and unregistered mappings as leaves, and
its specs are slow to compare, but each microbatch compares some.

A *tree* is any value. A *container* is a value with values inside that :func:`flatten` takes apart; every other value
is a *leaf*. A *spec* is the structure of a tree without its leaves. A *meta* is the description of a leaf or tree that
a receiver needs: the structure, the shapes and dtypes of tensors, and the values that are not tensors.
"""

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
    """The structure of a tree without its leaves. It is hashable, comparable and picklable, all at the speed of C.

    Two specs are equal if a tree with one spec can be put together from the leaves of a tree with the other one.

    Attributes:
        kind: The class of the container; ``None`` for a leaf.
        names: The names of the children: the keys of a mapping or the fields of a dataclass; empty for a sequence.
        children: The specs of the children.
        num_leaves: The number of leaves of the whole tree.
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
        """Return the structure for messages; ``*`` is a leaf."""
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

    Containers are mappings, lists, tuples (also named tuples) and dataclass instances. Every other value is a leaf,
    including ``None``, strings and tensors.

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
    # Most leaves are tensors. Checking for all kinds of containers takes ten times as long.
    found = None if type(tree) is Tensor else contents(tree)
    if found is None:
        leaves.append(tree)
        return LEAF
    names, values = found
    before = len(leaves)
    children = tuple([_flatten(value, leaves) for value in values])
    return TreeSpec(type(tree), names, children, len(leaves) - before)


def contents(tree: Any) -> tuple[tuple[Any, ...], Sequence[Any]] | None:
    """Return the names and values directly in a container; ``None`` for a leaf. For a sequence, the names are empty."""
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
        leaves: The leaves.
        spec: The structure of the tree.

    Raises:
        ValueError: If the number of leaves differs from ``spec.num_leaves``.
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
    # ``__init__`` is not called, because it may compute, check or reject fields.
    instance = object.__new__(kind)
    for name, value in zip(spec.names, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


def _mapping(kind: type, items: dict[Any, Any]) -> Any:
    if kind is dict:
        return items
    try:
        return kind(items)
    except TypeError:  # the first argument is not a mapping, as for defaultdict
        mapping = kind()
        mapping.update(items)
        return mapping


def is_unchanged(tree: Any, leaves: Sequence[Any], spec: TreeSpec) -> bool:
    """Return True if a tree still has the same objects in the same places as when it was taken apart.

    Args:
        tree: The tree.
        leaves: The leaves at that time.
        spec: The spec at that time.
    """
    now, now_spec = flatten(tree)
    return now_spec == spec and all(one is other for one, other in zip(now, leaves, strict=True))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the same tree with ``function`` applied to each leaf."""
    leaves, spec = flatten(tree)
    return unflatten([function(leaf) for leaf in leaves], spec)


def flatten_with_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[TreePath, Any]]:
    """Return the leaves of a tree of dicts, lists and tuples, each with the path from the root to the leaf.

    Unlike in :func:`flatten`, other containers are leaves. Each step of a path is a ``tree[key]``, and a mapping that
    is not a dict may compute its values or raise errors.

    Args:
        tree: Any value.
        is_leaf: Returns True for a dict, list or tuple that is a leaf.

    Example:
        >>> flatten_with_path({"x": 1, "y": (2, None)})
        [(('x',), 1), (('y', 0), 2), (('y', 1), None)]
    """
    children = children_by_key(tree)
    if children is None or (is_leaf is not None and is_leaf(tree)):
        return [((), tree)]
    return [((key, *path), leaf) for key, child in children.items() for path, leaf in flatten_with_path(child, is_leaf)]


def children_by_key(tree: Any) -> dict[Any, Any] | None:
    """Return the entries of a dict, list or tuple, by key or index; ``None`` for any other value."""
    if isinstance(tree, dict):
        return tree
    return dict(enumerate(tree)) if isinstance(tree, (list, tuple)) else None


def walk(values: Sequence[Any], inside: Callable[[Any], Sequence[Any] | None]) -> Iterator[Any]:
    """Yield values and all values inside them, each object once, and each container before its contents.

    Args:
        values: The values to begin with.
        inside: Returns the values directly inside a value; ``None`` to omit the value.
    """
    waiting, seen = list(reversed(values)), dict[int, Any]()  # keeps the objects alive, so that ids stay unique
    while waiting:
        value = waiting.pop()
        held = None if id(value) in seen else inside(value)
        if held is not None:
            seen[id(value)] = value
            yield value
            waiting += reversed(held)


# Types of values that are sent without pickling: immutable, and equal if they compare equal. float is not one of these
# types, because NaN differs from itself.
_PLAIN = frozenset({type(None), bool, int, str})


class TensorMeta(NamedTuple):
    """The facts about a tensor that a receiver needs.

    Attributes:
        shape: The shape.
        dtype: The dtype.
        requires_grad: True if the tensor of the sender requires a gradient.
        on_host: True if the tensor of the sender is on the CPU.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    on_host: bool

    def __str__(self) -> str:
        """Return the facts for messages, such as ``float32[2, 8] requires_grad``."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{' requires_grad' * self.requires_grad}"


class ValueMeta(NamedTuple):
    """A leaf that is not a tensor.

    Attributes:
        kind: The type of the value, because ``True == 1``; ``bytes`` if the value is pickled.
        value: The value, or its pickle.
    """

    kind: type
    value: Any

    def load(self) -> Any:
        """Return the value; if it is mutable, each call returns a new copy."""
        return decode(self.value) if self.kind is bytes else self.value

    def equals(self, other: Any) -> bool:
        """Return True if the values are equal, even if their pickles differ."""
        if self == other or not isinstance(other, ValueMeta):
            return bool(self == other)
        ours, theirs = self.load(), other.load()
        try:
            return type(ours) is type(theirs) and bool(ours == theirs)
        except (ValueError, RuntimeError):  # comparing arrays, for example, does not return a bool
            return False

    def __str__(self) -> str:
        """Return the value for messages."""
        return repr(self.load())


class TreeMeta(NamedTuple):
    """A description of a tree without the values of its tensors; hashable and picklable.

    Attributes:
        spec: The structure of the tree; ``None`` for a bare list of leaves.
        leaves: One entry per leaf.
    """

    spec: TreeSpec | None
    leaves: tuple[TensorMeta | ValueMeta, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any], spec: TreeSpec | None) -> TreeMeta:
        """Return the description of a tree.

        Raises:
            TypeError: If a leaf cannot be sent.
        """
        metas = [_tensor_meta(leaf) if isinstance(leaf, Tensor) else _value_meta(leaf) for leaf in leaves]
        return cls(spec, tuple(metas))

    def fits(self, leaves: Sequence[Any], spec: TreeSpec | None) -> bool:
        """Return True if this describes a tree. Values are compared by pickles, which can differ for equal values.

        Raises:
            TypeError: If a value cannot be pickled.
        """
        described = [
            (leaf.shape, leaf.dtype, leaf.requires_grad, leaf.is_cpu) if isinstance(leaf, Tensor) else _value_meta(leaf)
            for leaf in leaves
        ]
        return tuple(described) == self.leaves and (spec is self.spec or spec == self.spec)

    def equals(self, other: TreeMeta) -> bool:
        """Return True if two trees differ only in the values of their tensors."""
        return (
            self.spec == other.spec
            and len(self.leaves) == len(other.leaves)
            and all(
                ours.equals(theirs) if isinstance(ours, ValueMeta) else ours == theirs
                for ours, theirs in zip(self.leaves, other.leaves, strict=True)
            )
        )

    def values(self) -> list[Any]:
        """Return the leaves that are not tensors, at their positions, with ``None`` in place of tensors."""
        return [leaf.load() if isinstance(leaf, ValueMeta) else None for leaf in self.leaves]

    def tensors(self) -> list[tuple[int, TensorMeta]]:
        """Return the tensors, with their positions among the leaves."""
        return [(index, leaf) for index, leaf in enumerate(self.leaves) if isinstance(leaf, TensorMeta)]

    @property
    def has_values(self) -> bool:
        """True if some leaves are not tensors."""
        return any(isinstance(leaf, ValueMeta) for leaf in self.leaves)

    def __str__(self) -> str:
        """Return the description for messages."""
        leaves = ", ".join(map(str, self.leaves))
        return leaves if self.spec is None or self.spec.kind is None else f"{leaves} in {self.spec!r}"


def split_values(leaves: list[Any], spec: TreeSpec) -> tuple[TreeMeta, list[Any]]:
    """Return the description of a tree without the values that are not tensors, and these values by position.

    Many trees share the description, in which ``None`` takes the place of these values. In the list of values, ``None``
    takes the place of tensors.

    Raises:
        TypeError: If a tensor is not dense.
    """
    tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
    return TreeMeta.of(tensors, spec), [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _tensor_meta(leaf: Tensor) -> TensorMeta:
    if leaf.layout is not torch.strided:
        raise TypeError(
            f"a tensor with layout {leaf.layout} cannot be sent to another rank: convert it with `.to_dense()` [LH726]"
        )
    return TensorMeta(leaf.shape, leaf.dtype, leaf.requires_grad, leaf.is_cpu)


def _value_meta(leaf: Any) -> ValueMeta:
    """Return the description of a leaf that is not a tensor."""
    if type(leaf) in _PLAIN:
        return ValueMeta(type(leaf), leaf)
    try:
        return ValueMeta(bytes, encode(leaf))
    except Exception as error:  # classes may raise any error when they are pickled
        raise TypeError(
            f"a value of type {type(leaf).__qualname__} cannot be sent to another rank, because it cannot be pickled "
            f"({error}) [LH726]"
        ) from error


#: Bytes of the first part of a message whose length the receiver does not know, unless both sides agree on another
#: number. Fewer bytes are not faster.
FIRST_PART = 4096
_HEADER = struct.Struct("qqqq")  # code, bytes of the value, bytes of the message, subject
_ALIGNED = 16  # bytes: the size, and so the alignment, of torch's largest dtype, complex128


def encode(value: Any) -> bytes:
    """Return a value as bytes, for another rank or process of this job.

    Raises:
        Exception: Any exception, if the value cannot be pickled.
    """
    return pickle.dumps(value)


def decode(encoded: bytes) -> Any:
    """Return the value that was passed to :func:`encode`."""
    return pickle.loads(encoded)


class Message(NamedTuple):
    """A value, and tensors whose description the receiver has, as the bytes of a message.

    ::

        [code | bytes of the value | bytes of all | subject]  [value]  [tensor]  [tensor] ...  [padding]

    Every message whose length the receiver cannot know has this form, on each kind of connection. The receiver first
    receives as many bytes as sender and receiver have agreed on, and then the missing bytes, whose number is in the
    header.

    Attributes:
        code: The number of the kind of message, on which sender and receiver agree.
        subject: The number of the message's subject, which the receiver compares with the one it expects.
        num_bytes: The length without padding.
        encoded: The bytes of the value; empty without a value.
        parts: The whole message as uint8 tensors on the host: the first part, and the rest if there is any. A received
            message has one part.
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
        """Return a message.

        Args:
            encoded: A value, encoded by :func:`encode`.
            tensors: Tensors on the host.
            code: The number of the kind of message.
            subject: The number of the subject.
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
        """Return a message from its bytes. If only the first part is passed, the value is cut off."""
        view = data.numpy().data
        code, num_encoded, length, subject = _HEADER.unpack_from(view)
        return cls(code, subject, length, view[_HEADER.size : _HEADER.size + num_encoded].tobytes(), (data,))

    @classmethod
    def receive(cls, receive: Callable[[int], Tensor], size: int = _HEADER.size) -> Message:
        """Receive a message in one part, or in two if it is longer.

        Args:
            receive: Receives the next bytes, whose number is its argument; returns a uint8 tensor on the host.
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
        """Return the tensors of a received message, which share its memory.

        Args:
            likes: Tensors with the dtypes and shapes of the tensors in the message.
        """
        [data] = self.parts
        places = _places(len(self.encoded), likes)[1:]
        return [_like(like, data[place]) for like, place in zip(likes, places, strict=True)]


def _places(num_encoded: int, tensors: Sequence[Tensor]) -> list[slice]:
    """Return the place of the value in a message, and the places of its tensors, aligned for any dtype."""
    places = [slice(_HEADER.size, _HEADER.size + num_encoded)]
    for tensor in tensors:
        begin = -(-places[-1].stop // _ALIGNED) * _ALIGNED
        places.append(slice(begin, begin + tensor.nbytes))
    return places


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    """Return bytes as a tensor with the dtype and shape of another tensor, because no backend supports every dtype."""
    return data.view(tensor.dtype).view(tensor.shape)


#: Types of values that are not copied: a layer cannot change them, and tensors are handled elsewhere.
_UNCHANGING = (type(None), bool, int, float, str, Tensor, torch.dtype, torch.device)


def copy_object(value: Any, of_tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """Return a copy of an object that a layer may change, such as a cache of keys.

    Numbers, strings, tensors, dtypes, devices and callable objects are returned themselves.

    Args:
        value: The object.
        of_tensor: Returns the replacement of each tensor in the copy; by default the tensor itself.
    """
    if isinstance(value, _UNCHANGING) or callable(value):
        return value
    tensors = (each for each in walk([value], _held) if isinstance(each, Tensor))
    return copy.deepcopy(value, {id(tensor): of_tensor(tensor) for tensor in tensors})


def _held(value: Any) -> Sequence[Any] | None:
    """Return the contents and attribute values of an object; an empty sequence for a tensor, ``None`` for a class."""
    if isinstance(value, Tensor):
        return ()
    if isinstance(value, type):
        return None
    held = list(value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ())
    return [*held, *vars(value).values()] if hasattr(value, "__dict__") else held

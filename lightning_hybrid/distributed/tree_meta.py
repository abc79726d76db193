"""All of a tree but the contents of its tensors: what a receiver must know before these can be received."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.distributed.pytree import TreeSpec

__all__ = ["TensorMeta", "TreeMeta", "ValueMeta"]

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
        return pickle.loads(self.value) if self.kind is bytes else self.value

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


def _tensor_meta(leaf: Tensor) -> TensorMeta:
    if leaf.layout is not torch.strided:
        raise TypeError(
            f"a tensor with layout {leaf.layout} cannot be sent to another rank: convert it with `.to_dense()`"
        )
    return TensorMeta(leaf.shape, leaf.dtype, leaf.requires_grad, leaf.is_cpu)


def _value_meta(leaf: Any) -> ValueMeta:
    if type(leaf) in _PLAIN:
        return ValueMeta(type(leaf), leaf)
    try:
        return ValueMeta(bytes, pickle.dumps(leaf))
    except Exception as error:  # the pickle protocol lets classes raise anything
        raise TypeError(
            f"a value of type {type(leaf).__qualname__} cannot be sent to another rank, because it cannot be pickled "
            f"({error})"
        ) from error

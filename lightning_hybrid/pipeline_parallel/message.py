"""Headers: everything about a message between stages but the contents of its tensors."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.distributed.pytree import TreeSpec

__all__ = ["MessageMeta", "PickledLeaf", "PlainLeaf", "TensorLeaf", "check_equal", "describe"]

# Leaves that describe themselves: immutable, and equal when they compare equal. (Not float: NaN differs from itself.)
_PLAIN = frozenset({type(None), bool, int, str})


class TensorLeaf(NamedTuple):
    """What the receiver must know of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    on_host: bool

    def __str__(self) -> str:
        """For messages, such as ``float32[2, 8] requires_grad``."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{' requires_grad' * self.requires_grad}"


class PlainLeaf(NamedTuple):
    """A value that travels as it is. With its type, because ``True == 1``."""

    kind: type
    value: Any

    def __str__(self) -> str:
        """For messages."""
        return repr(self.value)


class PickledLeaf(NamedTuple):
    """Any other value. Every receive unpickles a copy of its own, because a stage may change it."""

    pickled: bytes

    def __str__(self) -> str:
        """For messages."""
        return repr(pickle.loads(self.pickled))


class MessageMeta(NamedTuple):
    """Tree, shapes, dtypes, ``requires_grad`` and plain values of a message.

    Attributes:
        spec: The tree; ``None`` for a bare list of leaves.
        leaves: One description per leaf.
    """

    spec: TreeSpec | None
    leaves: list[TensorLeaf | PlainLeaf | PickledLeaf]

    def fits(self, leaves: Sequence[Any], spec: TreeSpec | None) -> bool:
        """Whether a message has this header, as far as can be told at once; the rest is for :func:`check_equal`."""
        described = [
            (leaf.shape, leaf.dtype, leaf.requires_grad, leaf.is_cpu)
            if isinstance(leaf, Tensor)
            else _describe_value(leaf)
            for leaf in leaves
        ]
        return described == self.leaves and (spec is self.spec or spec == self.spec)

    def __str__(self) -> str:
        """For messages."""
        leaves = ", ".join(map(str, self.leaves))
        return leaves if self.spec is None or self.spec.kind is None else f"{leaves} in {self.spec!r}"


def describe(leaves: Sequence[Any], spec: TreeSpec | None) -> MessageMeta:
    """The header of a message.

    Raises:
        TypeError: If a leaf cannot travel.
    """
    return MessageMeta(
        spec, [_describe_tensor(leaf) if isinstance(leaf, Tensor) else _describe_value(leaf) for leaf in leaves]
    )


def _describe_tensor(leaf: Tensor) -> TensorLeaf:
    if leaf.layout is not torch.strided:
        raise TypeError(
            f"a tensor with layout {leaf.layout} cannot cross a stage boundary; convert it with `.to_dense()`, or move "
            "the boundary with `partition`"
        )
    return TensorLeaf(leaf.shape, leaf.dtype, leaf.requires_grad, leaf.is_cpu)


def _describe_value(leaf: Any) -> PlainLeaf | PickledLeaf:
    if type(leaf) in _PLAIN:
        return PlainLeaf(type(leaf), leaf)
    try:
        return PickledLeaf(pickle.dumps(leaf))
    except Exception as error:  # the pickle protocol lets classes raise anything
        raise TypeError(
            f"a value of type {type(leaf).__qualname__} cannot cross a stage boundary, because it cannot be pickled "
            f"({error}); pass tensors and plain values between the layers of the body"
        ) from error


def check_equal(known: MessageMeta, header: MessageMeta) -> None:
    """Check a message against what the receiver has learnt.

    Raises:
        ValueError: If they differ.
    """
    # Pickles of equal values may differ; everything else that differs is an error.
    same_tree = known.spec == header.spec and len(known.leaves) == len(header.leaves)
    if same_tree and all(map(_equal, known.leaves, header.leaves)):
        return
    raise ValueError(
        "a message between two stages differs from the first one of a microbatch with the same signature\n"
        f"    first: {known}\n"
        f"    now:   {header}\n"
        "The receiver learns tree, shapes, dtypes, requires_grad and plain values once. If they depend on the data, "
        "and not only on the shapes of the batch, or gradients are switched on and off around the body from step to "
        "step (`torch.set_grad_enabled`), use `HybridStrategy(dynamic_shapes=True)`. Freezing parameters needs nothing."
    )


def _equal(known: Any, leaf: Any) -> bool:
    if not (isinstance(known, PickledLeaf) and isinstance(leaf, PickledLeaf)) or known == leaf:
        return bool(known == leaf)
    before, now = pickle.loads(known.pickled), pickle.loads(leaf.pickled)
    try:
        return type(before) is type(now) and bool(before == now)
    except (ValueError, RuntimeError):  # such as arrays, whose comparison is no single truth
        return False

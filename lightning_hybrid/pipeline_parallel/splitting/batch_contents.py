"""Contents of a batch: tensors and objects with samples, and entries that do not allow a split.

:mod:`~.splitting.microbatch` uses these functions for each batch, to split it or to decide that it cannot be split.
:mod:`~.splitting.splitters` uses them to find and replace parts of a batch, and `trainer.losses` uses some of the
predicates. No function changes a batch. Terms:

- An *entry* is a part of a batch that has its own number of samples, usually a tensor.
- A *misfit* is an entry that makes it uncertain how to split the batch.
- An *opaque* object has a method `to` but an unknown structure, such as a batch class of the user.
- A *divisible* object defines its samples itself: a `PackedSequence` or a batch of graphs.
- An *irregular* tensor is nested or sparse.
- *Packed rows* are documents joined into one long row. A tensor of *offsets* contains the boundaries.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_hybrid.distributed.messages.lazy_tensor import peek
from lightning_hybrid.distributed.pytree import flatten

#: Names of tensors with the offsets of documents in packed rows.
_OFFSETS = re.compile(r"cu_?seq_?len|(^|_)cu(_|$)|(^|_)offsets?(_|$)|indptr|row_splits", re.IGNORECASE)
_MOST_NAMED = 6  # maximum number of tensors in a message


class Entry(NamedTuple):
    """Part of a batch that has its own number of samples.

    Attributes:
        path: The place in the batch, such as ``batch['x']``.
        name: The last key or attribute of the path; empty for an index.
        value: A tensor with at least one dimension, a `PackedSequence`, or a batch of graphs.
        length: The number of samples, assuming that `value` has one entry per sample; ``None`` for nested and sparse
            tensors.
        holder: The object that contains the entry, if it is an object of unknown structure; otherwise ``None``.
    """

    path: str
    name: str
    value: Any
    length: int | None
    holder: Any = None

    def __str__(self) -> str:
        """Return the path and the shape, for messages."""
        if isinstance(self.value, Tensor) and self.length is None:
            return f"{self.path} ({'nested' if self.value.is_nested else 'sparse'})"
        return f"{self.path} {list(self.value.shape) if isinstance(self.value, Tensor) else type(self.value).__name__}"


def entries(tree: Any, path: str = "batch", name: str = "") -> Iterator[Entry]:
    """Yield the entries of a batch, including entries in objects with a method `to`.

    Tensors without dimensions and Python values are not entries.

    Args:
        tree: The batch, or a part of it.
        path: The place of this part.
        name: The last key of the path.
    """
    if isinstance(tree, Tensor):
        if is_irregular(tree):
            yield Entry(path, name, tree, None)
        elif tree.ndim > 0:
            yield Entry(path, name, tree, tree.shape[0])
    elif is_divisible(tree):
        yield Entry(path, name, tree, count_own_samples(tree))
    elif is_opaque(tree):
        for each in _held(tree, path, name, set()):
            yield each._replace(holder=tree)
    else:
        for child_path, child_name, child in children(tree, path):
            yield from entries(child, child_path, child_name)


def children(tree: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the path, the name and the value of each direct child of a container; nothing for a leaf."""
    if isinstance(tree, Mapping):
        for key in tree:
            yield f"{path}[{key!r}]", key if isinstance(key, str) else "", tree[key]
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for name, value in zip(tree._fields, tree, strict=True):
            yield f"{path}.{name}", name, value
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield f"{path}[{index}]", "", value
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield f"{path}.{field.name}", field.name, getattr(tree, field.name)


def is_irregular(tensor: Tensor) -> bool:
    """Return whether a tensor is nested or sparse."""
    return tensor.is_nested or tensor.layout is not torch.strided


def is_graph_batch(value: Any) -> bool:
    """Return whether an object is a `Batch` of PyTorch Geometric, or has the same methods."""
    kind = type(value)
    return callable(getattr(kind, "to_data_list", None)) and callable(getattr(kind, "from_data_list", None))


def is_divisible(value: Any) -> bool:
    """Return whether an object itself defines its samples: a `PackedSequence` or a batch of graphs."""
    return isinstance(value, PackedSequence) or is_graph_batch(value)


def count_own_samples(value: Any) -> int:
    """Return the number of samples of an object for which :func:`is_divisible` is True."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    return int(value.num_graphs) if hasattr(value, "num_graphs") else len(value.to_data_list())


def is_opaque(value: Any) -> bool:
    """Return whether a value is an object of unknown structure with a method `to`, such as a user-defined batch class.

    Lightning moves objects with this method to the device.
    """
    kind = type(value)
    return (
        kind not in (int, float, str, bool, type(None), bytes)
        and not isinstance(value, (Tensor, torch.nn.Module, type))
        and callable(getattr(kind, "to", None))
        and flatten(value)[1].kind is None
    )


def held_shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the tensors in an object of unknown structure."""
    return tuple(tuple(each.value.shape) for each in _held(value, "", "", set()) if isinstance(each.value, Tensor))


def _held(value: Any, path: str, name: str, seen: set[int]) -> Iterator[Entry]:
    """Yield the tensors in the attributes of an object, recursively.

    Args:
        value: The object.
        path: The place of the object in the batch.
        name: The last key of the path.
        seen: The `id` of each object that was visited; changed in place.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if value.ndim > 0 or is_irregular(value):
            yield Entry(path, name, value, None if is_irregular(value) else value.shape[0])
        return
    inner = list(children(value, path))
    slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
    if not inner and (is_opaque(value) or is_graph_batch(value)):
        attributes = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)} | getattr(
            value, "__dict__", {}
        )
        inner = [(f"{path}.{key}", key, each) for key, each in attributes.items()]
    for child_path, child_name, child in inner:
        yield from _held(child, child_path, child_name, seen)


def count_graphs(batch: Any) -> int | None:
    """Return the number of graphs in a mapping or object with `edge_index` and `batch`, the graph number of each node.

    Args:
        batch: Any batch.

    Returns:
        The number; ``None`` if the batch does not have these tensors, if there are no nodes, or if the number would
        have to be read from a device.
    """
    edges, nodes = field(batch, "edge_index"), field(batch, "batch")
    if not (_is_integers(edges, 2) and edges.shape[0] == 2 and _is_integers(nodes, 1) and len(nodes)):
        return None
    pointers = field(batch, "ptr")
    if _is_integers(pointers, 1):
        return len(pointers) - 1
    return int(peek(nodes).max()) + 1 if nodes.is_cpu else None


def field(batch: Any, key: Any) -> Any:
    """Return the value of a key, an attribute or an index; ``None`` if it does not exist."""
    if isinstance(batch, Mapping):
        return batch.get(key)
    if isinstance(key, str):
        return None if isinstance(batch, Tensor) else getattr(batch, key, None)
    return batch[key] if isinstance(batch, (list, tuple)) and -len(batch) <= key < len(batch) else None


def _is_integers(value: Any, ndim: int) -> bool:
    """Return whether a value is a tensor of integers with ``ndim`` dimensions."""
    return (
        isinstance(value, Tensor)
        and value.ndim == ndim
        and value.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
    )


def find_offsets(found: Sequence[Entry]) -> list[Entry]:
    """Find the offsets of packed rows: integers that start at 0, never decrease, and end with a length.

    If the tensor has a name such as ``cu_seqlens``, the last integer is the length of the first or second dimension of
    another tensor. Otherwise, it is the length of rows of shape ``(1, length)``. Values on a device are not read, so
    there a name with "seq", such as ``cu_seqlens``, is enough.

    Args:
        found: The entries of a batch.
    """
    tensors = [each for each in found if isinstance(each.value, Tensor) and each.length is not None]
    offsets = []
    for each in tensors:
        if not _is_integers(each.value, 1) or len(each.value) < 2:
            continue
        lengths = {size for other in tensors if other is not each for size in other.value.shape[:2]}
        rows = {other.value.shape[1] for other in tensors if other.value.ndim > 1 and len(other.value) == 1}
        is_named = _OFFSETS.search(each.name) is not None
        if not is_named and not rows:
            continue
        if not each.value.is_cpu:
            if "seq" in each.name.lower() and is_named:
                offsets.append(each)
            continue
        numbers = peek(each.value)
        ends = int(numbers[0]), int(numbers[-1])
        if ends[0] == 0 < ends[1] and ends[1] in (lengths if is_named else rows) and bool((numbers.diff() >= 0).all()):
            offsets.append(each)
    return offsets


def is_list_of_samples(batch: Any) -> bool:
    """Return whether a batch is a list of records that look like samples.

    Each record contains a tensor, and an integer or a tensor without dimensions, such as a label.
    """
    if type(batch) not in (list, tuple) or len(batch) < 2 or len({type(record) for record in batch}) > 1:
        return False
    return all(
        any(isinstance(value, Tensor) for value in values)
        and any(type(value) is int or (isinstance(value, Tensor) and value.ndim == 0) for value in values)
        for values in ([value for _, _, value in children(record, "")] for record in batch)
    )


# -- messages ----------------------------------------------------------------------------------------------------------


def whole_text(misfits: Sequence[Entry], batch: Any, module: str, num_microbatches: int) -> str:
    """Return the warning about a batch that is not split, because the strategy would have to guess how.

    Args:
        misfits: The entries that do not match; empty for a list of samples.
        batch: The batch.
        module: The name of the user's class.
        num_microbatches: The requested number.
    """
    found = list(entries(batch))
    offsets = find_offsets(found)
    text = f"The batch runs as one microbatch instead of {num_microbatches}, because "
    if not misfits:
        text += "it is a list in which each entry looks like one sample, not like a tensor for all samples"
    else:
        text += f"{_reason(misfits, offsets)}: {_listed(_beside(misfits, found))}"
    return (
        f"{text}. The strategy does not guess how to split a batch. To split it,"
        f" {_remedy(batch, found, offsets, module)}"
        " If a tensor is the same for all samples, such as class weights, register it as a buffer of the module."
    )


def _reason(misfits: Sequence[Entry], offsets: Sequence[Entry]) -> str:
    """Return the reason why a batch is not split."""
    if any(each.length is None for each in misfits):
        return "it contains nested or sparse tensors"
    if offsets:
        return f"{offsets[0].path} contains offsets of packed rows"
    holders = {type(each.holder).__name__ for each in misfits if each.holder is not None}
    if len(holders) == 1:
        return f"its tensors are in an object of class {holders.pop()}, or do not have the same first dimension"
    return "its tensors do not have the same first dimension"


def _beside(misfits: Sequence[Entry], found: Sequence[Entry]) -> list[Entry]:
    """Return the misfits together with some other entries for comparison, in the order of the batch."""
    paths = {each.path for each in misfits}
    others = [each for each in found if each.path not in paths][: max(1, _MOST_NAMED - len(misfits))]
    kept = paths | {each.path for each in others}
    return [each for each in found if each.path in kept]


def _listed(found: Sequence[Entry]) -> str:
    """Return a list of entries as text."""
    more = f" and {len(found) - _MOST_NAMED} others" if len(found) > _MOST_NAMED else ""
    return ", ".join(map(str, found[:_MOST_NAMED])) + more


def _remedy(batch: Any, found: Sequence[Entry], offsets: Sequence[Entry], module: str) -> str:
    """Return the advice how to split a batch: a ready-made splitter if one fits, or a `split_batch` method."""
    ready = ""
    if offsets:
        ready = f"split_rows({_keys(offsets)})"
    elif is_list_of_samples(batch):
        ready = "split_samples()"
    elif field(batch, "edge_index") is not None and field(batch, "batch") is not None:
        ready = "split_graphs()"
    else:
        lengths = next((each for each in found if "len" in each.name.lower() and _is_integers(each.value, 1)), None)
        joined = lengths and next(
            (
                e
                for e in found
                if isinstance(e.value, Tensor) and e.value.ndim == 1 and len(e.value) > len(lengths.value)
            ),
            None,
        )
        if lengths and joined:
            ready = f"split_targets({_keys([joined, lengths])})"
    line = f"set `split_batch = lightning_hybrid.{ready}` in {module}, or " if ready else ""
    return f"{line}define `{module}.split_batch(batch, num_microbatches)`, which returns a list of microbatches."


def _keys(found: Sequence[Entry]) -> str:
    """Return the keys of entries as the arguments of a splitter."""

    def key(each: Entry) -> str:
        index = re.search(r"\[(\d+)\]$", each.path)
        return repr(each.name) if each.name or index is None else index[1]

    return ", ".join(map(key, found))

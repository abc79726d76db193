"""Splitting a batch into microbatches, and joining their outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_hybrid.distributed.pytree import LEAF, TreeSpec, contents, flatten, unflatten
from lightning_hybrid.pipeline_parallel.splitting.batch_contents import (
    Entry,
    children,
    count_graphs,
    count_own_samples,
    entries,
    find_offsets,
    held_shapes,
    is_divisible,
    is_irregular,
    is_list_of_samples,
    is_opaque,
)


class JoinError(ValueError):
    """It is ambiguous how to join the outputs of microbatches."""


def sizes(total: int, num_microbatches: int) -> list[int]:
    """Split a number of samples into microbatches that differ by at most one, the larger ones first.

    Args:
        total: The number of samples.
        num_microbatches: The requested number. There are fewer when there are fewer samples.

    Example:
        >>> sizes(10, 4), sizes(3, 4)
        ([3, 3, 2, 2], [1, 1, 1])
    """
    number = max(1, min(num_microbatches, total))
    small, larger = divmod(total, number)
    return [small + 1] * larger + [small] * (number - larger)


def signatures(microbatches: Sequence[Any]) -> list[Hashable]:
    """The :func:`signature` of each microbatch."""
    return [signature(microbatch) for microbatch in microbatches]


def signature(tree: Any) -> Hashable:
    """What decides the shapes that a tree leads to, without its numbers.

    Args:
        tree: Any nested container of values.

    Returns:
        A hashable: the containers, the shape, dtype and `requires_grad` of tensors, ``None`` and booleans as they are,
        the shapes of the tensors in objects with a method `to`, the types of other leaves.
    """
    leaves, spec = flatten(tree)
    return spec, tuple([_leaf_signature(leaf) for leaf in leaves])


def _leaf_signature(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        shape = tuple(part.shape for part in leaf.unbind()) if leaf.is_nested else leaf.shape
        return shape, leaf.dtype, leaf.requires_grad
    if leaf is None or isinstance(leaf, bool):
        return (leaf,)
    return (type(leaf), held_shapes(leaf)) if is_opaque(leaf) else (type(leaf),)


def signature_text(signature: Any) -> str:
    """A signature of :func:`signature`, for messages."""
    spec, leaves = signature
    tensors = (
        f"{list(leaf[0])} {str(leaf[1]).removeprefix('torch.')}" if len(leaf) == 3 else repr(leaf[0]) for leaf in leaves
    )
    return f"{spec!r} of {', '.join(tensors)}"


def find_batch_size(batch: Any) -> int | None:
    """The number of samples.

    It is the length of the first dimension that most tensors have (the first tensor's, where several are equally
    frequent); without tensors the length of the first list of strings or numbers. A list of as many records as a tensor
    has rows, or as a list has tensors, has one entry for each sample, as in detection. A `PackedSequence` has its
    sequences as samples, a batch of graphs (a `Batch` of PyTorch Geometric, or node indices `batch` beside
    `edge_index`) its graphs.

    Args:
        batch: A batch as a loader gives it.

    Returns:
        The number of samples, ``None`` if nothing in the batch has a first dimension.
    """
    return _find_samples(batch).total


class _Samples(NamedTuple):
    """What tells how many samples a batch has.

    Attributes:
        total: Their number, ``None`` if nothing in the batch has a first dimension.
        tensor: The tensor (or other entry) whose length it is, if it is one's.
        fields: The level of the batch in which lists have an entry for each sample, if they tell it: its container, and
            what is in it.
    """

    total: int | None
    tensor: Any = None
    fields: tuple[TreeSpec, Sequence[Any]] | None = None


def _find_samples(batch: Any) -> _Samples:
    if is_divisible(batch):
        return _Samples(count_own_samples(batch), batch)
    graphs = count_graphs(batch)
    if graphs is not None:
        return _Samples(graphs)
    fields = _children(batch)
    found = [entry for entry in entries(batch) if entry.holder is None and entry.length is not None]
    listed = _listed_samples(fields, found)
    if listed is not None:
        return _Samples(listed, fields=(flatten(batch)[1], fields))
    if not found:
        return _Samples(_first_list_length(batch))
    (length, _), *_ = Counter(entry.length for entry in found).most_common(1)
    return _Samples(length, next(entry.value for entry in found if entry.length == length))


def _listed_samples(fields: Sequence[Any], found: Sequence[Entry]) -> int | None:
    """The number of samples of a batch like ``((image, image), ({"boxes": ...}, {"boxes": ...}))``."""
    lists = [field for field in fields if type(field) in (list, tuple) and field]
    tensors = {len(field) for field in lists if all(isinstance(entry, Tensor) for entry in field)}
    tensors |= {len(field) for field in fields if isinstance(field, Tensor) and _length(field) > 1}
    records = {len(field) for field in lists if all(isinstance(entry, Mapping) for entry in field)}
    # Where all tensors have the same length it is that of samples, and the lists are a container of two batches.
    return min(tensors & records, default=None) if len({entry.length for entry in found}) > 1 else None


def _first_list_length(tree: Any) -> int | None:
    if type(tree) is list and tree and all(isinstance(value, (str, bytes, int, float)) for value in tree):
        return len(tree)
    lengths = (_first_list_length(child) for child in _children(tree))
    return next((length for length in lengths if length is not None), None)


def split_batch(batch: Any, num_microbatches: int) -> tuple[list[Any], list[int]]:
    """Split a batch along its samples, if it is certain what these are.

    Tensors whose first dimension is the number of samples are split, and so are lists with one entry for each sample:
    strings, numbers, or records of one class such as the targets of detection. (A container that holds the tensor by
    which the samples are counted is no such list.) A `PackedSequence` and a `Batch` of PyTorch Geometric are split into
    smaller ones. Python values, tensors without dimensions, and tensors with one row, such as a mask, go unsplit to
    every microbatch. A batch with anything else, for which :func:`find_misfits` has a list, is one microbatch.

    Args:
        batch: A nested container of values.
        num_microbatches: The requested number of microbatches.

    Returns:
        The microbatches, and the number of samples of each.
    """
    uniform = _split_uniform(batch, num_microbatches)
    if uniform is not None:
        return uniform
    found = _find_samples(batch)
    total, samples, listed = found
    if total in (None, 1) or num_microbatches == 1 or _find_misfits(batch, found) is not None:
        return [batch], [1 if total is None else total]
    counts = sizes(total, num_microbatches)
    if listed is None:
        return _split(batch, counts, samples), counts
    spec, fields = listed
    columns = [_slices(each, counts) if _is_listed(each, total) else _split(each, counts, None) for each in fields]
    level = _level(spec, len(fields))
    return [unflatten(list(row), level) for row in zip(*columns, strict=True)], counts


def _split_uniform(batch: Any, num_microbatches: int) -> tuple[list[Any], list[int]] | None:
    """Split a batch of tensors that all have the same length, about which nothing is to be found out.

    Args:
        batch: A nested container of values.
        num_microbatches: The requested number of microbatches.

    Returns:
        As :func:`split_batch`; ``None`` for any other batch, and where there are so few samples that a dimension of a
        graph's edges, or a list of tensors, could be as long.
    """
    leaves, spec = flatten(batch)
    is_plain = all(isinstance(leaf, Tensor) and leaf.ndim and not is_irregular(leaf) for leaf in leaves)
    lengths = {len(leaf) for leaf in leaves} if is_plain else set()
    total = lengths.pop() if len(lengths) == 1 else 0
    if num_microbatches == 1 or total <= max(2, len(leaves)):
        return None
    counts = sizes(total, num_microbatches)
    return [
        unflatten(list(parts), spec) for parts in zip(*(leaf.split(counts) for leaf in leaves), strict=True)
    ], counts


def find_misfits(batch: Any) -> list[Entry] | None:
    """Find what leaves it open how a batch is split.

    Args:
        batch: A nested container of values.

    Returns:
        Tensors with another first dimension than the number of samples, nested and sparse tensors, offsets of packed
        rows, and tensors in objects that are not opened; an empty list if the batch is a list of samples; ``None`` if
        the batch can be split.
    """
    return _find_misfits(batch, _find_samples(batch))


def _find_misfits(batch: Any, samples: _Samples) -> list[Entry] | None:
    total, tensor, listed = samples
    if listed is not None:
        paths = list(children(batch, "batch"))
        misfits = [
            each for path, name, field in paths if not _is_listed(field, total) for each in entries(field, path, name)
        ]
    else:
        misfits = list(_unlisted(batch, "batch", "", total, tensor))
    offsets = find_offsets(misfits) if misfits else []
    misfits = [
        each
        for each in misfits
        if each in offsets or (each.length != 1 if each.holder is not None else each.length not in (1, total))
    ]
    if total == 1:  # one microbatch, whatever there is
        return offsets or None
    return misfits or ([] if is_list_of_samples(batch) else None)


def _unlisted(tree: Any, path: str, name: str, total: int | None, samples: Any) -> Iterator[Entry]:
    """The entries that are not in a list with an entry for each sample."""
    if type(tree) in (list, tuple) and len(tree) == total and _has_entry_for_each_sample(tree, samples):
        return
    inner = [] if is_divisible(tree) else list(children(tree, path))
    for child_path, child_name, child in inner:
        yield from _unlisted(child, child_path, child_name, total, samples)
    if not inner:
        yield from entries(tree, path, name)


def _is_listed(field: Any, total: int | None) -> bool:
    """Return whether a field goes by samples, where lists tell how many there are."""
    return (type(field) in (list, tuple) or isinstance(field, Tensor)) and _length(field) == total


class Microbatches(list[Any]):
    """Microbatches that say how much each of them counts.

    Args:
        microbatches: The microbatches.
        counts: The number of samples of each.
    """

    def __init__(self, microbatches: Sequence[Any], counts: Sequence[int]) -> None:
        super().__init__(microbatches)
        self.counts = list(counts)


def split_into(
    batch: Any, num_microbatches: int, user_split: Callable[[Any, int], Sequence[Any]] | None
) -> tuple[list[Any], list[int]]:
    """Split a training batch, by the module's `split_batch` if it has one.

    A microbatch of `split_batch` counts by its samples, as :func:`find_batch_size` finds them: for graphs the number of
    graphs. The ready-made splitters say the counts themselves (:class:`Microbatches`).

    Args:
        batch: The batch.
        num_microbatches: The requested number of microbatches.
        user_split: The module's hook `split_batch`, if it has one.

    Returns:
        The microbatches, and the number of samples of each.

    Raises:
        ValueError: If `split_batch` returns none.
    """
    if user_split is None:
        return split_batch(batch, num_microbatches)
    given = user_split(batch, num_microbatches)
    microbatches = list(given)
    if not microbatches:
        raise ValueError(
            "`split_batch` returned no microbatches. It must return a list with at least one microbatch. [LH717]"
        )
    if isinstance(given, Microbatches):
        return microbatches, given.counts
    found = [find_batch_size(microbatch) for microbatch in microbatches]
    counts = [count for count in found if count is not None]
    if len(counts) == len(found):
        return microbatches, counts
    _, total = split_batch(batch, 1)
    return microbatches, sizes(max(total[0], len(microbatches)), len(microbatches))


def _length(field: Any) -> int:
    return 0 if isinstance(field, Tensor) and (field.ndim == 0 or is_irregular(field)) else len(field)


def _slices(listed: Any, counts: list[int]) -> list[Any]:
    return [listed[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]


def _split(tree: Any, counts: list[int], samples: Any) -> list[Any]:
    if is_divisible(tree):
        return split_divisible(tree, counts)
    if isinstance(tree, Tensor):
        if tree.ndim > 0 and tree.shape[0] == sum(counts):
            return list(torch.split(tree, counts))
        return [tree] * len(counts)
    if type(tree) in (list, tuple) and len(tree) == sum(counts) and _has_entry_for_each_sample(tree, samples):
        return _slices(tree, counts)
    spec = flatten(tree)[1]
    if spec.kind is None:
        return [tree] * len(counts)
    parts = [_split(child, counts, samples) for child in _children(tree)]
    level = _level(spec, len(parts))
    return [unflatten([part[i] for part in parts], level) for i in range(len(counts))]


def split_divisible(value: Any, counts: Sequence[int]) -> list[Any]:
    """Split an object that says itself how it is divided into samples.

    Args:
        value: A `PackedSequence`, whose samples are in the order before they were sorted; or a batch of graphs.
        counts: The number of samples of each part.
    """
    if not isinstance(value, PackedSequence):
        graphs = value.to_data_list()
        return [type(value).from_data_list(part) for part in _slices(graphs, list(counts))]
    padded, lengths = pad_packed_sequence(value, batch_first=True)
    rows, parts = torch.split(padded, list(counts)), torch.split(lengths, list(counts))
    is_sorted = value.sorted_indices is None
    return [
        pack_padded_sequence(row[:, : int(part.max())], part, batch_first=True, enforce_sorted=is_sorted)
        for row, part in zip(rows, parts, strict=True)
    ]


def _has_entry_for_each_sample(listed: list[Any] | tuple[Any, ...], samples: Any) -> bool:
    """Whether a list or tuple, which is as long as there are samples, goes by samples."""
    if all(isinstance(entry, (str, bytes)) for entry in listed):
        return True
    if isinstance(listed, tuple):  # a record, such as the height and width of all images
        return False
    if all(entry is None or isinstance(entry, (int, float)) for entry in listed):
        return True
    alike = len({type(entry) for entry in listed}) == 1
    return alike and not any(leaf is samples for leaf in flatten(listed)[0] if samples is not None)


def _children(tree: Any) -> Sequence[Any]:
    """Return what is directly in a container; nothing for a leaf."""
    found = contents(tree)
    return [] if found is None else found[1]


def _level(spec: TreeSpec, num_children: int) -> TreeSpec:
    """Return the spec of a container alone, whose children are its leaves."""
    assert spec.kind is not None
    return TreeSpec.of(spec.kind, spec.names, (LEAF,) * num_children)


@dataclass(frozen=True)
class Slicing:
    """How the input of the body is split in evaluation, where the user's step sees the whole batch.

    Attributes:
        spec: The shape of the tree.
        dims: For each leaf the dimension that is the batch; ``None`` for leaves that go unsplit to every microbatch.
        counts: The number of samples of each microbatch; one entry if the tree is not split.
    """

    spec: TreeSpec
    dims: tuple[int | None, ...]
    counts: tuple[int, ...]

    def apply(self, tree: Any) -> list[Any]:
        """The microbatches of a tree."""
        if len(self.counts) == 1:
            return [tree]
        leaves, _ = flatten(tree)
        columns = [
            [leaf] * len(self.counts) if dim is None else torch.split(leaf, list(self.counts), dim)
            for leaf, dim in zip(leaves, self.dims, strict=True)
        ]
        return [unflatten(list(row), self.spec) for row in zip(*columns, strict=True)]


def slicing(tree: Any, total: int | None, num_microbatches: int) -> Slicing:
    """Find out how to split the input of the body, leaf by leaf.

    A dimension is taken for the batch if its length is the number of samples. If a leaf has several such dimensions, or
    none of the leaves has one, the tree is not split: correct, only not overlapped.

    Args:
        tree: The input of the body for the whole batch.
        total: The number of samples, ``None`` if unknown.
        num_microbatches: The requested number of microbatches.
    """
    leaves, spec = flatten(tree)
    candidates = [
        [dim for dim, length in enumerate(leaf.shape) if length == total] if isinstance(leaf, Tensor) else []
        for leaf in leaves
    ]
    ambiguous = any(len(dims) > 1 for dims in candidates)
    if total is None or ambiguous or not any(candidates):
        return Slicing(spec, (None,) * len(leaves), (total or 1,))
    dims = tuple(found[0] if found else None for found in candidates)
    return Slicing(spec, dims, tuple(sizes(total, num_microbatches)))


def join(outputs: list[Any], counts: Sequence[int], *, strict: bool = False) -> Any:
    """Join the outputs of the body.

    Args:
        outputs: One tree for each microbatch.
        counts: The number of samples of each.
        strict: Whether to refuse leaves that are the same in all microbatches although they follow ``counts``.

    Returns:
        The tree of the whole batch: leaves with one dimension that follows ``counts`` are concatenated along it, leaves
        without are taken from the first microbatch if they are the same in all.

    Raises:
        JoinError: If a leaf has several such dimensions, or has none and differs between microbatches. The batch
            must then run as one microbatch.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [flatten(output) for output in outputs]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise JoinError("The outputs of the microbatches have different structures.")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return unflatten([_join_leaf(list(column), counts, strict) for column in columns], spec)


def _join_leaf(values: list[Any], counts: Sequence[int], strict: bool) -> Any:
    first = values[0]
    if not isinstance(first, Tensor):
        if not all(_equal(value, first) for value in values[1:]):
            raise JoinError(f"An output that is not a tensor differs between microbatches: {values}.")
        return first
    if not all(isinstance(value, Tensor) for value in values):
        raise JoinError("An output is a tensor for some microbatches but not for others.")
    alike = all(value.ndim == first.ndim for value in values)
    lengths = zip(*(value.shape for value in values), strict=True) if alike else ()
    dims = [dim for dim, along in enumerate(lengths) if along == tuple(counts)]
    if len(dims) == 1:
        if strict and all(_same(value, first) for value in values[1:]):
            raise JoinError(f"An output of shape {tuple(first.shape)} is the same for all microbatches.")
        return torch.cat(values, dims[0])
    if dims or any(value is not first and not _same(value, first) for value in values[1:]):
        shapes = [tuple(value.shape) for value in values]
        raise JoinError(f"The output shapes {shapes} must have exactly one dimension with the sizes {list(counts)}.")
    return first


def _equal(value: Any, other: Any) -> bool:
    try:
        return value is other or bool(value == other)
    except (TypeError, ValueError):  # arrays compare element by element
        return False


def _same(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and torch.equal(value, other)

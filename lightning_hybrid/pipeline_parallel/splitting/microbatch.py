"""Splitting of batches into microbatches, and joining of their outputs.

The training step calls :func:`split_into` for each batch, before the schedule runs; so do dry runs and comparisons of
microbatches. Every rank of a replica splits its copy of the batch in the same way, without communication. In an
evaluation step around an `nn.Sequential` body, the user's step receives the whole batch: only the input of the body is
split (:func:`slicing`), and the outputs of the body are joined (:func:`join`). Other evaluation steps are not split.

`torch.chunk` for each tensor would not be enough: a batch is a nested container, and also contains tensors that belong
to no sample, such as class weights or offsets. A wrong split would change the loss without an error, so an ambiguous
batch runs as one microbatch, with a warning. A *misfit* is an entry that makes the split ambiguous. A *signature* of a
microbatch contains everything that determines the shapes in a step.
"""

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
    """Error: it is ambiguous how to join the outputs of microbatches."""


def sizes(total: int, num_microbatches: int) -> list[int]:
    """Split a number of samples into microbatches whose sizes differ by at most one, the larger sizes first.

    Args:
        total: The number of samples.
        num_microbatches: The requested number. The result has fewer entries if there are fewer samples.

    Example:
        >>> sizes(10, 4), sizes(3, 4)
        ([3, 3, 2, 2], [1, 1, 1])
    """
    number = max(1, min(num_microbatches, total))
    small, larger = divmod(total, number)
    return [small + 1] * larger + [small] * (number - larger)


def signatures(microbatches: Sequence[Any]) -> list[Hashable]:
    """Return the :func:`signature` of each microbatch."""
    return [signature(microbatch) for microbatch in microbatches]


def signature(tree: Any) -> Hashable:
    """Return the properties of a tree, without its values, that determine the shapes in a step.

    Args:
        tree: Any nested container of values.

    Returns:
        A hashable object with the containers; the shape, dtype and `requires_grad` of tensors; ``None`` and booleans
        themselves; the shapes of tensors in objects with a method `to`; and the types of other leaves.
    """
    leaves, spec = flatten(tree)
    return spec, tuple([_leaf_signature(leaf) for leaf in leaves])


def _leaf_signature(leaf: Any) -> Hashable:
    """Return the part of a signature for one leaf."""
    if isinstance(leaf, Tensor):
        shape = tuple(part.shape for part in leaf.unbind()) if leaf.is_nested else leaf.shape
        return shape, leaf.dtype, leaf.requires_grad
    if leaf is None or isinstance(leaf, bool):
        return (leaf,)
    return (type(leaf), held_shapes(leaf)) if is_opaque(leaf) else (type(leaf),)


def signature_text(signature: Any) -> str:
    """Return a result of :func:`signature` as text, for messages."""
    spec, leaves = signature
    tensors = (
        f"{list(leaf[0])} {str(leaf[1]).removeprefix('torch.')}" if len(leaf) == 3 else repr(leaf[0]) for leaf in leaves
    )
    return f"{spec!r} of {', '.join(tensors)}"


def find_batch_size(batch: Any) -> int | None:
    """Find the number of samples in a batch.

    The first of these rules that applies determines the number:

    1. A `PackedSequence` has as many samples as sequences. A batch of graphs (a `Batch` of PyTorch Geometric, or
       `edge_index` with the graph number `batch` of each node) has as many samples as graphs.
    2. In a batch whose tensors have different lengths, a list of records, as in detection, has one entry per sample if
       its length is the number of rows of a tensor or the length of a list of tensors.
    3. The number is the length of the first dimension of most tensors. If several lengths are equally frequent, the
       first tensor decides.
    4. Without tensors, the number is the length of the first list of strings or numbers.

    Args:
        batch: A batch as the data loader returns it.

    Returns:
        The number of samples; ``None`` if no rule applies.
    """
    return _find_samples(batch).total


class _Samples(NamedTuple):
    """Number of samples in a batch, and the part of the batch that determines it.

    Attributes:
        total: The number of samples; ``None`` if unknown.
        tensor: The tensor (or other entry) whose length is the number of samples; ``None`` if another part determines
            it.
        fields: If lists with one entry per sample determine the number: the structure and the children of the container
            that contains these lists; otherwise ``None``.
    """

    total: int | None
    tensor: Any = None
    fields: tuple[TreeSpec, Sequence[Any]] | None = None


def _find_samples(batch: Any) -> _Samples:
    """Find the number of samples by the rules of :func:`find_batch_size`."""
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
    """Return the number of samples of a batch such as ``((image, image), ({"boxes": ...}, {"boxes": ...}))``."""
    lists = [field for field in fields if type(field) in (list, tuple) and field]
    tensors = {len(field) for field in lists if all(isinstance(entry, Tensor) for entry in field)}
    tensors |= {len(field) for field in fields if isinstance(field, Tensor) and _length(field) > 1}
    records = {len(field) for field in lists if all(isinstance(entry, Mapping) for entry in field)}
    # If all tensors have the same length, it is the number of samples, and the lists contain several batches.
    return min(tensors & records, default=None) if len({entry.length for entry in found}) > 1 else None


def _first_list_length(tree: Any) -> int | None:
    """Return the length of the first list of strings or numbers; ``None`` without such a list."""
    if type(tree) is list and tree and all(isinstance(value, (str, bytes, int, float)) for value in tree):
        return len(tree)
    lengths = (_first_list_length(child) for child in _children(tree))
    return next((length for length in lengths if length is not None), None)


def split_batch(batch: Any, num_microbatches: int) -> tuple[list[Any], list[int]]:
    """Split a batch along its samples, if it is certain which parts of it are samples.

    Tensors whose first dimension is the number of samples are split. Lists with one entry per sample are split too:
    strings, numbers, or records of one class, such as the targets in detection. A container of the tensor that
    determines the number of samples is not split like this. A `PackedSequence` and a `Batch` of PyTorch Geometric are
    split into smaller objects of the same class. Python values, tensors without dimensions, and tensors with one row,
    such as a mask, are passed unchanged to every microbatch. If :func:`find_misfits` finds any other entry, the batch
    is one microbatch.

    Args:
        batch: A nested container of values.
        num_microbatches: The requested number of microbatches.

    Returns:
        The microbatches, and the number of samples of each; 1 if the number is unknown.
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
    """Split a batch of tensors that all have the same length, which needs no further analysis.

    Args:
        batch: A nested container of values.
        num_microbatches: The requested number of microbatches.

    Returns:
        The result of :func:`split_batch`. ``None`` for any other batch, for one requested microbatch, and if there are
        so few samples that a graph's edge tensor or a list of tensors could have the same length.
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
    """Find the entries that make it uncertain how to split a batch.

    Args:
        batch: A nested container of values.

    Returns:
        Tensors whose first dimension is neither the number of samples nor 1, nested and sparse tensors, offsets of
        packed rows, and tensors in objects of unknown structure; an empty list if the batch is a list of samples;
        ``None`` if the batch can be split. For a single sample, only offsets of packed rows are returned, or ``None``.
    """
    return _find_misfits(batch, _find_samples(batch))


def _find_misfits(batch: Any, samples: _Samples) -> list[Entry] | None:
    """Find the misfits of a batch whose number of samples is known. See :func:`find_misfits`."""
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
    if total == 1:  # one microbatch in any case
        return offsets or None
    return misfits or ([] if is_list_of_samples(batch) else None)


def _unlisted(tree: Any, path: str, name: str, total: int | None, samples: Any) -> Iterator[Entry]:
    """Yield the entries that are not in a list with one entry per sample."""
    if type(tree) in (list, tuple) and len(tree) == total and _has_entry_for_each_sample(tree, samples):
        return
    inner = [] if is_divisible(tree) else list(children(tree, path))
    for child_path, child_name, child in inner:
        yield from _unlisted(child, child_path, child_name, total, samples)
    if not inner:
        yield from entries(tree, path, name)


def _is_listed(field: Any, total: int | None) -> bool:
    """Return whether a field has one entry per sample, in a batch whose lists determine the number of samples."""
    return (type(field) in (list, tuple) or isinstance(field, Tensor)) and _length(field) == total


class Microbatches(list[Any]):
    """List of microbatches with the weight of each, as the hooks of :mod:`~.splitters` return it.

    Args:
        microbatches: The microbatches.
        counts: The number of samples (or tokens) of each, which is its weight.
    """

    def __init__(self, microbatches: Sequence[Any], counts: Sequence[int]) -> None:
        super().__init__(microbatches)
        self.counts = list(counts)


def split_into(
    batch: Any, num_microbatches: int, user_split: Callable[[Any, int], Sequence[Any]] | None
) -> tuple[list[Any], list[int]]:
    """Split a training batch, with the module's `split_batch` if it is defined.

    The weight of a microbatch from `split_batch` is its number of samples, as :func:`find_batch_size` finds it; for
    graphs, it is the number of graphs. If the number of one microbatch is unknown, the samples of the whole batch are
    distributed evenly, so weights differ by at most one. The ready-made splitters return the weights themselves
    (:class:`Microbatches`).

    Args:
        batch: The batch.
        num_microbatches: The requested number of microbatches.
        user_split: The module's hook `split_batch`; ``None`` if it is not defined.

    Returns:
        The microbatches, and the weight of each: its number of samples, or of tokens or graphs.

    Raises:
        ValueError: If `split_batch` returns no microbatches.
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
    """Return the length of a field; 0 for tensors without a regular first dimension."""
    return 0 if isinstance(field, Tensor) and (field.ndim == 0 or is_irregular(field)) else len(field)


def _slices(listed: Any, counts: list[int]) -> list[Any]:
    """Split a list into slices of the given lengths."""
    return [listed[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]


def _split(tree: Any, counts: list[int], samples: Any) -> list[Any]:
    """Split a part of a batch.

    Args:
        tree: The part.
        counts: The number of samples of each microbatch.
        samples: The tensor that determines the number of samples; ``None`` if another part determines it.

    Returns:
        The part for each microbatch.
    """
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
    """Split an object for which :func:`is_divisible` is True.

    Args:
        value: A `PackedSequence`, whose samples have the order from before they were sorted; or a batch of graphs.
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
    """Return whether a list or tuple, whose length is the number of samples, has one entry per sample.

    Args:
        listed: The list or tuple.
        samples: The tensor that determines the number of samples; ``None`` if another part determines it.
    """
    if all(isinstance(entry, (str, bytes)) for entry in listed):
        return True
    if isinstance(listed, tuple):  # a record, such as the height and width of all images
        return False
    if all(entry is None or isinstance(entry, (int, float)) for entry in listed):
        return True
    alike = len({type(entry) for entry in listed}) == 1
    return alike and not any(leaf is samples for leaf in flatten(listed)[0] if samples is not None)


def _children(tree: Any) -> Sequence[Any]:
    """Return the direct children of a container; an empty list for a leaf."""
    found = contents(tree)
    return [] if found is None else found[1]


def _level(spec: TreeSpec, num_children: int) -> TreeSpec:
    """Return the structure of a single container, whose children are leaves."""
    assert spec.kind is not None
    return TreeSpec.of(spec.kind, spec.names, (LEAF,) * num_children)


@dataclass(frozen=True)
class Slicing:
    """Split of the body's input in evaluation, where the user's step receives the whole batch.

    Attributes:
        spec: The structure of the tree.
        dims: The batch dimension of each leaf; ``None`` for leaves that are passed unchanged to every microbatch.
        counts: The number of samples of each microbatch; one entry if the tree is not split.
    """

    spec: TreeSpec
    dims: tuple[int | None, ...]
    counts: tuple[int, ...]

    def apply(self, tree: Any) -> list[Any]:
        """Split a tree into microbatches."""
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

    A dimension is the batch dimension if its length is the number of samples. If a leaf has several such dimensions, or
    no leaf has one, the tree is not split. The result is then still correct, but stages do not work at the same time.

    Args:
        tree: The input of the body for the whole batch.
        total: The number of samples; ``None`` if unknown.
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
        counts: The number of samples of each microbatch.
        strict: If True, raise an error for a leaf with a dimension that matches ``counts`` but with equal values in all
            microbatches, which could also be one value for the whole batch. `ChainProgram` sets it for the first batch
            of each signature.

    Returns:
        The tree of the whole batch. A leaf with one dimension whose lengths are ``counts`` is concatenated along this
        dimension. A leaf without such a dimension is the leaf of the first microbatch, if it is equal in all
        microbatches.

    Raises:
        JoinError: If a leaf has several such dimensions, or has none and differs between microbatches; if the outputs
            have different structures; or, with `strict`, if a leaf is equal in all microbatches. The batch must then
            run as one microbatch.
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
    """Join one leaf of all microbatches."""
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
    """Return whether two values that are not tensors are equal."""
    try:
        return value is other or bool(value == other)
    except (TypeError, ValueError):  # arrays compare element by element
        return False


def _same(value: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape and values."""
    return value.shape == other.shape and torch.equal(value, other)

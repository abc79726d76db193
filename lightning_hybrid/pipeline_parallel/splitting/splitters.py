"""Ready-made `split_batch` hooks, for batches whose tensors do not all have one row per sample.

A user assigns the result of a function of this file to the attribute `split_batch` of the module. For each training
batch, every rank then calls it through :func:`~.microbatch.split_into`. Automatic splitting recognizes only tensors
with one row per sample, so such batches would otherwise run as one microbatch. In messages, a *splitter* is one of
these functions, with its arguments.

::

    packed rows, split_rows("cu_seqlens")            graphs, split_graphs()
    ids         a a a b b c c c c                    x           0 0 0 1 1 2 2 2    by nodes
    cu_seqlens  0     3   5       9                  edge_index  0 0 1 2 2          by edges, renumbered
                ---------- | -------                 y           0 1 2              by graphs
    microbatch 1: 0 3 5      microbatch 2: 0 4
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.pipeline_parallel.splitting.batch_contents import (
    Entry,
    children,
    count_own_samples,
    entries,
    field,
    is_divisible,
)
from lightning_hybrid.pipeline_parallel.splitting.microbatch import Microbatches, sizes, split_divisible

Key = str | int


def split_rows(*offsets: Key) -> Any:
    """Create a `split_batch` hook that splits packed documents into microbatches with about the same number of tokens.

    The hook splits a batch at document boundaries. It splits tensors of shape ``(1, tokens, ...)``, tensors with one
    row per token and tensors with one row per document. In each microbatch, the offsets start at 0 again. Numbers such
    as ``max_seqlen`` are passed unchanged to every microbatch, so ``max_seqlen`` remains an upper bound. The weight of
    a microbatch is its number of tokens, so the loss must be a mean over tokens. If the loss ignores some labels, also
    set ``microbatch_weight = lightning_hybrid.count_tokens(...)``.

    Args:
        offsets: Key, attribute name or tuple index of the document offsets in a batch, such as ``"cu_seqlens"``. Pass
            several arguments if different tensors, such as the queries and keys of attention, have different offsets
            for the same documents. The offsets of the first argument are then used to count tokens.

    Returns:
        A function that splits a batch into microbatches.

    Raises:
        TypeError: If no argument is passed, or if an argument is neither a string nor an integer.

    Example::

        class Packed(LightningModule):
            split_batch = lightning_hybrid.split_rows("cu_seqlens")
    """
    return _Rows(_checked("split_rows", *offsets))


def split_graphs(batch: Key = "batch", edge_index: Key = "edge_index") -> Any:
    """Create a `split_batch` hook for batches in which several graphs are joined into one large graph.

    A `Batch` of PyTorch Geometric does not need a hook. Use this hook for mappings, dataclasses, named tuples and other
    objects. If a tensor has one row per node, per graph or per edge, the hook splits the tensor accordingly. If there
    are as many edges as nodes or graphs, only tensors whose names contain "edge" are split by edges. In each
    microbatch, nodes and graphs are numbered from 0. The weight of a microbatch is its number of graphs.

    Args:
        batch: Key, attribute name or tuple index of the tensor that contains the graph number of each node. The tensor
            must have the dtype int64 and the shape ``(nodes,)``, and its values must be sorted in ascending order.
        edge_index: Key, attribute name or tuple index of the tensor that contains the two nodes of each edge. The
            tensor must have the dtype int64 and the shape ``(2, edges)``.

    Returns:
        A function that splits a batch into microbatches.

    Raises:
        TypeError: If a key is neither a string nor an integer.

    Example::

        class Molecules(LightningModule):
            split_batch = lightning_hybrid.split_graphs("batch", "edge_index")
    """
    return _Graphs(*_checked("split_graphs", batch, edge_index))


def split_targets(targets: Key = "targets", lengths: Key = "target_lengths") -> Any:
    """Create a `split_batch` hook for batches whose targets are joined into one tensor, as for `torch.nn.CTCLoss`.

    Values other than the targets are split by samples if they have one row per sample. The weight of a microbatch is
    its number of samples.

    Args:
        targets: Key, attribute name or tuple index of the targets in a batch.
        lengths: Key, attribute name or tuple index of the tensor that contains the number of targets of each sample.
            The tensor has the shape ``(samples,)``.

    Returns:
        A function that splits a batch into microbatches.

    Raises:
        TypeError: If a key is neither a string nor an integer.

    Example::

        class Speech(LightningModule):
            split_batch = lightning_hybrid.split_targets("targets", "target_lengths")
    """
    return _Targets(*_checked("split_targets", targets, lengths))


def split_samples() -> Any:
    """Create a `split_batch` hook for batches that are lists of samples, such as the results of ``collate_fn=list``.

    Each microbatch is a list of consecutive samples. The weight of a microbatch is its number of samples.

    Returns:
        A function that splits a batch into microbatches.

    Example::

        class Detector(LightningModule):
            split_batch = lightning_hybrid.split_samples()
    """
    return _Samples()


def _checked(function: str, *keys: Any) -> tuple[Key, ...]:
    """Return keys, after checking that there is at least one and that each is a string or an integer."""
    if not keys or any(isinstance(key, bool) or not isinstance(key, (str, int)) for key in keys):
        raise TypeError(
            f"{function}(...) accepts keys of a mapping, names of attributes or indices in a tuple, got"
            f" {keys!r}. [LH101]"
        )
    return keys


def _tensor(batch: Any, key: Key, splitter: str, ndim: int = 1) -> Tensor:
    """Return the tensor of integers at a key.

    Args:
        batch: The batch.
        key: The key.
        splitter: The splitter as text, such as ``split_rows('cu_seqlens')``, for the error message.
        ndim: The required number of dimensions.

    Raises:
        WrongUseError: If the batch contains no such tensor.
    """
    found = field(batch, key)
    if not isinstance(found, Tensor) or found.ndim != ndim or found.is_floating_point() or found.is_complex():
        kind = (
            f"a tensor of shape {list(found.shape)} and dtype {found.dtype}"
            if isinstance(found, Tensor)
            else type(found).__name__
        )
        keys = [name or path for path, name, _ in _parts(batch)]
        raise WrongUseError(
            f"{splitter} needs a tensor of integers with {ndim} dimension{'s' * (ndim > 1)} under {key!r}, but found"
            f" {kind}. The keys of the {type(batch).__name__} are {keys}. [LH711]"
        )
    return found


def _parts(batch: Any) -> list[tuple[str, str, Any]]:
    """Return the path, the name and the value of each direct child of a batch, which may be an object."""
    found = list(children(batch, "batch"))
    if found or isinstance(batch, Tensor):
        return found
    return [(f"batch.{name}", name, value) for name, value in getattr(batch, "__dict__", {}).items()]


def _with_parts(batch: Any, parts: Sequence[Any]) -> Any:
    """Return a batch of the same class with other children, in the order of :func:`_parts`."""
    spec = flatten(batch)[1]
    if spec.kind is None:
        made = copy(batch)
        made.__dict__.update(zip([name for _, name, _ in _parts(batch)], parts, strict=True))
        return made
    if isinstance(batch, Mapping):
        return (
            unflatten(list(parts), flatten(dict.fromkeys(batch))[1]) if type(batch) is dict else _mapping(batch, parts)
        )
    if dataclasses.is_dataclass(batch):
        made = copy(batch)
        for (_, name, _), part in zip(_parts(batch), parts, strict=True):
            object.__setattr__(made, name, part)
        return made
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def _mapping(batch: Any, parts: Sequence[Any]) -> Any:
    """Return a mapping of the same class with other values."""
    made = copy(batch)
    for key, part in zip(list(batch), parts, strict=True):
        made[key] = part
    return made


def _microbatches(batch: Any, columns: Sequence[Sequence[Any]], counts: Sequence[int]) -> Microbatches:
    """Return the microbatches.

    Args:
        batch: The batch.
        columns: For each child of the batch, its part for each microbatch.
        counts: The weight of each microbatch.
    """
    return Microbatches([_with_parts(batch, row) for row in zip(*columns, strict=True)], counts)


def _keys_of(batch: Any) -> list[Key]:
    """Return the key of each child of a batch."""
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return list(range(len(batch)))
    return list(batch) if isinstance(batch, Mapping) else [name for _, name, _ in _parts(batch)]


def _is_at(batch: Any, key: Key, number: int, own: Key) -> bool:
    """Return whether the child with this key and number is the child that the user's key `own` selects."""
    is_position = isinstance(own, int) and not isinstance(batch, Mapping)
    return key == own or (is_position and own % len(_parts(batch)) == number)


def _refuse(splitter: str, left: Sequence[Entry], lengths: str) -> None:
    """Raise an error if there are tensors that a splitter cannot split.

    Args:
        splitter: The splitter as text.
        left: The tensors.
        lengths: The numbers of samples, as text.

    Raises:
        WrongUseError: If there are any such tensors.
    """
    if left:
        raise WrongUseError(
            f"{splitter} cannot split {', '.join(map(str, left))} in a batch of {lengths}. If a tensor is the"
            " same for all samples, register it as a buffer of the module. Otherwise, define"
            " `split_batch(batch, num_microbatches)`. [LH713]"
        )


def _unsplit(value: Any, path: str) -> list[Entry]:
    """Return the tensors of a part of a batch that may differ between samples: all except tensors with one row."""
    return [entry for entry in entries(value, path) if entry.length != 1]


def _sliced(tensor: Tensor, counts: Sequence[int], dim: int = 0) -> list[Tensor]:
    """Split a tensor into slices of the given lengths."""
    return list(torch.split(tensor, list(counts), dim))


@dataclass(frozen=True)
class _Rows:
    """Callable that `split_rows` returns. A function would become a method of the user's class."""

    offsets: tuple[Key, ...]

    def __call__(self, batch: Any, num_microbatches: int) -> Microbatches:
        name = f"split_rows({', '.join(map(repr, self.offsets))})"
        ends = {key: _tensor(batch, key, name).tolist() for key in self.offsets}
        for key, numbers in ends.items():
            if len(numbers) < 2 or numbers[0] != 0 or numbers != sorted(numbers):
                raise WrongUseError(
                    f"{name} needs offsets under {key!r} that start at 0 and never decrease, but found {numbers[:8]}."
                    " [LH714]"
                )
        if len({len(numbers) for numbers in ends.values()}) > 1:
            raise WrongUseError(
                f"{name} needs the same number of offsets under each key, but found {[*map(len, ends.values())]}."
                " [LH714]"
            )
        first = ends[self.offsets[0]]
        bounds = _even_bounds(first, num_microbatches)
        documents = [b - a for a, b in pairwise(bounds)]
        cuts = {numbers[-1]: [numbers[b] - numbers[a] for a, b in pairwise(bounds)] for numbers in ends.values()}
        columns, left = [], []
        for number, ((path, _, value), key) in enumerate(zip(_parts(batch), _keys_of(batch), strict=True)):
            own = next((each for each in self.offsets if _is_at(batch, key, number, each)), None)
            if own is not None:
                columns.append([value[a : b + 1] - ends[own][a] for a, b in pairwise(bounds)])
                continue
            if type(value) in (list, tuple) and len(value) == len(first) - 1:
                columns.append([value[a:b] for a, b in pairwise(bounds)])
            elif not isinstance(value, Tensor) or value.ndim == 0:
                columns.append([value] * len(documents))
                left += _unsplit(value, path)
            elif len(value) in cuts:
                columns.append(_sliced(value, cuts[len(value)]))
            elif len(value) == 1 and value.ndim > 1 and value.shape[1] in cuts:
                columns.append(_sliced(value, cuts[value.shape[1]], 1))
            elif len(value) == len(first) - 1:
                columns.append(_sliced(value, documents))
            else:
                columns.append([value] * len(documents))
                left += _unsplit(value, path)
        _refuse(name, left, f"{first[-1]} tokens in {len(first) - 1} documents")
        return _microbatches(batch, columns, cuts[first[-1]])


def _even_bounds(offsets: Sequence[int], number: int) -> list[int]:
    """Divide documents into groups with about equal numbers of tokens.

    Each group has at least one document with tokens.

    Args:
        offsets: The offsets of the documents, one more than documents.
        number: The requested number of groups. The result has fewer groups if there are fewer documents with tokens.

    Returns:
        The first document of each group, followed by the number of documents.

    Example:
        >>> _even_bounds([0, 3, 7, 9, 12], 2)
        [0, 2, 4]
    """
    starts = [i for i, (a, b) in enumerate(pairwise(offsets)) if b > a] or [0]
    number = max(1, min(number, len(starts)))
    ends = [offsets[start] for start in starts]  # the tokens at which a group may begin
    chosen = [0]
    for group in range(1, number):
        ideal = offsets[-1] * group / number
        place = bisect_left(ends, ideal)
        if place and (place == len(ends) or ideal - ends[place - 1] < ends[place] - ideal):
            place -= 1
        chosen.append(min(max(place, chosen[-1] + 1), len(starts) - number + group))
    return [0, *(starts[place] for place in chosen[1:]), len(offsets) - 1]


@dataclass(frozen=True)
class _Graphs:
    """Callable that `split_graphs` returns."""

    batch: Key
    edge_index: Key

    def __call__(self, batch: Any, num_microbatches: int) -> Microbatches:
        if is_divisible(batch):
            counts = sizes(count_own_samples(batch), num_microbatches)
            return Microbatches(split_divisible(batch, counts), counts)
        name = f"split_graphs({self.batch!r}, {self.edge_index!r})"
        owners, edges = _tensor(batch, self.batch, name), _tensor(batch, self.edge_index, name, 2)
        if len(owners) > 1 and bool((owners.diff() < 0).any()):
            raise WrongUseError(f"{name} needs graph numbers in ascending order under {self.batch!r}. [LH712]")
        pointers = field(batch, "ptr")
        if isinstance(pointers, Tensor) and pointers.ndim == 1:
            num_graphs = len(pointers) - 1
        else:
            stated = field(batch, "num_graphs")
            num_graphs = stated if type(stated) is int else int(owners[-1]) + 1 if len(owners) else 0
        counts = sizes(num_graphs, num_microbatches)
        bounds = [0, *accumulate(counts)]
        nodes = _sliced(torch.bincount(owners, minlength=num_graphs), counts)
        num_nodes = [int(part.sum()) for part in nodes]
        first_nodes = [0, *accumulate(num_nodes)]
        of_edges = torch.bucketize(edges[0], torch.tensor(first_nodes[1:], device=edges.device), right=True)
        places = [(of_edges == part).nonzero()[:, 0] for part in range(len(counts))]
        columns, left = [], []
        for number, ((path, _, value), key) in enumerate(zip(_parts(batch), _keys_of(batch), strict=True)):
            is_of_edges = isinstance(key, str) and "edge" in key
            if _is_at(batch, key, number, self.edge_index):
                columns.append([value[:, place] - first for place, first in zip(places, first_nodes, strict=False)])
            elif _is_at(batch, key, number, self.batch):
                parts = zip(_sliced(value, num_nodes), bounds, strict=False)
                columns.append([part - first for part, first in parts])
            elif value is pointers:
                columns.append([value[a : b + 1] - value[a] for a, b in pairwise(bounds)])
            elif key in ("num_graphs", "num_nodes") and type(value) is int:
                columns.append(list(counts if key == "num_graphs" else num_nodes))
            elif type(value) in (list, tuple) and len(value) == num_graphs:
                columns.append([value[a:b] for a, b in pairwise(bounds)])
            elif not isinstance(value, Tensor) or value.ndim == 0:
                columns.append([value] * len(counts))
                left += _unsplit(value, path)
            elif is_of_edges and len(value) == edges.shape[1]:
                columns.append([value[place] for place in places])
            elif len(value) == len(owners):
                columns.append(_sliced(value, num_nodes))
            elif len(value) == num_graphs:
                columns.append(_sliced(value, counts))
            elif len(value) == edges.shape[1]:
                columns.append([value[place] for place in places])
            else:
                columns.append([value] * len(counts))
                left += _unsplit(value, path)
        _refuse(name, left, f"{num_graphs} graphs, {len(owners)} nodes and {edges.shape[1]} edges")
        return _microbatches(batch, columns, counts)


@dataclass(frozen=True)
class _Targets:
    """Callable that `split_targets` returns."""

    targets: Key
    lengths: Key

    def __call__(self, batch: Any, num_microbatches: int) -> Microbatches:
        name = f"split_targets({self.targets!r}, {self.lengths!r})"
        lengths, joined = _tensor(batch, self.lengths, name), field(batch, self.targets)
        counts = sizes(len(lengths), num_microbatches)
        tokens = [sum(part.tolist()) for part in _sliced(lengths, counts)]
        if not isinstance(joined, Tensor) or joined.ndim == 0 or len(joined) != sum(tokens):
            kind = f"a tensor of shape {list(joined.shape)}" if isinstance(joined, Tensor) else type(joined).__name__
            raise WrongUseError(
                f"{name} needs {sum(tokens)} targets (the sum of the lengths) under {self.targets!r}, but found"
                f" {kind}. [LH715]"
            )
        columns, left = [], []
        for number, ((path, _, value), key) in enumerate(zip(_parts(batch), _keys_of(batch), strict=True)):
            if _is_at(batch, key, number, self.targets):
                columns.append(_sliced(value, tokens))
            elif is_divisible(value) and count_own_samples(value) == len(lengths):
                columns.append(split_divisible(value, counts))
            elif type(value) in (list, tuple) and len(value) == len(lengths):
                columns.append([value[b - n : b] for b, n in zip(accumulate(counts), counts, strict=True)])
            elif isinstance(value, Tensor) and value.ndim > 0 and len(value) == len(lengths):
                columns.append(_sliced(value, counts))
            else:
                columns.append([value] * len(counts))
                left += _unsplit(value, path)
        _refuse(name, left, f"{len(lengths)} samples and {sum(tokens)} targets")
        return _microbatches(batch, columns, counts)


@dataclass(frozen=True)
class _Samples:
    """Callable that `split_samples` returns."""

    def __call__(self, batch: Any, num_microbatches: int) -> Microbatches:
        if type(batch) not in (list, tuple) or len({type(sample) for sample in batch}) > 1:
            is_list = isinstance(batch, (list, tuple))
            of = f" of {sorted({type(sample).__name__ for sample in batch})}" if is_list else ""
            raise WrongUseError(
                "split_samples() needs a list or a tuple of samples of one type, but got a"
                f" {type(batch).__name__}{of}. [LH716]"
            )
        counts = sizes(len(batch), num_microbatches)
        ends = accumulate(counts)
        return Microbatches([batch[end - count : end] for end, count in zip(ends, counts, strict=True)], counts)

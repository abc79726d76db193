"""Search for the number by which a loss is divided: counted targets, elements of masks, lengths, or class weights.

A mean over something other than samples is ``N / D``, where both are sums over samples. The loss of two joined
microbatches is then the mean of their losses weighted by ``D``. The search tries every ``D`` that a batch offers.

:meth:`.runs.Run.explain` and :meth:`.causes.Experiments.judge` use it after a comparison has shown that microbatches
change a loss. The result is only named in a warning, because ``D`` may fit by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.messages.lazy_tensor import LazyTensor
from lightning_hybrid.distributed.module_names import join_names
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.distributed.replaced import tables_of
from lightning_hybrid.pipeline_parallel.frame.stage_states import find_owners
from lightning_hybrid.pipeline_parallel.splitting.batch_contents import children, is_irregular

__all__ = ["Divisor", "find_class_weights", "fits", "named_leaves", "sizes_of"]

#: Common values of padding and of ignored classes, the most common first.
_IGNORED = (-100, 0, -1, 1, 255)
#: The largest number of distinct values of a leaf: with more values, one of them would fit by chance.
_MOST_VALUES = 64


class Divisor(NamedTuple):
    """A number that can be computed from a batch, by which its loss may be divided.

    Attributes:
        path: The path of a leaf of the batch, such as ``batch['labels']``.
        key: The key of that leaf for `count_tokens`; ``None`` if the leaf is the batch itself, or is nested.
        kind: ``"count"``: the number of elements other than `ignored`; ``"sum"``: the sum of the elements;
            ``"weights"``: the sum of the class weights of the elements.
        ignored: The value that is not counted; unused for other kinds.
        shift: True if the first position of each sequence is left out.
        weights: The path of the class weights in the module; empty for other kinds.
    """

    path: str
    key: str | int | None
    kind: Literal["count", "sum", "weights"]
    ignored: int = 0
    shift: bool = False
    weights: str = ""

    @property
    def is_usual(self) -> bool:
        """Return True if this is one of the few common candidates, which rarely fit by chance."""
        return self.kind != "count" or self.ignored in _IGNORED

    @property
    def text(self) -> str:
        """Return a noun phrase for messages."""
        place = f"`{self.path}`" + " (without the first position of each sequence)" * self.shift
        if self.kind == "count":
            return f"the number of elements that are not {self.ignored} in {place}"
        if self.kind == "sum":
            return f"the sum of {place}"
        return f"the sum of the class weights `{self.weights}` over {place}"

    @property
    def remedy(self) -> str:
        """Return the code that the user should add to the module, as a clause for messages."""
        if self.kind == "count" and (self.key is not None or self.path == "batch"):
            arguments = [repr(self.key)] if self.key is not None else []
            arguments += [f"ignore_index={self.ignored}"] * (self.ignored != -100) + ["shift=True"] * self.shift
            return f"set `microbatch_weight = lightning_hybrid.count_tokens({', '.join(arguments)})` in the module"
        place = self.path + "[..., 1:]" * self.shift
        value = {
            "count": f"({place} != {self.ignored}).sum()",
            "sum": f"{place}.sum()",
            "weights": f"self.{self.weights}[{place}].sum()",
        }[self.kind]
        return f"define a method `microbatch_weight(self, batch)` that returns `{value}`"


def find_class_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module that may be class weights, by path: one-dimensional buffers and attributes.

    Args:
        module: The user's module.
    """
    return {
        join_names(path, name): value.detach()
        for path, owner in find_owners([module]).items()
        for table in tables_of(owner)
        for name, value in table.items()
        if type(value) is Tensor
        and not value.is_meta
        and value.ndim == 1
        and len(value) > 1
        and value.is_floating_point()
    }


def sizes_of(batches: Sequence[Any], class_weights: Mapping[str, Tensor]) -> dict[Divisor, tuple[float, ...]]:
    """Return all numbers by which the losses of some batches may be divided, the likely numbers first.

    Args:
        batches: Batches of the same structure.
        class_weights: The result of :func:`find_class_weights`.

    Returns:
        For each divisor, its value for each batch.
    """
    found: dict[Divisor, tuple[float, ...]] = {}
    keys = _keys(batches[0])
    for of_leaf in zip(*map(named_leaves, batches), strict=False):
        path, leaves = of_leaf[0][0], [leaf for _, leaf in of_leaf]
        if all(each == path for each, _ in of_leaf) and all(map(_may_count, leaves)):
            found.update(_of_leaf(path, keys.get(path), leaves, class_weights))
    order = sorted(found, key=lambda each: (not each.is_usual, each.kind != "count", each.shift))
    return {divisor: found[divisor] for divisor in order}


def fits(losses: Sequence[float], sizes: Sequence[float], bound: float) -> bool:
    """Return True if a loss is the mean of its parts, weighted by their sizes. Parts of size 0 are left out.

    A joined loss that is not finite fits only if all sizes are 0.

    Args:
        losses: The loss of two batches joined, and the loss of each batch alone.
        sizes: The size of each part.
        bound: The allowed absolute difference.
    """
    joined, *parts = losses
    if not math.isfinite(joined):
        return not sum(sizes)
    expected = sum(size / sum(sizes) * part for size, part in zip(sizes, parts, strict=True) if size)
    return abs(joined - expected) <= bound


def _keys(batch: Any) -> dict[str, str | int]:
    """Return the keys of the direct members of a batch for `count_tokens`, by path."""
    keys = list(batch) if isinstance(batch, Mapping) else []
    found = enumerate(children(batch, "batch"))
    named = {path: keys[number] if keys else name or number for number, (path, name, _) in found}
    return {path: key for path, key in named.items() if isinstance(key, (str, int))}


def named_leaves(tree: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Return the leaves of a batch in the order of `flatten`, with their paths such as ``batch['labels']``."""
    if flatten(tree)[1].kind is None:
        yield path, tree
        return
    for child_path, _, child in children(tree, path):
        yield from named_leaves(child, child_path)


def _may_count(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or isinstance(leaf, LazyTensor) or is_irregular(leaf):
        return False
    return leaf.ndim > 0 and leaf.numel() > 0 and not leaf.is_complex()


def _of_leaf(
    path: str, key: str | int | None, leaves: Sequence[Tensor], class_weights: Mapping[str, Tensor]
) -> Iterator[tuple[Divisor, tuple[float, ...]]]:
    are_whole = not leaves[0].is_floating_point()
    for shift in (False, True) if leaves[0].ndim > 1 else (False,):
        parts = [leaf[..., 1:] if shift else leaf for leaf in leaves]
        counts = list(map(_count_values, parts)) if are_whole or all(map(_is_mask, parts)) else []
        for value in _values_of(counts):
            sizes = tuple(float(part.numel() - each.get(value, 0)) for part, each in zip(parts, counts, strict=True))
            yield Divisor(path, key, "count", value, shift), sizes
        if all(bool((part >= 0).all()) for part in parts):
            if not any(map(_is_mask, parts)):
                yield Divisor(path, key, "sum", 0, shift), tuple(float(part.double().sum()) for part in parts)
            if leaves[0].dtype == torch.int64:
                for name, weight in class_weights.items():
                    if all(part.numel() and int(part.max()) < len(weight) for part in parts):
                        sizes = tuple(float(weight.double()[part.to(weight.device)].sum()) for part in parts)
                        yield Divisor(path, key, "weights", 0, shift, name), sizes


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _count_values(tensor: Tensor) -> dict[int, int]:
    values, counts = torch.unique(tensor, return_counts=True)
    return dict(zip(map(int, values.tolist()), counts.tolist(), strict=True))


def _values_of(counts: Sequence[Mapping[int, int]]) -> list[int]:
    values = {value for each in counts for value in each}
    others = sorted(values.difference(_IGNORED)) if len(values) <= _MOST_VALUES else []
    return [*_IGNORED, *others] if counts else []

"""Calls of the user's forward hooks inside a layer with full sequences, although the layer computes on a shard.

`ContextParallel` makes one :class:`WholeHooks` for each call of a layer, and `attention.Region` enters it. A hook, such
as one that collects the logits of a router for a loss, must see the same tensors as in one process. The sequence
dimension of its arguments cannot be told from one shard, so the trial of the layer finds it before
(`trial.find_places`).

A *tap* is such a hook, see :mod:`lightning_hybrid.distributed.taps`. A *place* is the position of a tensor among the
arguments of a hook. A *leaf* is a tensor or another value in the tree of these arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.distributed.taps import Hook, Tap, Taps
from lightning_hybrid.tensor_parallel.context_parallel.attention import Region
from lightning_hybrid.tensor_parallel.context_parallel.division import Division, version_of
from lightning_hybrid.tensor_parallel.context_parallel.mappings import copy_to_cp, scatter_to_cp
from lightning_hybrid.tensor_parallel.context_parallel.sharded_sequence import ShardedSequence
from lightning_hybrid.tensor_parallel.sharded_activation import plain
from lightning_hybrid.tensor_parallel.sharding import Sharding, Shares


class Along(NamedTuple):
    """The sequence dimension of a tensor inside a layer.

    Attributes:
        dim: The dimension; ``None`` if the tensor has no sequence and is equal on every rank.
        is_outer: If the dimension is longer than the sequence: True if it holds one sequence after the other, False if
            it holds several entries of each position.
    """

    dim: int | None
    is_outer: bool = True

    def layout(self, tensor: Tensor, length: int, shares: Shares) -> Sharding | None:
        """Return the sharding of a tensor; ``None`` if it is not sharded.

        Args:
            tensor: A shard, or the full tensor.
            length: The number of positions in the tensor: of this rank for a shard, else of the sequence.
            shares: The positions of each rank.
        """
        if self.dim is None or self.dim >= tensor.ndim or tensor.shape[self.dim] % length:
            return None
        number = tensor.shape[self.dim] // length
        return Sharding(self.dim, shares, *((number, 1) if self.is_outer else (1, number)))


class Place(NamedTuple):
    """The position of a tensor among the arguments of a hook.

    Attributes:
        tap: The hook.
        num_leaves: The number of values in the arguments.
        position: The index of the tensor among these values.
    """

    tap: Tap
    num_leaves: int
    position: int


#: The sequence dimensions of hook arguments. Tensors without an entry, such as the tokens of an expert, have no known
#: sequence dimension, and hooks receive them unchanged.
Places = dict[Place, Along]


def common_places(found: Sequence[Places]) -> Places:
    """Return the entries that are equal in all of several findings."""
    return {place: along for place, along in found[0].items() if all(each.get(place) == along for each in found)}


class WholeHooks:
    """Calls of hooks inside a layer with full sequences, in one call of the layer.

    ::

        part of the layer --> shard --> full sequence --> hook: stores it, or returns another output --> shard

    Shards are gathered only if a hook reads the full sequence. Tensors without a sequence are passed unchanged.

    Args:
        taps: The hooks.
        places: The sequence dimensions of their arguments, as the trial of the layer returned them.
        division: The call of the layer.
    """

    def __init__(self, taps: Taps, places: Places, division: Division) -> None:
        self._taps, self._places, self._division = taps, places, division

    @contextmanager
    def __call__(self, region: Region) -> Iterator[None]:
        """Call the hooks with full sequences inside the context.

        Args:
            region: The region in which the layer runs. Hooks run outside the region.
        """
        with self._taps.calling(partial(self._call, region)):
            yield

    def _call(self, region: Region, tap: Tap, hook: Hook, module: nn.Module, *given: Any) -> Any:
        leaves, spec = flatten(given)
        places = [self._places.get(Place(tap, len(leaves), position)) for position in range(len(leaves))]
        made: dict[int, Any] = {}  # a tensor that is passed twice stays one tensor
        for leaf, along in zip(leaves, places, strict=True):
            if isinstance(leaf, Tensor) and id(leaf) not in made:
                sharding = along and along.layout(leaf, region.shares.length, region.shares)
                made[id(leaf)] = self._division.whole(leaf, sharding)
        wholes = [made.get(id(leaf), leaf) for leaf in leaves]
        versions = list(map(version_of, wholes))
        *others, output = unflatten(wholes, spec)
        with region.paused():
            result = hook(module, *others, output)
        first = len(leaves) - len(flatten(given[-1])[0])  # the index of the output's first value
        written = [
            leaf is not whole and _is_written(whole, version)
            for leaf, whole, version in zip(leaves, wholes, versions, strict=True)
        ]
        if any(written[:first]) and not torch.is_inference_mode_enabled():  # there, a read looks like a write
            raise region.refuse(
                f"A forward hook changes an argument of {tap.module!r} in place. Return a new output from the hook"
                " instead. [LH617]"
            )
        values, spec = flatten(output if result is None else result)
        if result is None and not any(written) and list(map(id, values)) == list(map(id, wholes[first:])):
            return None
        known = places[first:] if spec == flatten(given[-1])[1] else [None] * len(values)
        kept = {id(whole): leaf for whole, leaf, is_new in zip(wholes, leaves, written, strict=True) if not is_new}
        shares = [
            kept[id(value)] if id(value) in kept else self._share(value, along, region, tap)
            for value, along in zip(values, known, strict=True)
        ]
        return unflatten(shares, spec)

    def _share(self, value: Any, along: Along | None, region: Region, tap: Tap) -> Any:
        """Return this rank's shard of an output that a hook has replaced.

        Raises:
            WrongUseError: If the sequence dimension of the output is not known.
        """
        if not isinstance(value, Tensor):
            return value
        shares = region.shares
        if isinstance(value, ShardedSequence) and value.sharding.shares.is_same(shares) and not value.is_written():
            return value.local
        if along is not None and along.dim is None:
            return copy_to_cp(plain(value), shares.group)
        sharding = along and along.layout(value, shares.total, shares)
        if sharding is None:
            raise region.refuse(
                f"A forward hook replaces the output of {tap.module!r}. The output has no sequence dimension, or the"
                " hook changes the structure of the output. Change the output in the layer instead, or use"
                " context_parallel_size=1. [LH618]"
            )
        return sharding.split(plain(value), scatter_to_cp)


def _is_written(whole: Any, version: int) -> bool:
    """Return True if a hook may have written a tensor. In inference mode, a sequence that was read counts too."""
    if isinstance(whole, ShardedSequence) and whole.is_inference():
        return whole.is_written()
    return version_of(whole) != version

"""Forward hooks of the user's inside a layer see whole sequences of which the layer has a share."""

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
from lightning_hybrid.tensor_parallel.context_parallel.mappings import Shares, copy_to_cp
from lightning_hybrid.tensor_parallel.context_parallel.sharded_sequence import SequenceLayout, ShardedSequence, plain


class Along(NamedTuple):
    """Where the sequence is in a tensor inside a layer: alone, or in a row with others.

    Attributes:
        dim: The dimension; ``None`` if there is none, and the tensor is the same on every rank.
        is_outer: Whether sequences follow one another along it, instead of several entries of each position.
    """

    dim: int | None
    is_outer: bool = True

    def layout(self, tensor: Tensor, length: int, shares: Shares) -> SequenceLayout | None:
        """Return how a tensor is divided; ``None`` if it is not.

        Args:
            tensor: A share, or the whole.
            length: The length of the sequence in it.
            shares: How the sequence is divided.
        """
        if self.dim is None or self.dim >= tensor.ndim or tensor.shape[self.dim] % length:
            return None
        number = tensor.shape[self.dim] // length
        return SequenceLayout(self.dim, shares, *((number, 1) if self.is_outer else (1, number)))


class Place(NamedTuple):
    """A tensor among what a hook is given.

    Attributes:
        tap: The hook.
        num_leaves: How many values it is given.
        position: Which of these it is.
    """

    tap: Tap
    num_leaves: int
    position: int


#: What is known of tensors that hooks are given; of others it is not: the tokens of an expert, sums over positions.
Places = dict[Place, Along]


def common_places(found: Sequence[Places]) -> Places:
    """Return what all of these know."""
    return {place: along for place, along in found[0].items() if all(each.get(place) == along for each in found)}


class WholeHooks:
    """Calls hooks inside a layer with whole sequences, in one call of the layer.

    ::

        part of the layer --> share --> whole sequence --> hook: keeps it, or returns another output --> share

    Shares are gathered only if something reads the whole. What is no share of a sequence is given as it is.

    Args:
        taps: The hooks.
        places: Where the sequence is in what they are given.
        division: The call of the layer.
    """

    def __init__(self, taps: Taps, places: Places, division: Division) -> None:
        self._taps, self._places, self._division = taps, places, division

    @contextmanager
    def __call__(self, region: Region) -> Iterator[None]:
        """Inside, the hooks are called so.

        Args:
            region: In which the layer runs; hooks run outside it.
        """
        with self._taps.calling(partial(self._call, region)):
            yield

    def _call(self, region: Region, tap: Tap, hook: Hook, module: nn.Module, *given: Any) -> Any:
        leaves, spec = flatten(given)
        places = [self._places.get(Place(tap, len(leaves), position)) for position in range(len(leaves))]
        made: dict[int, Any] = {}  # what comes twice is one tensor again
        for leaf, along in zip(leaves, places, strict=True):
            if isinstance(leaf, Tensor) and id(leaf) not in made:
                layout = along and along.layout(leaf, region.shares.length, region.shares)
                made[id(leaf)] = self._division.whole(leaf, layout)
        wholes = [made.get(id(leaf), leaf) for leaf in leaves]
        versions = list(map(version_of, wholes))
        *others, output = unflatten(wholes, spec)
        with region.paused():
            result = hook(module, *others, output)
        first = len(leaves) - len(flatten(given[-1])[0])  # of the output
        written = [
            leaf is not whole and _is_written(whole, version)
            for leaf, whole, version in zip(leaves, wholes, versions, strict=True)
        ]
        if any(written[:first]) and not torch.is_inference_mode_enabled():  # there it may just have been read
            raise region.refuse(
                f"and a forward hook writes into what {tap.module!r} is given. Let it return another output instead."
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
        """Return what goes on in the layer, of what a hook has made in the place of an output of its module."""
        if not isinstance(value, Tensor):
            return value
        shares = region.shares
        if isinstance(value, ShardedSequence) and value.sequence.shares.is_same(shares) and not value.is_written():
            return value.local
        if along is not None and along.dim is None:
            return copy_to_cp(plain(value), shares.group)
        layout = along and along.layout(value, shares.total, shares)
        if layout is None:
            raise region.refuse(
                f"and a forward hook changes what {tap.module!r} returns. On a share of the sequence that is no share"
                " of what it returns on the whole, or the hook returns something of another form. Change the result of"
                " the layer instead, or use context_parallel_size=1."
            )
        return layout.scatter(plain(value))


def _is_written(whole: Any, version: int) -> bool:
    """Whether a hook may have written into a tensor; in inference mode, whether it has read a sequence in shares."""
    if isinstance(whole, ShardedSequence) and whole.is_inference():
        return whole.is_written()
    return version_of(whole) != version

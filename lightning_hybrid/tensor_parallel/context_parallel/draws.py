"""Which random numbers a layer draws on its share of a sequence.

::

    one number, or one for each sample (drop path)     from a stream of the layer: the same on every rank
    all others (dropout)                               a stream for each call, by the layer's number and the rank

Numbers of the second kind take nothing from the stream of the layer, as ranks may need different ones: an expert may
have got no token. Each call has a place in the layer, which it has again where it is recomputed. The stream of the code
around the layer stays where it is, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_hybrid.distributed.no_draws import DRAWS, DROPOUTS
from lightning_hybrid.distributed.random import derive_seed, with_seed


def _drops(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True) -> bool:
    """Whether a dropout draws at all."""
    return training and train and p > 0.0


class Draws:
    """What the functions of torch that draw draw in a layer that has a share of a sequence.

    Args:
        number: Of this call of the layer, the same on all ranks, and no other call's.
        rank: This rank.
        batch_size: The number of sequences.
        device: Where this rank computes.
    """

    def __init__(self, number: int, rank: int, batch_size: int, device: torch.device) -> None:
        self._number, self._rank, self._device = number, rank, device
        self._batch_size = batch_size

    def find(self, func: Any, place: Callable[[], int]) -> Callable[..., Any] | None:
        """What takes the place of a function; ``None`` if it draws nothing.

        Args:
            func: The function.
            place: Gives the next place of a call.
        """
        shape_of = DROPOUTS.get(func) or DRAWS.get(func)
        if shape_of is None:
            return None

        def draw(*args: Any, **kwargs: Any) -> Any:
            if func in DROPOUTS and not _drops(*args, **kwargs):
                return func(*args, **kwargs)
            with nullcontext() if self._is_common(shape_of(*args, **kwargs)) else self.own(place()):
                return func(*args, **kwargs)

        return draw

    def common(self) -> AbstractContextManager[None]:
        """Inside, numbers are those of the layer, from the first one on; outside, the same ones as before."""
        return with_seed(derive_seed(self._number), self._device)

    def own(self, place: int) -> AbstractContextManager[None]:
        """Inside, numbers are those of this rank, and of a place."""
        return with_seed(derive_seed(self._number, self._rank, place), self._device)

    def _is_common(self, shape: Sequence[int]) -> bool:
        """Whether this is one number, or one for each sample, and none of positions."""
        return [size for size in shape if size != 1] in ([], [self._batch_size])

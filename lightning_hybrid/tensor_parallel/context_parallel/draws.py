"""The random numbers that a layer draws on its sequence shard.

::

    one number, or one for each sample (drop path)     from a stream for each call of the layer: equal on every rank
    all other numbers (dropout)                        from a stream for each call of a function, different on each rank

Numbers of the second kind are not drawn from the stream of the layer, because ranks may need different numbers of them:
an expert may have received no token. Each call has a *place*, its number among such calls in the layer, and has the
same place when it is recomputed. The stream of the code around the layer does not advance.

`ContextParallel` makes one :class:`Draws` for each call of a layer, and `attention.Region` calls :meth:`Draws.find` for
each torch function. With torch's generators alone, which are equal on all ranks, dropout would drop the same entries of
every shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_hybrid.distributed.no_draws import DRAWS, DROPOUTS
from lightning_hybrid.distributed.random import derive_seed, with_seed


def _drops(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True) -> bool:
    """Return True if a dropout with these arguments draws random numbers."""
    return training and train and p > 0.0


class Draws:
    """The replacement of torch's random functions in a layer that computes on a sequence shard.

    Args:
        number: The seed of this call of the layer: equal on all ranks, different for each call.
        rank: This rank in the context-parallel group.
        batch_size: The number of sequences.
        device: The device of this rank.
    """

    def __init__(self, number: int, rank: int, batch_size: int, device: torch.device) -> None:
        self._number, self._rank, self._device = number, rank, device
        self._batch_size = batch_size

    def find(self, func: Any, place: Callable[[], int]) -> Callable[..., Any] | None:
        """Return the replacement of a function; ``None`` if the function draws nothing.

        Args:
            func: The torch function.
            place: Returns the next place in the layer. It is called only if this rank draws its own numbers.
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
        """Draw from a new stream of the layer inside the context, and restore the previous stream afterwards."""
        return with_seed(derive_seed(self._number), self._device)

    def own(self, place: int) -> AbstractContextManager[None]:
        """Draw this rank's own numbers for a place inside the context, and restore the previous stream afterwards."""
        return with_seed(derive_seed(self._number, self._rank, place), self._device)

    def _is_common(self, shape: Sequence[int]) -> bool:
        """Return True if a shape is one number, or one number for each sample."""
        return [size for size in shape if size != 1] in ([], [self._batch_size])

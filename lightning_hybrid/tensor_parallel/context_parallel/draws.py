"""Which random numbers a layer draws on its share of a sequence.

::

    drop path, noise of a sample           no positions: the numbers of one process, the same on every rank
    dropout of positions, of attention     a share has numbers of its own

All ranks take the same numbers from the stream of a layer, which is the same on all of them afterwards: numbers of its
own are seeded by one of these and the rank. So what is recomputed from a restored stream draws the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.distributed.random import own_draws, set_torch_states, torch_states
from lightning_hybrid.tensor_parallel.context_parallel.mappings import Shares


def _shape_of(input: Any, *_: Any, **__: Any) -> Sequence[int]:
    return tuple(input.shape)


def _of_channels(input: Any, *_: Any, **__: Any) -> Sequence[int]:
    """What drops whole channels draws a number for each of them."""
    return (*input.shape[:2], *(1 for _ in input.shape[2:]))


def _size_of(*size: Any, **options: Any) -> Sequence[int]:
    given = options.get("size", size)
    return tuple(given[0]) if given and not isinstance(given[0], int) else tuple(given)


#: Functions that leave out some of what they are given, and the shape of what they draw.
_DROPOUTS: dict[Any, Callable[..., Sequence[int]]] = {
    F.dropout: _shape_of,
    F.alpha_dropout: _shape_of,
    F.feature_alpha_dropout: _of_channels,
    F.dropout1d: _of_channels,
    F.dropout2d: _of_channels,
    F.dropout3d: _of_channels,
    torch.dropout: _shape_of,
    torch.dropout_: _shape_of,
}
#: Functions that draw, likewise.
_DRAWS: dict[Any, Callable[..., Sequence[int]]] = {
    torch.rand: _size_of,
    torch.randn: _size_of,
    torch.rand_like: _shape_of,
    torch.randn_like: _shape_of,
    torch.bernoulli: _shape_of,
    Tensor.bernoulli: _shape_of,
    Tensor.bernoulli_: _shape_of,
    Tensor.uniform_: _shape_of,
    Tensor.normal_: _shape_of,
    Tensor.exponential_: _shape_of,
    F.gumbel_softmax: _shape_of,
    F.rrelu: _shape_of,
}
_BERNOULLI = {torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_}


class Draws:
    """What the functions of torch that draw draw in a layer that has a share of a sequence.

    Args:
        shares: How the sequence is divided.
        batch_size: The number of sequences.
        sequence_dim: The dimension of the sequence in tensors of three dimensions.
        device: Where this rank computes.
    """

    def __init__(self, shares: Shares, batch_size: int, sequence_dim: int, device: torch.device) -> None:
        self._rank, self._device = shares.group.rank, device
        self._dim, self._batch_size = sequence_dim, batch_size
        # Those of all ranks: each must come to the same conclusion, and shares may differ by a position or two.
        self._lengths = set(shares.lengths)
        self._of_all_samples = {batch_size * length for length in shares.lengths}

    def find(self, func: Any) -> Callable[..., Any] | None:
        """What takes the place of a function; ``None`` if it draws nothing."""
        shape_of = _DROPOUTS.get(func) or _DRAWS.get(func)
        if shape_of is None:
            return None

        def draw(*args: Any, **kwargs: Any) -> Any:
            with self.own() if self._go_by_positions(shape_of(*args, **kwargs)) else nullcontext():
                return func(*args, **kwargs)

        return draw

    def own(self) -> AbstractContextManager[None]:
        """Inside, numbers are those of this rank."""
        return own_draws(self._rank, self._device)

    def _go_by_positions(self, shape: Sequence[int]) -> bool:
        if len(shape) == 3:
            return shape[self._dim] in self._lengths or self._are_all_positions(shape[0])
        if len(shape) == 2:
            return shape[1] in self._lengths or self._are_all_positions(shape[0])
        if len(shape) < 2:
            return any(map(self._are_all_positions, shape))
        return any(size in self._lengths for size in shape[1:-1]) or self._are_all_positions(shape[0])

    def _are_all_positions(self, size: int) -> bool:
        """Whether these are positions, of one sample or of all, and no samples."""
        return size != self._batch_size and (size in self._lengths or size in self._of_all_samples)


class NoDraws:
    """In the place of :class:`Draws` where two runs of a layer are compared.

    Nothing is dropped, and each number is the same one, however many positions there are.

    Args:
        device: Where this rank computes.
    """

    own = nullcontext

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def find(self, func: Any) -> Callable[..., Any] | None:
        """As :meth:`Draws.find`."""
        if func in _DROPOUTS:
            return lambda input, *_, **__: input
        if func is F.gumbel_softmax:
            return lambda logits, tau=1.0, *_, dim=-1, **__: (logits / tau).softmax(dim)
        if func is F.rrelu:
            return lambda input, lower=1 / 8, upper=1 / 3, *_, **__: F.leaky_relu(input, (lower + upper) / 2)
        return partial(self._draw, func) if func in _DRAWS else None

    def _draw(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        states = torch_states(self._device)
        made: Tensor = func(*args, **kwargs)
        set_torch_states(states, self._device)
        return made.fill_(1.0 if func in _BERNOULLI else 0.5)

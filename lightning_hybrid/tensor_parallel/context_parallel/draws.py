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
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.distributed.random import derive_seed, with_seed


def _shape_of(input: Any, *_: Any, **__: Any) -> Sequence[int]:
    return tuple(input.shape)


def _of_channels(input: Any, *_: Any, **__: Any) -> Sequence[int]:
    """What drops whole channels draws a number for each of them."""
    return (*input.shape[:2], *(1 for _ in input.shape[2:]))


def _size_of(*size: Any, **options: Any) -> Sequence[int]:
    """Of a function that is given a shape, as a sequence or number by number; bounds may stand before it."""
    given = options.get("size", next((each for each in size if isinstance(each, (tuple, list))), size))
    return tuple(given)


def _shape_of_made(*values: Any, **options: Any) -> Sequence[int]:
    """Of `torch.normal`, whose mean and deviation may be numbers."""
    made = [each for each in (*values, *options.values()) if isinstance(each, Tensor)]
    return max((tuple(each.shape) for each in made), key=len) if made else _size_of(*values, **options)


def _drops(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True) -> bool:
    """Whether a dropout draws at all."""
    return training and train and p > 0.0


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
    torch.randint: _size_of,
    torch.normal: _shape_of_made,
    F.gumbel_softmax: lambda logits, *_, **__: tuple(logits.shape),
    **dict.fromkeys(
        (
            *(torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, torch.poisson, F.rrelu),
            *(Tensor.bernoulli, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_),
            *(Tensor.random_, Tensor.geometric_, Tensor.log_normal_, Tensor.cauchy_),
            *(torch.multinomial, Tensor.multinomial),
        ),
        _shape_of,
    ),
}
_BERNOULLI = {torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_}


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
        shape_of = _DROPOUTS.get(func) or _DRAWS.get(func)
        if shape_of is None:
            return None

        def draw(*args: Any, **kwargs: Any) -> Any:
            if func in _DROPOUTS and not _drops(*args, **kwargs):
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


class NoDraws:
    """In the place of :class:`Draws` where two runs of a layer are compared.

    Nothing is dropped, and each number is the same one, however many positions there are.

    Args:
        device: Where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def find(self, func: Any, place: object = None) -> Callable[..., Any] | None:
        """As :meth:`Draws.find`."""
        if func in _DROPOUTS:
            return lambda input, *_, **__: input
        if func is F.gumbel_softmax:
            return lambda logits, tau=1.0, *_, dim=-1, **__: (logits / tau).softmax(dim)
        if func is F.rrelu:
            return lambda input, lower=1 / 8, upper=1 / 3, *_, **__: F.leaky_relu(input, (lower + upper) / 2)
        return partial(self._draw, func) if func in _DRAWS else None

    def common(self) -> AbstractContextManager[None]:
        """As :meth:`Draws.common`."""
        return nullcontext()

    def own(self, place: object) -> AbstractContextManager[None]:
        """As :meth:`Draws.own`."""
        return nullcontext()

    def _draw(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        with with_seed(0, self._device):
            made: Tensor = func(*args, **kwargs)
        if not made.is_floating_point():
            return made.fill_(made.flatten()[0]) if made.numel() else made
        return made.fill_(1.0 if func in _BERNOULLI else 0.5)

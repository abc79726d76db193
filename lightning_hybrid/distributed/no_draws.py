"""Functions of torch that draw random numbers, and replacements that draw none.

A trial runs a layer twice, for example once in full and once sharded, and compares the results. Random numbers would
differ between the two runs. So the trials of context parallelism and of automatic plans, and the dry run of `tuning`,
run layers with :class:`NoDraws`. `module.eval()` would not suffice: it changes the code path of layers, and does not
affect functions such as `torch.rand`. Context parallelism uses the two tables for its own replacement,
`tensor_parallel.context_parallel.draws.Draws`, which draws shards of the full numbers.

A generator that the caller passes as an argument still advances. Functions that are not in the tables, such as
`torch.randperm`, still draw.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.distributed.random import with_seed

#: The signature of the function that `nn.MultiheadAttention` calls.
MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


def _shape_of(input: Any, *_: Any, **__: Any) -> Sequence[int]:
    return tuple(input.shape)


def _of_channels(input: Any, *_: Any, **__: Any) -> Sequence[int]:
    """Return the shape of the random numbers of a function that drops whole channels."""
    return (*input.shape[:2], *(1 for _ in input.shape[2:]))


def _size_of(*size: Any, **options: Any) -> Sequence[int]:
    """Return the size argument of a function: one sequence, or several integers. Bounds may come before a sequence."""
    given = options.get("size", next((each for each in size if isinstance(each, (tuple, list))), size))
    return tuple(given)


def _shape_of_made(*values: Any, **options: Any) -> Sequence[int]:
    """Return the shape of the result of `torch.normal`, whose mean and standard deviation may be numbers."""
    made = [each for each in (*values, *options.values()) if isinstance(each, Tensor)]
    return max((tuple(each.shape) for each in made), key=len) if made else _size_of(*values, **options)


#: Functions that drop some of their inputs, each with a function that returns the shape of the random numbers.
DROPOUTS: Mapping[Any, Callable[..., Sequence[int]]] = {
    **dict.fromkeys((F.dropout, F.alpha_dropout, torch.dropout, torch.dropout_), _shape_of),
    **dict.fromkeys((torch.alpha_dropout, torch.alpha_dropout_), _shape_of),
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout), _of_channels),
    **dict.fromkeys((torch.feature_dropout, torch.feature_dropout_), _of_channels),
    **dict.fromkeys((torch.feature_alpha_dropout, torch.feature_alpha_dropout_), _of_channels),
}
#: Other functions that draw random numbers, each with a function that returns the shape of the numbers.
DRAWS: Mapping[Any, Callable[..., Sequence[int]]] = {
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


class NoDraws:
    """A replacement for random functions of torch that draws nothing, so that two runs can be compared.

    It is used as the call of a :class:`~lightning_hybrid.distributed.modes.FunctionMode`, or in place of the `Draws` of
    context parallelism::

        dropout, also in attention    drops nothing
        F.gumbel_softmax, F.rrelu     return the softmax, and a leaky ReLU with the mean slope
        other random functions        fill the result with a constant: 1 for Bernoulli numbers, 0.5 for other floating-
                                      point numbers, and for integers a number that depends only on the arguments

    Args:
        device: The device of this rank.
        functions: Additional replacements, by function, such as for attention. They take precedence.
        only_dropout: If True, replace only dropout; other functions draw as usual.
    """

    def __init__(
        self,
        device: torch.device,
        functions: Mapping[Any, Callable[..., Any]] | None = None,
        *,
        only_dropout: bool = False,
    ) -> None:
        self._device = device
        self._functions: dict[Any, Callable[..., Any]] = {
            **dict.fromkeys(DROPOUTS, lambda input, *_, **__: input),
            F.scaled_dot_product_attention: _attention,
            F.multi_head_attention_forward: _multi_head,
        }
        if not only_dropout:
            self._functions |= {func: partial(self._draw, func) for func in DRAWS}
            self._functions[F.gumbel_softmax], self._functions[F.rrelu] = _softmax, _leaky_relu
        self._functions |= functions or {}

    def find(self, func: Any, place: object = None) -> Callable[..., Any] | None:
        """Return the replacement for a function; ``None`` if the function has none.

        Args:
            func: The function.
            place: Ignored; the argument of `Draws.find`.
        """
        return self._functions.get(func)

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call the replacement for a function, or the function itself if it has none."""
        return self._functions.get(func, func)(*args, **kwargs)

    def common(self) -> AbstractContextManager[None]:
        """Return a context that does nothing; no random numbers are drawn."""
        return nullcontext()

    def own(self, place: object) -> AbstractContextManager[None]:
        """Return a context that does nothing; no random numbers are drawn."""
        return nullcontext()

    def _draw(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        with with_seed(0, self._device):
            made: Tensor = func(*args, **kwargs)
        if not made.is_floating_point():
            return made.fill_(made.flatten()[0]) if made.numel() else made
        return made.fill_(1.0 if func in _BERNOULLI else 0.5)


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    if len(args) > 4:
        args = *args[:4], 0.0, *args[5:]
    else:
        kwargs["dropout_p"] = 0.0
    return F.scaled_dot_product_attention(*args, **kwargs)


def _multi_head(*args: Any, **kwargs: Any) -> Any:
    call = MULTI_HEAD.bind(*args, **kwargs)
    call.arguments["dropout_p"] = 0.0
    return F.multi_head_attention_forward(*call.args, **call.kwargs)


def _softmax(logits: Tensor, tau: float = 1.0, *_: Any, dim: int = -1, **__: Any) -> Tensor:
    return (logits / tau).softmax(dim)


def _leaky_relu(input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, *_: Any, **__: Any) -> Tensor:
    return F.leaky_relu(input, (lower + upper) / 2)

"""Layers that get their share of a sequence where the other ranks do not exist: on shapes, as the first rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from lightning_hybrid.distributed.dtensor import is_tensor_parallel
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.modes import FunctionMode
from lightning_hybrid.distributed.no_draws import MULTI_HEAD, NoDraws
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.distributed.replaced import replaced_attributes, replaced_entries
from lightning_hybrid.distributed.taps import Taps
from lightning_hybrid.tensor_parallel.context_parallel import attention
from lightning_hybrid.tensor_parallel.context_parallel.context_parallel import ContextParallel
from lightning_hybrid.tensor_parallel.context_parallel.division import Division
from lightning_hybrid.tensor_parallel.context_parallel.hooks import Places, common_places
from lightning_hybrid.tensor_parallel.context_parallel.trial import (
    copied,
    find_places,
    is_close,
    mixing_text,
    without_trace,
    written_text,
)
from lightning_hybrid.torch_internals import FakeTensor, without_dispatch_modes

_POSITIONS = 4  # so many for each rank show what mixes neighbours, and statistics
_MANY = 1024  # so many show what looks farther
_MOST_PRODUCTS = 2**34  # of numbers, in a forward that is tried: more would take seconds, and large layers gigabytes
_CPU = torch.device("cpu")


class AloneContextParallel(ContextParallel):
    """As the first of some ranks, without the others: what they would send has no numbers.

    So what layers compute cannot be compared as in a run. Whether they mix positions elsewhere than in attention can be
    found out alone: with an attention in which each position attends to itself, a share of the result has to be the
    result of the share. That is tried with numbers, where layers are not divided among tensor-parallel ranks, too; of
    layers that are alike with the first one, and with none that is too large for it.

    Args:
        tried: What has been tried before, and where hooks meet the sequence; it grows.
        alike: The layers, each with the first one that is like it.
        given: As for :class:`ContextParallel`.
    """

    def __init__(self, *given: Any, tried: dict[Hashable, Places], alike: Mapping[nn.Module, nn.Module]) -> None:
        super().__init__(*given)
        self._tried_alone, self._alike = tried, alike

    @contextmanager
    def around(self, between: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Enter it around forwards, as there."""

        def make_without_modes(*size: int) -> Tensor:
            with without_dispatch_modes():  # torch cannot make such a tensor where a mode sees all operations
                bias: Tensor = causal_lower_right(*size)
                return bias

        with replaced_attributes(attention, causal_lower_right=make_without_modes), super().around(between):
            yield

    def _try(self, layer: nn.Module, forward: Callable[..., Any], division: Division, taps: Taps) -> Places:
        group = self._group
        key = id(self._alike[layer]), group.size
        if key in self._tried_alone or any(map(is_tensor_parallel, layer.parameters())):
            return self._tried_alone.get(key, {})
        total = division.shares.total
        most = _MOST_PRODUCTS // (division.batch_size * sum(each.numel() for each in layer.parameters()) or 1)
        tried = {min(total, length) for length in (_POSITIONS * group.size, _MANY)}
        lengths = sorted(length for length in tried if length <= most)
        if not lengths:
            return {}
        with torch.no_grad(), without_dispatch_modes(), _with_numbers(layer):
            ran = [self._runs(layer, forward, division, length, taps) for length in lengths]
            if not any(each is not None for each in ran) and total <= most:
                ran = [self._runs(layer, forward, division, total, taps)]  # it is made for sequences of this length
        found = [each for each in ran if each is not None]
        self._tried_alone[key] = common_places(found) if found else {}
        return self._tried_alone[key]  # nothing is marked: only then the memory is what a run has

    def _runs(
        self, layer: nn.Module, forward: Callable[..., Any], division: Division, length: int, taps: Taps
    ) -> Places | None:
        """Compare the shares of so many positions with the whole; ``None`` if the layer does not run with so many."""
        given = _numbers(division.cropped(length))
        try:
            with without_trace(layer, _CPU) as buffers, taps.recording() as calls:
                whole = _made(forward, *copied(given))
        except Exception:  # it is made for sequences of another length, or cannot run with these numbers
            return None
        # Of two pieces: what mixes earlier positions alone makes the same of a first piece.
        short = division.of_cropped(*copied(given), balanced=True)
        with without_trace(layer, _CPU) as own_buffers, taps.recording() as own_calls:
            is_share = _is_share(short, forward, whole)
        written = written_text(own_buffers, buffers) if is_share else ""
        if written or not is_share:
            name = f"{self._layers[layer]!r} ({type(layer).__name__})"
            raise WrongUseError(
                f"context_parallel_size={self._group.size} shards the sequence in {name},"
                f" {mixing_text(written or 'which')}"
            )
        return find_places(own_calls, calls, short.shares)


def _is_share(division: Division, forward: Callable[..., Any], whole: Sequence[Tensor]) -> bool:
    """Whether a layer makes of this rank's share what it has of the whole results."""
    args, kwargs = division.local()
    try:
        with FunctionMode(_BY_POSITION):
            found = division.result_dims(forward(*args, **kwargs))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if isinstance(error, WrongUseError):
            raise
        return False
    if len(found) != len(whole):
        return False
    pairs = zip(found, whole, strict=True)
    return all(is_close(each, division.shares.own(all_of_it, dim)) for (each, dim), all_of_it in pairs)


def _multi_head(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    given = MULTI_HEAD.bind(*args, **kwargs).arguments
    query = given["query"]
    mixed = sum((each for each in (given["key"], given["value"]) if each.shape == query.shape), query)
    return F.linear(mixed, given["out_proj_weight"], given["out_proj_bias"]), None


def _attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return something of the own query, key and value of each position, in the shape of an attention's result."""
    mixed = query.mean(-1, keepdim=True)
    if key.shape[-2] == query.shape[-2] and query.ndim == 4:
        mixed = mixed + key.mean((1, 3), keepdim=True) + value.mean(1, keepdim=True)
    return mixed.expand(*query.shape[:-1], value.shape[-1])


#: Each position attends to itself, and nothing is dropped.
_BY_POSITION = NoDraws(_CPU, {F.scaled_dot_product_attention: _attend, F.multi_head_attention_forward: _multi_head})


def _with_numbers(layer: nn.Module) -> AbstractContextManager[None]:
    """Give parameters and buffers values while entered; afterwards, buffers that a forward replaced are as before."""
    tables = (vars(part)[kind] for part in layer.modules() for kind in ("_parameters", "_buffers"))
    return replaced_entries(
        (table, {name: None if tensor is None else _number(tensor) for name, tensor in table.items()})
        for table in tables
    )


def _numbers(tree: Any) -> Any:
    """The same tree with tensors that have values; what comes twice is one tensor again."""
    leaves, spec = flatten(tree)
    made = {id(leaf): _number(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves}
    return unflatten([made[id(leaf)] for leaf in leaves], spec)


def _number(tensor: Tensor) -> Any:
    """A copy; of what has no values one with small random numbers, or zeros if it is an index.

    A parameter that is zero at first, such as a gate, has random numbers too: it will not stay zero.
    """
    has_values = not isinstance(tensor, FakeTensor) and not tensor.is_meta
    if has_values and not (isinstance(tensor, nn.Parameter) and not tensor.any()):
        made = tensor.detach().clone()
    elif tensor.is_floating_point():
        made = torch.randn(tensor.shape, dtype=tensor.dtype) / max(1, tensor.shape[-1] if tensor.ndim else 1) ** 0.5
    else:
        made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _made(forward: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a layer makes, each once."""
    given = set(map(id, flatten((args, kwargs))[0]))
    with FunctionMode(_BY_POSITION):
        leaves = {id(leaf): leaf for leaf in flatten(forward(*args, **kwargs))[0]}
    return [leaf for key, leaf in leaves.items() if isinstance(leaf, Tensor) and key not in given]

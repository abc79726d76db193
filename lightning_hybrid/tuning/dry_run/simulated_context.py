"""Context parallelism on fake tensors, as rank 0 of a group whose other ranks do not exist.

`DryRunStrategy` makes a :class:`SimulatedContextParallel` for each step with ``context_parallel_size`` above 1. A run
uses :class:`ContextParallel`, which compares the outputs of a layer on all ranks before its first call. That is not
possible here, because no other rank computes.

- *trial*: a run of a layer with values on a short sequence, once in full and once as a shard;
- *division*: a call of a layer, with the arguments that are sharded (:class:`Division`);
- *taps*: the user's forward hooks inside a layer, which receive full sequences;
- *places*: the sequence dimensions of the tensors among the arguments of these hooks.
"""

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

_POSITIONS = 4  # per rank: enough to find layers that mix neighboring positions, or compute statistics
_MANY = 1024  # in total: enough to find layers that mix distant positions
_MOST_PRODUCTS = 2**34  # multiplications in a trial; more would take seconds, and gigabytes with large layers
_CPU = torch.device("cpu")


class SimulatedContextParallel(ContextParallel):
    """Context parallelism on rank 0 without the other ranks, whose messages have no values.

    So the results of layers cannot be compared as in a run. But a single rank can find out whether layers mix positions
    outside attention: if each position attends only to itself, the output for a sequence shard must be equal to that
    shard of the full output. A trial with values tests this, unless a layer is also tensor-parallel or too large. If
    several layers are alike, only the first one is tried.

    Args:
        given: The arguments of :class:`ContextParallel`.
        tried: The places that earlier trials found, by the `id` of the first alike layer and the number of ranks. Each
            trial adds an entry.
        alike: The first layer that is like each layer.
    """

    def __init__(self, *given: Any, tried: dict[Hashable, Places], alike: Mapping[nn.Module, nn.Module]) -> None:
        super().__init__(*given)
        self._tried_alone, self._alike = tried, alike

    @contextmanager
    def around(self, between: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Shard sequences in forwards inside the context, see :meth:`ContextParallel.around`.

        Raises:
            WrongUseError: If a layer mixes positions outside attention.
        """

        def make_without_modes(*size: int) -> Tensor:
            with without_dispatch_modes():  # torch cannot create such a tensor in a mode that sees all operations
                bias: Tensor = causal_lower_right(*size)
                return bias

        with replaced_attributes(attention, causal_lower_right=make_without_modes), super().around(between):
            yield

    def _try(self, layer: nn.Module, forward: Callable[..., Any], division: Division, taps: Taps) -> Places:
        """Test a layer before its first call, see :meth:`ContextParallel._try`; empty without a trial."""
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
        with torch.no_grad(), without_dispatch_modes(), _values_in(layer):
            ran = [self._runs(layer, forward, division, length, taps) for length in lengths]
            if not any(each is not None for each in ran) and total <= most:
                ran = [self._runs(layer, forward, division, total, taps)]  # the layer requires sequences of this length
        found = [each for each in ran if each is not None]
        self._tried_alone[key] = common_places(found) if found else {}
        return self._tried_alone[key]  # no layer is marked as tried, so that the memory is the same as in a run

    def _runs(
        self, layer: nn.Module, forward: Callable[..., Any], division: Division, length: int, taps: Taps
    ) -> Places | None:
        """Compare a shard with the full output for a sequence length.

        Returns:
            The places; ``None`` if the layer does not support the length.

        Raises:
            WrongUseError: If they differ, or if the layer writes other values into its buffers.
        """
        given = _with_values(division.cropped(length))
        try:
            with without_trace(layer, _CPU) as buffers, taps.recording() as calls:
                whole = _created(forward, *copied(given))
        except Exception:  # it requires another sequence length, or cannot run with these values
            return None
        # The shard has two pieces, because a layer that mixes only earlier positions computes the first one correctly.
        short = division.of_cropped(*copied(given), balanced=True)
        with without_trace(layer, _CPU) as own_buffers, taps.recording() as own_calls:
            is_share = _is_share(short, forward, whole)
        written = written_text(own_buffers, buffers) if is_share else ""
        if written or not is_share:
            name = f"{self._layers[layer]!r} ({type(layer).__name__})"
            raise WrongUseError(
                f"context_parallel_size={self._group.size} shards the sequence in {name}."
                f" {mixing_text(written or 'The layer')}"
            )
        return find_places(own_calls, calls, short.shares)


def _is_share(division: Division, forward: Callable[..., Any], whole: Sequence[Tensor]) -> bool:
    """Return True if the output of a layer for this rank's shard is equal to this shard of the full output."""
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
    """Return a result of multi-head attention in which each position attends to itself, without weights."""
    given = MULTI_HEAD.bind(*args, **kwargs).arguments
    query = given["query"]
    mixed = sum((each for each in (given["key"], given["value"]) if each.shape == query.shape), query)
    return F.linear(mixed, given["out_proj_weight"], given["out_proj_bias"]), None


def _attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return a tensor with the shape of an attention result that depends only on each position's own inputs."""
    mixed = query.mean(-1, keepdim=True)
    if key.shape[-2] == query.shape[-2] and query.ndim == 4:
        mixed = mixed + key.mean((1, 3), keepdim=True) + value.mean(1, keepdim=True)
    return mixed.expand(*query.shape[:-1], value.shape[-1])


#: Each position attends to itself, and dropout is off.
_BY_POSITION = NoDraws(_CPU, {F.scaled_dot_product_attention: _attend, F.multi_head_attention_forward: _multi_head})


def _values_in(layer: nn.Module) -> AbstractContextManager[None]:
    """Give parameters and buffers values while entered, and restore all of them afterwards."""
    tables = (vars(part)[kind] for part in layer.modules() for kind in ("_parameters", "_buffers"))
    return replaced_entries(
        (table, {name: None if tensor is None else _value(tensor) for name, tensor in table.items()})
        for table in tables
    )


def _with_values(tree: Any) -> Any:
    """Return a tree with tensors that have values; a tensor that occurs twice is still one tensor."""
    leaves, spec = flatten(tree)
    made = {id(leaf): _value(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves}
    return unflatten([made[id(leaf)] for leaf in leaves], spec)


def _value(tensor: Tensor) -> Any:
    """Return a copy of a tensor that has values. A tensor without values gets small random ones, or zeros if integer.

    A parameter that is zero, such as a gate, gets random values too, because training changes it.
    """
    has_values = not isinstance(tensor, FakeTensor) and not tensor.is_meta
    if has_values and not (isinstance(tensor, nn.Parameter) and not tensor.any()):
        made = tensor.detach().clone()
    elif tensor.is_floating_point():
        made = torch.randn(tensor.shape, dtype=tensor.dtype) / max(1, tensor.shape[-1] if tensor.ndim else 1) ** 0.5
    else:
        made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _created(forward: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a layer creates and returns, each once."""
    given = set(map(id, flatten((args, kwargs))[0]))
    with FunctionMode(_BY_POSITION):
        leaves = {id(leaf): leaf for leaf in flatten(forward(*args, **kwargs))[0]}
    return [leaf for key, leaf in leaves.items() if isinstance(leaf, Tensor) and key not in given]

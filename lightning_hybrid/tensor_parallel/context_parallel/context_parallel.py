"""Layers that work on their share of a sequence, while the code around them sees all of it.

::

    the user's step    embedding, labels, masks          loss, metrics     whole sequences, the same on every rank
                           |                                ^
    layers              [ share ] --> [ share ]             |              attention communicates
    around them                          `--> norm, head, cross entropy    shares, as long as each position is by itself
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_hybrid.distributed.dtensor import uncompiled
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import map_leaves
from lightning_hybrid.distributed.random import derive_seed, peek_number
from lightning_hybrid.distributed.replaced import replaced_attributes, replaced_forwards
from lightning_hybrid.distributed.taps import Taps, find_taps
from lightning_hybrid.tensor_parallel.context_parallel.attention import Counts, Region, is_balanced
from lightning_hybrid.tensor_parallel.context_parallel.division import Division, sequence_dim_of
from lightning_hybrid.tensor_parallel.context_parallel.draws import Draws
from lightning_hybrid.tensor_parallel.context_parallel.hooks import Places, WholeHooks
from lightning_hybrid.tensor_parallel.context_parallel.leaks import Leaks
from lightning_hybrid.tensor_parallel.context_parallel.mappings import ContextGroup
from lightning_hybrid.tensor_parallel.context_parallel.recomputation import again_in
from lightning_hybrid.tensor_parallel.context_parallel.sharded_sequence import from_shares, to_shares
from lightning_hybrid.tensor_parallel.context_parallel.trial import Trial
from lightning_hybrid.tensor_parallel.sharded_activation import plain


class ContextParallel:
    """While this is entered, layers get their share of a sequence.

    ::

        layer(x)      divided --> runs again in backward, perhaps --> attention communicates, numbers of the layer
                      outside     somebody else's                     inside

    Whatever `torch.utils.checkpoint` runs again, around layers or in them, does so in the place where it ran before: in
    the same layer, after as many calls.

    Args:
        module: What holds the layers.
        layers: Those that get a share, by name.
        group: The ranks that share each sequence.
        kind: How attention communicates.
        device: Where this rank computes.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Mapping[str, nn.Module],
        group: ContextGroup,
        kind: str,
        device: torch.device,
    ) -> None:
        self._layers = {layer: name for name, layer in layers.items()}
        self._group, self._kind, self._device = group, kind, device
        self._is_balanced = is_balanced(kind)
        self._dims = {layer: sequence_dim_of(layer) for layer in self._layers}
        self._encoders = [part for part in module.modules() if isinstance(part, nn.TransformerEncoder)]
        self._numbers = {layer: number for number, layer in enumerate(self._layers)}
        self._calls: Counter[int] = Counter()  # of each layer, since the forward has begun
        self._tried: dict[Any, Places] = {}  # where hooks meet the sequence, by layer, whether it trains, and hooks
        self._leaks = Leaks()
        self._region: Region | None = None  # of the layer that runs
        self._is_paused = False

    @contextmanager
    def around(self, between: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Enter it around forwards.

        Args:
            between: What is entered around the layers' own code, and runs again in backward with it.
        """
        nested = [encoder.use_nested_tensor for encoder in self._encoders]
        self._calls.clear()
        try:
            for encoder in self._encoders:
                encoder.use_nested_tensor = False  # a nested tensor has no sequences of one length
            inside, outside = (replaced_forwards(self._layers, wrap) for wrap in (self._inside, self._outside))
            with again_in(self._here), inside, between(), outside:
                yield
        finally:
            for encoder, before in zip(self._encoders, nested, strict=True):
                encoder.use_nested_tensor = before

    def leave(self, value: Any, *, to_stage: bool) -> Any:
        """What leaves the layers and the code around them, or goes to the layers of the next stage.

        Args:
            value: A tree.
            to_stage: Whether it goes there: then each rank sends its share.

        Raises:
            WrongUseError: If it depends on what a layer keeps beside its result.
        """
        value = to_shares(value) if to_stage else map_leaves(plain, value)
        loss = value["loss"] if isinstance(value, Mapping) and "loss" in value and not to_stage else value
        leaking = self._leaks.find(loss)
        if leaking is not None:
            raise WrongUseError(
                f"context_parallel_size={self._group.size} shards the sequence in {leaking!r}, but the loss uses a"
                " tensor that this layer stores as an attribute, such as the balancing loss of a router. This tensor"
                " covers only one sequence shard. Compute the loss from the outputs of the layer, or from the logits of"
                " each position, which a forward hook can collect. Or use context_parallel_size=1. [LH604]"
            )
        return value

    def enter(self, value: Any) -> Any:
        """What has come from the stage before."""
        return from_shares(value, self._group, balanced=self._is_balanced)

    def paused(self) -> AbstractContextManager[None]:
        """Give layers whole sequences while entered: where a step is followed without values."""
        return replaced_attributes(self, _is_paused=True)

    def _outside(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        name = self._layers[layer]

        @uncompiled  # where the layer is compiled, collectives and modes would be too
        def divided(*args: Any, **kwargs: Any) -> Any:
            if self._is_paused or self._region is not None:
                return forward(*args, **kwargs)
            division = Division(name, self._dims[layer], args, kwargs, self._group, balanced=self._is_balanced)
            taps = Taps(layer, find_taps(layer, of_torch=False))
            key = id(layer), layer.training, taps.names
            if key not in self._tried:
                self._tried[key] = self._try(layer, forward, division, taps)
            hooks = WholeHooks(taps, self._tried[key], division)
            self._region = Region(name, division.shares, self._kind, self._make_draws(layer, division), hooks)
            try:
                local_args, local_kwargs = division.local()
                return division.joined(forward(*local_args, **local_kwargs))
            finally:
                self._region = None

        return divided

    def _inside(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            region = self._region
            if region is None or self._layers[layer] != region.name:  # or it is a part of one that is divided
                return forward(*args, **kwargs)
            with region.draws.common(), region.entered():
                return forward(*args, **kwargs)

        return inside

    def _here(self) -> Callable[[], AbstractContextManager[None]]:
        """Where the step is; enters it again."""
        region = self._region
        return partial(self._at, region, Counts() if region is None else region.counts, self._calls.copy())

    @contextmanager
    def _at(self, region: Region | None, counts: Counts, calls: Counter[int]) -> Iterator[None]:
        before = self._region, self._calls
        self._region, self._calls = region, calls.copy()
        try:
            with nullcontext() if region is None else region.entered(counts):
                yield
        finally:
            self._region, self._calls = before

    def _make_draws(self, layer: nn.Module, division: Division) -> Draws:
        number = self._numbers[layer]
        self._calls[number] += 1
        of_call = derive_seed(peek_number(), number, self._calls[number])
        return Draws(of_call, self._group.rank, division.batch_size, self._device)

    def _try(self, layer: nn.Module, forward: Callable[..., Any], division: Division, taps: Taps) -> Places:
        """Before the first call of a layer, in training or not, find out whether shares are right, and what hooks get.

        Args:
            layer: The layer.
            forward: Its `forward`.
            division: The call.
            taps: The hooks inside it that are called with whole sequences.
        """
        name = self._layers[layer]
        places = Trial(name, layer, forward, self._kind, self._group, self._device, taps)(division)
        if torch.is_grad_enabled():
            division.mark(partial(self._leaks.enter, name), self._leaks.leave)
        return places


def check_context_parallel(
    size: int,
    kind: str,
    *,
    sequence_parallel: bool,
    recompute: object,
    tensor_parallel_mode: str,
) -> None:
    """Check what goes with shares of sequences.

    Args:
        size: The number of ranks that share each sequence.
        kind: How attention communicates.
        sequence_parallel: Whether tensor-parallel ranks divide it too.
        recompute: What runs again in backward.
        tensor_parallel_mode: How tensor-parallel ranks are arranged.

    Raises:
        ValueError: If something does not.
    """
    if size > 1 and tensor_parallel_mode != "1d":
        raise ValueError(
            f"context_parallel_size={size} cannot be combined with tensor_parallel_mode={tensor_parallel_mode!r}, which"
            " already shards activations. Use tensor_parallel_mode='1d', or context_parallel_size=1. [LH601]"
        )
    if size > 1 and kind != "ulysses" and recompute == "selective":
        raise ValueError(
            "recompute='selective' saves the results of matrix multiplications and of torch's attention, but"
            f" context_parallel={kind!r} computes attention with other operators. Use recompute=True, or"
            " context_parallel='ulysses'. [LH602]"
        )
    if size > 1 and sequence_parallel:
        raise ValueError(
            f"context_parallel_size={size} cannot be combined with sequence_parallel=True, because both shard the"
            " sequence. Remove sequence_parallel: with context parallelism, all activations of a layer are already"
            " sharded. [LH603]"
        )

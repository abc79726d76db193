"""Layers that work on their share of a sequence, while the code around them sees all of it.

::

    the user's step    embedding, labels, masks          loss, metrics     whole sequences, the same on every rank
                           |                                ^
    layers              [ share ] --> [ share ]             |              attention communicates
    around them                          `--> norm, head, cross entropy    shares, as long as each position is by itself
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_hybrid.distributed.pytree import map_leaves
from lightning_hybrid.distributed.random import derive_seed, peek_number
from lightning_hybrid.tensor_parallel.context_parallel.attention import Counts, Region, is_balanced
from lightning_hybrid.tensor_parallel.context_parallel.division import Division, sequence_dim_of
from lightning_hybrid.tensor_parallel.context_parallel.draws import Draws
from lightning_hybrid.tensor_parallel.context_parallel.mappings import ContextGroup
from lightning_hybrid.tensor_parallel.context_parallel.sharded_sequence import from_shares, plain, to_shares
from lightning_hybrid.tensor_parallel.context_parallel.trial import Trial

# The argument by which what runs again in backward knows its region, and what was called there before.
_REGION = "context_parallel_region"


class ContextParallel:
    """While this is entered, layers get their share of a sequence.

    ::

        layer(x)      divided --> runs again in backward, perhaps --> attention communicates, numbers of the layer
                      around      somebody else's                     inside

    Args:
        module: What holds the layers.
        layers: Those that get a share, by name.
        recomputed: Layers, and parts of layers, that run again in backward.
        group: The ranks that share each sequence.
        kind: How attention communicates.
        device: Where this rank computes.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Mapping[str, nn.Module],
        recomputed: Iterable[nn.Module],
        group: ContextGroup,
        kind: str,
        device: torch.device,
    ) -> None:
        self._layers = {layer: name for name, layer in layers.items()}
        self._parts = [part for part in recomputed if part not in self._layers]
        self._group, self._kind, self._device = group, kind, device
        self._is_balanced = is_balanced(kind)
        self._dims = {layer: sequence_dim_of(layer) for layer in self._layers}
        self._encoders = [part for part in module.modules() if isinstance(part, nn.TransformerEncoder)]
        self._numbers = {layer: number for number, layer in enumerate((*self._layers, *self._parts))}
        self._calls: Counter[int] = Counter()  # of each layer, since the forward has begun
        self._tried: set[tuple[int, bool]] = set()
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
            with self._replaced(self._inside), between(), self._replaced(self._outside):
                yield
        finally:
            for encoder, before in zip(self._encoders, nested, strict=True):
                encoder.use_nested_tensor = before

    def leave(self, value: Any, *, to_stage: bool) -> Any:
        """What leaves the layers and the code around them, or goes to the layers of the next stage.

        Args:
            value: A tree.
            to_stage: Whether it goes there: then each rank sends its share.
        """
        return to_shares(value) if to_stage else map_leaves(plain, value)

    def enter(self, value: Any) -> Any:
        """What has come from the stage before."""
        return from_shares(value, self._group, balanced=self._is_balanced)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, layers are given whole sequences: where a step is followed without values."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextmanager
    def _replaced(self, wrap: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Inside, the `forward` of each layer is another one."""
        replaced = []
        try:
            for layer in (*self._layers, *self._parts):
                attributes = vars(layer)
                before = attributes.get("forward")
                replaced.append((attributes, before))
                attributes["forward"] = wrap(layer, before or _forward_of(layer))
            yield
        finally:
            for attributes, before in replaced:
                if before is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = before

    def _outside(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        name = self._layers.get(layer, "")

        def part(*args: Any, **kwargs: Any) -> Any:
            region = self._region
            place = {} if region is None else {_REGION: (region, region.counts)}
            return forward(*args, **kwargs, **place)

        def divided(*args: Any, **kwargs: Any) -> Any:
            if self._is_paused or self._region is not None:
                return forward(*args, **kwargs)
            division = Division(name, self._dims[layer], args, kwargs, self._group, balanced=self._is_balanced)
            self._try(layer, forward, division)
            self._region = Region(name, division.shares, self._kind, self._make_draws(layer, division))
            try:
                local_args, local_kwargs = division.local()
                place = {_REGION: (self._region, Counts())}
                return division.joined(forward(*local_args, **local_kwargs, **place))
            finally:
                self._region = None

        return divided if name else part

    def _inside(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            region, counts = kwargs.pop(_REGION, (None, Counts()))
            if region is None:
                return forward(*args, **kwargs)
            with ExitStack() as stack:
                if layer in self._layers:  # a part that runs again by itself goes on in the stream of its layer
                    stack.enter_context(region.draws.common())
                if not region.is_active:
                    stack.enter_context(region)
                    stack.callback(setattr, self, "_region", self._region)
                    self._region = region  # for parts, where the layer runs again
                region.counts = counts
                return forward(*args, **kwargs)

        return inside

    def _make_draws(self, layer: nn.Module, division: Division) -> Draws:
        number = self._numbers[layer]
        self._calls[number] += 1
        of_call = derive_seed(peek_number(), number, self._calls[number])
        return Draws(of_call, self._group.rank, division.batch_size, self._device)

    def _try(self, layer: nn.Module, forward: Callable[..., Any], division: Division) -> None:
        """Before the first call of a layer, in training or not, find out whether shares are right."""
        key = id(layer), layer.training
        if key in self._tried:
            return
        Trial(self._layers[layer], layer, forward, self._kind, self._group, self._device)(division)
        self._tried.add(key)


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
            f"context_parallel_size={size} does not go with tensor_parallel_mode={tensor_parallel_mode!r}, where"
            " activations are divided already. Use tensor_parallel_mode='1d', or context_parallel_size=1."
        )
    if size > 1 and kind != "ulysses" and recompute == "selective":
        raise ValueError(
            f"context_parallel={kind!r} does not go with recompute='selective', which keeps the results of matrix"
            " products and of torch's attention, and this one is made of others. Use recompute=True, or"
            " context_parallel='ulysses'."
        )
    if size > 1 and sequence_parallel:
        raise ValueError(
            f"context_parallel_size={size} does not go with sequence_parallel=True: both divide the sequence. Context"
            " parallelism divides it everywhere in the layers, so leave sequence_parallel out."
        )


def _forward_of(layer: nn.Module) -> Callable[..., Any]:
    """What a layer's class does: the one that it has now, as a layer may be of another for a while."""
    return lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)

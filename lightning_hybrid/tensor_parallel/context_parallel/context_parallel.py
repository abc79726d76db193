"""Context parallelism for the layers of a module. The code around the layers sees full sequences.

::

    the user's step    embedding, labels, masks          loss, metrics     full sequences, equal on every rank
                           |                                ^
    layers              [ shard ] --> [ shard ]             |              attention communicates
    around them                          `--> norm, head, cross entropy    shards, as long as positions are separate

`strategy.parallelize` creates one :class:`ContextParallel` per run and enters :meth:`ContextParallel.around` around all
forwards of a step or of an evaluation. `StepContext` calls `enter` and `leave` with values between stages, `leave` with
the result of the step, and `paused` while a step is traced. Sequences are sharded at layers and not in the data loader,
because the user's step, with its shifted labels, masks and metrics, must see full sequences.

Terms: a *division* is one call of a layer with its sharded arguments. A *region* is the mode in which the layer then
runs (`attention`). A *tap* is a forward hook of the user inside a layer. A *place* is the position of a tensor among
the arguments of such a hook (`hooks`). A *trial* compares a layer on full sequences and on shards before its first
call.
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
    """The context in which layers compute on sequence shards.

    ::

        layer(x)      shard inputs --> recomputation, if any --> attention communicates, own random numbers
                      outside          `between`                 inside

    If `torch.utils.checkpoint` recomputes code around or inside layers, the code runs in its original place: in the
    same layer, after the same number of calls. All ranks must call each layer together.

    Args:
        module: The module that contains the layers.
        layers: The layers that compute on shards, by name: the body, or the layers that would be split into stages.
        group: The context-parallel ranks.
        kind: The method by which attention communicates, one of :data:`~.attention.KINDS`.
        device: The device of this rank.
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
        self._calls: Counter[int] = Counter()  # calls of each layer in this forward
        self._tried: dict[Any, Places] = {}  # sequence dimensions of hook arguments, by layer, training mode and hooks
        self._leaks = Leaks()
        self._region: Region | None = None  # the region of the layer that runs
        self._is_paused = False

    @contextmanager
    def around(self, between: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Shard sequences in forwards inside the context.

        Calls of layers are counted from here, for their random numbers. Encoders of torch make no nested tensors.

        Args:
            between: Returns a context that is entered around the code of the layers, and that recomputes this code in
                backward.
        """
        nested = [encoder.use_nested_tensor for encoder in self._encoders]
        self._calls.clear()
        try:
            for encoder in self._encoders:
                encoder.use_nested_tensor = False  # nested tensors have sequences of different lengths
            inside, outside = (replaced_forwards(self._layers, wrap) for wrap in (self._inside, self._outside))
            with again_in(self._here), inside, between(), outside:
                yield
        finally:
            for encoder, before in zip(self._encoders, nested, strict=True):
                encoder.use_nested_tensor = before

    def leave(self, value: Any, *, to_stage: bool) -> Any:
        """Return a value that leaves the layers and the code around them, or that is sent to the next stage.

        All ranks must call it, because it gathers sharded sequences that are not sent to a stage.

        Args:
            value: A tree, such as the result of the user's step.
            to_stage: True if the value is sent to the next stage. Each rank then sends its sequence shard.

        Returns:
            The tree, with plain tensors, or with :class:`~.sharded_sequence.SequenceShare` for the next stage.

        Raises:
            WrongUseError: If the loss depends on a tensor that left a layer in another way than as its result.
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
        """Return a value that this stage received from the previous stage, with sequences that are sharded again."""
        return from_shares(value, self._group, balanced=self._is_balanced)

    def paused(self) -> AbstractContextManager[None]:
        """Pass full sequences to layers inside the context, while a step is traced without values."""
        return replaced_attributes(self, _is_paused=True)

    def _outside(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        name = self._layers[layer]

        @uncompiled  # in a compiled layer, collectives and modes would be compiled too
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
            if region is None or self._layers[layer] != region.name:  # or part of a sharded layer
                return forward(*args, **kwargs)
            with region.draws.common(), region.entered():
                return forward(*args, **kwargs)

        return inside

    def _here(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that enters the present place in the step again, when code is recomputed in backward."""
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
        """Test a layer before its first call, and find the sequence dimensions of hook arguments. It is a collective.

        A layer is tested again in evaluation, or with other hooks. If gradients are enabled, the tensors of this call
        are marked, so that :meth:`leave` finds a loss that depends on a single shard. A subclass of the dry run
        replaces this method.

        Args:
            layer: The layer.
            forward: The `forward` of the layer.
            division: The call.
            taps: The hooks inside the layer that are called with full sequences.

        Returns:
            The sequence dimensions of the arguments of hooks.
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
    """Raise an error if an argument cannot be combined with context parallelism.

    Args:
        size: The number of context-parallel ranks.
        kind: The method by which attention communicates.
        sequence_parallel: True if tensor-parallel ranks shard the sequence too.
        recompute: The activation checkpointing, as in `HybridStrategy`.
        tensor_parallel_mode: The arrangement of the tensor-parallel ranks.

    Raises:
        ValueError: If the arguments cannot be combined. With one context-parallel rank, all can be combined.
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

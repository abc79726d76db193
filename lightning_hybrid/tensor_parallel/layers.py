"""Parallel layers, which compute with this rank's shard of their weights. Inputs and outputs are plain tensors.

A layer of the user becomes a parallel layer in place: only its class changes, to a new subclass of a class of this file
and of the layer's own class. Names, hooks, ties and `isinstance` checks therefore keep working, and callbacks can copy
the layer. A replacement module would break all of them.

A plan (`plan`) gives a *style* to each layer, and `styles` maps each style to a class of this file. `Plan.apply` calls
:func:`parallelize_layer` before the first step, and `Plan.undo` calls :func:`restore_layer` when the full module is
gathered. All ranks must call a parallel layer together, because most forwards and backwards are collectives.

Terms: T is the number of tensor-parallel ranks. A *column-wise* layer has a shard of the output features, and a
*row-wise* layer has a shard of the input features and sums the results. A *block* is a module with such layers, for
example an attention. A *region* is a module of the plan inside which sequences are sharded (sequence parallelism).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hybrid.distributed.dtensor import shard_of, uncompiled
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.distributed.random import own_draws
from lightning_hybrid.tensor_parallel import mappings
from lightning_hybrid.tensor_parallel.async_linear import column_linear
from lightning_hybrid.tensor_parallel.context_parallel.sharded_sequence import on_share
from lightning_hybrid.tensor_parallel.vocab_parallel import VocabParallelLogits


class ParallelLayer:
    """The base class of parallel layers.

    Attributes:
        tensor_group: The ranks that compute the layer together.
        sequence_dim: The dimension of activations along which sequences are sharded outside the layer; ``None`` if
            activations are replicated there.
        sums_vector_gradients: True if ranks with the same features sum the gradients of biases and norms, as for ranks
            in a square or cube. Only the estimate of messages (`tuning.dry_run`) reads it.
    """

    tensor_group: mappings.TensorGroup
    sequence_dim: int | None
    sums_vector_gradients: ClassVar[bool] = False

    def gather_input(self, x: Tensor) -> Tensor:
        """Return the full input, as input of a shard of the weights: see :func:`~.mappings.gather_input`."""
        return mappings.gather_input(x, self.sequence_dim, self.tensor_group)

    def reduce_output(self, x: Tensor) -> Tensor:
        """Return the output from partial sums: replicated, or this rank's sequence shard. This is a collective."""
        if self.sequence_dim is None:
            return mappings.reduce_from_tp(x, self.tensor_group)
        return mappings.reduce_scatter_to_sp(x, self.sequence_dim, self.tensor_group)


def parallelize_layer(layer: nn.Module, mixin: type, **attributes: Any) -> None:
    """Turn a layer into a parallel layer.

    A layer can become several parallel layers, for example for two styles. The class that is added last runs first. If
    the layer has the class already, only its attributes are set.

    Args:
        layer: The layer, which is changed in place. Its parameters do not change.
        mixin: A class of parallel layers.
        attributes: Attributes of that class, by name. :func:`restore_layer` removes them.
    """
    if not isinstance(layer, mixin):
        layer.__class__ = _mixed(mixin, type(layer))
    vars(layer).setdefault(_ADDED, set()).update(attributes)
    vars(layer).update(attributes)


def restore_layer(layer: nn.Module) -> None:
    """Turn a parallel layer back into the original layer. The caller gathers its parameters."""
    layer.__class__ = _original(type(layer))
    for attribute in vars(layer).pop(_ADDED, ()):
        vars(layer).pop(attribute, None)


@contextmanager
def original_classes(module: nn.Module) -> Iterator[None]:
    """Give parallel layers their original classes, which compute with full weights, inside the context.

    It is used while a step is traced. The trace replaces the sharded parameters by fake tensors of the full shape.
    """
    parallel = [(layer, type(layer)) for layer in module.modules() if isinstance(layer, ParallelLayer)]
    try:
        for layer, kind in parallel:
            layer.__class__ = _original(kind)
        yield
    finally:
        for layer, kind in parallel:
            layer.__class__ = kind


_ADDED = "_tensor_parallel_attributes"  # where a layer stores the names of the attributes that were added
_MIXED: dict[tuple[type, type], type] = {}  # the made classes, by the class of parallel layers and the layer's class


def _mixed(mixin: type, base: type) -> type:
    if (mixin, base) not in _MIXED:
        namespace = {"__module__": base.__module__, "__doc__": base.__doc__}
        _MIXED[mixin, base] = type(base.__name__, (mixin, base), namespace)
    return _MIXED[mixin, base]


def _original(kind: type) -> type:
    while kind in _MIXED.values():
        kind = kind.__bases__[1]
    return kind


def original_class(layer: nn.Module) -> Any:
    """Return the class that a layer had before it became a parallel layer."""
    return _original(type(layer))


def disable_fastpath(module: nn.Module) -> None:
    """Disable torch's fused inference of transformer layers, which reads the weights directly.

    Each `nn.TransformerEncoder` also stops making nested tensors, which only this inference supports.
    """
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            if isinstance(layer.self_attn, ParallelLayer) or isinstance(layer.linear1, ParallelLayer):
                _set(layer, "activation_relu_or_gelu", 0)
        elif isinstance(layer, nn.TransformerEncoder):
            _set(layer, "use_nested_tensor", False)


def restore_fastpath(module: nn.Module) -> None:
    """Restore torch's fused inference of transformer layers where it was enabled."""
    for layer in module.modules():
        vars(layer).update(vars(layer).pop(_FASTPATH, {}))


_FASTPATH = "_fastpath_before_tensor_parallel"  # where a layer stores the original setting


def _set(layer: nn.Module, attribute: str, value: Any) -> None:
    vars(layer).setdefault(_FASTPATH, {attribute: getattr(layer, attribute)})
    setattr(layer, attribute, value)


class ColumnParallelLinear(ParallelLayer):
    """A linear layer that computes this rank's shard of the output features.

    Attributes:
        gather_output: True if the output is gathered.
        input_is_gathered: True if a module around the layer, a :class:`SequenceGathered`, has already gathered the
            input, and reduces its gradient.
        is_transposed: True if the weight is ``[in_features, out_features]``, as in GPT-2's `Conv1D`.
    """

    weight: Tensor
    bias: Tensor | None
    gather_output: bool
    input_is_gathered: bool
    is_transposed: bool

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features / T)``, or gathered to ``(..., out_features)``."""
        weight, bias = shard_of(self.weight), shard_of(self.bias)
        weight = weight.t() if self.is_transposed else weight
        if self.input_is_gathered:
            y = F.linear(x, weight, bias)
        else:
            y = column_linear(x, weight, bias, self.tensor_group, self.sequence_dim)
        return mappings.gather_from_tp(y, -1, self.tensor_group) if self.gather_output else y


class RowParallelLinear(ParallelLayer):
    """A linear layer that takes this rank's shard of the input features. The results are summed over the ranks.

    The bias is replicated, and is added after the sum.

    Attributes:
        scatter_input: True if the input has all features on every rank, and the layer takes this rank's shard of them.
        is_transposed: True if the weight is ``[in_features, out_features]``.
    """

    weight: Tensor
    bias: Tensor | None
    scatter_input: bool
    is_transposed: bool

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_features / T)``, or ``(..., in_features)`` if it is scattered, to ``(..., out_features)``."""
        if self.scatter_input:
            x = mappings.scatter_to_tp(x, -1, self.tensor_group)
        weight = shard_of(self.weight)
        y = self.reduce_output(F.linear(x, weight.t() if self.is_transposed else weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)  # the dtype that autocast gives a linear layer


class VocabParallelEmbedding(ParallelLayer):
    """An embedding that holds this rank's shard of the rows."""

    weight: Tensor
    padding_idx: int | None

    @uncompiled
    def forward(self, indices: Tensor) -> Tensor:
        """Map indices of any shape to ``(..., embedding_dim)``.

        Each rank looks up the indices of its own rows. The other rows are zero, and the results are summed over the
        ranks. The result is replicated, also in a region.

        Raises:
            IndexError: If an index is out of range; only for indices on the CPU, because reading them from a device
                would wait for it.
        """
        weight = shard_of(self.weight)
        if (
            type(indices) is Tensor
            and indices.device.type == "cpu"
            and ((indices < 0) | (indices >= len(self.weight))).any()
        ):
            raise IndexError(f"An index is out of range: the embedding has {len(self.weight)} rows [LH530]")
        local, elsewhere = self.tensor_group.local_indices(indices, len(weight))
        padding = None if self.padding_idx is None else self.padding_idx - self.tensor_group.rank * len(weight)
        local_padding = padding if padding is not None and 0 <= padding < len(weight) else None
        found = F.embedding(local, weight, local_padding)
        return mappings.reduce_from_tp(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tensor_group)


class ColumnParallelEmbedding(ParallelLayer):
    """An embedding that computes this rank's shard of the features, for example a bias for each head.

    It communicates nothing.
    """

    weight: Tensor
    padding_idx: int | None

    @uncompiled
    def forward(self, indices: Tensor) -> Tensor:
        """Map indices of any shape to ``(..., embedding_dim / T)``."""
        return F.embedding(indices, shard_of(self.weight), self.padding_idx)


class VocabParallelHead(ParallelLayer):
    """A linear layer to the vocabulary. Its output is gathered only for operations that need all classes.

    A gathered output would take T times the memory, and ranks would send all logits in each step.
    """

    weight: Tensor
    bias: Tensor | None

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to `VocabParallelLogits` of shape ``(..., out_features)``.

        If `x` is a sequence that is sharded over context-parallel ranks, the result is such a sequence too.
        """
        return on_share(self._logits, x)

    def _logits(self, x: Tensor) -> Tensor:
        weight, bias = shard_of(self.weight), shard_of(self.bias)
        y = column_linear(x, weight, bias, self.tensor_group, self.sequence_dim)
        return VocabParallelLogits.from_local(y, self.tensor_group)


class OnShards(ParallelLayer):
    """A layer that computes on shards, such as a dropout or a norm.

    In training, each rank draws its own random numbers. With equal random numbers, dropout would drop the same entries
    of every shard.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        forward: Callable[..., Any] = super().forward  # type: ignore[misc]
        if not getattr(self, "training", False) or getattr(self, "p", 1.0) == 0.0:
            return forward(*args, **kwargs)
        with own_draws(self.tensor_group.rank, _device_of(args)):
            return forward(*args, **kwargs)


class LocalRandomNumbers(ParallelLayer):
    """A block in which each rank draws its own random numbers between two layers, as dropout of shards requires.

    Before the first and after the last of these layers, where activations are replicated, all ranks draw the same
    numbers. Random functions that the code of the block calls, such as `F.dropout`, are not modules and cannot become
    :class:`OnShards`. In evaluation, the block is unchanged.

    Attributes:
        first: The path, relative to the block, of the column-wise layer after which each rank draws its own numbers.
        last: The path, relative to the block, of the row-wise layer before which this ends.
    """

    first: str
    last: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        block: Any = self
        forward: Callable[..., Any] = super().forward  # type: ignore[misc]
        if not block.training:
            return forward(*args, **kwargs)
        with ExitStack() as hooks, ExitStack() as inside:

            def begin(layer: nn.Module, args: Any, output: Tensor) -> None:
                inside.enter_context(own_draws(self.tensor_group.rank, output.device))

            def end(layer: nn.Module, args: Any) -> None:
                inside.close()

            hooks.callback(block.get_submodule(self.first).register_forward_hook(begin).remove)
            hooks.callback(block.get_submodule(self.last).register_forward_pre_hook(end).remove)
            return forward(*args, **kwargs)


class DividedNumbers(ParallelLayer):
    """A module whose integer attributes, such as a number of heads, are divided while it runs.

    The divisor is the number of shards of features: all ranks in a line, one side of a square or cube. Outside
    `forward`, the attributes have their full values, for example for code that makes a mask for each head.

    Attributes:
        divided: The names of the divided attributes.
    """

    divided: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        whole = {name: getattr(self, name) for name in self.divided}
        try:
            for name, number in whole.items():
                setattr(self, name, number // self.tensor_group.feature_parts)
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            for name, number in whole.items():
                setattr(self, name, number)


class NarrowInput(ParallelLayer):
    """A block that reads the width of its shards from its input, as in ``B, N, C = x.shape``.

    The code of the block receives, as first argument, a tensor that is as wide as a shard and has only NaN values. The
    layers to which the code passes this tensor receive the true input instead. Their other arguments are unchanged.

    Attributes:
        takers: The paths of these layers, relative to the block.
    """

    takers: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block.

        Raises:
            WrongUseError: If one of `takers` receives another tensor that is as wide as a shard, because the code has
                changed the input.
        """
        block: Any = self
        first = _argument_names(self)[0]
        x: Tensor = args[0] if args else kwargs[first]
        # The block computes with the width of its input before any of its layers runs, so only the input can have
        # another width. Any other use of the input is visible, because its values are NaN. The hooks below recognize
        # the tensor by identity, and pass the true input to the layers.
        narrow = x.new_full((), math.nan).expand(*x.shape[:-1], x.shape[-1] // self.tensor_group.size)

        def give(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if args[0] is narrow:
                return (x, *args[1:])
            if args[0].shape[-1] == narrow.shape[-1]:
                raise WrongUseError(
                    f"A {type(self).__name__} has the style 'narrow_input', but passes a modified input to layers that"
                    f" are sharded over tensor_parallel_size={self.tensor_group.size} ranks. Pass the input unchanged."
                    " Alternatively, remove 'narrow_input' from `tensor_parallel_plan` and read widths from the outputs"
                    " of the layers. To keep the module unsharded, give it the style 'replicate'. [LH514]"
                )
            return None

        with ExitStack() as hooks:
            for path in self.takers:
                hooks.callback(block.get_submodule(path).register_forward_pre_hook(give, prepend=True).remove)
            given = ((narrow, *args[1:]), kwargs) if args else ((), {**kwargs, first: narrow})
            return super().forward(*given[0], **given[1])  # type: ignore[misc]


class MaskPerHead(ParallelLayer):
    """An attention that computes this rank's heads, but whose masks, biases and attention weights have all heads.

    Attributes:
        total_heads: The number of all heads. An argument after the first one has values for each head if its name
            contains "mask", "bias" or "alibi", and its shape is ``(batch, total_heads, L or 1, S)``; the layer receives
            this rank's heads. A result after the first one, such as attention weights, has values for each head if its
            shape is ``(batch, total_heads / T, L, S)``; it is gathered.
    """

    total_heads: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the attention.

        Raises:
            WrongUseError: If a mask has one or three dimensions, and the first one is as long as the number of heads,
                or of heads in all samples.
        """
        names = _argument_names(self)
        given = [*zip(names, args, strict=False), *kwargs.items()]
        sizes: tuple[int, ...] = next((value.shape[:-1] for _, value in given if isinstance(value, Tensor)), ())
        masks = {name: value for name, value in given[1:] if _is_mask(name) and isinstance(value, Tensor)}
        local = {}
        for name, mask in masks.items():
            if mask.ndim == 4 and mask.shape[1] == self.total_heads and mask.shape[2] in (1, *sizes):
                local[name] = mappings.scatter_to_tp(mask, 1, self.tensor_group)
            elif mask.ndim in (1, 3) and len(mask) in {self.total_heads, self.total_heads * sizes[0]} - {sizes[0]}:
                raise WrongUseError(
                    f"A {type(self).__name__} received {name!r} of shape {tuple(mask.shape)}, but its"
                    f" {self.total_heads} heads are sharded over tensor_parallel_size={self.tensor_group.size} ranks"
                    " (style 'mask_per_head' in `tensor_parallel_plan`). A mask or bias with values for each head must"
                    f" therefore have the shape (batch, {self.total_heads}, L, S). To keep the attention unsharded,"
                    " write your own plan without an entry for it. [LH515]"
                )
        args = tuple(local.get(name, value) for name, value in zip_longest(names[: len(args)], args))
        output = super().forward(*args, **{key: local.get(key, value) for key, value in kwargs.items()})  # type: ignore[misc]
        return self._whole(output, {id(value): masks[name] for name, value in local.items()})

    def _whole(self, output: Any, given: dict[int, Tensor]) -> Any:
        """Return the output with the values of all heads. Attention weights are gathered, which is a collective.

        Args:
            output: The output of the attention for this rank's heads: a tree of tensors and other values.
            given: The masks of all heads, by the `id()` of their shards. A shard in the output is replaced by its mask.
        """
        leaves, spec = flatten(output)
        for index, leaf in enumerate(leaves):
            if id(leaf) in given:
                leaves[index] = given[id(leaf)]
            elif index and is_per_head(leaf, self.total_heads // self.tensor_group.size):
                leaves[index] = mappings.gather_from_tp(leaf, 1, self.tensor_group)
        return unflatten(leaves, spec)


def is_per_head(value: Any, heads: int) -> bool:
    """Return True if a value is a tensor ``(batch, heads, L, S)`` with so many heads."""
    return isinstance(value, Tensor) and value.ndim == 4 and value.shape[1] == heads


def _is_mask(name: str) -> bool:
    return any(word in name for word in ("mask", "bias", "alibi"))


def _argument_names(layer: nn.Module | ParallelLayer) -> list[str]:
    """Return the argument names of the user's `forward`."""
    kind: Any = _original(type(layer))
    return list(_signature(kind.forward).parameters)[1:]


_signature = functools.lru_cache(inspect.signature)


class SequenceRegion(ParallelLayer):
    """A layer inside which sequences are sharded.

    Attributes:
        scatter_input: True if the input is replicated, and the layer scatters it. If False, the input is a shard
            already, because the layer before it in an `nn.Sequential` is a region too.
        gather_output: True if the output is gathered. If False, the next layer receives the shard.
    """

    scatter_input: bool
    gather_output: bool

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on a sequence shard.

        Raises:
            ValueError: If the length of the sequence is not divisible by the number of ranks.
        """
        assert self.sequence_dim is not None
        if self.scatter_input:
            x = mappings.scatter_to_tp(x, self.sequence_dim, self.tensor_group)
        y = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return mappings.gather_from_tp(y, self.sequence_dim, self.tensor_group) if self.gather_output else y


class SequenceGathered(ParallelLayer):
    """A layer inside a region that gathers the sequence once, for all column-wise layers in it.

    Its row-wise layers reduce-scatter the sequence again.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on full sequences."""
        return super().forward(self.gather_input(x), *args, **kwargs)  # type: ignore[misc]


def _device_of(args: tuple[Any, ...]) -> torch.device:
    return next((arg.device for arg in args if isinstance(arg, Tensor)), torch.device("cpu"))

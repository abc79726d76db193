"""Layers over a grid of ranks: squares and cubes. Each rank computes with its block of the weights.

`grid.styles` selects them if ``tensor_parallel_mode`` is not ``"1d"``, and `tensor_parallel.layers.parallelize_layer`
changes the classes of the user's layers before the first step. Layers for a line (`tensor_parallel.layers`) cannot be
used, because here activations are sharded too.

Terms: *rows* are samples. A *pair* is a column-wise and a row-wise layer, or the projections of an attention, between
which activations have the *inner* layout; around the pair they have the *outer* layout. A *region* is a module with the
style ``"sequence_region"``, inside which all activations are blocks in the outer layout.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.dtensor import shard_of, uncompiled
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.tensor_parallel.attention import ParallelAttention, is_same
from lightning_hybrid.tensor_parallel.context_parallel.attention import additive_mask
from lightning_hybrid.tensor_parallel.grid.blocks import (
    Grid,
    block_linear,
    gather_blocks,
    local_rows,
    scatter_blocks,
)
from lightning_hybrid.tensor_parallel.layers import ParallelLayer
from lightning_hybrid.tensor_parallel.mappings import copy_to_tp, reduce_from_tp


class GridLayer(ParallelLayer):
    """The base class of layers over a grid.

    Attributes:
        rows_dim: The dimension of the samples in an activation.
        in_region: True if the layer is in a region, where activations are sharded in blocks. If False, its input and
            output are replicated, or are in blocks between the two layers of a pair.
    """

    tensor_group: Grid
    rows_dim: int
    in_region: bool
    sums_vector_gradients: ClassVar[bool] = True


class GridLinear(GridLayer):
    """A linear layer with a weight in blocks.

    Attributes:
        is_second: True if it is the second layer of a pair, which maps the inner layout to the outer layout.
        enters: True if its input is replicated outside a region.
        leaves: True if its output is replicated outside a region.
        is_transposed: True if the weight is ``[in_features, out_features]``.
        blocks: The number of equal blocks of output features. Each block is split separately.
    """

    weight: Tensor
    bias: Tensor | None
    blocks: int
    is_second: bool
    enters: bool
    leaves: bool
    is_transposed: bool

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``, in blocks between the layers of a pair and in regions.

        Raises:
            WrongUseError: If a replicated input has no dimension for samples, or if no first layer of a pair has run
                before a second one.
        """
        grid, shape = self.tensor_group, self.tensor_group.shape
        enters, leaves = self.enters and not self.in_region, self.leaves and not self.in_region
        if enters:
            x = grid.enter(_with_rows(x, self), self.rows_dim)
        source, target = (shape.inner, shape.outer) if self.is_second else (shape.outer, shape.inner)
        weight, bias = shard_of(self.weight), shard_of(self.bias)
        weight = weight.t() if self.is_transposed else weight
        dims = {"rows_dim": self.rows_dim, "blocks": self.blocks}
        y = block_linear(x, weight, bias, grid, source=source, target=target, **dims)
        return grid.leave(y, target, self.rows_dim) if leaves else y


class GridAttention(ParallelAttention, GridLayer):
    """An `nn.MultiheadAttention` that computes this rank's heads for this rank's samples.

    ::

        query, key, value     blocks of samples and features
        in-projection         the features of this rank's heads, for q, k and v, for this rank's samples
        attention             this rank's heads and samples; nothing is sent
        out-projection        blocks of samples and features
    """

    @uncompiled
    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute `nn.MultiheadAttention.forward`, with the same shapes.

        Raises:
            WrongUseError: If attention weights are requested in a region, or if the input has no batch dimension.
            RuntimeError: If `is_causal` is True without an `attn_mask`, as in torch.
        """
        rows = _with_rows(query, self, dims=3).shape[self.rows_dim]
        out, weights = super().forward(query, *args, **kwargs)
        if not self.in_region:
            out = gather_blocks(out, self.tensor_group, self.tensor_group.shape.outer, self.rows_dim)
            out = out.narrow(self.rows_dim, 0, rows)
        elif weights is not None:
            raise WrongUseError(
                f"With tensor_parallel_mode={self.tensor_group.shape.mode!r}, a {type(self).__name__} inside a module"
                " with the style 'sequence_region' cannot return attention weights. Call the attention with"
                " need_weights=False. [LH519]"
            )
        return out, None if weights is None else weights.narrow(0, 0, rows)

    def _gather_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blocks: dict[int, Tensor] = {}

        def block(x: Tensor, *, is_block: bool) -> Tensor:
            if id(x) not in blocks:
                grid = self.tensor_group
                blocks[id(x)] = x if is_block else scatter_blocks(x, grid, grid.shape.outer, self.rows_dim)
            return blocks[id(x)]

        memory_is_block = self.in_region and not self.memory_is_replicated
        key, value = (query if is_same(other, query) else other for other in (key, value))
        q = block(query, is_block=self.in_region)
        return q, block(key, is_block=memory_is_block), block(value, is_block=memory_is_block)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: int = 1) -> Tensor:
        shape = self.tensor_group.shape
        dims = {"rows_dim": self.rows_dim, "blocks": blocks}
        return block_linear(x, weight, bias, self.tensor_group, source=shape.outer, target=shape.inner, **dims)

    def _project_out(self, x: Tensor) -> Tensor:
        shape = self.tensor_group.shape
        weight, bias = shard_of(self.out_proj.weight), shard_of(self.out_proj.bias)
        dims = {"rows_dim": self.rows_dim}
        return block_linear(x, weight, bias, self.tensor_group, source=shape.inner, target=shape.outer, **dims)

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Combine both masks into one mask for this rank's samples and heads."""
        grid, layout, mask = self.tensor_group, self.tensor_group.shape.inner, None
        if attn_mask is not None:
            mask = copy_to_tp(additive_mask(attn_mask, q.dtype), grid)
            if mask.dim() == 3:  # one mask per head: (samples * all heads, L, S)
                mask = local_rows(mask.view(-1, self.num_heads, *mask.shape[1:]), grid, layout, 0)
                mask = grid.along(layout.features).local_chunk(mask, 1)
        if padding is None:
            return mask
        rows = local_rows(copy_to_tp(additive_mask(padding, q.dtype), grid), grid, layout, 0)[:, None, None, :]
        return rows if mask is None else mask + rows

    def _gather_weights(self, weights: Tensor | None, *, average: bool, is_batched: bool) -> Tensor | None:
        if weights is None:
            return None
        grid = self.tensor_group
        gathered = gather_blocks(weights, grid, grid.shape.inner, 0, features_dim=1)
        return gathered.mean(1) if average else gathered


class GridLayerNorm(GridLayer):
    """An `nn.LayerNorm` in a region. Mean and variance are computed over the features of all ranks."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """Normalize a block of ``(..., features)``. Sums are all-reduced over the ranks with the same samples."""
        grid, layout = self.tensor_group, self.tensor_group.shape.outer
        same_features, same_samples = grid.along(*layout.rows), grid.along(layout.features)
        number = x.shape[-1] * same_samples.size
        wide = x if x.dtype == torch.float64 else x.float()

        def mean(values: Tensor) -> Tensor:
            total = reduce_from_tp(values.sum(-1, keepdim=True), same_samples)
            return copy_to_tp(total, same_samples) / number

        centred = wide - mean(wide)
        y = centred * (mean(centred * centred) + self.eps).rsqrt()
        if self.weight is not None:
            y = y * copy_to_tp(shard_of(self.weight), same_features)
        if self.bias is not None:
            y = y + copy_to_tp(shard_of(self.bias), same_features)
        return y if torch.is_autocast_enabled(x.device.type) else y.to(x.dtype)


class GridRegion(GridLayer):
    """A layer inside which activations are in blocks. It splits its input once, and gathers its output once."""

    sums_vector_gradients: ClassVar[bool] = False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on a block.

        Raises:
            WrongUseError: If the input has no batch dimension.
        """
        grid, layout = self.tensor_group, self.tensor_group.shape.outer
        block = scatter_blocks(_with_rows(x, self, dims=self.rows_dim + 2), grid, layout, self.rows_dim)
        y = super().forward(block, *args, **kwargs)  # type: ignore[misc]
        return gather_blocks(y, grid, layout, self.rows_dim).narrow(self.rows_dim, 0, x.shape[self.rows_dim])


def _with_rows(x: Tensor, layer: GridLayer, dims: int = 2) -> Tensor:
    """Return an input that has a batch dimension to shard, or raise a `WrongUseError`.

    Args:
        x: The input.
        layer: The layer, for the message.
        dims: The least number of dimensions.
    """
    if x.dim() >= dims:
        return x
    assert isinstance(layer, nn.Module)
    raise WrongUseError(
        f"A {type(layer).__name__} received an input of shape {tuple(x.shape)} without a batch dimension, but"
        f" tensor_parallel_mode={layer.tensor_group.shape.mode!r} shards this dimension. Add the dimension with"
        " `x.unsqueeze(0)`, or give the layer the style 'replicate' in `tensor_parallel_plan`. [LH518]"
    )

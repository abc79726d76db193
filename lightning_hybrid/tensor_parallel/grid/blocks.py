"""Activations in blocks over a grid of ranks, and matrix products of blocks.

A *grid* is a square ("2d"), several squares ("2.5d") or a cube ("3d") of tensor-parallel ranks. `grid.layers` calls the
functions here in each forward. All ranks of the grid must call them together. In a line, each rank has full activations
around pairs of layers. In a grid, it has only a block of them in regions (modules with the style
``"sequence_region"``), but weights must be gathered for each product.

Each rank has a block of the rows (samples) and features of an activation, and a block of each weight::

    2d, 2.5d     X[rows over depth and column, features over row]    W[in over column, out over row]
                 Y = all-gather X along row @ all-gather W along column       each depth has the same weights

    3d           X[rows over input and weight, features over output] W[in over output, out over input and weight]
                 Y = reduce-scatter(all-gather X along input @ all-gather W along weight) along output
                                            rows of Y are sharded over output and weight, features over input: the
                                            next layer exchanges input and output, and restores the layout of X

The papers either broadcast blocks one after the other (SUMMA: van de Geijn and Watts, 1997; "2d": Xu et al., "An
Efficient 2D Method for Training Super-Large Deep Learning Models", 2021, https://arxiv.org/abs/2104.05343; "2.5d": Wang
et al., "Tesseract", 2021, https://arxiv.org/abs/2105.14500), or gather them ("3d": Bian et al., "Maximizing Parallelism
in Distributed Training for Huge Neural Networks", 2021, https://arxiv.org/abs/2105.14450). Here, blocks are always
gathered. A rank receives the same bytes as with broadcasts, but in one message, and computes one product. As in the
papers, a layer stores only this rank's block for backward, which gathers the blocks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_hybrid.distributed.arrangement import Arrangement, BlockLayout
from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.process_group import all_gather_single
from lightning_hybrid.tensor_parallel.mappings import (
    TensorGroup,
    all_gather_along,
    copy_to_tp,
    gather_from_sp,
    reduce_scatter_along,
    share_input,
    shared_input,
)


class Grid(TensorGroup):
    """The tensor-parallel ranks, arranged in two or three dimensions.

    Args:
        group: The group of all ranks.
        shape: The arrangement of the ranks.
        along: The groups of this rank, by the axes that :meth:`Arrangement.groups` returns.

    Attributes:
        shape: The arrangement of the ranks: its axes and their sizes.
    """

    __slots__ = ("_along", "_rows", "shape")

    def __init__(self, group: ProcessGroup, shape: Arrangement, along: Mapping[tuple[str, ...], ProcessGroup]) -> None:
        super().__init__(group)
        self.shape = shape
        self._along = {axes: TensorGroup(each) for axes, each in along.items()}
        self._rows: dict[int, int] = {}  # rows of inputs between `enter` and `leave`, by the rows of a block

    @property
    def feature_parts(self) -> int:
        """The number of parts into which features, and heads, are divided."""
        return self.shape.parts([self.shape.outer.features])

    def weight_copies(self, group: ProcessGroup) -> int:
        """Return the number of squares, each of which has all weights, if a group gathers weights; else 0.

        Weights are gathered along columns. A single square returns 0 too.
        """
        squares = dict(self.shape.axes).get("depth", 1)
        return squares if squares > 1 and group is self.along("column")() else 0

    def shape_hint(self) -> str:
        """Return the hint that the batch dimension is sharded too."""
        return (
            f" With tensor_parallel_mode={self.shape.mode!r}, the batch dimension is sharded too. Attention, and code"
            " that reads sizes from its input, must be in a module with the style 'sequence_region', where all"
            " activations are sharded."
        )

    def along(self, *axes: str) -> TensorGroup:
        """Return the group of the ranks along some axes."""
        return self._along[axes]

    def enter(self, x: Tensor, rows_dim: int) -> Tensor:
        """Return this rank's block of a replicated input of a pair of layers. Rows are padded.

        The number of rows before the padding is stored for :meth:`leave`. Layers with the same input share the
        communication for its gradient, as in :func:`~.mappings.copy_to_tp`.
        """
        how = "block", rows_dim, torch.is_grad_enabled()  # a block that was made without gradients has no graph
        block = shared_input(x, how)
        if block is None:
            block = scatter_blocks(x, self, self.shape.outer, rows_dim)
            share_input(x, how, block)
        self._rows[block.shape[rows_dim]] = x.shape[rows_dim]
        return block

    def leave(self, block: Tensor, layout: BlockLayout, rows_dim: int) -> Tensor:
        """Return the full output of a pair of layers, without padding, on every rank. This is a collective.

        Args:
            block: This rank's block of the output.
            layout: The layout of the output.
            rows_dim: The dimension of the rows.

        Raises:
            WrongUseError: If no input of a pair with as many rows has entered.
        """
        rows = self._rows.pop(block.shape[rows_dim], None)
        if rows is None:
            raise WrongUseError(
                f"A row-wise layer received a block of {block.shape[rows_dim]} rows that no column-wise layer produced"
                f" on this rank. With tensor_parallel_mode={self.shape.mode!r}, each row-wise layer needs its own"
                " column-wise layer before it on the same stage. Set a `partition` that keeps both layers on one stage,"
                " or give both layers the style 'replicate' in `tensor_parallel_plan`. [LH517]"
            )
        return gather_blocks(block, self, layout, rows_dim).narrow(rows_dim, 0, rows)


def scatter_blocks(x: Tensor, grid: Grid, layout: BlockLayout, rows_dim: int) -> Tensor:
    """Return this rank's block of a replicated tensor. Rows are padded so that they can be split.

    Only the backward communicates: it gathers the gradient.
    """
    x = _padded(x, grid.shape.parts(layout.rows), rows_dim)
    return _Scatter.apply(x, grid, layout, rows_dim)  # type: ignore[no-untyped-call, no-any-return]


def gather_blocks(block: Tensor, grid: Grid, layout: BlockLayout, rows_dim: int, *, features_dim: int = -1) -> Tensor:
    """Return the full tensor, with its padding, on every rank. This is a collective; its backward is local."""
    dims = rows_dim, features_dim % block.dim()
    return _Gather.apply(block, grid, layout, *dims)  # type: ignore[no-untyped-call, no-any-return]


def local_rows(x: Tensor, grid: Grid, layout: BlockLayout, rows_dim: int) -> Tensor:
    """Return this rank's rows of a replicated tensor, such as a mask. Rows are padded so that they can be split."""
    parts = grid.shape.parts(layout.rows)
    return _padded(x, parts, rows_dim).chunk(parts, rows_dim)[grid.shape.index(grid.rank, layout.rows)]


def _padded(x: Tensor, parts: int, rows_dim: int) -> Tensor:
    """Repeat the last row until the rows can be split.

    The results for copies of a row are finite if the result for the row is finite.
    """
    missing = -x.shape[rows_dim] % parts
    if not missing:
        return x
    sizes = [*x.shape]
    sizes[rows_dim] = missing
    return torch.cat([x, x.narrow(rows_dim, x.shape[rows_dim] - 1, 1).expand(sizes)], rows_dim)


def _own_block(x: Tensor, grid: Grid, layout: BlockLayout, rows_dim: int, features_dim: int) -> Tensor:
    rows = x.chunk(grid.shape.parts(layout.rows), rows_dim)[grid.shape.index(grid.rank, layout.rows)]
    features = [layout.features]
    block = rows.chunk(grid.shape.parts(features), features_dim)[grid.shape.index(grid.rank, features)]
    return block.clone(memory_format=torch.contiguous_format)


def _all_blocks(block: Tensor, grid: Grid, layout: BlockLayout, rows_dim: int, features_dim: int) -> Tensor:
    block = block.contiguous()
    gathered = block.new_empty(grid.size * block.shape[0], *block.shape[1:])
    all_gather_single(gathered, block, group=grid())
    names, sizes = zip(*grid.shape.axes, strict=True)
    order = []
    for dim in range(block.dim()):  # before each dimension, the axes over which it is split
        order += [names.index(axis) for axis in layout.rows] if dim == rows_dim else []
        order += [names.index(layout.features)] if dim == features_dim else []
        order.append(len(names) + dim)
    shape = list(block.shape)
    shape[rows_dim] *= grid.shape.parts(layout.rows)
    shape[features_dim] *= grid.shape.parts([layout.features])
    return gathered.view(*sizes, *block.shape).permute(order).reshape(shape)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, layout: BlockLayout, rows_dim: int) -> Tensor:
        ctx.where = grid, layout, rows_dim, x.dim() - 1
        return _own_block(x, *ctx.where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_blocks(full_tensor(gradient), *ctx.where), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, grid: Grid, layout: BlockLayout, rows_dim: int, features_dim: int) -> Tensor:
        ctx.where = grid, layout, rows_dim, features_dim
        return _all_blocks(block, *ctx.where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _own_block(full_tensor(gradient), *ctx.where), None, None, None, None


@dataclass(frozen=True)
class _Product:
    """The communication of one product of blocks.

    Attributes:
        x_dim: The dimension along which the input is gathered.
        x_group: The ranks that gather the input.
        weight_dim: The dimension along which the weight is gathered.
        weight_group: The ranks that gather the weight.
        blocks: The number of equal blocks of output features. Each block is split separately.
        rows_dim: The dimension of the output along which sums are reduce-scattered.
        sum_group: The ranks that reduce-scatter the sums; ``None`` if nothing is summed.
        copies: The ranks that have the same block of the weight; ``None`` if no other rank has it.
    """

    x_dim: int
    x_group: TensorGroup
    weight_dim: int
    weight_group: TensorGroup
    blocks: int
    rows_dim: int
    sum_group: TensorGroup | None
    copies: TensorGroup | None

    def gather_input(self, x: Tensor) -> Tensor:
        """Gather the input features, or the rows, of all ranks along an axis."""
        return all_gather_along(x, self.x_dim, self.x_group)

    def gather_weight(self, weight: Tensor) -> Tensor:
        """Gather the input features, or the output features of each block, of all ranks along an axis."""
        if self.weight_dim == 1:
            return all_gather_along(weight, 1, self.weight_group)
        return all_gather_along(_by_block(weight, self.blocks), 1, self.weight_group).flatten(0, 1)

    def reduce_weight(self, gradient: Tensor) -> Tensor:
        """Return this rank's shard of the sum of the gradients of a weight that :meth:`gather_weight` made."""
        if self.weight_dim == 1:
            return reduce_scatter_along(gradient, 1, self.weight_group).contiguous()
        by_block = _by_block(gradient, self.blocks)
        return reduce_scatter_along(by_block, 1, self.weight_group).flatten(0, 1)


def _by_block(x: Tensor, blocks: int) -> Tensor:
    """Return a tensor with a dimension for the blocks before the first dimension."""
    return torch.unflatten(x, 0, (blocks, -1))


def weight_axes(shape: Arrangement, target: BlockLayout) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes over which the output features, and over which the input features of a weight are split.

    Args:
        shape: The arrangement of the ranks.
        target: The layout of the output of the layer. In a cube, the two layers of a pair differ.
    """
    if shape.mode != "3d":
        return ("row",), ("column",)
    over_input = "input", "weight"
    return (over_input, ("output",)) if target.features == "input" else (("output",), over_input)


def block_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grid: Grid,
    *,
    source: BlockLayout,
    target: BlockLayout,
    rows_dim: int,
    blocks: int = 1,
) -> Tensor:
    """Compute a linear layer over a grid.

    Args:
        x: This rank's block of the input.
        weight: This rank's block, ``(output features, input features)``.
        bias: This rank's shard of the bias; some other ranks have the same shard. ``None`` without a bias.
        grid: The ranks.
        source: The layout of the input.
        target: The layout of the output.
        rows_dim: The dimension of the rows.
        blocks: The number of equal blocks of output features. Each block is split separately.

    Returns:
        This rank's block of the output.
    """
    low = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    if low is not None and x.dtype != torch.float64:  # as autocast does
        x, weight, bias = x.to(low), weight.to(low), None if bias is None else bias.to(low)
    if grid.shape.mode == "3d":
        x_group, sum_group = grid.along(target.features), grid.along(source.features)
        weight_dim = 0 if target.features == "input" else 1
        product = _Product(rows_dim, x_group, weight_dim, grid.along("weight"), blocks, rows_dim, sum_group, None)
    else:
        copies = grid.along("depth") if grid.shape.parts(source.rows) > grid.along("column").size else None
        product = _Product(-1, grid.along("row"), 1, grid.along("column"), blocks, rows_dim, None, copies)
    y: Tensor = _BlockLinear.apply(x, weight, product)  # type: ignore[no-untyped-call]
    return y if bias is None else y + _all_of_bias(bias, grid, target, product)


def _all_of_bias(bias: Tensor, grid: Grid, target: BlockLayout, product: _Product) -> Tensor:
    """Return the bias of the output features that this rank computes, gathered if the weight's output features are."""
    if product.weight_dim == 1:
        return copy_to_tp(bias, grid.along(*target.rows))
    gathered = gather_from_sp(_by_block(bias, product.blocks), 1, product.weight_group).flatten()
    return copy_to_tp(gathered, grid.along("output"))


class _BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: _Product) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):  # the operands are cast already
            y = F.linear(product.gather_input(x), product.gather_weight(weight))
        return y if product.sum_group is None else reduce_scatter_along(y, product.rows_dim, product.sum_group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        product: _Product = ctx.product
        gradient = full_tensor(gradient)
        if product.sum_group is not None:
            gradient = all_gather_along(gradient, product.rows_dim, product.sum_group)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            partial = gradient @ product.gather_weight(weight)
            of_x = reduce_scatter_along(partial, product.x_dim, product.x_group)
        if ctx.needs_input_grad[1]:
            gathered = product.gather_input(x)
            partial = gradient.flatten(0, -2).t() @ gathered.flatten(0, -2)
            of_weight = product.reduce_weight(partial)
            if product.copies is not None:
                dist.all_reduce(of_weight, group=product.copies())
        return of_x, of_weight, None

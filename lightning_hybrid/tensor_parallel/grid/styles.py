"""The styles of a plan for tensor-parallel ranks in a square or cube. The names are the same as for ranks in a line.

Most styles turn a layer into a layer of `grid.layers`, and shard its parameters in blocks. `tensor_parallel.plan`
creates a :class:`GridMode` if the ranks are not in a line, and gets the style of each layer from it.

Terms: a *grid* is an arrangement of ranks in squares or a cube. *Rows* are samples. A *region* is a module with the
style ``"sequence_region"``, inside which all activations are sharded in blocks of samples and features. `grid.layers`
explains pairs of layers, and their outer and inner layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_hybrid.distributed.arrangement import Arrangement, BlockLayout
from lightning_hybrid.tensor_parallel.grid.blocks import Grid, weight_axes
from lightning_hybrid.tensor_parallel.grid.layers import GridAttention, GridLayerNorm, GridLinear, GridRegion
from lightning_hybrid.tensor_parallel.mappings import TensorGroup
from lightning_hybrid.tensor_parallel.mode import Mode
from lightning_hybrid.tensor_parallel.styles import (
    IN_PROJECTIONS,
    LAYOUT,
    STYLES,
    ParamSplit,
    PlanRow,
    Style,
    find_style,
    is_conv1d,
    transposed,
)

#: Styles with the same classes of layers in every mode. 'vocab' and 'vocab_head' shard parameters over all ranks, as in
#: a line. 'divide' is possible only in a region.
_IN_A_LINE = ("vocab", "vocab_head", "replicate", "on_shards", "divide")
#: Styles for modules in a region, where activations are sharded in blocks. In a line, these are sequence shards.
_IN_REGIONS = ("sequence_region", "sequence_parallel", "sequence_gathered")
#: The attributes `is_second`, `enters` and `leaves` of the :class:`GridLinear` into which a style turns a layer.
_LINEARS = {
    "colwise": (False, True, False),
    "packed_colwise_2": (False, True, False),
    "packed_colwise_3": (False, True, False),
    "colwise_gather_output": (False, True, True),
    "rowwise": (True, False, True),
    "rowwise_split_input": (False, True, True),
}
#: The styles that :class:`GridMode` supports, as error messages name them.
GRID_STYLES = (*_LINEARS, "attention", "vocab", "on_shards", "divide:NAME", *_IN_REGIONS, "replicate")


@dataclass(frozen=True)
class GridSplit(ParamSplit):
    """The sharding of a parameter in blocks over a grid.

    Attributes:
        grid: The arrangement of the ranks.
        over: The split dimensions, each with the axes of the grid that split it, the outermost first. The axes of one
            dimension together are one axis of the device mesh.
    """

    grid: Arrangement | None = None
    over: tuple[tuple[int, tuple[str, ...]], ...] = ()

    def cuts(self, rank: int, size: int) -> list[tuple[int, int, int]]:
        """Return one cut for each split dimension."""
        assert self.grid is not None
        return [(dim, self.grid.parts(axes), self.grid.index(rank, axes)) for dim, axes in self.over]

    def dim_of(self, axis: str) -> int | None:
        """Return the dimension that an axis of the device mesh splits; ``None`` if its ranks have the same values."""
        assert self.grid is not None
        return next((dim for dim, axes in self.over if axes == self.grid.mesh_axes[axis]), None)

    def transposed(self) -> ParamSplit:
        """Return the sharding of the transposed parameter."""
        return replace(self, dim=1 - self.dim, over=tuple((1 - dim, axes) for dim, axes in self.over))


class _NormStyle(Style):
    """The style of a norm over features, which are the last dimension."""

    def unsupported_reason(self, layer: nn.Module, size: int) -> str | None:
        """Return the reason why a norm cannot have this style; ``None`` if it can."""
        assert isinstance(layer, nn.LayerNorm)
        if len(layer.normalized_shape) > 1:
            return f"normalizes over dimensions of sizes {list(layer.normalized_shape)} instead of only over features"
        return super().unsupported_reason(layer, size)


class GridMode(Mode):
    """The mode for ranks in two or three dimensions, which shards activations in regions over samples and features."""

    shards_samples: ClassVar[bool] = True

    def find_style(self, name: str, layer: nn.Module) -> Style:
        """Return the grid's style for the name of a style.

        Raises:
            ValueError: If grids do not support the style: 'local_rng', 'narrow_input', 'mask_per_head', a linear style
                for an embedding, and 'sequence_parallel' for layers with parameters other than `nn.LayerNorm`.
        """
        return _find_style(name, layer, self.arrangement)

    def check(self, styles: Mapping[str, Any]) -> None:
        """Raise a `ValueError` if the plan has a layout or a style of torch: both work only for ranks in a line."""
        for name, style in styles.items():
            what = f"torch's {type(style).__name__}" if isinstance(style, ParallelStyle) else None
            if isinstance(style, str) and style.startswith(f"{LAYOUT}:"):
                what = f"the layout {style.partition(':')[2]}"
            if what is not None:
                raise ValueError(
                    f"tensor_parallel_plan assigns {what} to {name!r}. This works only with tensor_parallel_mode='1d'."
                    f" With tensor_parallel_mode={self.arrangement.mode!r}, each rank has a block of every weight and"
                    f" activation. Use a style of this package ({', '.join(GRID_STYLES)}), or set"
                    " tensor_parallel_mode='1d'. Or remove the entry, so that every rank has the full tensor. [LH509]"
                )

    def find_regions(self, rows: Sequence[PlanRow], module: nn.Module, *, sequence_parallel: bool) -> list[PlanRow]:
        """Return the rows of a plan. Rows in regions have the options for activations in blocks.

        `sequence_parallel` has no effect: regions of a grid are always sharded.

        Raises:
            ValueError: If a layer that needs a region is not in a region.
        """
        return _find_regions(rows, self.arrangement.mode)

    def make_group(self, group: ProcessGroup, along: Mapping[tuple[str, ...], ProcessGroup]) -> TensorGroup:
        """Return the :class:`Grid` in which the layers communicate: all ranks, and the groups along each axis."""
        return Grid(group, self.arrangement, along)


def _find_style(name: str, layer: nn.Module, grid: Arrangement) -> Style:
    kind = name.partition(":")[0]
    if kind in _LINEARS and not isinstance(layer, nn.Embedding):
        return _linear(kind, layer, grid)
    if kind == "attention":
        style = replace(STYLES["attention"], mixin=GridAttention, param_splits=_attention(grid))
        return replace(
            style,
            attributes={"in_region": False, "rows_dim": _samples_dim(layer)},
            head_parts=grid.parts([grid.inner.features]),
        )
    if kind == "sequence_region":
        dim = 1 - int(name.partition(":")[2] or 1)
        return replace(STYLES[kind], mixin=GridRegion, attributes={"rows_dim": dim, "in_region": False})
    if kind == "sequence_parallel" and isinstance(layer, nn.LayerNorm):
        splits = _features(grid.outer, grid)
        return _NormStyle((nn.LayerNorm,), GridLayerNorm, splits, {"in_region": True, "rows_dim": 0})
    if kind == "sequence_parallel" and not any(True for _ in layer.parameters()):
        return STYLES["on_shards"]
    if kind == "sequence_gathered":
        return STYLES["replicate"]
    if kind in _IN_A_LINE:
        return find_style(name, layer)
    raise ValueError(
        f"tensor_parallel_plan gives a {type(layer).__name__} the style {name!r}, which"
        f" tensor_parallel_mode={grid.mode!r} does not support. Use one of {', '.join(GRID_STYLES)}. [LH509]"
    )


def _samples_dim(layer: nn.Module) -> int:
    return 0 if getattr(layer, "batch_first", True) else 1


def _linear(kind: str, layer: nn.Module, grid: Arrangement) -> Style:
    is_second, enters, leaves = _LINEARS[kind]
    target = grid.outer if is_second else grid.inner
    blocks = int(kind.rpartition("_")[2]) if kind.startswith("packed") else 1

    def param_splits(layer: nn.Module) -> list[ParamSplit]:
        over = tuple(enumerate(weight_axes(grid, target)))
        splits: list[ParamSplit] = [GridSplit("weight", 0, blocks, grid, over)]
        if getattr(layer, "bias", None) is not None:
            splits.append(GridSplit("bias", 0, blocks, grid, over[:1]))
        return splits

    attributes = {"is_second": is_second, "enters": enters, "leaves": leaves, "is_transposed": False, "blocks": blocks}
    style = Style((nn.Linear,), GridLinear, param_splits, {**attributes, "in_region": False, "rows_dim": 0})
    return transposed(style) if is_conv1d(layer) else style


def _features(layout: BlockLayout, grid: Arrangement) -> Callable[[nn.Module], list[ParamSplit]]:
    def param_splits(layer: nn.Module) -> list[ParamSplit]:
        over = ((0, (layout.features,)),)
        names = [name for name in ("weight", "bias") if getattr(layer, name) is not None]
        return [GridSplit(name, 0, 1, grid, over) for name in names]

    return param_splits


def _attention(grid: Arrangement) -> Callable[[nn.Module], list[ParamSplit]]:
    def param_splits(layer: nn.Module) -> list[ParamSplit]:
        into, out = (tuple(enumerate(weight_axes(grid, target))) for target in (grid.inner, grid.outer))
        splits: list[ParamSplit] = [
            GridSplit(name, 0, blocks, grid, into[:1] if name.endswith("bias") else into)
            for name, blocks in IN_PROJECTIONS.items()
            if getattr(layer, name) is not None
        ]
        splits.append(GridSplit("out_proj.weight", 0, 1, grid, out))
        if layer.out_proj.bias is not None:  # type: ignore[union-attr]
            splits.append(GridSplit("out_proj.bias", 0, 1, grid, out[:1]))
        return splits

    return param_splits


def _find_regions(rows: Sequence[PlanRow], mode: str) -> list[PlanRow]:
    """Return the rows of a plan. Rows in regions have the options for activations in blocks.

    Raises:
        ValueError: If a layer that needs a region is not in a region.
    """
    dims = {row.name: 1 - int(row.style.partition(":")[2] or 1) for row in rows if row.kind == "sequence_region"}
    found = []
    for row in rows:
        region = next((name for name in dims if row.name.startswith(f"{name}.") or not name), None)
        if region is not None and row.kind not in _IN_A_LINE:
            row = replace(row, options={**row.options, "in_region": True, "rows_dim": dims[region]})
        elif region is None and row.kind in ("sequence_parallel", "divide"):
            raise ValueError(
                f"With tensor_parallel_mode={mode!r}, the style {row.style!r} of {row.name!r} works only inside another"
                " module with the style 'sequence_region', where activations are sharded in blocks. Give a module that"
                f" contains {row.name!r} the style 'sequence_region'. If {row.name!r} computes attention and other"
                " things, first move the attention into a separate module. [LH513]"
            )
        found.append(row)
    return found

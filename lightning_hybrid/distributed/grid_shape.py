"""Shapes of tensor-parallel groups: lines, squares and cubes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

#: How tensor-parallel ranks are arranged.
TENSOR_PARALLEL_MODES = ("1d", "2d", "2.5d", "3d")


@dataclass(frozen=True)
class BlockLayout:
    """How an activation, seen as a matrix, lies in blocks over a grid of ranks.

    Attributes:
        rows: The axes over which rows (samples) are divided, the outermost first.
        features: The axis over which features are divided.
    """

    rows: tuple[str, ...]
    features: str


@dataclass(frozen=True)
class GridShape:
    """The arrangement of tensor-parallel ranks in two or three dimensions.

    An axis is called as the groups of ranks along it are in the papers and in Colossal-AI. 2 x 2 ranks, and 2 x 2 x 2::

        2d, 2.5d (depth 2)                      3d
        depth 0   0 1    depth 1   4 5          output 0   0 1    output 1   4 5      weight: to the right
                  2 3              6 7                     2 3               6 7      input:  down

        row      [0,1] [2,3] [4,5] [6,7]        weight   [0,1] [2,3] [4,5] [6,7]
        column   [0,2] [1,3] [4,6] [5,7]        input    [0,2] [1,3] [4,6] [5,7]
        depth    [0,4] [1,5] [2,6] [3,7]        output   [0,4] [1,5] [2,6] [3,7]

    Attributes:
        mode: One of :data:`TENSOR_PARALLEL_MODES`, but for the first.
        axes: Names and sizes, the outermost first.
        outer: The layout of what enters a pair of layers, and leaves it.
        inner: The layout between the two layers of a pair.
    """

    mode: str
    axes: tuple[tuple[str, int], ...]
    outer: BlockLayout
    inner: BlockLayout

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.parts(name for name, _ in self.axes)

    def parts(self, names: Iterable[str]) -> int:
        """Into how many parts several axes divide something."""
        return math.prod(dict(self.axes)[name] for name in names)

    def index(self, rank: int, names: Iterable[str]) -> int:
        """Return the number of the part that a tensor-parallel rank has."""
        index = 0
        coordinates = self.coordinates(rank)
        for name in names:
            index = index * dict(self.axes)[name] + coordinates[name]
        return index

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a tensor-parallel rank is, by axis."""
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return found

    def ranks_along(self, names: Collection[str]) -> list[int]:
        """The tensor-parallel ranks that differ from the first one along some axes alone."""
        coordinates = [self.coordinates(rank) for rank in range(self.size)]
        others = [name for name, _ in self.axes if name not in names]
        return [rank for rank, at in enumerate(coordinates) if not any(at[name] for name in others)]

    @property
    def mesh_axes(self) -> dict[str, tuple[str, ...]]:
        """The axes of the mesh over which parameters lie, by name.

        Of a cube, a weight has one of its sides divided over ``"output"``, and the other over ``"input"`` and
        ``"weight"``, which are one axis there: what torch finds out about tensors over three axes takes it minutes.
        """
        parts = [("output",), ("input", "weight")] if self.mode == "3d" else [(name,) for name, _ in self.axes]
        return {"_".join(axes): axes for axes in parts}

    def groups(self) -> list[tuple[str, ...]]:
        """The axes along which ranks work together: each alone, and those over which the rows of a layout lie."""
        rows = [layout.rows for layout in (self.outer, self.inner)]
        return list(dict.fromkeys([*((name,) for name, _ in self.axes), *rows]))


def grid_shape(mode: str, size: int, depth: int = 1) -> GridShape | None:
    """The arrangement of tensor-parallel ranks; ``None`` for ``"1d"``, where they are in a line, and for a single one.

    Args:
        mode: One of :data:`TENSOR_PARALLEL_MODES`.
        size: The number of tensor-parallel ranks.
        depth: Of ``"2.5d"``: how many squares there are.

    Raises:
        ValueError: If they cannot be arranged so.

    Example:
        >>> grid_shape("2.5d", 8, 2).axes
        (('depth', 2), ('column', 2), ('row', 2))
    """
    if mode == "1d" or size == depth == 1:
        return None
    power, number = (3, 1) if mode == "3d" else (2, depth)
    edge = next(edge for edge in itertools.count(1) if number * (edge + 1) ** power > size)
    if number * edge**power != size:
        square, cube = "a perfect square", "a perfect cube"
        form = {"2d": square, "2.5d": f"tensor_parallel_depth ({depth}) times {square}", "3d": cube}[mode]
        near = [number * each**power for each in (edge, edge + 1)]
        near = near[:1] if near[0] > size else near
        raise ValueError(
            f"tensor_parallel_mode={mode!r} needs a tensor_parallel_size that is {form}, got {size}. The nearest"
            f" possible {'size is' if len(near) == 1 else 'sizes are'} {' and '.join(map(str, near))}. [LH108]"
        )
    if mode == "3d":
        outer, inner = BlockLayout(("input", "weight"), "output"), BlockLayout(("output", "weight"), "input")
        return GridShape(mode, tuple((name, edge) for name in ("output", "input", "weight")), outer, inner)
    layout = BlockLayout(("depth", "column") if mode == "2.5d" else ("column",), "row")
    axes = (("depth", depth),) if mode == "2.5d" else ()
    return GridShape(mode, (*axes, ("column", edge), ("row", edge)), layout, layout)


def check_grid(mode: str, sizes: Iterable[int], depth: int, *, sequence_parallel: bool) -> None:
    """Check how tensor-parallel ranks are to be arranged.

    Args:
        mode: One of :data:`TENSOR_PARALLEL_MODES`.
        sizes: The numbers of ranks that are allowed.
        depth: As of :func:`grid_shape`.
        sequence_parallel: Whether sequences are divided.

    Raises:
        ValueError: If these do not go together.
    """
    if depth > 1 and mode != "2.5d":
        raise ValueError(
            f"tensor_parallel_depth={depth} needs tensor_parallel_mode='2.5d', got tensor_parallel_mode={mode!r}."
            " Remove tensor_parallel_depth, or set tensor_parallel_mode='2.5d'. [LH109]"
        )
    if mode != "1d" and sequence_parallel:
        raise ValueError(
            f"sequence_parallel=True cannot be combined with tensor_parallel_mode={mode!r}, which already shards"
            " activations over samples and features. Remove one of the two arguments. [LH110]"
        )
    for size in sizes:
        grid_shape(mode, size, depth)

"""Arrangements of tensor-parallel ranks: lines, squares and cubes.

`HybridStrategy` checks its arguments by :func:`check_arrangement`. `strategy.run.World` makes the arrangement of a run
by :func:`arrange`, the mesh makes the process groups of its axes, and `tensor_parallel.grid` shards layers over these
axes. The plain mode ``"1d"`` is an arrangement too (a *line*), so the mesh has no special case for it. This file makes
no process groups, so layouts can be checked and searched in one process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lightning_hybrid.axes import TENSOR

#: The names of the arrangements of tensor-parallel ranks.
TENSOR_PARALLEL_MODES = ("1d", "2d", "2.5d", "3d")


@dataclass(frozen=True)
class BlockLayout:
    """A layout of an activation, seen as a matrix (samples x features), over the axes of an arrangement.

    Attributes:
        rows: The axes over which rows (samples) are sharded, the outermost first; empty in a line.
        features: The axis over which features are sharded.
    """

    rows: tuple[str, ...]
    features: str


@dataclass(frozen=True)
class Arrangement:
    """An arrangement of tensor-parallel ranks in one, two or three dimensions.

    A line has one axis, which has the name of the tensor-parallel axis of the device mesh. The axes of squares and
    cubes have the names used in the papers and in Colossal-AI. With 2 x 2 ranks per square, and 2 x 2 x 2 ranks in a
    cube::

        2d, 2.5d (depth 2)                      3d
        depth 0   0 1    depth 1   4 5          output 0   0 1    output 1   4 5      weight: to the right
                  2 3              6 7                     2 3               6 7      input:  down

        row      [0,1] [2,3] [4,5] [6,7]        weight   [0,1] [2,3] [4,5] [6,7]
        column   [0,2] [1,3] [4,6] [5,7]        input    [0,2] [1,3] [4,6] [5,7]
        depth    [0,4] [1,5] [2,6] [3,7]        output   [0,4] [1,5] [2,6] [3,7]

    Attributes:
        mode: One of :data:`TENSOR_PARALLEL_MODES`: ``"1d"`` (a line), ``"2d"`` (a square), ``"2.5d"`` (several squares,
            whose number is the depth) or ``"3d"`` (a cube).
        axes: The names and sizes of the axes, the outermost first.
        outer: The layout of activations before and after a pair of layers: a column-wise and a row-wise linear layer,
            such as the two layers of an MLP.
        inner: The layout of activations between the two layers of a pair.
    """

    mode: str
    axes: tuple[tuple[str, int], ...]
    outer: BlockLayout
    inner: BlockLayout

    @property
    def is_line(self) -> bool:
        """True if there is one axis."""
        return len(self.axes) == 1

    @property
    def feature_parts(self) -> int:
        """The number of shards of features between the two layers of a pair."""
        return self.parts([self.inner.features])

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.parts(name for name, _ in self.axes)

    def parts(self, names: Iterable[str]) -> int:
        """Return the number of shards of a dimension that is sharded over the axes with these names."""
        return math.prod(dict(self.axes)[name] for name in names)

    def index(self, rank: int, names: Iterable[str]) -> int:
        """Return the index of a rank's shard of a dimension that is sharded over several axes.

        Args:
            rank: The tensor-parallel rank.
            names: The names of the axes, the outermost first.
        """
        index = 0
        coordinates = self.coordinates(rank)
        for name in names:
            index = index * dict(self.axes)[name] + coordinates[name]
        return index

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a tensor-parallel rank, by axis."""
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return found

    def ranks_along(self, names: Collection[str]) -> list[int]:
        """Return the tensor-parallel ranks that differ from rank 0 only along the axes with these names."""
        coordinates = [self.coordinates(rank) for rank in range(self.size)]
        others = [name for name, _ in self.axes if name not in names]
        return [rank for rank, at in enumerate(coordinates) if not any(at[name] for name in others)]

    @property
    def mesh_axes(self) -> dict[str, tuple[str, ...]]:
        """The tensor-parallel axes of a parameter's device mesh: each name with its axes of the arrangement.

        In squares, these are the axes of the arrangement; along ``"depth"``, parameters are replicated. In a cube, one
        dimension of a weight is sharded over ``"output"``, and the other one over ``"input"`` and ``"weight"``. The
        mesh has one axis for the latter two, because torch needs minutes to derive placements on a mesh of three axes.
        """
        parts = [("output",), ("input", "weight")] if self.mode == "3d" else [(name,) for name, _ in self.axes]
        return {"_".join(axes): axes for axes in parts}

    def groups(self) -> list[tuple[str, ...]]:
        """Return the axes of each process group: every single axis, and the axes over which a layout shards rows."""
        rows = [layout.rows for layout in (self.outer, self.inner)]
        return list(dict.fromkeys([*((name,) for name, _ in self.axes), *filter(None, rows)]))


def line(size: int) -> Arrangement:
    """Return an arrangement of ranks in a line."""
    features = BlockLayout((), TENSOR.name)
    return Arrangement("1d", ((TENSOR.name, size),), features, features)


def arrange(mode: str, size: int, depth: int = 1) -> Arrangement:
    """Return an arrangement of tensor-parallel ranks. A single rank is a line in every mode.

    Args:
        mode: One of :data:`TENSOR_PARALLEL_MODES`.
        size: The number of tensor-parallel ranks.
        depth: The number of squares, for ``"2.5d"``.

    Raises:
        ValueError: If this number of ranks cannot be arranged in this mode; the text has the nearest possible sizes.

    Example:
        >>> arrange("2.5d", 8, 2).axes
        (('depth', 2), ('column', 2), ('row', 2))
    """
    if mode == "1d" or size == depth == 1:
        return line(size)
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
        return Arrangement(mode, tuple((name, edge) for name in ("output", "input", "weight")), outer, inner)
    layout = BlockLayout(("depth", "column") if mode == "2.5d" else ("column",), "row")
    axes = (("depth", depth),) if mode == "2.5d" else ()
    return Arrangement(mode, (*axes, ("column", edge), ("row", edge)), layout, layout)


def check_arrangement(mode: str, sizes: Iterable[int], depth: int, *, sequence_parallel: bool) -> None:
    """Raise an error if tensor-parallel ranks cannot be arranged as the user wants.

    Args:
        mode: One of :data:`TENSOR_PARALLEL_MODES`.
        sizes: The allowed numbers of tensor-parallel ranks.
        depth: The number of squares, for ``"2.5d"``.
        sequence_parallel: If True, sequences are sharded.

    Raises:
        ValueError: If these settings cannot be combined.
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
        arrange(mode, size, depth)

"""Parallel axes, their roles and their sizes.

`distributed.sizes` makes the :class:`Sizes` of a job from the arguments of `HybridStrategy`. The strategy, the mesh,
the layout search and the commands pass them on. To add an axis, add a row to :data:`AXES`, a field to :class:`Sizes`
and an argument to `HybridStrategy`; the mesh, the gradients, ZeRO, checkpoints and loaders read the role of each axis.
The layout search needs a field in `tuning.candidates.Layout`, because it has to estimate the costs of the axis. The
table is a file of its own, which imports no torch, because all these packages read it.

A *replica* is a set of ranks that together train one copy of the model on the same samples; these ranks are a *model
group*. The *mesh* numbers all ranks along the axes, in the order of the argument `rank_order`, such as ``"pp-dp-tp"``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Role:
    """Role of an axis: what its ranks split, and how these ranks relate to replicas and gradients.

    Attributes:
        splits: The object that is split, so that each rank has its own part.
        in_replica: True if these ranks train on the same samples. The ranks along all other axes are replicas.
        averages_gradients: True if these ranks compute gradients of the same parameters from different data.
    """

    splits: str
    in_replica: bool
    averages_gradients: bool


LAYERS = Role("the layers of the model", in_replica=True, averages_gradients=False)
SAMPLES = Role("the samples of a batch", in_replica=False, averages_gradients=True)
POSITIONS = Role("the positions of a sequence", in_replica=True, averages_gradients=True)
WEIGHTS = Role("the weights of a layer", in_replica=True, averages_gradients=False)
#: The roles in the order of the coordinates of a rank in :class:`~.distributed.mesh.Mesh`. It is not `rank_order`.
ROLES = (LAYERS, SAMPLES, POSITIONS, WEIGHTS)


@dataclass(frozen=True)
class Axis:
    """Parallel axis.

    Attributes:
        key: The short name in `rank_order` and, for axes of every mesh, in names of strategies (``"hybrid_tp2"``).
        label: The name in messages, such as ``"tensor"``, and the field of :class:`Sizes` that contains the size.
        role: The role of the axis.
        outside_of: ``None`` for an axis that every mesh has. Otherwise, the axis exists only if its size is above 1,
            and if `rank_order` does not name it, its position is directly outside of the axis with this key.
    """

    key: str
    label: str
    role: Role
    outside_of: str | None = None

    @property
    def name(self) -> str:
        """The name in torch's device mesh."""
        return f"{self.label}_parallel"

    @property
    def argument(self) -> str:
        """The argument of `HybridStrategy` that sets the size."""
        return f"{self.label}_parallel_size"

    @property
    def is_optional(self) -> bool:
        """True if the axis exists only if its size is above 1."""
        return self.outside_of is not None


DATA = Axis("dp", "data", SAMPLES)
TENSOR = Axis("tp", "tensor", WEIGHTS)
PIPELINE = Axis("pp", "pipeline", LAYERS)
CONTEXT = Axis("cp", "context", POSITIONS, outside_of="tp")
#: The axes, in the order in which messages name them.
AXES = (DATA, TENSOR, PIPELINE, CONTEXT)
AXIS_OF_KEY = {axis.key: axis for axis in AXES}
#: The axes that every mesh has.
ALWAYS = tuple(axis for axis in AXES if not axis.is_optional)


@dataclass(frozen=True)
class Sizes:
    """Number of ranks along each axis.

    Example:
        >>> sizes = Sizes(data=2, pipeline=4)
        >>> print(sizes, "=", sizes.num_ranks, "ranks")
        data 2 x tensor 1 x pipeline 4 = 8 ranks
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    def __str__(self) -> str:
        """Return the labels and sizes of the axes that exist."""
        return " x ".join(f"{axis.label} {self.along(axis)}" for axis in self.axes)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that exist."""
        return tuple(axis for axis in AXES if not axis.is_optional or self.along(axis) > 1)

    @property
    def by_key(self) -> dict[str, int]:
        """The sizes of the axes that exist, by the keys of the axes."""
        return {axis.key: self.along(axis) for axis in self.axes}

    @property
    def by_argument(self) -> dict[str, int]:
        """The sizes of all axes, by the arguments of `HybridStrategy` that set them."""
        return {axis.argument: self.along(axis) for axis in AXES}

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the mesh."""
        return math.prod(self.by_key.values())

    @cached_property
    def num_replicas(self) -> int:
        """The number of replicas. The ranks of a replica train on the same samples."""
        return math.prod(self.along(axis) for axis in AXES if not axis.role.in_replica)

    def along(self, axis: Axis) -> int:
        """Return the size of an axis."""
        return int(getattr(self, axis.label))

    def stride(self, axis: Axis, rank_order: str) -> int:
        """Return the distance between the numbers of neighboring ranks along an axis.

        Args:
            axis: The axis.
            rank_order: The keys of all axes that exist, from the outermost to the innermost axis, such as
                ``"pp-dp-tp"``.
        """
        return math.prod(map(self.along, axes_inside(axis, rank_order)))

    def with_role(self, role: Role) -> int:
        """Return the product of the sizes of all axes that have this role."""
        return math.prod(self.along(axis) for axis in AXES if axis.role is role)


assert [axis.label for axis in AXES] == [field.name for field in fields(Sizes)]
assert {axis.outside_of for axis in AXES} <= {None, *(axis.key for axis in ALWAYS)}


def axes_inside(axis: Axis, rank_order: str) -> tuple[Axis, ...]:
    """Return the axes that `rank_order` names after this axis. Their ranks have closer numbers.

    Args:
        axis: The axis.
        rank_order: The keys of all axes that exist, as for :meth:`Sizes.stride`.
    """
    keys = rank_order.split("-")
    return tuple(AXIS_OF_KEY[key] for key in keys[keys.index(axis.key) + 1 :])


def sizes_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes among arguments of `HybridStrategy`, by the labels of the axes.

    Args:
        arguments: Values by argument name; a size may also be a list or ``"auto"``. A missing size is 1.
    """
    return {axis.label: arguments.get(axis.argument, 1) for axis in AXES}


def complete_order(rank_order: str, optional: Collection[str]) -> str:
    """Return the order of the axes that exist, from the outermost to the innermost axis.

    Args:
        rank_order: The order that the user sets, which can omit optional axes.
        optional: The keys of the optional axes that exist.

    Example:
        >>> complete_order("pp-dp-tp", ["cp"]), complete_order("cp-pp-dp-tp", [])
        ('pp-dp-cp-tp', 'pp-dp-tp')
    """
    order = [key for key in rank_order.split("-") if not AXIS_OF_KEY[key].is_optional or key in optional]
    for axis in AXES:
        if axis.outside_of is not None and axis.key in optional and axis.key not in order:
            order.insert(order.index(axis.outside_of), axis.key)
    return "-".join(order)

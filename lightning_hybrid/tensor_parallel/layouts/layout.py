"""Layouts, in which the user writes the placements of a tensor over the ranks, and the distribution of tensors.

`plan` parses layouts of parameters and buffers in `tensor_parallel_plan` with :func:`divided_dim`, and
`HybridStrategy.distribute` shards other tensors in the user's code with :func:`distribute`. Users write letters,
because torch's placements need a mesh and an entry for each of its axes.

A layout has one letter for each axis of ranks, as in OneFlow (Yuan et al., "OneFlow: Redesign the distributed deep
learning framework from scratch", 2021), where the letters are called SBP:

=========  =============================================  ==============================================
``S(0)``   split: each rank has a shard of dimension 0    :class:`torch.distributed.tensor.Shard`
``B``      broadcast: every rank has the full tensor      :class:`torch.distributed.tensor.Replicate`
``P``      partial: the tensor is the sum over the ranks  :class:`torch.distributed.tensor.Partial`
=========  =============================================  ==============================================

The layout ``"S(0),S(1)"`` of a tensor of shape 16 x 8 on 2 x 2 ranks::

    data rank 0     rows 0-7  columns 0-3  |  rows 0-7  columns 4-7
    data rank 1     rows 8-15 columns 0-3  |  rows 8-15 columns 4-7
                    tensor rank 0             tensor rank 1
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_hybrid.axes import AXIS_OF_KEY, DATA, LAYERS, PIPELINE
from lightning_hybrid.axes import TENSOR as TENSOR_AXIS
from lightning_hybrid.distributed.dtensor import copy_attributes

TENSOR = TENSOR_AXIS.name
#: The axes of the ranks that hold one stage, from the outermost on, in the default order.
STAGE_AXES = (DATA.name, TENSOR)
_LETTER = re.compile(r"S\((-?\d+)\)|B|P")
_HELP = "Write 'S(dimension)', 'B' or 'P' for each axis, such as 'S(0),S(1)' or 'data_parallel=S(0),tensor_parallel=B'."

#: The reasons why a parameter (True) or a buffer (False) cannot have a layout, and the remedies.
_WHY = {
    True: {
        "other axis": "train the same parameter. Use 'B' for this axis. To shard parameters over replicas, set"
        " HybridStrategy(zero_stage=3).",
        "sum": "which an optimizer cannot update",
    },
    False: {
        "other axis": "have the same buffer. Use 'B' for this axis. To shard a tensor over replicas, call"
        " `strategy.distribute(tensor, layout)` in your code.",
        "sum": "which a buffer cannot be",
    },
}


def stage_axes(rank_order: str) -> tuple[str, ...]:
    """Return the axes of the ranks that hold one stage, from the outermost on.

    Args:
        rank_order: All axes by their short names, joined by ``-``.
    """
    order = [AXIS_OF_KEY[key] for key in rank_order.split("-")]
    return tuple(axis.name for axis in order if axis.role is not LAYERS)


def is_layout(style: object) -> TypeGuard[str | Mapping[str, str]]:
    """Return True if an entry of a plan is a layout instead of the name of a style."""
    if isinstance(style, str) and ":" not in style:
        return any("=" in part or _LETTER.fullmatch(part.strip()) for part in style.split(","))
    return isinstance(style, Mapping)


def parse_layout(layout: str | Mapping[str, str], axes: Sequence[str], shape: Sequence[int]) -> dict[str, Placement]:
    """Parse a layout.

    Args:
        layout: A letter for each axis, separated by commas, in the order of `axes`; or one letter for the
            tensor-parallel axis; or ``"AXIS=LETTER,..."`` or a mapping, for some axes. Along other axes, all ranks have
            the full tensor.
        axes: The axes of the ranks that hold one stage, from the outermost on.
        shape: The shape of the full tensor.

    Returns:
        The placements of the axes in the layout, in the order of `axes`. Dimensions are not negative.

    Raises:
        TypeError: If the layout is neither a string nor a mapping.
        ValueError: If the layout cannot be parsed, names no axis or an axis twice, or has an unknown axis, letter or
            dimension.
    """
    pairs = _letters(layout, axes)
    names = [name for name, _ in pairs]
    unknown = [name for name in names if name not in axes]
    twice = [name for name in names if names.count(name) > 1]
    if unknown or not names:
        what = f"the unknown axis {unknown[0]!r}" if unknown else "no axis"
        raise ValueError(f"The layout {layout!r} names {what}. The axes are {', '.join(axes)}. {_HELP} [LH520]")
    if twice:
        said = " and ".join(repr(letter) for name, letter in pairs if name == twice[0])
        raise ValueError(
            f"The layout {layout!r} gives {said} for the axis {twice[0]}. Keep only one of them. {_HELP} [LH520]"
        )
    given = dict(pairs)
    return {axis: _placement(layout, given[axis], shape) for axis in axes if axis in given}


def _letters(layout: object, axes: Sequence[str]) -> list[tuple[str, object]]:
    """Return the axes of a layout and their letters."""
    if isinstance(layout, Mapping):
        return list(layout.items())
    if not isinstance(layout, str):
        raise TypeError(
            f"A layout must be a string or a mapping from axes to placements, got {layout!r}. {_HELP} [LH520]"
        )
    parts = [part.strip() for part in layout.split(",")]
    if any("=" in part for part in parts):
        return [(name.strip(), letter.strip()) for name, _, letter in (part.partition("=") for part in parts)]
    if len(parts) == 1:
        return [(TENSOR, parts[0])]
    if len(parts) != len(axes):
        raise ValueError(
            f"The layout {layout!r} has {len(parts)} placements, but must have one for each of the axes"
            f" {', '.join(axes)}. {_HELP} [LH520]"
        )
    return list(zip(axes, parts, strict=True))


def divided_dim(layout: str | Mapping[str, str], axes: Sequence[str], tensor: Tensor, name: str = "") -> int | None:
    """Return the dimension of a parameter or buffer that is split over the tensor-parallel ranks.

    Args:
        layout: As for :func:`parse_layout`.
        axes: As for :func:`parse_layout`.
        tensor: The parameter or buffer.
        name: Its name, if the layout is in a plan.

    Returns:
        The dimension; ``None`` if every rank has the full tensor.

    Raises:
        TypeError, ValueError: If the layout is invalid, as in :func:`parse_layout`, or not supported. Optimizers, norms
            and checkpoints support only shards over the tensor-parallel axis.
    """
    why = _WHY[isinstance(tensor, nn.Parameter)]
    start = f"The layout {layout!r}{f' of {name!r} in tensor_parallel_plan' if name else ''}"
    placements = parse_layout(layout, axes, tensor.shape)
    other = next((axis for axis, each in placements.items() if axis != TENSOR and not each.is_replicate()), None)
    if other is not None:
        raise ValueError(
            f"{start} must have 'B' for the axis {other}, because all ranks of this axis {why['other axis']} [LH521]"
        )
    placement = placements.get(TENSOR)
    if placement is not None and placement.is_partial():
        raise ValueError(f"{start} contains 'P' (a partial sum), {why['sum']}. Use 'S(dim)' or 'B'. [LH522]")
    return placement.dim if isinstance(placement, Shard) else None


def _placement(layout: object, letter: object, shape: Sequence[int]) -> Placement:
    found = _LETTER.fullmatch(letter) if isinstance(letter, str) else None
    if found is None:
        raise ValueError(f"The layout {layout!r} has the invalid placement {letter!r} for an axis. {_HELP} [LH520]")
    if found[1] is None:
        return Replicate() if letter == "B" else Partial()
    dim = int(found[1])
    if not -len(shape) <= dim < len(shape):
        allowed = f"whose dimensions are 0 to {len(shape) - 1}" if shape else "which has no dimensions: use 'B'"
        raise ValueError(
            f"The layout {layout!r} splits dimension {dim} of a tensor of shape {tuple(shape)}, {allowed}. [LH523]"
        )
    return Shard(dim % len(shape))


def layout_text(tensor: DTensor) -> str:
    """Return the layout of a tensor as the user would write it, and its axes, for messages."""
    letters = (
        f"S({each.dim})" if isinstance(each, Shard) else "B" if each.is_replicate() else "P"
        for each in tensor.placements
    )
    return f"{','.join(letters)!r} over {', '.join(tensor.device_mesh.mesh_dim_names or ())}"


def distribute(
    tensor: Tensor, layout: str | Mapping[str, str], mesh: DeviceMesh, *, makes_parameters: bool = True
) -> DTensor:
    """Distribute a tensor: see :meth:`lightning_hybrid.HybridStrategy.distribute`.

    All ranks along the axes must call it: a DTensor can need messages, and the backward of a shard is an all-gather.

    Args:
        tensor: The full tensor, the same on every rank of the stage; or a DTensor, which is redistributed.
        layout: As for :func:`parse_layout`.
        mesh: All axes of ranks, with the pipeline axis, which layouts do not name.
        makes_parameters: If True, the result for a parameter is a new parameter. If False, it is a value in the graph.

    Raises:
        TypeError, ValueError: If the layout is invalid, or not supported for this tensor.
    """
    axes = [axis for axis in mesh.mesh_dim_names or () if axis != PIPELINE.name]
    if isinstance(tensor, nn.Parameter) and makes_parameters:
        return _parameter(tensor, layout, axes, mesh)
    placements = parse_layout(layout, axes, tensor.shape)
    if isinstance(tensor, DTensor):
        _check_axes(tensor, layout, placements)
        return tensor.redistribute(placements=list(placements.values()))
    over = mesh[tuple(placements)]
    kept, summed = list(placements.values()), []
    for index, placement in enumerate(kept):
        if placement.is_partial():
            kept[index] = Replicate()
            summed.append(over.get_local_rank(index))
    if any(summed):  # the first rank keeps the tensor, and the other ranks have zeros
        tensor = _Nothing.apply(tensor)  # type: ignore[no-untyped-call]
    local = DTensor.from_local(tensor, over, [Replicate()] * len(kept), run_check=False).redistribute(placements=kept)
    if not summed:
        return local
    shape, stride = local.shape, local.stride()
    return DTensor.from_local(
        local.to_local(), over, list(placements.values()), run_check=False, shape=shape, stride=stride
    )


class _Nothing(torch.autograd.Function):
    """Zeros that replace a tensor. The tensor receives the gradient of the zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _check_axes(tensor: DTensor, layout: object, placements: Mapping[str, Placement]) -> None:
    names = tensor.device_mesh.mesh_dim_names or ()
    if tuple(placements) != tuple(names):
        raise ValueError(
            f"The layout {layout!r} is for the axes {', '.join(placements)}, but the tensor is distributed over the"
            f" axes {', '.join(names)}. Use a layout for the axes of the tensor, or first convert the tensor to a plain"
            " tensor with `tensor.full_tensor()`. [LH524]"
        )
    if any(
        new.is_partial() and not old.is_partial()
        for new, old in zip(placements.values(), tensor.placements, strict=True)
    ):
        raise ValueError(
            f"The layout {layout!r} contains 'P' (a partial sum), but an existing tensor cannot become a partial sum."
            " Use 'S(dim)' or 'B'. [LH522]"
        )


def _parameter(
    parameter: nn.Parameter, layout: str | Mapping[str, str], axes: Sequence[str], mesh: DeviceMesh
) -> DTensor:
    """Distribute a parameter over the tensor-parallel ranks, so that optimizers, norms and checkpoints support it.

    The result has the attributes of the parameter, and no graph.
    """
    dim, size = divided_dim(layout, axes, parameter), mesh[TENSOR].size()
    if dim is not None and parameter.shape[dim] % size:
        raise ValueError(
            f"The layout {layout!r} cannot split dimension {dim} of a parameter of shape {tuple(parameter.shape)} into"
            f" {size} equal parts. [LH523]"
        )
    placement = Replicate() if dim is None else Shard(dim)
    whole = DTensor.from_local(parameter.detach(), mesh[TENSOR], [Replicate()], run_check=False)
    sharded = nn.Parameter(whole.redistribute(placements=[placement]), requires_grad=parameter.requires_grad)
    copy_attributes(parameter, sharded)
    return sharded  # type: ignore[return-value]

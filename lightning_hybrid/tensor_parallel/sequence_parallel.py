"""Where sequences are divided: regions of layers that work on shares of a sequence, and hand them to each other.

::

    body           layer 0       layer 1       layer 2      norm
    region         [ .......................... ]
    activations    split here    a share       a share      joined before it is used
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import nn

from lightning_hybrid.tensor_parallel.styles import STYLES, ParamSplit

__all__ = ["PlanRow", "in_regions"]

_FOR_SEQUENCES = frozenset(name for name, style in STYLES.items() if style.for_sequences)


@dataclass(frozen=True)
class PlanRow:
    """One layer of a plan.

    Attributes:
        name: Its dotted name.
        style: The name of its style.
        divisions: Its parameters that are divided.
        sequence_dim: The dimension of activations along which sequences are divided around it, if they are.
        options: What the style is told beside.
    """

    name: str
    style: str
    divisions: tuple[ParamSplit, ...] = ()
    sequence_dim: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The name of the style, without the dimension that may follow it."""
        return self.style.partition(":")[0]


def in_regions(rows: list[PlanRow], module: nn.Module, *, sequence_parallel: bool) -> list[PlanRow]:
    """Tell each row where sequences are divided around it.

    Args:
        rows: The layers that take part.
        module: The whole module.
        sequence_parallel: Whether sequences are divided; if not, rows that matter only then are left out.

    Returns:
        The rows, with the dimension of the sequence inside of regions.

    Raises:
        ValueError: If a layer that works on shares of a sequence is in no region.
    """
    if not sequence_parallel:
        return [row for row in rows if row.kind not in _FOR_SEQUENCES]
    dims = {row.name: int(row.style.partition(":")[2] or 1) for row in rows if row.kind == "sequence_region"}
    gathered = {row.name for row in rows if row.kind == "sequence_gathered"}
    neighbours = set(_neighbours(module))
    result = []
    for row in rows:
        region = next((name for name in _ancestors(row.name) if name in dims), None)
        if region is None:
            if row.kind in _FOR_SEQUENCES:
                raise ValueError(
                    f"tensor_parallel_plan gives {row.name!r} the style {row.style!r}, but it is in no module with the"
                    " style 'sequence_region', so its sequences are not divided."
                )
            result.append(row)
            continue
        options = dict(row.options)
        if row.kind == "sequence_region":
            before = {first for first, second in neighbours if second == row.name}
            after = {second for first, second in neighbours if first == row.name}
            options |= {
                "splits": not any(dims.get(name) == dims[region] for name in before),
                "gathers": not any(dims.get(name) == dims[region] for name in after),
            }
        elif row.kind.startswith(("colwise", "packed_colwise")):
            options |= {"enters": not any(name in gathered for name in _ancestors(row.name))}
        result.append(replace(row, sequence_dim=dims[region], options=options))
    return result


def _ancestors(name: str) -> Iterator[str]:
    """The name itself, then what it is in, inside out."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _neighbours(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Layers, by name, of which the second gets just what the first has made, and that stand nowhere else."""
    names = {id(layer): name for name, layer in module.named_modules()}
    places = Counter(id(child) for parent in module.modules() for child in parent._modules.values())
    for container in module.modules():
        if isinstance(container, nn.Sequential) and type(container).forward is nn.Sequential.forward:
            for first, second in pairwise(container._modules.values()):
                if places[id(first)] == places[id(second)] == 1:
                    yield names[id(first)], names[id(second)]

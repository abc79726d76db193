"""The interface between a plan and the arrangement (line, square or cube) of the tensor-parallel ranks.

:func:`~.plan.make_plan` creates a :class:`Mode` for a line (``tensor_parallel_mode="1d"``) and a
:class:`~.grid.styles.GridMode` for squares and cubes. The plan and the automatic plan get the styles of layers from it,
and `strategy.parallelize` the group in which the layers communicate. So other code does not depend on the arrangement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from torch.distributed import ProcessGroup

from lightning_hybrid.distributed.arrangement import Arrangement
from lightning_hybrid.tensor_parallel.mappings import TensorGroup
from lightning_hybrid.tensor_parallel.sequence_parallel import assign_sequence_dims
from lightning_hybrid.tensor_parallel.styles import PlanRow, Style, find_style


@dataclass(frozen=True)
class Mode:
    """The way in which layers are sharded over the ranks of an arrangement. This base class is the mode for a line.

    Attributes:
        arrangement: The arrangement of the tensor-parallel ranks.
        shards_samples: True if activations inside regions are sharded over samples and features. In a line, they are
            sharded along the sequence, and only under sequence parallelism.
    """

    arrangement: Arrangement
    shards_samples: ClassVar[bool] = False

    def find_style(self, name: str, layer: nn.Module) -> Style:
        """Return the style with a name for a layer. A line supports all styles.

        Raises:
            ValueError: If this mode does not support the style.
        """
        return find_style(name, layer)

    def check(self, styles: Mapping[str, Any]) -> None:
        """Raise an error if this mode does not support a style of a plan. A line supports all styles.

        Args:
            styles: Styles of this package or of torch, by module name.

        Raises:
            ValueError: If this mode does not support a style.
        """

    def find_regions(self, rows: Sequence[PlanRow], module: nn.Module, *, sequence_parallel: bool) -> list[PlanRow]:
        """Return the rows of a plan with the options that depend on the region around each layer.

        A *region* is a module with the style ``"sequence_region"``. A line removes rows that only affect sequence
        parallelism if sequences are not sharded.

        Args:
            rows: The rows of the plan.
            module: The full module.
            sequence_parallel: True if sequences are sharded.

        Raises:
            ValueError: If a layer that needs a region is not in a region.
        """
        return assign_sequence_dims(list(rows), module, sequence_parallel=sequence_parallel)

    def make_group(self, group: ProcessGroup, along: Mapping[tuple[str, ...], ProcessGroup]) -> TensorGroup:
        """Return the group in which the layers communicate.

        Args:
            group: The group of all tensor-parallel ranks.
            along: The groups of this rank along the axes of the arrangement, as :meth:`Arrangement.groups` names them.
        """
        return TensorGroup(group)

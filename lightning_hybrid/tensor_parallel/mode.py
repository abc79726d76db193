"""The interface between a plan and the arrangement of the ranks that it is for."""

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
    """The way in which layers are sharded over the ranks of an arrangement; this class is the one for a line.

    Attributes:
        arrangement: The arrangement of the tensor-parallel ranks.
        shards_samples: True if activations in regions are sharded over samples and features.
    """

    arrangement: Arrangement
    shards_samples: ClassVar[bool] = False

    def find_style(self, name: str, layer: nn.Module) -> Style:
        """Return the style with a name for a layer.

        Raises:
            ValueError: If this mode does not support the style.
        """
        return find_style(name, layer)

    def check(self, styles: Mapping[str, Any]) -> None:
        """Check the styles of a plan.

        Args:
            styles: Styles of this package, or of torch, by name of module.

        Raises:
            ValueError: If this mode does not support one of them.
        """

    def find_regions(self, rows: Sequence[PlanRow], module: nn.Module, *, sequence_parallel: bool) -> list[PlanRow]:
        """Return the rows of a plan, with what each layer must know of the region that it is in.

        Args:
            rows: The layers that take part.
            module: The whole module.
            sequence_parallel: True if sequences are sharded.

        Raises:
            ValueError: If a layer that needs a region is in none.
        """
        return assign_sequence_dims(list(rows), module, sequence_parallel=sequence_parallel)

    def make_group(self, group: ProcessGroup, along: Mapping[tuple[str, ...], ProcessGroup]) -> TensorGroup:
        """Return the group that the layers communicate in.

        Args:
            group: All tensor-parallel ranks of this rank.
            along: Its groups along axes of the arrangement, by :meth:`Arrangement.groups`.
        """
        return TensorGroup(group)

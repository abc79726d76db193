"""Placement of stages on ranks.

A schedule determines the placement (:func:`~.generators.placement_of`). From it, the strategy derives the layers and
parameters of each rank, and the channels between ranks. Code asks the placement instead of computing
``stage % num_ranks``, so a schedule may place its stages in another way. All current schedules use
:meth:`Placement.in_turns`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class Placement:
    """Pipeline rank of each stage.

    ::

        Placement.in_turns(4, 2)     rank   0  1  2  3  0  1  2  3
                                     stage  0  1  2  3  4  5  6  7

    Attributes:
        ranks: The pipeline rank of each stage. Every rank has the same number of stages, its chunks, in the order of
            the model.
    """

    ranks: tuple[int, ...]

    @classmethod
    def in_turns(cls, num_ranks: int, num_chunks: int = 1) -> Placement:
        """Give each rank one stage, then a second stage, and so on (Megatron, https://arxiv.org/abs/2104.04473)."""
        return cls(tuple(range(num_ranks)) * num_chunks)

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return len(self.ranks)

    @cached_property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(set(self.ranks))

    @property
    def num_chunks(self) -> int:
        """The number of stages per rank."""
        return self.num_stages // self.num_ranks

    @cached_property
    def hops(self) -> tuple[tuple[int, int], ...]:
        """The pairs of ranks between which activations are sent, sender first. Gradients are sent the other way."""
        return tuple(dict.fromkeys((here, there) for here, there in pairwise(self.ranks) if here != there))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in ascending order."""
        return self._stages[rank]

    def chunk_of(self, stage: int) -> int:
        """Return the position of a stage among the stages of its rank."""
        return self.stages_of(self.ranks[stage]).index(stage)

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        of_ranks: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.ranks):
            of_ranks[rank].append(stage)
        return tuple(map(tuple, of_ranks))

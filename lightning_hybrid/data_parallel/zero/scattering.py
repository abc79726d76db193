"""Gradients of wholes, of which each replica gets the mean of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_hybrid.data_parallel.bucket import Bucket
from lightning_hybrid.data_parallel.grad_buckets import BUCKET_BYTES, GradientBuckets, assign
from lightning_hybrid.data_parallel.zero.grad_scatter import ReduceScatterBucket
from lightning_hybrid.data_parallel.zero.param_group import ParameterGroup

__all__ = ["ZeroGradients"]


class ZeroGradients:
    """Puts gradients into buckets, and says when they travel.

    Args:
        units: The layers of each stage of this rank.
        outside: What is in none of them.
        stage: Of ZeRO: with 1 gradients travel once in a step, by size, otherwise after each backward, layer by layer.
        frees_early: Whether parameters travel in backwards too: then gradients do at fixed places of that walk.
    """

    def __init__(
        self, units: Mapping[int, Sequence[ParameterGroup]], outside: ParameterGroup, *, stage: int, frees_early: bool
    ) -> None:
        self._units, self._outside = units, outside
        self._stage, self._frees_early = stage, frees_early
        every = [unit for several in units.values() for unit in several]
        self._of_share = {id(twin.shard): twin for unit in (outside, *every) for twin in unit.twins}
        self._of_whole = {id(twin.whole): twin for twin in self._of_share.values()}
        self._backwards = [*reversed(every), outside]
        self._walked: dict[int, GradientBuckets] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeroGradients:
        """A copy of the module goes its own way: its gradients do not travel, and wholes may have no memory to copy."""
        return self

    def buckets(self, stage: int | None, shards: Sequence[Tensor], group: ProcessGroup) -> GradientBuckets:
        """The gradients of some parameters.

        Args:
            stage: The stage that alone holds them, if one does: then they travel while its backward runs.
            shards: The parameters, in the order of the model.
            group: The replicas.
        """
        buckets = GradientBuckets(
            [self._of_share[id(shard)].whole for shard in shards],
            group,
            scale=1 / group.size(),
            overlap=stage is not None and not self._frees_early,
            divide=self._divide,
            at_once=1 if self._stage > 1 else None,
        )
        if stage is not None and self._frees_early:
            self._walked[stage] = buckets
        return buckets

    def arrive(self, stage: int, place: int) -> None:
        """A backward has come to a layer: those behind it have their gradients."""
        if stage in self._walked:
            behind = self._units[stage][place + 1 :]
            self._walked[stage].launch_complete({id(twin.whole) for unit in behind for twin in unit.twins})

    def _divide(self, wholes: Sequence[nn.Parameter]) -> list[Bucket]:
        """Put parameters into buckets: of some size if they travel once, otherwise layer by layer.

        Args:
            wholes: Some of this rank, in the order of the model.

        Returns:
            Buckets, in the order in which backward should complete them.
        """
        if self._stage == 1:
            sets = assign(wholes, BUCKET_BYTES)
        else:
            wanted = {id(whole) for whole in wholes}
            of_units = [[twin.whole for twin in unit.twins if id(twin.whole) in wanted] for unit in self._backwards]
            sets = [bucket for members in of_units for bucket in assign(members, BUCKET_BYTES)]
        return [ReduceScatterBucket([self._of_whole[id(whole)] for whole in members]) for members in sets]

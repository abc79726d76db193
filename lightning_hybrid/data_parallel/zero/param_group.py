"""Parameters that are unsharded together: one all-gather for those of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from lightning_hybrid.data_parallel.zero.param import ShardedParameter
from lightning_hybrid.distributed.process_group import GroupRef, all_gather_single


class ParameterGroup:
    """The parameters of a layer, which are unsharded or are not.

    ::

        unshard_async()         all-gather                      not waited for: the layer before computes
        wait_for_unshard()      the shards are there, and are copied out
        release()               not needed for now              resharded, unless memory stays
        reshard()               out of date

    Args:
        parameters: The parameters.
        group: The replicas.
        keeps_memory: Whether unsharded parameters have memory all the time, or only while they are needed; only then
            layers can find them.

    Attributes:
        keeps_memory: Whether unsharded parameters have memory all the time.
        is_unsharded: Whether what layers find is up to date.
        in_backward: Whether a backward goes through the layer.
    """

    copies_out: ClassVar[bool] = False
    """True while gathered values are copied into parameters, which is not part of the user's step."""

    def __init__(self, parameters: Sequence[ShardedParameter], group: ProcessGroup, *, keeps_memory: bool) -> None:
        self.parameters = list(parameters)
        self.is_unsharded = self.in_backward = False
        self.keeps_memory = keeps_memory
        self._group = GroupRef(group)
        kinds: dict[object, list[ShardedParameter]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.flat.dtype, parameter.flat.device), []).append(parameter)
        self._kinds = list(kinds.values())
        self._in_flight: list[tuple[list[ShardedParameter], Tensor, Work]] = []

    @torch.no_grad()
    def unshard_async(self) -> None:
        """Start to gather shards, unless that was done, or the parameters are unsharded."""
        if self.is_unsharded or self._in_flight:
            return
        group = self._group()
        for parameters in self._kinds:
            own = torch.cat([parameter.all_gather_input() for parameter in parameters])
            shards = own.new_empty(group.size() * own.numel())
            work = all_gather_single(shards, own, group=group, async_op=True)
            self._in_flight.append((parameters, shards.view(group.size(), -1), work))

    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        """Have all values in place."""
        if self.is_unsharded:
            return
        self.unshard_async()
        for parameters, shards, work in self._in_flight:
            work.wait()
            sizes = [parameter.rows.padded_numel for parameter in parameters]
            ParameterGroup.copies_out = True
            try:
                for parameter, gathered in zip(parameters, torch.split(shards, sizes, 1), strict=True):
                    parameter.copy_out(gathered)
            finally:
                ParameterGroup.copies_out = False
        self._in_flight.clear()
        self.is_unsharded = True
        if not self.keeps_memory:
            self.to_unsharded()

    def release(self) -> None:
        """The values are not needed for now: free memory that does not stay."""
        self.in_backward = False
        if not self.keeps_memory:
            self.reshard()

    def reshard(self) -> None:
        """The values are not needed any more, or out of date."""
        if self._in_flight:  # no layer has waited for them
            self.wait_for_unshard()
        if self.is_unsharded and not self.keeps_memory:
            self.to_sharded()  # what has no memory must not be found
            for parameter in self.parameters:
                parameter.update_shard()
                parameter.free()
        self.is_unsharded = False

    def to_unsharded(self) -> None:
        """Let layers find unsharded parameters."""
        for parameter in self.parameters:
            parameter.to_unsharded()

    def to_sharded(self) -> None:
        """Let everybody else find shards."""
        for parameter in self.parameters:
            parameter.to_sharded()

    def abandon(self) -> None:
        """Let go of collectives in flight, after a failure."""
        self._in_flight.clear()

"""Parameters that are made whole together: one all-gather for those of a layer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from lightning_hybrid.data_parallel.zero.param import ShardedParameter

__all__ = ["ParameterGroup"]

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name up to torch 2.12


class ParameterGroup:
    """The parameters of a layer, which are whole or are not.

    ::

        request()       shares travel                       not waited for: the layer before computes
        make_whole()    they have arrived, and are in place
        close()         not needed for now                  memory goes, unless it is kept
        free()          out of date

    Args:
        twins: The parameters.
        group: The replicas.
        keeps: Whether wholes have memory all the time, or only while they are needed; only then they can be found.

    Attributes:
        keeps: Likewise.
        is_whole: Whether what layers find is up to date.
        in_backward: Whether a backward goes through the layer.
    """

    def __init__(self, twins: Sequence[ShardedParameter], group: ProcessGroup, *, keeps: bool) -> None:
        self.twins = list(twins)
        self.is_whole = self.in_backward = False
        self.keeps = keeps
        self._group = weakref.ref(group)
        kinds = dict.fromkeys((twin.memory.dtype, twin.memory.device) for twin in twins)
        self._kinds = [[t for t in twins if (t.memory.dtype, t.memory.device) == kind] for kind in kinds]
        self._arriving: list[tuple[list[ShardedParameter], Tensor, Work]] = []

    @property
    def travelling(self) -> list[Tensor]:
        """What is under way."""
        return [shares for _, shares, _ in self._arriving]

    @torch.no_grad()
    def request(self) -> None:
        """Let shares travel, unless they do already, or the parameters are whole."""
        if self.is_whole or self._arriving:
            return
        group = self._group()
        assert group is not None, "the process groups have been destroyed"
        for twins in self._kinds:
            own = torch.cat([twin.share() for twin in twins])
            shares = own.new_empty(group.size() * own.numel())
            work = _all_gather(shares, own, group=group, async_op=True)
            self._arriving.append((twins, shares.view(group.size(), -1), work))

    @torch.no_grad()
    def make_whole(self) -> None:
        """Have all values in place."""
        if self.is_whole:
            return
        self.request()
        for twins, shares, work in self._arriving:
            work.wait()
            offset = 0
            for twin in twins:
                twin.take(shares[:, offset : offset + twin.rows.share])
                offset += twin.rows.share
        self._arriving.clear()
        self.is_whole = True
        if not self.keeps:
            self.put_whole()

    def close(self) -> None:
        """The values are not needed for now: memory goes that is not kept."""
        self.in_backward = False
        if not self.keeps:
            self.free()

    def free(self) -> None:
        """The values are not needed any more, or out of date."""
        if self._arriving:  # nobody came
            self.make_whole()
        if self.is_whole and not self.keeps:
            self.put_shards()  # what has no memory must not be found
            for twin in self.twins:
                twin.free()
        self.is_whole = False

    def put_whole(self) -> None:
        """Let layers find wholes."""
        for twin in self.twins:
            twin.put_whole()

    def put_shards(self) -> None:
        """Let everybody else find shards."""
        for twin in self.twins:
            twin.put_shard()

    def abandon(self) -> None:
        """Let go of what is under way, after a failure."""
        self._arriving.clear()

"""Channels between live ranks, and groups that count what really goes over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.pipeline_parallel.p2p import Channel
from lightning_hybrid.pipeline_parallel.schedules import ChannelKey

__all__ = ["CountingGroup", "open_channel", "open_channels"]


class CountingGroup:
    """A process group that records its sends and receives.

    Attributes:
        calls: ``("send" | "recv", number of elements)``, in order.
        unwaited: Sends that nobody has waited for.
        peak: The largest value of `unwaited` ever.
    """

    def __init__(self, group: dist.ProcessGroup, log: Callable[[str], None] = lambda text: None) -> None:
        self.group = group
        self.log = log
        self.calls: list[tuple[str, int]] = []
        self.unwaited = self.peak = 0

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self.calls.append(("send", tensors[0].numel()))
        self.log("send")
        self.unwaited += 1
        self.peak = max(self.peak, self.unwaited)
        return _Work(self, self.group.send(tensors, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self.calls.append(("recv", tensors[0].numel()))
        self.log("recv")
        return self.group.recv(tensors, peer, tag)


class _Work:
    def __init__(self, group: CountingGroup, work: Any) -> None:
        self.group, self.work = group, work

    def wait(self) -> None:
        self.work.wait()
        self.group.unwaited -= 1


def open_channel(sender: int, receiver: int, dynamic_shapes: bool = False) -> tuple[Channel, CountingGroup] | None:
    """The channel of two ranks, on these two; collective over the default group."""
    group = CountingGroup(dist.new_group([sender, receiver]))
    rank = dist.get_rank()
    if rank not in (sender, receiver):
        return None
    peer = sorted((sender, receiver)).index(sender + receiver - rank)
    channel = Channel(group, peer, torch.device("cpu"), dynamic_shapes)  # type: ignore[arg-type]
    channel.owner = group  # type: ignore[attr-defined]  # a channel refers to its group weakly
    return channel, group


def open_channels(dynamic_shapes: bool = False) -> tuple[dict[ChannelKey, Channel], dict[ChannelKey, CountingGroup]]:
    """All channels of a pipeline over all ranks (a ring, for several chunks), and their groups."""
    channels: dict[ChannelKey, Channel] = {}
    groups: dict[ChannelKey, CountingGroup] = {}
    size = dist.get_world_size()
    pairs = {(rank, (rank + 1) % size) for rank in range(size)} if size > 1 else set()
    for sender, receiver in sorted(pairs | {(b, a) for a, b in pairs}):
        for kind in ("activation", "gradient"):
            opened = open_channel(sender, receiver, dynamic_shapes)
            if opened is not None:
                key: ChannelKey = (sender, receiver, kind)  # type: ignore[assignment]
                channels[key], groups[key] = opened
    return channels, groups

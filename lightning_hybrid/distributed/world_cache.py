"""Meshes, process groups and messages that outlive a run, so that the next run of the same shape reuses them.

`Mesh` requests its groups here. Making groups takes time, and each group uses threads and files.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_hybrid.distributed.messages.host_messages import HostMessages
from lightning_hybrid.distributed.messages.posted_broadcast import PostedBroadcast
from lightning_hybrid.torch_internals import clear_dtensor_cache, forget_mesh_groups


class WorldCache:
    """A cache of the meshes, process groups and messages of the current world, for the next mesh of the same shape.

    The garbage collector frees a Trainer at any time, possibly in a `DataLoader` worker that was forked from this
    process. The threads of process groups do not exist in the worker, so freeing a group would crash or block the
    worker. References in this cache prevent that. When the cache drops its entries, it collects garbage at once, in
    this process. The copy of the cache in a forked process never drops its entries.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, Any] = {}
        self._of_parent: list[dict[Hashable, Any]] = []
        self._world: Callable[[], dist.ProcessGroup | None] = lambda: None

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the entry of a key; the first request makes it.

        Every rank must request the same keys in the same order.

        Args:
            key: The key.
            make: Makes the entry.
        """
        world = dist.group.WORLD
        assert world is not None
        if self._world() is not world:
            if self._entries or self._of_parent:  # collecting garbage takes several tenths of a second
                self.clear()
                # torch caches how the results of operations on DTensors are sharded. Entries refer to the mesh of the
                # first call, whose groups are destroyed, but an equal mesh of the new world would get the entries. The
                # names of the groups may now belong to other groups.
                clear_dtensor_cache()
                gc.collect()
            self._world = weakref.ref(world)
        if key not in self._entries:
            self._entries[key] = make()
        return self._entries[key]

    def leave_to_parent(self) -> None:
        """Keep the entries forever in a forked process.

        Freeing a group would wait for its threads, which do not exist in this process.
        """
        if self._entries:
            self._of_parent.append(self._entries)
            self._entries = {}

    def clear(self) -> None:
        """Drop all entries, and the groups to which meshes and pending messages refer."""
        for entry in self._entries.values():
            if isinstance(entry, DeviceMesh):
                forget_mesh_groups(entry)
            if isinstance(entry, PostedBroadcast | HostMessages):
                entry.abandon()
        self._entries.clear()


#: The cache of this process.
WORLD_CACHE = WorldCache()
os.register_at_fork(after_in_child=WORLD_CACHE.leave_to_parent)

"""What the Trainer's collectives mean: to the user the world is the replicas, and decisions are everyone's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor

from lightning_hybrid.exchange import reduce_over
from lightning_hybrid.mesh import Mesh

__all__ = ["ReplicaCollectives"]


class ReplicaCollectives(ParallelStrategy):
    """Values are reduced and gathered over the replicas; barriers, broadcasts and decisions are those of all ranks."""

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        raise NotImplementedError

    @property
    def is_alone(self) -> bool:
        """Whether there are no process groups: before a run, or after they were destroyed."""
        raise NotImplementedError

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas, or over the group that is given."""
        if not isinstance(tensor, Tensor) or self.is_alone:
            return tensor
        if group is None or group is dist.group.WORLD:
            group = self.mesh.data_group
        return reduce_over(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over the replicas, or over a given group: shape ``(replicas, ...)``, with one replica ``(...)``."""
        if group is None or group is dist.group.WORLD:
            if self.is_alone or self.mesh.data_parallel_size == 1:
                return tensor
            group = self.mesh.data_group
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (any) of the processes say yes."""
        if self.is_alone:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return int(votes) == self.world_size if all else int(votes) > 0

    def barrier(self, name: str | None = None) -> None:
        """Wait for every process."""
        if not _distributed_is_initialized():
            return
        dist.barrier(device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Give every process the object of one."""
        if not _distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

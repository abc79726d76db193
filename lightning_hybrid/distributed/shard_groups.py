"""The groups of ranks over which parameters are sharded, and of ranks with equal shards.

`Mesh` makes them for ZeRO and for experts. Without `zero_size`, ZeRO shards over all replicas, and a mesh has these
groups for other uses too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.distributed.process_group import GroupRef


class ShardGroups:
    """The groups of this rank for parameters that replicas shard.

    Parameters are sharded over `size` consecutive replicas. The *group* of a rank has the other shards of its
    parameters. Its *rows group* has equal shards, which must have equal gradients. With 4 replicas of 2 context ranks
    and ``size=2``, on rank 0::

        data rank       0     1   |   2     3
        rank           0 1   2 3  |  4 5   6 7
        rows           a a   b b  |  a a   b b       group [0,2], rows group [0,1,4,5]

    The constructor makes groups, so it is a collective of all ranks.

    Args:
        ranks: The global ranks, ``(pipeline, data, context, tensor)``.
        size: The number of replicas over which parameters are sharded, a divisor of all; ``None`` for all.
        data_rank: The data rank of this rank.
        make_group: Returns the group of this rank for ranks of the shape ``(groups, ranks per group)``; it takes the
            backend as second argument.
        has_rows_group: True to make the rows group even if it has only this rank.

    Attributes:
        size: The number of replicas over which parameters are sharded.
        rank: The rank in the group.
        rows_group_size: The number of ranks in the rows group.
    """

    def __init__(
        self,
        ranks: Tensor,
        data_rank: int,
        make_group: Callable[..., GroupRef],
        *,
        size: int | None,
        has_rows_group: bool = False,
    ) -> None:
        num_replicas, num_context = ranks.shape[1:3]
        self.size = num_replicas if size is None else size
        self.rank = data_rank % self.size
        self.rows_group_size = num_replicas // self.size * num_context
        by_shard = self._by_shard(ranks)
        sharding = by_shard.permute(0, 1, 3, 4, 2).flatten(0, 3)
        self._group = make_group(sharding)
        self._control_group = make_group(sharding, "gloo") if num_replicas > 1 else None
        self._rows_group: GroupRef | None = None
        if self.rows_group_size > 1 or has_rows_group:
            self._rows_group = make_group(by_shard.permute(0, 2, 4, 1, 3).flatten(0, 2).flatten(1))

    def _by_shard(self, ranks: Tensor) -> Tensor:
        """Return ranks of some stages with the dimensions ``(pipeline, group, rank in it, context, tensor)``."""
        return ranks.reshape(ranks.shape[0], -1, self.size, *ranks.shape[2:])

    def by_rows(self, ranks: Tensor) -> Tensor:
        """Return the groups of the ranks with equal shards on several stages, ``(groups, ranks of a group, ...)``.

        Args:
            ranks: The global ranks of these stages, ``(pipeline, data, context, tensor)``.
        """
        return self._by_shard(ranks).permute(2, 4, 0, 1, 3).flatten(0, 1)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks over which the parameters of this rank are sharded, one in each of `size` replicas."""
        return self._group()

    @property
    def control_group(self) -> dist.ProcessGroup:
        """The ranks of the group, over gloo; it exists only with several replicas."""
        assert self._control_group is not None
        return self._control_group()

    @property
    def rows_group(self) -> dist.ProcessGroup:
        """The ranks with equal shards, in all groups and along the context axis, if there are several."""
        assert self._rows_group is not None
        return self._rows_group()

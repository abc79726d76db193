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

    Parameters are sharded over `size` replicas, which gather them to compute. Experts are first sharded over
    `num_expert_ranks` consecutive replicas, which compute with different experts. The *group* of a rank has the other
    shards of the parameters with which it computes. Its *rows group* has equal shards, which must have equal gradients.
    With 4 replicas of 2 context ranks, ``size=2``, and 1 or 2 expert ranks, on rank 0::

        data rank       0     1   |   2     3
        rank           0 1   2 3  |  4 5   6 7
        rows           a a   b b  |  a a   b b       1: group [0,2], rows group [0,1,4,5]
        expert, rows  xa xa ya ya | xb xb yb yb      2: group [0,4], rows group [0,1], expert group [0,2]

    The constructor makes groups, so it is a collective of all ranks.

    Args:
        ranks: The global ranks, ``(pipeline, data, context, tensor)``.
        data_rank: The data rank of this rank.
        make_group: Returns the group of this rank for ranks of the shape ``(groups, ranks per group)``; it takes the
            backend as second argument.
        size: The number of replicas that gather a parameter.
        num_expert_ranks: The number of replicas over which experts are sharded; 1 for other parameters. It times `size`
            divides the number of replicas.

    Attributes:
        size: The number of replicas that gather a parameter.
        rank: The rank in the group.
        num_expert_ranks: The number of replicas over which experts are sharded.
        expert_rank: The rank in the expert group.
        rows_group_size: The number of ranks in the rows group.
        has_first_copy: True if this replica is the first one with its shards.
    """

    def __init__(
        self,
        ranks: Tensor,
        data_rank: int,
        make_group: Callable[..., GroupRef],
        *,
        size: int,
        num_expert_ranks: int = 1,
    ) -> None:
        num_replicas, num_context = ranks.shape[1:3]
        self.size, self.num_expert_ranks = size, num_expert_ranks
        self.expert_rank = data_rank % num_expert_ranks
        self.rank = data_rank // num_expert_ranks % size
        self.rows_group_size = num_replicas // self.num_shards * num_context
        self.has_first_copy = data_rank < self.num_shards
        by_shard = self._by_shard(ranks)
        sharding = by_shard.movedim(2, -1).flatten(0, -2)
        self._group = make_group(sharding)
        self._control_group = make_group(sharding, "gloo") if num_replicas > 1 else None
        self._expert_group, self._rows_group = None, None
        if num_expert_ranks > 1:
            self._expert_group = make_group(by_shard.movedim(3, -1).flatten(0, -2))
        if self.rows_group_size > 1 or num_expert_ranks > 1:
            self._rows_group = make_group(by_shard.permute(0, 2, 3, 5, 1, 4).flatten(0, 3).flatten(1))

    def _by_shard(self, ranks: Tensor) -> Tensor:
        """Return ranks of some stages, ``(pipeline, groups, rank in group, expert rank, context, tensor)``."""
        return ranks.reshape(ranks.shape[0], -1, self.size, self.num_expert_ranks, *ranks.shape[2:])

    def by_rows(self, ranks: Tensor) -> Tensor:
        """Return the groups of the ranks with equal shards on several stages, ``(groups, ranks of a group, ...)``.

        Args:
            ranks: The global ranks of these stages, ``(pipeline, data, context, tensor)``.
        """
        return self._by_shard(ranks).permute(2, 3, 5, 0, 1, 4).flatten(0, 2)

    def sharing(self, ranks: Tensor, data_rank: int) -> Tensor:
        """Return the ranks with the shards of one copy of the parameters, ``(expert rank, rank in group, ...)``.

        Args:
            ranks: Global ranks, ``(data, ...)``.
            data_rank: A data rank that has a shard of the copy.
        """
        first = data_rank - data_rank % self.num_shards
        own = ranks[first : first + self.num_shards]
        return own.unflatten(0, (self.size, self.num_expert_ranks)).transpose(0, 1)  # type: ignore[no-untyped-call, no-any-return]

    @property
    def num_shards(self) -> int:
        """The number of replicas with different shards."""
        return self.size * self.num_expert_ranks

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that gather the same parameters, one in each of `size` replicas."""
        return self._group()

    @property
    def control_group(self) -> dist.ProcessGroup:
        """The ranks of the group, over gloo; it exists only with several replicas."""
        assert self._control_group is not None
        return self._control_group()

    @property
    def expert_group(self) -> dist.ProcessGroup:
        """The ranks that compute together with all experts; it exists only if experts are sharded."""
        assert self._expert_group is not None
        return self._expert_group()

    @property
    def rows_group(self) -> dist.ProcessGroup:
        """The ranks with equal shards, in all groups and along the context axis, if there are several."""
        assert self._rows_group is not None
        return self._rows_group()

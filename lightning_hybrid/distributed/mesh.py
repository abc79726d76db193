"""The device mesh: its axes, its process groups, and the coordinates of this rank.

`strategy.run.World` makes the mesh of a process once, after `HybridStrategy` has started the group of all ranks. Almost
all other code takes its groups and coordinates from this mesh. torch's `DeviceMesh` alone is not sufficient: it has one
group for each axis, but a run also needs groups over several axes, gloo groups for data on the host, a group for each
pair of stages, and messages whose receives stay posted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from lightning_hybrid.axes import AXIS_OF_KEY, DATA, LAYERS, ROLES, TENSOR, Sizes, complete_order
from lightning_hybrid.distributed.arrangement import Arrangement, line
from lightning_hybrid.distributed.dtensor import EXPERTS, REPLICAS
from lightning_hybrid.distributed.messages.host_messages import HostMessages, connect
from lightning_hybrid.distributed.messages.posted_broadcast import PostedBroadcast
from lightning_hybrid.distributed.messages.tree_broadcast import TreeBroadcast
from lightning_hybrid.distributed.process_group import GroupRef, device_backends, make_group, set_timeout
from lightning_hybrid.distributed.shard_groups import ShardGroups
from lightning_hybrid.distributed.world_cache import WORLD_CACHE

#: The tags of messages between two stages over the control group.
STAGE_TAGS: dict[Literal["activation", "gradient"], int] = {"activation": 1, "gradient": 2}

#: The names of the broadcasts over the control group. Each rank may be a source, and each source has its own tags.
_BROADCASTS = "batches", "results", "signals", "layers"


class Mesh:
    """The ranks of a run, with a coordinate for each role of an axis: pipeline, data, context and tensor rank.

    torch owns the process groups. The package refers to them only by :class:`GroupRef`, so destroying a group closes
    its connections at once, and waiting ranks notice. Each group uses threads and files, so the next mesh of the same
    shape reuses the groups of this one.

    The *model group* of a rank consists of the ranks that hold one replica: all ranks with the same data rank. With
    ``rank_order="pp-dp-tp"`` and 2 x 2 x 2 ranks::

        rank 0 1 2 3 | 4 5 6 7       pipeline rank 0 | 1
             tensor      [0,1] [2,3] [4,5] [6,7]
             data        [0,2] [1,3] [4,6] [5,7]
             pipeline    [0,4] [1,5] [2,6] [3,7]
             model       [0,1,4,5] [2,3,6,7]

    One call of :func:`make_group` makes all groups of one line of this table, unless an earlier line has the same
    groups. torch's mesh has a group for each axis. If several axes have the same role, the coordinate of this role runs
    over all these axes: the data rank is the index of the replica. The *gradient group* of a rank covers all axes whose
    role averages gradients. With context parallelism, these are the data and context axes. The *control group* of a
    rank has the ranks of its model group, over gloo.

    The constructor makes all these groups, so it is a collective of all ranks. If a group were made when it is first
    needed, a rank that failed earlier would block the others. Only two methods make groups later, and every rank must
    call them: :meth:`new_p2p_group`, for the messages of the pipeline, and :meth:`shared_parameter_group`, for
    parameters on several stages.

    Args:
        sizes: The number of ranks along each axis.
        rank_order: The axes from the outermost to the innermost, joined by ``-``; optional axes may be missing.
        device_type: The type of the devices of torch's mesh: ``"cpu"`` or ``"cuda"``.
        timeout: The timeout of the groups, also of the group of all ranks if the mesh uses that; ``None`` for torch's.
        hosts: The host of each rank; empty if it is not known.
        writes_together: If True, make a separate group for files that all ranks write together in the background.
        arrangement: The arrangement of the tensor-parallel ranks; by default a line.
        zero_size: The number of replicas over which ZeRO shards; ``None`` for all.
        expert_parallel_size: The number of replicas over which experts are sharded.
        expert_zero_size: The number of replicas with the same experts over which ZeRO shards these.

    Attributes:
        sizes: The number of ranks along each axis.
        hosts: The host of each rank.
        arrangement: The arrangement of the tensor-parallel ranks.
        num_replicas: The number of model groups.
        zero: The groups for parameters that ZeRO shards.
        experts: The groups for the parameters of experts; the same object as `zero` if experts are not sharded.
        pipeline_rank, data_rank, context_rank, tensor_rank: The coordinates of this rank. Each is 0 if its role has
            size 1.
        host_messages: The messages of the host between the ranks of the control group.
        is_first: True if this rank is the first one along every axis. This rank writes files and logs.
        broadcasts: The broadcasts that :meth:`posted_broadcast` has returned; the watch reads their progress.
    """

    def __init__(
        self,
        sizes: Sizes,
        *,
        rank_order: str = "pp-dp-tp",
        device_type: str = "cpu",
        timeout: timedelta | None = None,
        hosts: Sequence[str] = (),
        writes_together: bool = False,
        arrangement: Arrangement | None = None,
        zero_size: int | None = None,
        expert_parallel_size: int = 1,
        expert_zero_size: int = 1,
    ) -> None:
        self.sizes, self.num_replicas, self.hosts = sizes, sizes.num_replicas, list(hosts)
        self.arrangement = line(sizes.tensor) if arrangement is None else arrangement
        by_key = sizes.by_key
        order = [AXIS_OF_KEY[key] for key in complete_order(rank_order, by_key).split("-")]
        by_order = torch.arange(dist.get_world_size(), dtype=torch.int).view([by_key[axis.key] for axis in order])
        by_role = sorted(order, key=lambda axis: ROLES.index(axis.role))
        arranged = by_order.permute([order.index(axis) for axis in by_role])
        self._ranks = arranged.reshape([sizes.with_role(role) for role in ROLES])
        self._requests: Counter[Hashable] = Counter()
        self._timeout = timeout
        coordinates = (self._ranks == dist.get_rank()).nonzero().flatten().tolist()
        self.pipeline_rank, self.data_rank, self.context_rank, self.tensor_rank = coordinates
        self.is_first = not any(coordinates)

        by_stage = self._ranks.permute(0, 2, 3, 1).flatten(0, 2)
        by_replica = self._ranks.transpose(0, 1).flatten(1)
        everyone = by_order.view(1, -1)
        self._data_group = self._group(by_stage)
        self._tensor_group = self._group(self._ranks.flatten(0, 2))
        self._arranged = {axes: self._group(self._along(axes)) for axes in self.arrangement.groups()}
        self._model_group = self._group(by_replica)
        self._context_group: GroupRef | None = None
        self._gradient_group = self._data_group
        if sizes.context > 1:
            self._context_group = self._group(self._ranks.transpose(2, 3).flatten(0, 2))
            self._gradient_group = self._group(self._ranks.permute(0, 3, 1, 2).flatten(0, 1).flatten(1))
        place = self._ranks, self.data_rank, self._group
        self.zero = self.experts = ShardGroups(*place, size=zero_size or self.num_replicas)
        if expert_parallel_size > 1:
            self.experts = ShardGroups(*place, size=expert_zero_size, num_expert_ranks=expert_parallel_size)
        of_axes: dict[str, GroupRef] = {}
        for axis in reversed(by_role):  # groups over stages last, as only torch's mesh has them
            ranks = by_order.movedim(order.index(axis), -1).flatten(0, -2)
            of_axes[axis.name] = self._group(ranks, connects_when_used=axis.role is LAYERS)
        self._control_group = self._group(by_replica, "gloo", use="control")
        self.host_messages = self._connect_host()
        takes_host_tensors = "cpu" in device_backends()
        self._decision_group = GroupRef(dist.group.WORLD) if takes_host_tensors else self._group(everyone, "gloo")
        beside = self._group(everyone, "gloo", use="in the background") if writes_together else self._decision_group
        self._writing_group = beside
        self._data_control_group = self._group(by_stage, "gloo") if self.num_replicas > 1 else None

        groups = {axis.name: of_axes[axis.name]() for axis in order}
        self._device_mesh: DeviceMesh | None = _make_device_mesh(groups, by_order, device_type)
        self.broadcasts: list[PostedBroadcast] = []

    @property
    def device_mesh(self) -> DeviceMesh:
        """The device mesh of torch, with the names of the axes."""
        assert self._device_mesh is not None, "the process groups have been destroyed"
        return self._device_mesh

    def retire(self) -> None:
        """Wait until each message sent through the host has been received, or copied by the kernel."""
        for messages in self.broadcasts:
            messages.retire()
        self.host_messages.flush()

    def abandon(self) -> None:
        """After a failure, drop messages and torch's mesh, because they keep connections open."""
        self._device_mesh = None
        WORLD_CACHE.clear()

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the model, one in each replica."""
        return self._data_group()

    @property
    def context_group(self) -> dist.ProcessGroup:
        """The ranks that each hold a shard of the same sequences; it exists only with context parallelism."""
        assert self._context_group is not None
        return self._context_group()

    @property
    def gradient_group(self) -> dist.ProcessGroup:
        """The ranks over which gradients are averaged: along all axes whose role averages gradients."""
        return self._gradient_group()

    @property
    def gradient_group_size(self) -> int:
        """The number of ranks in the gradient group."""
        return self.num_replicas * self.sizes.context

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """The ranks that each hold a shard of the same layers."""
        return self._tensor_group()

    @property
    def model_group(self) -> dist.ProcessGroup:
        """The ranks that hold one replica."""
        return self._model_group()

    @property
    def control_group(self) -> dist.ProcessGroup:
        """The ranks of the model group, over gloo: for batches, decisions and other data on the host."""
        return self._control_group()

    @property
    def writing_group(self) -> dist.ProcessGroup:
        """All ranks, over a backend for tensors on the host: for files that the ranks write together."""
        return self._writing_group()

    @property
    def decision_group(self) -> dist.ProcessGroup:
        """All ranks, over a backend for tensors on the host: for collectives of the main thread."""
        return self._decision_group()

    @property
    def data_control_group(self) -> dist.ProcessGroup:
        """The ranks of the data group, over gloo; it exists only with several replicas."""
        assert self._data_control_group is not None
        return self._data_control_group()

    def posted_broadcast(self, name: str, source: int) -> PostedBroadcast:
        """Return a broadcast from one rank of the model group to the others, over the control group.

        Receives stay posted between runs. Therefore a later mesh with the same ranks gets the same object.

        Every rank of the model group must request the broadcast, because ranks forward its messages.

        Args:
            name: The name of the broadcast, one of :data:`_BROADCASTS`.
            source: The rank in the model group that sends.
        """
        group, before = self.control_group, 1 + max(STAGE_TAGS.values()) + len(_BROADCASTS) * source
        tag = before + _BROADCASTS.index(name)
        ranks = tuple(dist.get_process_group_ranks(group))
        messages: PostedBroadcast = WORLD_CACHE.get(
            (ranks, tag, self._timeout), lambda: PostedBroadcast(self.host_messages, source, tag, name)
        )
        if messages not in self.broadcasts:
            self.broadcasts.append(messages)
        return messages

    def tree_broadcast(
        self, name: str, source: int, device: torch.device, *, pin_memory: bool = False
    ) -> TreeBroadcast:
        """Return a broadcast of trees from one rank of the model group to the others.

        Args:
            name: The name of the broadcast, one of :data:`_BROADCASTS`.
            source: The rank in the model group that sends.
            device: The argument of :class:`TreeBroadcast`.
            pin_memory: The argument of :class:`TreeBroadcast`. The first request for a name, source and device decides.
        """
        messages = self.posted_broadcast(name, source)
        trees: TreeBroadcast = WORLD_CACHE.get(
            (id(messages), device), lambda: TreeBroadcast(messages, self.model_group, device, pin_memory=pin_memory)
        )
        return trees

    def _along(self, axes: Sequence[str]) -> Tensor:
        """Return the ranks along axes of the arrangement, for all replicas and stages.

        The shape is ``(groups, ranks per group)``.
        """
        names = [name for name, _ in self.arrangement.axes]
        by_axis = self._ranks.reshape(-1, *(size for _, size in self.arrangement.axes))
        others = [name for name in names if name not in axes]
        order = [0, *(1 + names.index(name) for name in (*others, *axes))]
        return by_axis.permute(order).reshape(-1, self.arrangement.parts(axes))

    @property
    def arranged_groups(self) -> dict[tuple[str, ...], dist.ProcessGroup]:
        """The groups of this rank along axes of the arrangement, by the axes from :meth:`Arrangement.groups`."""
        return {axes: group() for axes, group in self._arranged.items()}

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """The mesh over which layers are sharded: the tensor-parallel axis, or :attr:`Arrangement.mesh_axes`."""
        if self.arrangement.is_line:
            return self.device_mesh[TENSOR.name]
        axes = self._tensor_axes()
        ranks = self._ranks[self.pipeline_rank, self.data_rank].reshape([group.size() for group in axes.values()])
        return _make_device_mesh(axes, ranks, self.device_mesh.device_type)

    def shard_mesh(self, groups: ShardGroups) -> DeviceMesh:
        """Return the mesh for parameters that replicas shard: tensor-parallel axes, an axis of experts, and replicas.

        The replicas are the innermost axis, so they split the rows of a rank's tensor-parallel shard, or of its
        experts. Axes over which the parameters are not sharded are missing, but for the replicas.

        Args:
            groups: :attr:`zero` or :attr:`experts`.
        """
        axes = self._tensor_axes() if self.sizes.tensor > 1 else {}
        if not axes and groups.size == self.sizes.along(DATA) == self.num_replicas:
            return self.device_mesh[DATA.name]
        if groups.num_expert_ranks > 1:
            axes = {**axes, EXPERTS: groups.expert_group}
        axes = {**axes, REPLICAS: groups.group}
        ranks = groups.sharing(self._ranks[self.pipeline_rank, :, self.context_rank], self.data_rank)
        shape = [group.size() for group in axes.values()]
        return _make_device_mesh(axes, ranks.movedim(-1, 0).reshape(shape), self.device_mesh.device_type)

    @property
    def shard_groups(self) -> tuple[ShardGroups, ...]:
        """:attr:`zero`, and :attr:`experts` if experts are sharded."""
        return (self.zero,) if self.experts is self.zero else (self.zero, self.experts)

    def _tensor_axes(self) -> dict[str, dist.ProcessGroup]:
        """Return the groups of the axes over which layers are sharded, by name."""
        return {name: self._arranged[axes]() for name, axes in self.arrangement.mesh_axes.items()}

    def _connect_host(self) -> HostMessages:
        group = self.control_group
        ranks = dist.get_process_group_ranks(group)
        own = self.hosts[dist.get_rank()] if self.hosts else ""
        local = [index for index, rank in enumerate(ranks) if not self.hosts or self.hosts[rank] == own]
        messages: HostMessages = WORLD_CACHE.get(
            ("host messages", tuple(ranks), self._timeout),  # the parts of the key that the control group has too
            lambda: connect(group, local, self._timeout or default_pg_timeout),
        )
        return messages

    def data_parallel_min(self, number: int) -> int:
        """Return the minimum of a number over the ranks of the data group, all of which must call this."""
        if self._data_control_group is None:
            return number
        smallest = torch.tensor(number)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self._data_control_group())
        return int(smallest)

    def rank(self, pipeline_rank: int, data_rank: int, tensor_rank: int, context_rank: int = 0) -> int:
        """Return the global rank at these coordinates."""
        return int(self._ranks[pipeline_rank, data_rank, context_rank, tensor_rank])

    def peer(self, pipeline_rank: int) -> int:
        """Return the global rank at a pipeline rank that has the other coordinates of this rank."""
        return self.rank(pipeline_rank, self.data_rank, self.tensor_rank, self.context_rank)

    def pipeline_rank_of(self, rank: int) -> int:
        """Return the pipeline rank of a global rank."""
        return int((self._ranks == rank).nonzero()[0, 0])

    def model_ranks(self, data_rank: int) -> list[int]:
        """Return the global ranks of one replica, by pipeline rank, then context rank, then tensor rank."""
        ranks: list[int] = self._ranks[:, data_rank].flatten().tolist()
        return ranks

    def model_group_rank(self, pipeline_rank: int, tensor_rank: int, context_rank: int = 0) -> int:
        """Return the rank in the model group, and in the control group, at these coordinates.

        torch sorts the ranks of a group by their global ranks.
        """
        rank = self.rank(pipeline_rank, self.data_rank, tensor_rank, context_rank)
        return sorted(self.model_ranks(self.data_rank)).index(rank)

    def shared_parameter_group(
        self, pipeline_ranks: Iterable[int], shards: ShardGroups | None = None, *, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Return the group of all ranks on several stages that have this rank's tensor rank.

        Every rank of the world must call this with the same arguments in the same order.

        Args:
            pipeline_ranks: The pipeline ranks of the group.
            shards: :attr:`zero` or :attr:`experts`, for a group of ranks with the same shards. ``None`` for a group of
                ranks of all replicas.
            backend: The backend of the group; ``None`` for the backend of the world.

        Returns:
            The group of this rank; ``None`` if this rank is not in a group.
        """
        ranks = self._ranks[sorted(pipeline_ranks)]
        by_rank = ranks.permute(3, 0, 1, 2) if shards is None else shards.by_rows(ranks)
        reference = self._find_group(by_rank.flatten(1), backend)
        return None if reference is None else reference()

    def spans_machines(self, *pipeline_ranks: int) -> bool:
        """Return True if these pipeline ranks are on different nodes in any replica; all ranks get the same result."""
        return bool(self.hosts) and any(
            len({self.hosts[rank] for rank in ranks}) > 1
            for ranks in self._ranks[list(pipeline_ranks)].flatten(1).T.tolist()
        )

    def new_p2p_group(self, pairs: Iterable[tuple[int, int]]) -> dist.ProcessGroup | None:
        """Return a new group of two pipeline ranks of this rank's replica, the lower one first.

        Every rank of the world must call this with the same arguments in the same order. Each call makes new groups, so
        that messages of different pairs, directions and kinds never wait for each other.

        Args:
            pairs: Disjoint pairs of pipeline ranks. One call makes the groups of all pairs.

        Returns:
            The group of this rank's pair; ``None`` if this rank is not in a pair.
        """
        ranks = torch.cat([self._ranks[list(pair)].permute(1, 2, 3, 0).flatten(0, 2) for pair in pairs])
        reference = self._find_group(ranks, use="messages")
        return None if reference is None else reference()

    def _group(self, rank_groups: Tensor, *args: Any, **kwargs: Any) -> GroupRef:
        """Return the group of this rank, where every rank is in a group; see :meth:`_find_group`."""
        reference = self._find_group(rank_groups, *args, **kwargs)
        assert reference is not None
        return reference

    def _find_group(
        self, rank_groups: Tensor, backend: str | None = None, *, use: str = "", connects_when_used: bool = False
    ) -> GroupRef | None:
        """Return the group of this rank, one of several disjoint groups. Groups that exist already are reused.

        Args:
            rank_groups: The global ranks, shape ``(groups, ranks per group)``.
            backend: The backend of the groups; ``None`` for the backend of the world.
            use: The use of the groups. Groups for different uses are distinct. For ``"messages"``, each request makes
                new groups.
            connects_when_used: The argument of :func:`make_group`.

        Returns:
            A reference to the group; ``None`` if this rank is not in a group.
        """
        ranks: list[list[int]] = rank_groups.sort(1).values.tolist()
        request = tuple(map(tuple, ranks)), backend, use, self._timeout
        if use == "messages":
            self._requests[request] += 1

        def make() -> GroupRef | None:
            world = dist.group.WORLD
            assert world is not None
            if backend is None and not use and len(ranks[0]) == world.size() and set_timeout(world, self._timeout):
                return GroupRef(world)
            group = make_group(
                ranks,
                backend=backend,
                timeout=self._timeout,
                carries_messages=use == "messages",
                connects_when_used=connects_when_used or len(ranks[0]) == 1,
            )
            return None if group is None else GroupRef(group)

        reference: GroupRef | None = WORLD_CACHE.get((request, self._requests[request]), make)
        return reference


def _make_device_mesh(groups: Mapping[str, dist.ProcessGroup], ranks: Tensor, device_type: str) -> DeviceMesh:
    """Return torch's mesh of groups, by the names of their axes. An existing mesh of the same ranks is reused."""
    names, ranks = tuple(groups), ranks.contiguous()
    mesh: DeviceMesh = WORLD_CACHE.get(
        (device_type, names, tuple(ranks.shape), tuple(ranks.flatten().tolist())),
        lambda: DeviceMesh.from_group(list(groups.values()), device_type, mesh=ranks, mesh_dim_names=names),
    )
    return mesh

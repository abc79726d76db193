"""The device mesh: its axes, the groups of ranks that work together, and this rank's coordinates."""

from __future__ import annotations

import gc
import os
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from lightning_hybrid.axes import AXIS_OF_KEY, DATA, LAYERS, ROLES, SAMPLES, TENSOR, Sizes, complete_order
from lightning_hybrid.distributed.arrangement import Arrangement, line
from lightning_hybrid.distributed.messages.host_messages import HostMessages, connect
from lightning_hybrid.distributed.messages.posted_broadcast import PostedBroadcast
from lightning_hybrid.distributed.messages.tree_broadcast import TreeBroadcast
from lightning_hybrid.distributed.process_group import GroupRef, device_backends, make_group, set_timeout
from lightning_hybrid.torch_internals import clear_dtensor_cache, forget_mesh_groups

#: Tags of what travels between two stages through the control group.
STAGE_TAGS: dict[Literal["activation", "gradient"], int] = {"activation": 1, "gradient": 2}

#: What is broadcast in the same group by messages; each of its ranks may be a source, with tags of its own.
_BROADCASTS = "batches", "results", "signals", "layers"


class _WorldCache:
    """Meshes and process groups of the present world, to be taken over by the next mesh of the same shape.

    A Trainer is freed as cyclic garbage, at any time: also in a worker of a `DataLoader` that was forked before. There
    the threads of process groups do not exist, and freeing one ends or stops the worker. What is held here is not freed
    there; what is dropped is collected at once, in this process. A copy of it never drops what it has got.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, Any] = {}
        self._of_parent: list[dict[Hashable, Any]] = []
        self._world: Callable[[], dist.ProcessGroup | None] = lambda: None

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The entry of this key, made if there is none. Every rank must ask for the same keys in the same order."""
        world = dist.group.WORLD
        assert world is not None
        if self._world() is not world:
            if self._entries or self._of_parent:  # to collect takes a good part of a second
                self.clear()
                # Torch caches how results on DTensors are sharded, with the mesh of the first time. An equal mesh of a
                # world that is gone has groups that are gone, whose names others may have now.
                clear_dtensor_cache()
                gc.collect()
            self._world = weakref.ref(world)
        if key not in self._entries:
            self._entries[key] = make()
        return self._entries[key]

    def leave_to_parent(self) -> None:
        """In a process that was forked: to free a group is to wait for its threads, which were not copied."""
        if self._entries:
            self._of_parent.append(self._entries)
            self._entries = {}

    def clear(self) -> None:
        """Drop everything: meshes, parameters that are sharded over them, and messages under way hold groups."""
        for entry in self._entries.values():
            if isinstance(entry, DeviceMesh):
                forget_mesh_groups(entry)
            if isinstance(entry, PostedBroadcast | HostMessages):
                entry.abandon()
        self._entries.clear()


_WORLD_CACHE = _WorldCache()
os.register_at_fork(after_in_child=_WORLD_CACHE.leave_to_parent)


class Mesh:
    """The ranks of a run, arranged by the roles of the axes: pipeline, data, context and tensor rank.

    torch owns the process groups; here and elsewhere in the package they are held by :class:`GroupRef`. So destroying
    them closes their connections at once, and a rank that waits for this one notices. Each group costs threads and
    files until then, so the next mesh of the same shape takes over the groups of this one.

    The *model group* of a rank are the ranks that hold one replica together: all with its data rank. With
    ``rank_order="pp-dp-tp"`` and 2 x 2 x 2 ranks::

        rank 0 1 2 3 | 4 5 6 7       pipeline rank 0 | 1
             tensor      [0,1] [2,3] [4,5] [6,7]
             data        [0,2] [1,3] [4,6] [5,7]
             pipeline    [0,4] [1,5] [2,6] [3,7]
             model       [0,1,4,5] [2,3,6,7]

    Each line is one call of :func:`make_group`, if no line before it has the same ranks. Torch's mesh has a group for
    each axis. If several axes have one role, the rank of this role counts through all of them: the data rank is the
    number of the replica. Ranks of axes whose role averages gradients form the *gradient group*: with context
    parallelism these are the replicas and the ranks that share each sequence.

    All groups are made at once, and none when it is first needed: a rank that fails before would leave the
    others waiting for it.

    Args:
        sizes: The number of ranks along each axis.
        rank_order: The axes from the outermost to the innermost, joined by ``-``; optional axes may be missing.
        device_type: ``"cpu"`` or ``"cuda"``.
        timeout: Of the groups made here, and of the group of all ranks where that is one of them.
        hosts: The machine of each rank.
        writes_together: Whether ranks write files together, for which they need a group: it may be beside training.
        arrangement: The arrangement of the tensor-parallel ranks; a line by default.

    Attributes:
        sizes: As given.
        hosts: As given.
        arrangement: As given.
        num_replicas: The number of model groups.
        host_messages: Between the ranks of the control group.
        is_first: Whether this is the first rank of every axis: the one that writes and logs.
        broadcasts: Those that have been asked for.
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
        of_axes: dict[str, GroupRef] = {}
        for axis in reversed(by_role):  # the groups over stages last: nothing here uses them
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
        """The mesh of torch, with the names of the axes."""
        assert self._device_mesh is not None, "the process groups have been destroyed"
        return self._device_mesh

    def retire(self) -> None:
        """Wait until what has been sent through the host is received, or the kernel has it."""
        for messages in self.broadcasts:
            messages.retire()
        self.host_messages.flush()

    def abandon(self) -> None:
        """After a failure, drop what keeps connections open: messages, and torch's mesh with the group of all ranks."""
        self._device_mesh = None
        _WORLD_CACHE.clear()

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same part of the model."""
        return self._data_group()

    @property
    def context_group(self) -> dist.ProcessGroup:
        """Ranks that share each sequence; only where sequences are shared."""
        assert self._context_group is not None
        return self._context_group()

    @property
    def gradient_group(self) -> dist.ProcessGroup:
        """Ranks over which gradients are averaged: those of all axes whose role says so."""
        return self._gradient_group()

    @property
    def gradient_group_size(self) -> int:
        """The number of these ranks."""
        return self.num_replicas * self.sizes.context

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """Ranks that share each layer."""
        return self._tensor_group()

    @property
    def model_group(self) -> dist.ProcessGroup:
        """Ranks that hold one replica."""
        return self._model_group()

    @property
    def control_group(self) -> dist.ProcessGroup:
        """The model group again, over gloo: for batches, decisions and other data of the host."""
        return self._control_group()

    @property
    def writing_group(self) -> dist.ProcessGroup:
        """All ranks, over a backend that takes tensors of the host: for files that they write together."""
        return self._writing_group()

    @property
    def decision_group(self) -> dist.ProcessGroup:
        """All ranks, over a backend that takes tensors of the host: for what the main thread exchanges."""
        return self._decision_group()

    @property
    def data_control_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same part of the model, over gloo; only where there are replicas."""
        assert self._data_control_group is not None
        return self._data_control_group()

    def posted_broadcast(self, name: str, source: int) -> PostedBroadcast:
        """Messages from one rank of the model group to the others, over the control group.

        Receives stay posted between runs, so a later mesh with these ranks gets the same one.

        Args:
            name: What is sent, one of :data:`_BROADCASTS`.
            source: The rank inside of the model group that sends.
        """
        group, before = self.control_group, 1 + max(STAGE_TAGS.values()) + len(_BROADCASTS) * source
        tag = before + _BROADCASTS.index(name)
        ranks = tuple(dist.get_process_group_ranks(group))
        messages: PostedBroadcast = _WORLD_CACHE.get(
            (ranks, tag, self._timeout), lambda: PostedBroadcast(self.host_messages, source, tag, name)
        )
        if messages not in self.broadcasts:
            self.broadcasts.append(messages)
        return messages

    def tree_broadcast(
        self, name: str, source: int, device: torch.device, *, pin_memory: bool = False
    ) -> TreeBroadcast:
        """Trees from one rank of the model group to the others; arguments as there, and of :meth:`posted_broadcast`."""
        messages = self.posted_broadcast(name, source)
        trees: TreeBroadcast = _WORLD_CACHE.get(
            (id(messages), device), lambda: TreeBroadcast(messages, self.model_group, device, pin_memory=pin_memory)
        )
        return trees

    def _along(self, axes: Sequence[str]) -> Tensor:
        """Return the ranks along axes of the arrangement, in all replicas and stages; shape (groups, ranks of each)."""
        names = [name for name, _ in self.arrangement.axes]
        by_axis = self._ranks.reshape(-1, *(size for _, size in self.arrangement.axes))
        others = [name for name in names if name not in axes]
        order = [0, *(1 + names.index(name) for name in (*others, *axes))]
        return by_axis.permute(order).reshape(-1, self.arrangement.parts(axes))

    @property
    def arranged_groups(self) -> dict[tuple[str, ...], dist.ProcessGroup]:
        """This rank's groups along axes of the arrangement, by :meth:`Arrangement.groups`."""
        return {axes: group() for axes, group in self._arranged.items()}

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """The mesh over which layers are sharded: the tensor-parallel axis, or :attr:`Arrangement.mesh_axes`."""
        if self.arrangement.is_line:
            return self.device_mesh[TENSOR.name]
        axes = self._tensor_axes()
        ranks = self._ranks[self.pipeline_rank, self.data_rank].reshape([group.size() for group in axes.values()])
        return _make_device_mesh(axes, ranks, self.device_mesh.device_type)

    @property
    def zero_mesh(self) -> DeviceMesh:
        """What ZeRO shards parameters over: the replicas, inside the tensor-parallel ranks, if there are any.

        In this order, so that each replica has some of the rows that a rank has of a tensor-parallel layer.
        """
        axes = self._tensor_axes() if self.sizes.tensor > 1 else {}
        if not axes and [axis.role for axis in self.sizes.axes].count(SAMPLES) == 1:
            return self.device_mesh[DATA.name]
        shape = [group.size() for group in axes.values()]
        ranks = self._ranks[self.pipeline_rank, :, self.context_rank].T.reshape(*shape, self.num_replicas)
        return _make_device_mesh({**axes, DATA.name: self.data_group}, ranks, self.device_mesh.device_type)

    def _tensor_axes(self) -> dict[str, dist.ProcessGroup]:
        """The groups of the axes over which layers are shared."""
        return {name: self._arranged[axes]() for name, axes in self.arrangement.mesh_axes.items()}

    def _connect_host(self) -> HostMessages:
        group = self.control_group
        ranks = dist.get_process_group_ranks(group)
        own = self.hosts[dist.get_rank()] if self.hosts else ""
        local = [index for index, rank in enumerate(ranks) if not self.hosts or self.hosts[rank] == own]
        messages: HostMessages = _WORLD_CACHE.get(
            ("host messages", tuple(ranks), self._timeout),  # as the control group, and what is broadcast over them
            lambda: connect(group, local, self._timeout or default_pg_timeout),
        )
        return messages

    def data_parallel_min(self, number: int) -> int:
        """The smallest of the numbers that the replicas' ranks have."""
        if self._data_control_group is None:
            return number
        smallest = torch.tensor(number)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self._data_control_group())
        return int(smallest)

    def rank(self, pipeline_rank: int, data_rank: int, tensor_rank: int, context_rank: int = 0) -> int:
        """The global rank at these coordinates."""
        return int(self._ranks[pipeline_rank, data_rank, context_rank, tensor_rank])

    def peer(self, pipeline_rank: int) -> int:
        """The global rank that differs from this one in the pipeline rank at most."""
        return self.rank(pipeline_rank, self.data_rank, self.tensor_rank, self.context_rank)

    def pipeline_rank_of(self, rank: int) -> int:
        """The pipeline rank of a global rank."""
        return int((self._ranks == rank).nonzero()[0, 0])

    def model_ranks(self, data_rank: int) -> list[int]:
        """The global ranks of one replica, by pipeline rank, then context rank, then tensor rank."""
        ranks: list[int] = self._ranks[:, data_rank].flatten().tolist()
        return ranks

    def model_group_rank(self, pipeline_rank: int, tensor_rank: int, context_rank: int = 0) -> int:
        """The rank inside of the model group, and of the control group, at these coordinates: torch sorts the ranks."""
        rank = self.rank(pipeline_rank, self.data_rank, tensor_rank, context_rank)
        return sorted(self.model_ranks(self.data_rank)).index(rank)

    def shared_parameter_group(
        self, pipeline_ranks: Iterable[int], *, of_replica: bool = False, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """The group over the ranks of several stages and all replicas, at this rank's tensor rank.

        Every rank of the world must call this with the same arguments in the same order.

        Args:
            pipeline_ranks: The pipeline ranks that belong to the group.
            of_replica: Whether it has the ranks of this replica only, with all that share its sequences.
            backend: Of the group; ``None`` for the one of the world.

        Returns:
            The group that this rank is in; ``None`` if it is in none.
        """
        ranks = self._ranks[sorted(pipeline_ranks)]
        rank_groups = ranks.permute(1, 3, 0, 2).flatten(0, 1) if of_replica else ranks.permute(3, 0, 1, 2)
        rank_groups = rank_groups.flatten(1)
        reference = self._find_group(rank_groups, backend)
        return None if reference is None else reference()

    def spans_machines(self, *pipeline_ranks: int) -> bool:
        """Whether these pipeline ranks are on different machines, in any replica; the same on every rank."""
        return bool(self.hosts) and any(
            len({self.hosts[rank] for rank in ranks}) > 1
            for ranks in self._ranks[list(pipeline_ranks)].flatten(1).T.tolist()
        )

    def new_p2p_group(self, pairs: Iterable[tuple[int, int]]) -> dist.ProcessGroup | None:
        """A new group of two pipeline ranks of this rank's replica, the lower one first.

        Every rank of the world must call this with the same arguments in the same order. Each call makes another group:
        messages of different pairs, directions and kinds never wait for each other.

        Args:
            pairs: Pairs of pipeline ranks that have no rank in common: one call makes the groups of all of them.

        Returns:
            The group of the pair that this rank is in; ``None`` if it is in none.
        """
        ranks = torch.cat([self._ranks[list(pair)].permute(1, 2, 3, 0).flatten(0, 2) for pair in pairs])
        reference = self._find_group(ranks, use="messages")
        return None if reference is None else reference()

    def _group(self, rank_groups: Tensor, *args: Any, **kwargs: Any) -> GroupRef:
        """Return the group that this rank is in, of groups that contain every rank; see :meth:`_find_group`."""
        reference = self._find_group(rank_groups, *args, **kwargs)
        assert reference is not None
        return reference

    def _find_group(
        self, rank_groups: Tensor, backend: str | None = None, *, use: str = "", connects_when_used: bool = False
    ) -> GroupRef | None:
        """The one of some disjoint groups that this rank is in, made where there is none of these ranks.

        Args:
            rank_groups: The global ranks, shape (groups, ranks of each).
            backend: Of the groups; ``None`` for the one of the world.
            use: Groups of the same ranks for something else are others. Each request for ``"messages"`` is.
            connects_when_used: As in :func:`make_group`.
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

        reference: GroupRef | None = _WORLD_CACHE.get((request, self._requests[request]), make)
        return reference


def _make_device_mesh(groups: Mapping[str, dist.ProcessGroup], ranks: Tensor, device_type: str) -> DeviceMesh:
    """Torch's mesh, of groups by the names of their axes; the one that there is, if there is one of these ranks."""
    names, ranks = tuple(groups), ranks.contiguous()
    mesh: DeviceMesh = _WORLD_CACHE.get(
        (device_type, names, tuple(ranks.shape), tuple(ranks.flatten().tolist())),
        lambda: DeviceMesh.from_group(list(groups.values()), device_type, mesh=ranks, mesh_dim_names=names),
    )
    return mesh

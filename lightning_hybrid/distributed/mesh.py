"""The device mesh: its axes, the groups of ranks that work together, and this rank's coordinates."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_hybrid.distributed.process_group import GroupRef

#: Short names, as in ``rank_order``, and the names of the axes, as Lightning spells them.
AXES = {"dp": "data_parallel", "tp": "tensor_parallel", "pp": "pipeline_parallel"}


class _WorldCache:
    """Meshes and process groups of the present world, to be taken over by the next mesh of the same shape.

    A Trainer is freed as cyclic garbage, at any time: also in a worker of a `DataLoader` that was forked before. There
    the threads of process groups do not exist, and freeing one ends or stops the worker. What is held here is not freed
    there; what is dropped is collected at once, in this process.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, Any] = {}
        self._world: Callable[[], dist.ProcessGroup | None] = lambda: None

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The entry of this key, made if there is none. Every rank must ask for the same keys in the same order."""
        world = dist.group.WORLD
        assert world is not None
        if self._world() is not world:
            self._entries.clear()
            _clear_sharding_cache()
            gc.collect()
            self._world = weakref.ref(world)
        if key not in self._entries:
            self._entries[key] = make()
        return self._entries[key]

    def clear(self) -> None:
        """Drop everything: torch's mesh holds the group of all ranks."""
        self._entries.clear()


def _clear_sharding_cache() -> None:
    """Torch caches how the results of operations on DTensors are sharded, with the mesh of the first time.

    An equal mesh of a world that is gone has groups that are gone; their names may now be those of others.
    """
    try:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    except ImportError:  # then a second world in one process needs meshes of other shapes
        return
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


_WORLD_CACHE = _WorldCache()


class Mesh:
    """Data x tensor x pipeline parallel ranks.

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

    Args:
        data_parallel_size: The number of replicas.
        tensor_parallel_size: The number of ranks that share each layer.
        pipeline_parallel_size: The number of ranks that share the layers.
        rank_order: The axes from the outermost to the innermost, joined by ``-``.
        device_type: ``"cpu"`` or ``"cuda"``.
        timeout: Of the groups made here.
    """

    def __init__(
        self,
        data_parallel_size: int,
        tensor_parallel_size: int,
        pipeline_parallel_size: int,
        *,
        rank_order: str = "pp-dp-tp",
        device_type: str = "cpu",
        timeout: timedelta | None = None,
    ) -> None:
        sizes = {"dp": data_parallel_size, "tp": tensor_parallel_size, "pp": pipeline_parallel_size}
        order = rank_order.split("-")
        self.sizes = sizes
        self.data_parallel_size = data_parallel_size
        self.tensor_parallel_size = tensor_parallel_size
        self.pipeline_parallel_size = pipeline_parallel_size
        shape, names = tuple(sizes[axis] for axis in order), tuple(AXES[axis] for axis in order)
        device_mesh: DeviceMesh = _WORLD_CACHE.get(
            (device_type, shape, names), lambda: init_device_mesh(device_type, shape, mesh_dim_names=names)
        )
        self._device_mesh: DeviceMesh | None = device_mesh
        self._requests: Counter[Hashable] = Counter()
        self._ranks = device_mesh.mesh.permute([order.index(axis) for axis in ("pp", "dp", "tp")])
        self._timeout = timeout
        self._shared_parameter_groups: dict[tuple[tuple[int, ...], bool], GroupRef | None] = {}
        coordinates = (self._ranks == dist.get_rank()).nonzero().flatten().tolist()
        self.pipeline_rank, self.data_rank, self.tensor_rank = coordinates
        # Not the groups of torch's mesh: those do not have our timeout.
        self._data_group = GroupRef(self.new_group_of(self._ranks_by_stage()))
        self._tensor_group = GroupRef(self.new_group_of(self._ranks.reshape(-1, tensor_parallel_size).tolist()))
        model_groups = [self.model_ranks(data_rank) for data_rank in range(data_parallel_size)]
        self._model_group = GroupRef(self.new_group_of(model_groups))
        self._control_group = GroupRef(self.new_group_of(model_groups, backend="gloo"))
        # All at once, and none when it is first needed: a rank that fails before would leave the others waiting for it.
        everyone = [list(range(dist.get_world_size()))]
        self._world_group = GroupRef(self.new_group_of(everyone, backend="gloo"))
        takes_host_tensors = "cpu:" in dist.get_backend_config()
        self._decision_group = GroupRef(
            dist.group.WORLD if takes_host_tensors else self.new_group_of(everyone, backend="gloo")
        )
        has_replicas = data_parallel_size > 1
        self._data_control_group = (
            GroupRef(self.new_group_of(self._ranks_by_stage(), backend="gloo")) if has_replicas else None
        )

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of torch, with the axes named as in :data:`AXES`."""
        assert self._device_mesh is not None, "the process groups have been destroyed"
        return self._device_mesh

    def abandon(self) -> None:
        """Drop torch's mesh, after a failure: it holds the group of all ranks, which is to close connections."""
        self._device_mesh = None
        _WORLD_CACHE.clear()

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same part of the model."""
        return self._data_group()

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
    def world_group(self) -> dist.ProcessGroup:
        """All ranks, over gloo, in the order of the world: for what is written beside training."""
        return self._world_group()

    @property
    def decision_group(self) -> dist.ProcessGroup:
        """All ranks, over a backend that takes tensors of the host: for decisions on the main thread."""
        return self._decision_group()

    @property
    def zero_mesh(self) -> DeviceMesh:
        """What ZeRO shards parameters over: the replicas, inside the tensor-parallel ranks, if there are any.

        In this order, so that each replica has some of the rows that a rank has of a tensor-parallel layer.
        """
        if self.tensor_parallel_size == 1:
            return self.device_mesh[AXES["dp"]]
        names = AXES["tp"], AXES["dp"]
        groups = [self.device_mesh.get_group(name) for name in names]
        ranks = self._ranks[self.pipeline_rank].T.contiguous()
        device = self.device_mesh.device_type
        mesh: DeviceMesh = _WORLD_CACHE.get(
            (device, names, tuple(ranks.flatten().tolist()), tuple(ranks.shape)),
            lambda: DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names),
        )
        return mesh

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of every axis: the one that writes and logs."""
        return bool(self.pipeline_rank == self.data_rank == self.tensor_rank == 0)

    def data_parallel_min(self, number: int) -> int:
        """The smallest of the numbers that the replicas' ranks have."""
        if self._data_control_group is None:
            return number
        smallest = torch.tensor(number)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self._data_control_group())
        return int(smallest)

    def _ranks_by_stage(self) -> list[list[int]]:
        """The ranks that hold the same part of the model, for every such part."""
        ranks: list[list[int]] = self._ranks.permute(0, 2, 1).reshape(-1, self.data_parallel_size).tolist()
        return ranks

    def rank(self, pipeline_rank: int, data_rank: int, tensor_rank: int) -> int:
        """The global rank at these coordinates."""
        return int(self._ranks[pipeline_rank, data_rank, tensor_rank])

    def pipeline_rank_of(self, rank: int) -> int:
        """The pipeline rank of a global rank."""
        return int((self._ranks == rank).nonzero()[0, 0])

    def model_ranks(self, data_rank: int) -> list[int]:
        """The global ranks of one replica, by pipeline rank, then tensor rank."""
        return [int(rank) for rank in self._ranks[:, data_rank, :].flatten()]

    def model_group_rank(self, pipeline_rank: int, tensor_rank: int) -> int:
        """The rank inside of the model group, and of the control group, at these coordinates: torch sorts the ranks."""
        rank = self.rank(pipeline_rank, self.data_rank, tensor_rank)
        return sorted(self.model_ranks(self.data_rank)).index(rank)

    def shared_parameter_group(
        self, pipeline_ranks: Iterable[int], *, of_replica: bool = False
    ) -> dist.ProcessGroup | None:
        """The group over the ranks of several stages and all replicas, at this rank's tensor rank.

        Every rank of the world must call this with the same arguments in the same order.

        Args:
            pipeline_ranks: The pipeline ranks that belong to the group.
            of_replica: Whether it has the ranks of this replica only.

        Returns:
            The group that this rank is in; ``None`` if it is in none. Ranks are ordered by pipeline rank, then
            data rank.
        """
        stages = tuple(sorted(pipeline_ranks))
        key = stages, of_replica
        if key not in self._shared_parameter_groups:
            replicas = range(self.data_parallel_size)
            group = self._new_groups(stages, [range(d, d + 1) for d in replicas] if of_replica else [replicas])
            self._shared_parameter_groups[key] = None if group is None else GroupRef(group)
        reference = self._shared_parameter_groups[key]
        return None if reference is None else reference()

    def new_p2p_group(self, sender: int, receiver: int) -> dist.ProcessGroup | None:
        """A new group of two pipeline ranks of this rank's replica, the lower one first.

        Every rank of the world must call this with the same arguments in the same order. Each call makes another group:
        messages of different pairs, directions and kinds never wait for each other.
        """
        return self._new_groups(sorted((sender, receiver)), [range(d, d + 1) for d in range(self.data_parallel_size)])

    def _new_groups(self, stages: Iterable[int], replicas: Sequence[range]) -> dist.ProcessGroup | None:
        """For each of the sets of replicas and each tensor rank a group over these stages; the one of this rank."""
        return self.new_group_of(
            [
                [self.rank(stage, data_rank, tensor_rank) for stage in stages for data_rank in data_ranks]
                for data_ranks in replicas
                for tensor_rank in range(self.tensor_parallel_size)
            ]
        )

    def new_group_of(self, partition: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup | None:
        """Make disjoint groups, on every rank in the same order, and return the one that this rank is in.

        Args:
            partition: The global ranks of each group, in their order inside it.
            backend: Of the groups; ``None`` for the one of the world.
        """

        def make() -> GroupRef | None:
            own: GroupRef | None = None
            for ranks in partition:
                group = dist.new_group(list(ranks), timeout=self._timeout, backend=backend)
                if dist.get_rank() in ranks:
                    own = GroupRef(group)
            return own

        request = (tuple(map(tuple, partition)), backend, self._timeout)
        self._requests[request] += 1
        reference: GroupRef | None = _WORLD_CACHE.get((request, self._requests[request]), make)
        return None if reference is None else reference()

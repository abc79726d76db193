"""Gradients and values that several ranks share: summed over holders, averaged over replicas, equal at start."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn
from torch.distributed import ProcessGroup

from lightning_hybrid.data_parallel import GradientBuckets, equalize, synchronize_batch_norm
from lightning_hybrid.materialize import is_stand_in
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.placement import Location, Placement, locate
from lightning_hybrid.shards import is_sharded, local_of, settle_gradient

__all__ = ["Replication"]


class Replication:
    """What this rank has in common with others: with the replicas of its stages, and with stages that share a tensor.

    ::

        parameter of one stage              bucket of that stage     over data parallel; starts in its last backward
        of several stages of this rank      late bucket              over data parallel; starts when all is done
        of several ranks (tied, outside     one bucket for each      over (holders x data parallel): summed over the
        of the body)                        set of holders           holders, averaged over the replicas, in one go

    Every rank of the world must make this with the same module (apart from stand-ins) and placement: groups are made.

    Args:
        module: The user's module, with stand-ins for what lives elsewhere.
        placement: Which stage holds what.
        mesh: The ranks.
        sync_batch_norm: Whether batch norm takes its statistics over all replicas, until :meth:`remove`.
        adds_up: The names of parameters whose gradients are parts of a sum over the tensor-parallel ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        mesh: Mesh,
        *,
        sync_batch_norm: bool = False,
        adds_up: Collection[str] = (),
    ) -> None:
        self._mesh = mesh
        self._undo: list[Callable[[], None]] = []
        if sync_batch_norm and mesh.data_parallel_size > 1:
            self._undo.append(synchronize_batch_norm(module, mesh.data_group))
        self._parameters = locate(module.named_parameters(remove_duplicate=False), placement)
        # Buffers by name: moving a module to a device unties them, and would do so only where they are no stand-ins.
        buffers = module.named_buffers(remove_duplicate=False)
        self._buffers = [place for named in buffers for place in locate([named], placement)]
        holders = sorted({place.ranks for place in (*self._parameters, *self._buffers) if len(place.ranks) > 1})
        made = {ranks: mesh.holders(ranks) for ranks in holders}
        self._shared_by = [ranks for ranks, group in made.items() if group is not None]
        named = dict(module.named_parameters(remove_duplicate=False))
        self._adding_up = list({id(named[name]): named[name] for name in sorted(adds_up)}.values())
        self._floating_buffers = [
            place.tensor for place in self._buffers if self._mine(place) and place.tensor.is_floating_point()
        ]
        self._counted = {id(place.tensor) for place in self._parameters if place.ranks[0] == mesh.pipeline_rank}
        self._by_stage: dict[int, GradientBuckets] = {}
        self._late: list[GradientBuckets] = []
        self._last: list[GradientBuckets] = []
        self._make_buckets()

    def _mine(self, place: Location) -> bool:
        return self._mesh.pipeline_rank in place.ranks and not is_stand_in(place.tensor)

    def _make_buckets(self) -> None:
        own = [place for place in self._parameters if self._mine(place) and len(place.ranks) == 1]
        if self._mesh.data_parallel_size > 1:
            for stage in sorted({min(place.stages) for place in own}):
                places = [place for place in own if place.stages == {stage}]
                if places:
                    self._by_stage[stage] = self._buckets(places, self._mesh.data_group, overlap=True)
            several = [place for place in own if len(place.stages) > 1]
            if several:
                self._late.append(self._buckets(several, self._mesh.data_group, overlap=False))
        for ranks in self._shared_by:
            shared = [place for place in self._parameters if place.ranks == ranks]
            if shared:
                self._late.append(self._buckets(shared, self._group(ranks), overlap=False))
        adding_up = [tensor for tensor in self._adding_up if not is_stand_in(tensor)]
        if adding_up:
            self._last.append(GradientBuckets(adding_up, self._mesh.tensor_group, scale=1.0, overlap=False))

    def _group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        group = self._mesh.holders(ranks)
        assert group is not None
        return group

    def _buckets(self, places: list[Location], group: ProcessGroup, *, overlap: bool) -> GradientBuckets:
        parameters = [place.tensor for place in places if isinstance(place.tensor, nn.Parameter)]
        return GradientBuckets(parameters, group, scale=1 / self._mesh.data_parallel_size, overlap=overlap)

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts the parameter, or its shard of it, in the gradient norm: its first holder does."""
        return id(parameter) in self._counted and (self._mesh.tensor_rank == 0 or is_sharded(parameter))

    def last_backward_begins(self, stage: int) -> None:
        """The gradients of this stage that come now are final."""
        if stage in self._by_stage:
            self._by_stage[stage].arm()

    def last_backward_ends(self, stage: int) -> None:
        """All gradients of this stage are there."""
        if stage in self._by_stage:
            self._by_stage[stage].launch_rest()

    def finish(self) -> None:
        """All gradients of this rank are there: start what is left, and wait for everything."""
        for buckets in self._late:
            buckets.launch_rest()
        for buckets in (*self._by_stage.values(), *self._late):
            buckets.finish()
        for buckets in self._last:
            buckets.launch_rest()
            buckets.finish()
        for place in self._parameters:
            settle_gradient(place.tensor)

    def equalize_start(self) -> None:
        """Give every tensor the values of its first holder on the first replica."""
        mine = [place for place in (*self._parameters, *self._buffers) if self._mine(place)]
        if self._mesh.tensor_parallel_size > 1:
            whole = [local_of(place.tensor) for place in mine if not is_sharded(place.tensor)]
            equalize(whole, self._mesh.tensor_group)
        if self._mesh.data_parallel_size > 1:
            equalize([local_of(place.tensor) for place in mine if len(place.ranks) == 1], self._mesh.data_group)
        for ranks in self._shared_by:
            equalize([local_of(place.tensor) for place in mine if place.ranks == ranks], self._group(ranks))

    def equalize_buffers(self) -> None:
        """Give floating-point buffers the values of the first replica, as `DistributedDataParallel` does."""
        if self._mesh.data_parallel_size > 1 and self._floating_buffers:
            equalize(self._floating_buffers, self._mesh.data_group)

    def abandon(self) -> None:
        """Let go of collectives that are under way, after a failure."""
        for buckets in (*self._by_stage.values(), *self._late, *self._last):
            buckets.abandon()

    def remove(self) -> None:
        """Take the hooks off the parameters, and put the user's layers back."""
        for undo in self._undo:
            undo()
        for buckets in (*self._by_stage.values(), *self._late, *self._last):
            buckets.remove()

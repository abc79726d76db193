"""Gradients and values that several ranks share: summed over holders, averaged over replicas, equal at start."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_hybrid.data_parallel.broadcast import broadcast_tensors
from lightning_hybrid.data_parallel.fp32_grads import Float32Gradients
from lightning_hybrid.data_parallel.grad_buckets import GradientBuckets
from lightning_hybrid.data_parallel.sync_batch_norm import synchronize_batch_norm
from lightning_hybrid.data_parallel.zero.param import is_divided
from lightning_hybrid.data_parallel.zero.zero import ZeroParameters
from lightning_hybrid.distributed.dtensor import is_tensor_parallel, redistribute_grad, to_local
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder
from lightning_hybrid.pipeline_parallel.stage_map import StageMap, TensorStages, locate

__all__ = ["GradientSync"]


class GradientSync:
    """What this rank has in common with others: with the replicas of its stages, and with stages that share a tensor.

    ::

        parameter of one stage              bucket of that stage     over data parallel; starts in its last backward
        of several stages of this rank      late bucket              over data parallel; starts when all is done
        of several ranks (tied, outside     one bucket for each      over (holders x data parallel): summed over the
        of the body)                        set of holders           holders, averaged over the replicas, in one go

    A parameter that is divided over replicas has the same place, but each replica gets its rows of the gradient: over
    data parallel first, and what comes to rows that several stages hold is then summed over these.

    Every rank of the world must make this with the same module (apart from placeholders) and stages:
    groups are made.

    Args:
        module: The user's module, with placeholders for what lives elsewhere.
        stage_map: Which stage holds what.
        mesh: The ranks.
        sync_batch_norm: Whether batch norm takes its statistics over all replicas, until :meth:`remove`.
        adds_up: The names of parameters whose gradients are parts of a sum over the tensor-parallel ranks.
        wholes: Makes parameters whole that are divided over replicas; ``None`` if none are.
        wide: Whether gradients of parameters in half precision are added up, and travel, in float32.
    """

    def __init__(
        self,
        module: nn.Module,
        stage_map: StageMap,
        mesh: Mesh,
        *,
        sync_batch_norm: bool = False,
        adds_up: Collection[str] = (),
        wholes: ZeroParameters | None = None,
        wide: bool = False,
    ) -> None:
        self._mesh = mesh
        self.wholes = wholes
        self._has_evaluated = False
        self._watch: Callable[[int | None], None] | None = None
        self._undo: list[Callable[[], None]] = []
        if sync_batch_norm and mesh.data_parallel_size > 1:
            self._undo.append(synchronize_batch_norm(module, mesh.data_group))
        self._parameters = locate(module.named_parameters(remove_duplicate=False), stage_map)
        # Buffers by name: moving a module to a device unties them, and would do so only where they are no placeholders.
        buffers = module.named_buffers(remove_duplicate=False)
        self._buffers = [place for named in buffers for place in locate([named], stage_map)]
        holders = sorted({place.ranks for place in (*self._parameters, *self._buffers) if len(place.ranks) > 1})
        made = {
            ranks: (mesh.shared_parameter_group(ranks), mesh.shared_parameter_group(ranks, of_replica=True))
            for ranks in holders
        }
        self._shared_by = [ranks for ranks, (group, _) in made.items() if group is not None]
        named = dict(module.named_parameters(remove_duplicate=False))
        self._adding_up = list({id(named[name]): named[name] for name in sorted(adds_up)}.values())
        self._floating_buffers = [
            place.tensor for place in self._buffers if self._mine(place) and place.tensor.is_floating_point()
        ]
        self._counted = {id(place.tensor) for place in self._parameters if place.ranks[0] == mesh.pipeline_rank}
        self._by_stage: dict[int, list[GradientBuckets]] = {}
        self._late: list[GradientBuckets] = []
        self._last: list[GradientBuckets] = []
        self._each_backward: set[int] = set()
        self._wide = Float32Gradients(self.forms() if wide else ())
        self._make_buckets()

    def forms(self) -> list[Tensor]:
        """The parameters of this rank, of divided ones the share and the whole."""
        twins = () if self.wholes is None else self.wholes.twins.values()
        own = [place.tensor for place in self._parameters if self._mine(place)]
        return [*own, *(form for twin in twins for form in (twin.shard, twin.whole))]

    def _mine(self, place: TensorStages) -> bool:
        return self._mesh.pipeline_rank in place.ranks and not is_placeholder(place.tensor)

    def _make_buckets(self) -> None:
        mine = [place for place in self._parameters if self._mine(place)]
        own = [place for place in mine if len(place.ranks) == 1]
        if self._mesh.data_parallel_size > 1:
            for stage in sorted({min(place.stages) for place in own}):
                places = [place for place in own if place.stages == {stage}]
                self._by_stage[stage] = self._averaged(places, self._mesh.data_group, stage)
            self._late += self._averaged([place for place in own if len(place.stages) > 1], self._mesh.data_group)
        for ranks in self._shared_by:
            shared = [place for place in self._parameters if place.ranks == ranks]
            self._late += self._averaged(shared, self._group(ranks))
            parts = [place.tensor for place in shared if is_divided(place.tensor)]
            self._last += self._summed(parts, self._group(ranks, of_replica=True))
        adding_up = [tensor for tensor in self._adding_up if not is_placeholder(tensor)]
        self._last += self._summed(adding_up, self._mesh.tensor_group)

    def _group(self, ranks: tuple[int, ...], *, of_replica: bool = False) -> ProcessGroup:
        group = self._mesh.shared_parameter_group(ranks, of_replica=of_replica)
        assert group is not None
        return group

    def _averaged(
        self, places: list[TensorStages], group: ProcessGroup, stage: int | None = None
    ) -> list[GradientBuckets]:
        """Of what is not divided over replicas, summed over a group; of the rest, each replica its rows."""
        parameters = [place.tensor for place in places if isinstance(place.tensor, nn.Parameter)]
        scale = 1 / self._mesh.data_parallel_size
        alike = [each for each in parameters if not is_divided(each)]
        parts = [each for each in parameters if is_divided(each)]
        made = []
        if parts:
            assert self.wholes is not None
            scattered = self.wholes.gradients.buckets(stage, parts, self._mesh.data_group)
            made.append(scattered)
            if stage is not None and self.wholes.scatters_each_backward:
                self._each_backward.add(id(scattered))
        if alike:
            # Replicas that use different layers would start these at different moments: after all that has one order.
            made.append(GradientBuckets(alike, group, scale=scale, overlap=stage is not None and not parts))
        return made

    def _summed(self, tensors: Iterable[Tensor], group: ProcessGroup) -> list[GradientBuckets]:
        parameters = [each for each in tensors if isinstance(each, nn.Parameter)]
        return [GradientBuckets(parameters, group, scale=1.0, overlap=False)] if parameters else []

    def counts_in_norm(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts the parameter, or its part of it, in the gradient norm: its first holder does."""
        mesh = self._mesh
        if id(parameter) not in self._counted or not (mesh.tensor_rank == 0 or is_tensor_parallel(parameter)):
            return False
        return self.wholes is None or mesh.data_rank == 0 or is_divided(parameter)

    @contextmanager
    def step(self, *, evaluates: bool = False, is_cut: bool = True) -> Iterator[None]:
        """During a step layers find whole parameters.

        Args:
            evaluates: Whether it is one of an evaluation, during which parameters stay the same.
            is_cut: Whether its batch is split into micro-batches; in an evaluation, as each replica can.
        """
        if self.wholes is None:
            yield
            return
        self.wholes.open(unchanged=evaluates and self._has_evaluated, frees_early=not (evaluates and is_cut))
        self._has_evaluated = evaluates
        try:
            yield
        except BaseException:
            self.wholes.abandon()
            raise
        self.wholes.close()

    def forward_begins(self, stage: int) -> None:
        """The layers of this stage are about to run, for one micro-batch."""
        if self.wholes is not None:
            self.wholes.forward_begins(stage)
        if self._watch is not None:
            self._watch(stage)

    def backward_begins(self, stage: int, *, is_last: bool) -> None:
        """A backward of this stage begins; the gradients that come in the last one of a step are final."""
        self._wide.begin()
        if self.wholes is not None:
            self.wholes.backward_begins(stage)
        for buckets in self._by_stage.get(stage, ()):
            if is_last or id(buckets) in self._each_backward:
                buckets.arm()

    def backward_ends(self, stage: int, *, is_last: bool, frees: bool) -> None:
        """All gradients of this backward are there.

        Args:
            stage: The stage.
            is_last: Whether they are final.
            frees: Whether the stage's layers are not needed any more in this step.
        """
        if self._watch is not None:
            self._watch(None)
        if self.wholes is not None:
            self.wholes.backward_ends(stage, is_last=frees)
        for buckets in self._by_stage.get(stage, ()):
            if is_last or id(buckets) in self._each_backward:
                buckets.launch_rest()
            if id(buckets) in self._each_backward:
                buckets.finish()

    def finish(self) -> None:
        """All gradients of this rank are there: start what is left, and wait for everything."""
        for buckets in self._late:
            buckets.launch_rest()
        for buckets in (*itertools.chain(*self._by_stage.values()), *self._late):
            if id(buckets) not in self._each_backward:
                buckets.finish()
        for buckets in self._last:
            buckets.launch_rest()
            buckets.finish()
        for place in self._parameters:
            redistribute_grad(place.tensor)
        self._wide.end()
        if self._watch is not None:
            self._watch(None)

    def broadcast_parameters(self) -> None:
        """Give every tensor the values of its first holder on the first replica."""
        mine = [place for place in (*self._parameters, *self._buffers) if self._mine(place)]
        if self._mesh.tensor_parallel_size > 1:
            alike = [to_local(place.tensor) for place in mine if not is_tensor_parallel(place.tensor)]
            broadcast_tensors(alike, self._mesh.tensor_group)
        whole = [place for place in mine if not is_divided(place.tensor)]
        if self._mesh.data_parallel_size > 1:
            broadcast_tensors(
                [to_local(place.tensor) for place in whole if len(place.ranks) == 1], self._mesh.data_group
            )
        for ranks in self._shared_by:
            broadcast_tensors([to_local(place.tensor) for place in whole if place.ranks == ranks], self._group(ranks))
            parts = [to_local(place.tensor) for place in mine if place.ranks == ranks and is_divided(place.tensor)]
            broadcast_tensors(parts, self._group(ranks, of_replica=True))

    def broadcast_buffers(self) -> None:
        """Give floating-point buffers the values of the first replica, as `DistributedDataParallel` does.

        To be called before each training step and each evaluation.
        """
        self._has_evaluated = False
        if self._mesh.data_parallel_size > 1 and self._floating_buffers:
            broadcast_tensors(self._floating_buffers, self._mesh.data_group)

    @property
    def watch(self) -> Callable[[int | None], None] | None:
        """Called when much is held: with a stage when its layers are about to run, otherwise with ``None``."""
        return self._watch

    @watch.setter
    def watch(self, watch: Callable[[int | None], None] | None) -> None:
        self._watch = watch
        for buckets in self._all:
            buckets.watch = watch
        if self.wholes is not None:
            self.wholes.watch = watch

    @property
    def travelling(self) -> list[Tensor]:
        """Gradients that are under way to other ranks."""
        return [tensor for buckets in self._all for tensor in buckets.travelling]

    @property
    def _all(self) -> list[GradientBuckets]:
        return [*itertools.chain(*self._by_stage.values()), *self._late, *self._last]

    def abandon(self) -> None:
        """Let go of collectives that are under way, after a failure."""
        for buckets in self._all:
            buckets.abandon()

    def remove(self) -> None:
        """Take the hooks off the parameters, and put the user's layers back."""
        self._wide.end()
        for undo in self._undo:
            undo()
        for buckets in self._all:
            buckets.remove()
        if self.wholes is not None:
            self.wholes.remove()

"""Synchronization of gradients and values: summed over holders, averaged over replicas, equal at the start.

`strategy.run.Run` makes a :class:`GradientSync` for each run of the Trainer, and broadcasts the initial values with it.
The training and evaluation steps of `trainer` enter :meth:`GradientSync.step`. The engine calls
:meth:`GradientSync.backward_begins` and :meth:`GradientSync.backward_ends` around each backward of a stage, and the
training step calls :meth:`GradientSync.finish` after the last one. A training step in which microbatches may have no
loss also uses a :class:`LeftOut`. torch's `DistributedDataParallel` cannot do this, because it knows neither stages nor
parameters that several stages hold.

A *holder* of a parameter is a rank that has its values. The *replicas* are the data-parallel ranks. ZeRO makes them
*shard* a parameter: each replica has some of its rows. The *outside* of a model are its modules around the body, which
is the module whose layers are split into stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hybrid.data_parallel.broadcast import broadcast_tensors
from lightning_hybrid.data_parallel.fp32_grads import Float32Gradients
from lightning_hybrid.data_parallel.grad_buckets import GradientBuckets
from lightning_hybrid.data_parallel.parameter_map import ParameterMap
from lightning_hybrid.data_parallel.sync_batch_norm import synchronize_batch_norm
from lightning_hybrid.data_parallel.zero.param import is_expert, is_gathered, is_shard
from lightning_hybrid.data_parallel.zero.zero import NoZero, ZeroParameters
from lightning_hybrid.distributed.dtensor import (
    is_tensor_parallel,
    local_gradient,
    redistribute_grad,
    to_local,
)
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.shard_groups import ShardGroups
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder
from lightning_hybrid.pipeline_parallel.stage_map import TensorStages


class GradientSync:
    """The synchronization of this rank's gradients with the replicas of its stages, and with other stages.

    ::

        parameter of one stage              buckets of that stage    over data parallel; start in its last backward
        of several stages of this rank      buckets of these         over data parallel; start after all backwards
        of several ranks (tied, outside     buckets for each set     over (holders x data parallel): sum over holders,
        of the body)                        of holders               mean over replicas, in one collective
        in `adds_up`                        also a further bucket    sum over the tensor-parallel ranks, at the end

    Context-parallel ranks are averaged like replicas: data parallel means both in this table. A parameter that replicas
    shard has the same place, but each replica receives its rows of the gradient. These gradients are first reduced over
    the replicas that shard it, with ZeRO stages 2 and 3 after each backward of a stage. Rows that several stages hold
    are then summed over these stages, and averaged over the context-parallel ranks and over other replicas with these
    rows (`zero_size`). Gradients of experts are complete on the rank that has them, see `ZeroParameters`, and are
    averaged over the ranks with the same experts.

    Every rank of the world must construct this object with the same module (apart from placeholders) and stages,
    because the constructor makes process groups. It also adds hooks to parameters, and may replace batch norms, until
    :meth:`remove`.

    Args:
        parameters: The places of the module's tensors.
        sync_batch_norm: If True, batch norm takes its statistics over all replicas, until :meth:`remove`.
        adds_up: The names of parameters whose gradients are parts of a sum over the tensor-parallel ranks.
        make_zero: Makes the object that unshards parameters that replicas shard.
        float32_gradients: If True, gradients of half-precision parameters are accumulated and reduced in float32.
        rounds_gradients: If True, these gradients are rounded for the optimizer when they are final. False with master
            weights, whose optimizers use float32.

    Attributes:
        zero: Unshards parameters that replicas shard.
        has_sync_batch_norm: True if replicas communicate in forwards, for statistics over all of them.
        reduces: If True, the last backward of a stage starts to reduce its gradients; otherwise they are accumulated,
            except by ZeRO stages 2 and 3. The training step sets it.
    """

    def __init__(
        self,
        parameters: ParameterMap,
        *,
        sync_batch_norm: bool = False,
        adds_up: Collection[str] = (),
        make_zero: Callable[[], ZeroParameters | NoZero] = NoZero,
        float32_gradients: bool = False,
        rounds_gradients: bool = True,
    ) -> None:
        self._map, self._mesh, self._make_zero = parameters, parameters.mesh, make_zero
        module, mesh = parameters.module, parameters.mesh
        self._adds_up, self._has_float32, self._rounds = sorted(adds_up), float32_gradients, rounds_gradients
        self.reduces = True
        self._has_evaluated = False
        self._undo: list[Callable[[], None]] = []
        self.has_sync_batch_norm = mesh.num_replicas > 1 and (
            sync_batch_norm or any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
        )
        if sync_batch_norm and mesh.num_replicas > 1:
            self._undo.append(synchronize_batch_norm(module, mesh.data_group))
        self._by_stage: dict[int, list[GradientBuckets]] = {}
        self._after_backward: list[GradientBuckets] = []
        self._over_holders: list[GradientBuckets] = []
        self._float32: list[Float32Gradients] = []
        self._optimizers: Callable[[], Sequence[Optimizer]] = tuple
        self.zero: ZeroParameters | NoZero = NoZero()
        try:
            self._attach()
        except BaseException:
            self.remove()
            raise

    def _attach(self) -> None:
        """Make the buckets and groups for the tensors that this rank and other ranks hold."""
        mesh, self.zero = self._mesh, self._make_zero()
        self.zero.follow(self._optimizers())
        parameters, self._buffers = self._map.parameters(), self._map.buffers()
        holders = sorted({each.ranks for each in (*parameters, *self._buffers) if len(each.ranks) > 1})
        # Each stage lacks gradients of parameters of several stages in every step.
        on_device = mesh.device_mesh.device_type != "cpu"
        kinds = [(ranks, shards) for ranks in holders for shards in (None, *mesh.shard_groups)]
        self._mask_groups = {kind: mesh.shared_parameter_group(*kind, backend="gloo") for kind in kinds if on_device}
        groups = {kind: mesh.shared_parameter_group(*kind) for kind in kinds}
        self._shared_by = [ranks for ranks in holders if groups[ranks, None] is not None]
        # Placeholders are filtered out once here instead of in each step, because there may be thousands.
        self._parameters = [location for location in parameters if self._map.is_local(location)]
        own_buffers = (location.tensor for location in self._buffers if self._map.is_local(location))
        self._floating_buffers = [buffer for buffer in own_buffers if buffer.is_floating_point()]
        self._counted = {id(each.tensor) for each in self._parameters if self._map.is_owner(each)}
        self._by_stage, self._after_backward, self._over_holders = {}, [], []
        self._each_backward: set[int] = set()
        self._parts: list[nn.Parameter] = []  # the parameters whose gradients are summed over the tensor-parallel ranks
        self._summed_parts: set[int] = set()  # the ids of parameters in `_parts` whose gradient is the sum already
        self._float32 = [Float32Gradients(self.local_parameters())] if self._has_float32 else []
        named = dict(self._map.module.named_parameters(remove_duplicate=False))
        self._make_buckets(named[name] for name in self._adds_up)

    def follow(self, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        """Use the new values of parameters after a step of these optimizers, even in the middle of a training step."""
        self._optimizers = optimizers
        self.zero.follow(optimizers())

    def local_parameters(self) -> list[Tensor]:
        """Return the parameters of this rank. Parameters that replicas shard occur in both forms, some twice."""
        return [*(location.tensor for location in self._parameters), *self.zero.tensors()]

    def optimized_parameters(self) -> dict[int, nn.Parameter]:
        """Return this rank's parameters as optimizers know them, by identity; a shard also by its unsharded form."""
        parameters = (each.tensor for each in self._parameters if isinstance(each.tensor, nn.Parameter))
        return {id(parameter): parameter for parameter in parameters} | self.zero.shards()

    def _make_buckets(self, adding_up: Iterable[Tensor]) -> None:
        data_group = self._mesh.gradient_group
        unshared = [location for location in self._parameters if len(location.ranks) == 1]
        if self._mesh.gradient_group_size > 1:
            for stage in sorted({min(location.stages) for location in unshared}):
                of_stage = [location for location in unshared if location.stages == {stage}]
                self._by_stage[stage] = self._averaged(of_stage, data_group, stage)
            of_stages = [location for location in unshared if len(location.stages) > 1]
            self._after_backward += self._averaged(of_stages, data_group)
        for shards in self._mesh.shard_groups:
            rows = [location.tensor for location in unshared if self._is_reduced_in_parts(location.tensor, shards)]
            if shards.rows_group_size > 1:
                self._over_holders += self._summed(rows, shards.rows_group, scale=1 / shards.rows_group_size)
        for ranks in self._shared_by:
            shared = [location for location in self._parameters if location.ranks == ranks]
            self._after_backward += self._averaged(shared, self._group(ranks), ranks=ranks)
            for shards in self._mesh.shard_groups:
                rows = [location.tensor for location in shared if self._is_reduced_in_parts(location.tensor, shards)]
                mask_group, scale = self._mask_groups.get((ranks, shards)), 1 / shards.rows_group_size
                self._over_holders += self._summed(rows, self._group(ranks, shards), mask_group, scale=scale)
        parts = {id(tensor): tensor for tensor in adding_up if not is_placeholder(tensor)}
        self._over_holders += self._summed(parts.values(), self._mesh.tensor_group)
        self._parts = [tensor for tensor in parts.values() if isinstance(tensor, nn.Parameter)]

    def _group(self, ranks: tuple[int, ...], shards: ShardGroups | None = None) -> ProcessGroup:
        group = self._mesh.shared_parameter_group(ranks, shards)
        assert group is not None
        return group

    def _averaged(
        self,
        locations: list[TensorStages],
        group: ProcessGroup,
        stage: int | None = None,
        ranks: tuple[int, ...] = (),
    ) -> list[GradientBuckets]:
        """Return buckets that average gradients over a group. If replicas shard a parameter, each gets its rows.

        Args:
            locations: The places of the parameters.
            group: The ranks that hold the parameters, with all replicas.
            stage: The only stage of the parameters, if there is one.
            ranks: The pipeline ranks that hold the parameters, if there are several.
        """
        parameters = [location.tensor for location in locations if isinstance(location.tensor, nn.Parameter)]
        has_mask = bool(self._mask_groups and ranks) and self._mesh.num_replicas > 1
        made = self.zero.gradient_buckets(stage, parameters, has_mask=has_mask)
        if any(map(_has_own_gradient, parameters)):
            experts = self._mesh.experts
            rows_group = self._group(ranks, experts) if ranks else experts.rows_group
            made.append(
                self.zero.expert_buckets(stage, parameters, rows_group, self._mask_groups.get((ranks, experts)))
            )
        if stage is not None and self.zero.reduces_each_backward:
            self._each_backward |= set(map(id, made))
        unsharded = [parameter for parameter in parameters if not is_shard(parameter)]
        if unsharded:
            # Replicas that use different layers would start these at different times, so they start after the ordered
            # collectives.
            overlap = stage is not None and not any(is_shard(each) and is_gathered(each) for each in parameters)
            mask_group, scale = self._mask_groups.get((ranks, None)), 1 / self._mesh.gradient_group_size
            made.append(GradientBuckets(unsharded, group, scale=scale, overlap=overlap, mask_group=mask_group))
        return made

    def _summed(
        self,
        tensors: Iterable[Tensor],
        group: ProcessGroup,
        mask_group: ProcessGroup | None = None,
        *,
        scale: float = 1.0,
    ) -> list[GradientBuckets]:
        """Return buckets that multiply gradients by a factor, and sum them over a group."""
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        if not parameters:
            return []
        return [GradientBuckets(parameters, group, scale=scale, overlap=False, mask_group=mask_group)]

    def _is_sharded_over(self, parameter: Tensor, groups: ShardGroups) -> bool:
        """Return True if replicas shard a parameter over these groups."""
        own = self._mesh.experts if is_expert(parameter) else self._mesh.zero
        return is_shard(parameter) and groups is own

    def _is_reduced_in_parts(self, parameter: Tensor, groups: ShardGroups) -> bool:
        """Return True if the gradient of a shard is reduced over its group first, and then over its rows group."""
        return self._is_sharded_over(parameter, groups) and is_gathered(parameter)

    def counts_in_norm(self, parameter: nn.Parameter) -> bool:
        """Return True if this rank counts the parameter, or its shard of the parameter, in the gradient norm."""
        return id(parameter) in self._counted and self.zero.counts_in_norm(parameter)

    @contextmanager
    def step(self, *, evaluates: bool = False, is_cut: bool = True) -> Iterator[None]:
        """Let layers use unsharded parameters during a step. With ZeRO, all replicas must enter this together.

        Args:
            evaluates: True for a step of an evaluation, in which parameters do not change.
            is_cut: True if the batch is split into microbatches; in an evaluation, replicas may have different numbers.
        """
        if not self.zero.is_active:
            yield
            return
        unchanged = evaluates and self._has_evaluated
        self.zero.open(unchanged=unchanged, reshard_after_forward=not (evaluates and is_cut))
        self._has_evaluated = evaluates
        try:
            yield
        except BaseException:
            self.zero.abandon()
            raise
        self.zero.close()

    @property
    def backward_hooks(self) -> dict[str, Callable[[int, bool], None]]:
        """The methods `backward_begins` and `backward_ends`, for :meth:`~.Engine.run`; empty if both do nothing."""
        if not (self._float32 or self._by_stage or self.zero.is_active):
            return {}
        return {"backward_begins": self.backward_begins, "backward_ends": self.backward_ends}

    def keep_sums(self) -> None:
        """Divide gradients that were summed after an earlier backward, so that the next sum counts them once.

        These are the gradients of parameters in `adds_up`. Manual optimization calls this before each step, because its
        backward may add to gradients of earlier steps. A mean over ranks keeps equal values, but a sum multiplies them
        by the number of ranks. In automatic optimization, gradients are zeroed between steps.
        """
        for parameter in self._parts:
            gradient = local_gradient(parameter)
            if gradient is None:
                self._summed_parts.discard(id(parameter))
            elif parameter.requires_grad and id(parameter) in self._summed_parts:
                gradient.div_(self._mesh.sizes.tensor)
                self._summed_parts.discard(id(parameter))

    def backward_begins(self, stage: int, is_last: bool) -> None:
        """Prepare for a backward of a stage.

        Args:
            stage: The stage.
            is_last: True for the stage's last backward of this step. Its gradients are final, unless they are
                accumulated over several steps.
        """
        for float32 in self._float32:
            float32.begin()
        if self.zero.is_active:
            self.zero.backward_begins(stage)
        for buckets in self._by_stage.get(stage, ()):
            if (is_last and self.reduces) or id(buckets) in self._each_backward:
                buckets.arm()

    def backward_ends(self, stage: int, is_last: bool) -> None:
        """Reduce the gradients of a backward that is complete; the arguments are as for :meth:`backward_begins`.

        This starts collectives of the replicas in the last backward of a stage, and with ZeRO stages 2 and 3 it waits
        for collectives after each backward.
        """
        if self.zero.is_active:
            self.zero.backward_ends(stage, is_last=is_last)
        for buckets in self._by_stage.get(stage, ()):
            if (is_last and self.reduces) or id(buckets) in self._each_backward:
                buckets.launch_rest()
            if id(buckets) in self._each_backward:
                buckets.finish()

    @property
    def is_reducing(self) -> bool:
        """True if gradients of this step are already being reduced."""
        return any(buckets.is_launched for of_stage in self._by_stage.values() for buckets in of_stage)

    @property
    def reduces_early(self) -> bool:
        """True if gradients may be reduced during a step, and not only at its end."""
        return bool(self._by_stage)

    def finish(self, *, scale: Tensor | float | None = None) -> None:
        """Start the remaining reductions after all backwards of this rank, and wait for all of them.

        Every rank must call this, also a rank without gradients. Afterwards, ``.grad`` has the final gradients.

        Args:
            scale: The factor for the gradients, a number or a tensor of shape ``()``; the same on every rank. ``None``
                does not scale them.
        """
        for buckets in self._after_backward:
            buckets.launch_rest()
        for buckets in (*itertools.chain(*self._by_stage.values()), *self._after_backward):
            if id(buckets) not in self._each_backward:
                buckets.finish()
        for buckets in self._over_holders:
            buckets.launch_rest()
            buckets.finish()
        self._summed_parts |= {id(parameter) for parameter in self._parts if parameter.requires_grad}
        for location in self._parameters:
            if isinstance(location.tensor.grad, DTensor):
                redistribute_grad(location.tensor)
        if scale is not None:
            for location in self._parameters:
                gradient = local_gradient(location.tensor)
                if gradient is not None:
                    gradient.mul_(scale)
        if self._rounds:
            for float32 in self._float32:
                float32.end()

    def discard(self) -> None:
        """Delete the gradients after :meth:`finish` if nothing has a loss, so that the optimizer changes nothing."""
        for location in self._parameters:
            location.tensor.grad = None

    def broadcast_parameters(self) -> None:
        """Set every tensor to the values of its first holder on the first replica. Every rank must call this.

        Rows of parameters that replicas shard are not sent between replicas: :func:`~.shard_module.shard_module` has
        already done so.
        """
        own = [*self._parameters, *filter(self._map.is_local, self._buffers)]
        if self._mesh.sizes.tensor > 1:
            alike = [to_local(each.tensor) for each in own if not is_tensor_parallel(each.tensor)]
            broadcast_tensors(alike, self._mesh.tensor_group)
        unsharded = [location for location in own if not is_shard(location.tensor)]
        if self._mesh.gradient_group_size > 1:
            unshared = [to_local(location.tensor) for location in unsharded if len(location.ranks) == 1]
            broadcast_tensors(unshared, self._mesh.gradient_group)
        for shards in self._mesh.shard_groups:
            of_kind = [each for each in own if self._is_sharded_over(each.tensor, shards)]
            rows = [to_local(each.tensor) for each in of_kind if len(each.ranks) == 1]
            if rows and shards.rows_group_size > 1:
                broadcast_tensors(rows, shards.rows_group)
        for ranks in self._shared_by:
            shared = [to_local(location.tensor) for location in unsharded if location.ranks == ranks]
            broadcast_tensors(shared, self._group(ranks))
            for shards in self._mesh.shard_groups:
                of_kind = [each for each in own if self._is_sharded_over(each.tensor, shards)]
                rows = [to_local(each.tensor) for each in of_kind if each.ranks == ranks]
                if rows:
                    broadcast_tensors(rows, self._group(ranks, shards))

    def parameters_changed(self) -> None:
        """Record that parameters may have changed since the last evaluation step."""
        self._has_evaluated = False

    def broadcast_buffers(self) -> None:
        """Set floating-point buffers to the values of the first replica, as `DistributedDataParallel` does.

        The strategy calls this on every rank before each training batch, and at the start of each evaluation. It also
        calls :meth:`parameters_changed`.
        """
        self.parameters_changed()
        if self._mesh.num_replicas > 1 and self._floating_buffers:
            broadcast_tensors(map(to_local, self._floating_buffers), self._mesh.data_group)

    @property
    def _all(self) -> list[GradientBuckets]:
        return [*itertools.chain(*self._by_stage.values()), *self._after_backward, *self._over_holders]

    def abandon(self) -> None:
        """Drop collectives in flight after a failure."""
        for buckets in self._all:
            buckets.abandon()

    def release_parameters(self) -> None:
        """Remove the hooks from the parameters. Parameters that ZeRO shards remain sharded."""
        for float32 in self._float32:
            float32.end()
        for buckets in self._all:
            buckets.remove()
        self.zero.remove()

    def take_parameters(self, placeholders: Mapping[int, Tensor]) -> None:
        """Make buckets and groups again after parameters have moved, on every rank; see :class:`Follower`."""
        self._attach()

    def remove(self) -> None:
        """Remove the hooks from the parameters, and restore the user's layers."""
        for undo in self._undo:
            undo()
        self.release_parameters()


def _has_own_gradient(parameter: nn.Parameter) -> bool:
    """Return True if a parameter is a shard that layers compute with, of which a rank has the complete gradient."""
    return is_shard(parameter) and not is_gathered(parameter)


class Rest(NamedTuple):
    """The effect of missing losses on an optimizer step; see :class:`LeftOut`.

    Attributes:
        scale: The factor for the gradients; 0 if nothing has a loss.
        has_loss: True if a replica has a loss for the last batch.
    """

    scale: float
    has_loss: bool


class LeftOut:
    """The batches of one optimizer step, in which microbatches and replicas may have no loss.

    A microbatch for which `training_step` returns ``None`` has weight 0, and its samples do not count. The replicas
    know its original weight only after the gradients have been averaged, so the gradients are scaled then::

        scale = sum(weight of batch i) / sum(weight in batch i of what has a loss)      over the batches i with a loss

    So one batch is a mean over the samples with a loss, as in a single process without the other samples. A batch for
    which no replica has a loss does not affect the other batches, as in a single process: Lightning still divides these
    by `accumulate_grad_batches`. Several batches with missing losses form one mean over all samples with a loss.

    In an ordinary step, replicas send a single number between their hosts while backward runs.

    Args:
        mesh: The mesh. The ranks at one place of all replicas call :meth:`ask` and :meth:`settle` together, because
            these are collectives of the data group. In a pipeline, only the ranks that compute losses do so.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._pending: tuple[Tensor, dist.Work | None] | None = None
        self.begin()

    def begin(self) -> None:
        """Start an optimizer step."""
        self._is_whole = True
        # For each batch, the weight with a loss, and the total weight.
        self._weights: list[tuple[float | Tensor, float | Tensor]] = []

    def add(self, kept: float | Tensor, total: float | Tensor, *, is_whole: bool) -> None:
        """Record a batch.

        Args:
            kept: The weight of the microbatches with a loss.
            total: The weight of all microbatches.
            is_whole: True if all microbatches have a loss.
        """
        self._is_whole &= is_whole
        self._weights.append((kept, total))

    def ask(self, *, waits: bool = False) -> None:
        """Start to ask the other replicas if they have missing losses.

        Args:
            waits: True to wait for the answer before this replica sends anything else. Otherwise, replicas that wait
                for this replica in `self.log` could receive its next message as a logged value.
        """
        is_whole = torch.tensor(self._is_whole, dtype=torch.uint8)
        work = None
        if self._mesh.num_replicas > 1:
            group = self._mesh.data_control_group
            work = dist.all_reduce(is_whole, dist.ReduceOp.MIN, group=group, async_op=not waits)
        self._pending = is_whole, work

    def settle(self) -> Rest | None:
        """Return the effect of missing losses, after :meth:`ask`; ``None`` if no replica has any.

        A collective of the replicas sums the weights if a replica has missing losses. The host waits for weights that
        are on a device.
        """
        assert self._pending is not None
        is_whole, work = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        if is_whole:
            return None
        weights = torch.tensor([list(map(float, pair)) for pair in self._weights], dtype=torch.float64)
        if self._mesh.num_replicas > 1:
            dist.all_reduce(weights, group=self._mesh.data_control_group)
        kept, totals = weights[weights[:, 0] > 0].sum(0).tolist()
        return Rest(totals / kept if kept else 0.0, bool(weights[-1, 0] > 0))

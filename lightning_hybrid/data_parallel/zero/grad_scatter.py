"""Gradients of unsharded parameters, of which each replica receives the mean of its rows.

`ZeroParameters` makes a :class:`ZeroGradients`, and `GradientSync` reduces its buckets like other buckets. *Rows* are
the part of a parameter that a replica holds, see `RowShards`. The *root* group has the parameters that belong to no
single layer. A layer is *reached* when a backward first needs its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from lightning_hybrid.data_parallel.all_reduce import Pending, start_all_reduce
from lightning_hybrid.data_parallel.grad_buckets import BUCKET_BYTES, Bucket, GradientBuckets, assign
from lightning_hybrid.data_parallel.zero.param import ShardedParameter
from lightning_hybrid.data_parallel.zero.param_group import ParameterGroup
from lightning_hybrid.distributed.dtensor import give_gradient, local_gradient, to_local
from lightning_hybrid.distributed.process_group import reduce_scatter_single


class ReduceScatterBucket(Bucket):
    """A bucket of which each rank receives its rows.

    ::

        on each rank    rank 0's rows | 1 1 || rank 1's rows | 1 1 ||     the sum goes to rank 0 || to rank 1 ||

    The numbers after the bar mark the gradients of this rank, as in :class:`AllReduceBucket`. The sum is added to the
    gradient of the shard, because earlier microbatches may have set it.

    Args:
        parameters: The parameters, in the order in which the gradients of their unsharded forms should arrive.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        super().__init__([parameter.unsharded for parameter in parameters])
        self._sharded = list(parameters)

    def _pack(self, gradients: Iterator[Tensor], has_gradient: Tensor, num_ranks: int) -> Tensor:
        num_elements = sum(parameter.rows.padded_numel for parameter in self._sharded)
        flat = has_gradient.new_empty((num_ranks, num_elements + has_gradient.numel()))
        offset = 0
        for parameter, gradient in zip(self._sharded, gradients, strict=True):
            _fill(flat[:, offset : offset + parameter.rows.padded_numel], gradient, parameter)
            offset += parameter.rows.padded_numel
        flat[:, offset:] = has_gradient
        return flat

    def _reduce(self, flat: Tensor, group: ProcessGroup) -> tuple[Tensor, Pending | Work]:
        own = flat.new_empty(flat.shape[1])
        return own, reduce_scatter_single(own, flat.view(-1), group=group, async_op=True)

    @torch.no_grad()
    def _unpack(self, flat: Tensor, used: Sequence[bool]) -> None:
        offset = 0
        for parameter, is_used in zip(self._sharded, used, strict=True):
            if is_used:
                shape = to_local(parameter.sharded).shape
                _add(parameter.sharded, flat[offset : offset + shape.numel()].view(shape))
            offset += parameter.rows.padded_numel


class OwnRowsBucket(ReduceScatterBucket):
    """A bucket of parameters that are not gathered: a rank has gradients of its own rows only.

    The group has the ranks with the same rows, and each of them receives the whole sum.
    """

    def _pack(self, gradients: Iterator[Tensor], has_gradient: Tensor, num_ranks: int) -> Tensor:
        return super()._pack(gradients, has_gradient, 1).view(-1)

    def _reduce(self, flat: Tensor, group: ProcessGroup) -> tuple[Tensor, Pending]:
        return flat, start_all_reduce(flat, group)


def _fill(shards: Tensor, gradient: Tensor, parameter: ShardedParameter) -> None:
    """Copy a flat gradient into padded shards, ``(ranks, padded shard)``, with zeros as padding."""
    size = parameter.rows.padded_numel
    full = parameter.rows.numel // size
    shards[:full].copy_(gradient[: full * size].view(full, size))
    if full < parameter.rows.num_ranks:
        rest = gradient[full * size :]
        shards[full:] = 0
        shards[full : full + 1, : rest.numel()] = rest


def _add(shard: nn.Parameter, gradient: Tensor) -> None:
    before = local_gradient(shard)
    if before is None:
        give_gradient(shard, gradient)
    else:
        before.add_(gradient)


class ZeroGradients:
    """The buckets for the gradients of a rank's unsharded parameters, and the start of their reduction.

    Args:
        groups: The parameters of the layers of each stage of this rank.
        root: The parameters outside these layers.
        zero_stage: With stage 1, gradients are reduced once per step, in buckets by size; with other stages after each
            backward, layer by layer.
        reshard_after_forward: If True (only with stage 3), parameters are also gathered in backward, and gradients are
            reduced at fixed points in the order of these gathers.
    """

    def __init__(
        self,
        groups: Mapping[int, Sequence[ParameterGroup]],
        root: ParameterGroup,
        *,
        zero_stage: int,
        reshard_after_forward: bool,
    ) -> None:
        self._groups = groups
        self._zero_stage, self._reshard_after_forward = zero_stage, reshard_after_forward
        layers = [group for members in groups.values() for group in members]
        self._by_shard = {id(each.sharded): each for group in (root, *layers) for each in group.parameters}
        self._by_unsharded = {id(each.unsharded): each for each in self._by_shard.values()}
        self._group_of = {id(each): group for group in (root, *layers) for each in group.parameters}
        self._backward_order = [*reversed(layers), root]
        # By stage: the buckets of stages whose layers are gathered in backward.
        self._prefetched: dict[int, list[GradientBuckets]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeroGradients:
        """Return the object itself: a copy of the module reduces no gradients, and memory may not be allocated."""
        return self

    def find(self, parameter: Tensor) -> tuple[ShardedParameter, ParameterGroup] | None:
        """Return a sharded parameter and its group; ``None`` for other tensors.

        Args:
            parameter: Any tensor; a sharded parameter in either form.
        """
        found = self._by_unsharded.get(id(parameter)) or self._by_shard.get(id(parameter))
        return None if found is None else (found, self._group_of[id(found)])

    def buckets(
        self,
        stage: int | None,
        shards: Sequence[Tensor],
        group: ProcessGroup,
        *,
        scale: float,
        mask_group: ProcessGroup | None = None,
    ) -> GradientBuckets:
        """Return the buckets for the gradients of some parameters, which are all gathered, or none of them is.

        Args:
            stage: The only stage with these parameters, if there is one. Their gradients are then reduced while its
                backward runs.
            shards: The parameters, in the order of the model.
            group: The replicas that gather the parameters; for others, the ranks with the same rows.
            scale: The factor for each gradient before the sum.
            mask_group: As for :class:`GradientBuckets`.
        """
        parameters = [self._by_shard[id(shard)] for shard in shards]
        buckets = GradientBuckets(
            [parameter.unsharded for parameter in parameters],
            group,
            scale=scale,
            overlap=stage is not None and not self._reshard_after_forward,
            make_buckets=self._make_buckets,
            max_in_flight=1 if self._zero_stage > 1 else None,
            mask_group=mask_group,
        )
        if stage is not None and self._reshard_after_forward and parameters[0].is_gathered:
            self._prefetched.setdefault(stage, []).append(buckets)
        return buckets

    def launch_behind(self, stage: int, index: int) -> None:
        """Start to reduce the gradients of the layers after a layer that a backward has reached, as these are final.

        A `Prefetcher` calls this. It does nothing unless layers are resharded after each forward.

        Args:
            stage: The stage.
            index: The index of the layer among the layers of the stage with sharded parameters.
        """
        if stage in self._prefetched:
            behind = {id(p.unsharded) for group in self._groups[stage][index + 1 :] for p in group.parameters}
            for buckets in self._prefetched[stage]:
                buckets.launch_complete(behind)

    def _make_buckets(self, parameters: Sequence[nn.Parameter]) -> list[Bucket]:
        """Put unsharded parameters into buckets: by size if they are reduced once per step, otherwise by layer."""
        layers = [list(parameters)]
        if self._zero_stage > 1:
            keys = {id(parameter) for parameter in parameters}
            unsharded = [[each.unsharded for each in group.parameters] for group in self._backward_order]
            layers = [[parameter for parameter in layer if id(parameter) in keys] for layer in unsharded]
        alike = (members for layer in layers for members in assign(layer, BUCKET_BYTES))
        sharded = [[self._by_unsharded[id(parameter)] for parameter in members] for members in alike]
        return [(ReduceScatterBucket if each[0].is_gathered else OwnRowsBucket)(each) for each in sharded]

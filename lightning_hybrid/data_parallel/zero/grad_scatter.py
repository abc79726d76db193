"""Gradients of which each replica gets the sum of its own rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_hybrid.data_parallel.bucket import Bucket, flatten_gradient, gradient_dtype, too_late
from lightning_hybrid.data_parallel.zero.param import ShardedParameter
from lightning_hybrid.distributed.dtensor import give_gradient, local_gradient, redistribute_grad, to_local

__all__ = ["ReduceScatterBucket"]

_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name up to torch 2.12


class ReduceScatterBucket(Bucket):
    """Some parameters, whose gradients travel as one flat tensor, to each rank its rows.

    ::

        on each rank    rank 0's rows | 1 1 || rank 1's rows | 1 1 ||     the sum goes to rank 0 || to rank 1 ||

    The numbers behind the bar say which gradients this rank had, as in :class:`SummedBucket`. What arrives is added to
    the gradient of the shard: earlier micro-batches may have left something there.

    Args:
        twins: The parameters, in the order in which the gradients of their wholes should arrive.
    """

    def __init__(self, twins: Sequence[ShardedParameter]) -> None:
        super().__init__([twin.whole for twin in twins])
        self._twins = list(twins)
        self._own: Tensor | None = None
        shapes = [to_local(whole).shape for whole in self.parameters]
        strides = [to_local(whole).stride() for whole in self.parameters]
        self._members: list[tuple[nn.Parameter, torch.Size, tuple[int, ...]]] = list(
            zip(self.parameters, shapes, strides, strict=True)
        )

    @property
    def travelling(self) -> list[Tensor]:
        """What is under way."""
        return [] if self._own is None else [self._own]

    @torch.no_grad()
    def launch(self, group: ProcessGroup, scale: float) -> None:
        """Start the sum."""
        for parameter in self.parameters:
            redistribute_grad(parameter)
        self.missing = {index for index, parameter in enumerate(self.parameters) if parameter.grad is None}
        memory, size = self._twins[0].memory, group.size()
        length = sum(twin.rows.share for twin in self._twins)
        flat = memory.new_empty((size, length + len(self._twins)), dtype=gradient_dtype(self.parameters[0]))
        offset = 0
        for twin, member in zip(self._twins, self._members, strict=True):
            _fill(flat[:, offset : offset + twin.rows.share], flatten_gradient(*member), twin)
            member[0].grad = None
            offset += twin.rows.share
        flat[:, length:] = 1
        for index in self.missing:
            flat[:, length + index] = 0
        if scale != 1.0:
            flat.mul_(scale)
        self._own = flat.new_empty(flat.shape[1])
        self.work = _reduce_scatter(self._own, flat.view(-1), group=group, async_op=True)

    @torch.no_grad()
    def give_back(self) -> None:
        """Add this rank's rows to the gradients of the shards."""
        assert self._own is not None
        used = self._own[-len(self._twins) :].tolist() if self.missing else []
        offset = 0
        for index, twin in enumerate(self._twins):
            if twin.whole.grad is not None:
                raise too_late(twin.whole)
            if index not in self.missing or used[index]:
                shape = to_local(twin.shard).shape
                _add(twin.shard, self._own[offset : offset + shape.numel()].view(shape))
            offset += twin.rows.share
        self._own = None
        self.clear()


def _fill(shares: Tensor, gradient: Tensor, twin: ShardedParameter) -> None:
    """Lay a flat gradient out as shares, ``(ranks, share)``; what is missing of the last ones is zero."""
    rows = twin.rows
    full = rows.numel // rows.share
    shares[:full].copy_(gradient[: full * rows.share].view(full, rows.share))
    if full < rows.num_ranks:
        rest = gradient[full * rows.share :]
        shares[full:] = 0
        shares[full : full + 1, : rest.numel()] = rest


def _add(shard: nn.Parameter, gradient: Tensor) -> None:
    before = local_gradient(shard)
    if before is None:
        give_gradient(shard, gradient)
    else:
        before.add_(gradient)

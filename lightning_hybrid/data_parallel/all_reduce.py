"""All-reduce of tensors on the host, by the shorter of two ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_MOST_BYTES = 1 << 20
_MOST_RANKS = 8


class Pending(Protocol):
    """What has been started, and has to be waited for."""

    def wait(self) -> object:
        """Return when it is done."""


def start_all_reduce(tensor: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
    """Reduce a tensor over a group in place; it must not be used until it has been waited for.

    Gloo passes pieces around a ring, and a small tensor waits for all those messages one after the other. Here every
    rank sends all of it to every other one, which takes a single message's time, and all add up in the same order::

        ring, n ranks                             to everyone, n ranks
        2 (n - 1) rounds of bytes / n             1 round of bytes to each of n - 1

    Args:
        tensor: Contiguous; the same shape and dtype on every rank.
        group: The ranks.
        op: The sum, or the greatest.

    Returns:
        Something to wait for. With the same bits on every rank.
    """
    if not tensor.is_cpu or tensor.nbytes > _MOST_BYTES or not 1 < group.size() <= _MOST_RANKS:
        work: Pending | None = dist.all_reduce(tensor, op, group=group, async_op=True)
        assert work is not None
        return work
    return _AllToAllReduce(tensor, group, op)


class _AllToAllReduce:
    """The tensors of all ranks, on their way to this one."""

    def __init__(self, tensor: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType) -> None:
        self._tensor, self._reduce = tensor, _REDUCE[op]
        own = tensor.reshape(1, -1)
        self._sent = own.expand(group.size(), -1).contiguous()
        self._received = torch.empty_like(self._sent)
        work = dist.all_to_all_single(self._received, self._sent, group=group, async_op=True)
        assert work is not None
        self._work = work

    def wait(self) -> None:
        """Put the result into the tensor."""
        self._work.wait()
        first, *others = self._received.unbind()
        for other in others:
            self._reduce(first, other, out=first)
        self._tensor.copy_(first.view(self._tensor.shape))


_REDUCE: dict[Any, Callable[..., Tensor]] = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}

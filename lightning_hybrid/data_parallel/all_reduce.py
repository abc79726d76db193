"""All-reduce of tensors, with a faster algorithm for small tensors on the host.

`grad_buckets` sums gradients with it, and the masks of the gradients that ranks have. On a GPU, and for tensors that
are large or in large groups, it is torch's all-reduce. A collective is *pending* until it has been waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_MOST_BYTES = 1 << 20  # the largest tensor that is sent to every rank
_MOST_RANKS = 8  # the largest group in which tensors are sent to every rank


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Wait until it is done."""


def start_all_reduce(tensor: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
    """Start to reduce a tensor over a group in place. The tensor must not be used before the result was waited for.

    Every rank of the group must call this.

    Gloo passes parts of a tensor around a ring, and a small tensor waits for many messages, one after the other. Here,
    if the tensor is on the CPU, has at most 1 MiB, and the group has at most 8 ranks, every rank sends the whole tensor
    to every other rank, which takes the time of one message, and all ranks add the tensors in the same order::

        ring, n ranks                             to everyone, n ranks
        2 (n - 1) rounds of bytes / n             1 round of bytes to each of n - 1

    Args:
        tensor: A contiguous tensor with the same shape and dtype on every rank.
        group: The ranks.
        op: The sum or the maximum.

    Returns:
        The collective to wait for. The result is bitwise equal on every rank.
    """
    if not tensor.is_cpu or tensor.nbytes > _MOST_BYTES or not 1 < group.size() <= _MOST_RANKS:
        work: Pending | None = dist.all_reduce(tensor, op, group=group, async_op=True)
        assert work is not None
        return work
    return _AllToAllReduce(tensor, group, op)


class _AllToAllReduce:
    """An all-reduce of small tensors, in which each rank receives the tensors of all ranks."""

    def __init__(self, tensor: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType) -> None:
        self._tensor, self._reduce = tensor, _REDUCE[op]
        own = tensor.reshape(1, -1)
        self._sent = own.expand(group.size(), -1).contiguous()
        self._received = torch.empty_like(self._sent)
        work = dist.all_to_all_single(self._received, self._sent, group=group, async_op=True)
        assert work is not None
        self._work = work

    def wait(self) -> None:
        """Wait, and write the result into the tensor."""
        self._work.wait()
        first, *others = self._received.unbind()
        for other in others:
            self._reduce(first, other, out=first)
        self._tensor.copy_(first.view(self._tensor.shape))


_REDUCE: dict[Any, Callable[..., Tensor]] = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}

"""The exchange of rows between ranks: each row is sent to the rank that computes with it, and its result returns.

`TokenDispatch` sends tokens to the ranks of their experts with it. All tensors of a row are in one message, so an
exchange takes two collectives: the numbers of rows, and the rows. In backward, gradients are sent in the opposite
direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hybrid.distributed.process_group import GroupRef


@dataclass(frozen=True)
class Routes:
    """The numbers of rows that a rank exchanges with each rank of a group.

    Attributes:
        group: The ranks.
        sent: The number of rows for each rank.
        received: The number of rows from each rank.
    """

    group: GroupRef
    sent: list[int]
    received: list[int]

    @classmethod
    def of(cls, group: GroupRef, counts: Tensor) -> Routes:
        """Exchange the numbers of rows. Every rank of the group must call this. The host waits for the device.

        Args:
            group: The ranks.
            counts: The number of rows for each rank, integers of shape ``(ranks,)``.
        """
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group())
        sent, from_ranks = torch.stack([counts, received]).tolist()
        return cls(group, sent, from_ranks)

    @property
    def back(self) -> Routes:
        """The routes of the results."""
        return Routes(self.group, self.received, self.sent)

    @property
    def num_received(self) -> int:
        """The number of rows that this rank receives."""
        return sum(self.received)

    def exchange(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Send the rows of some tensors, and return the rows that this rank receives. Backward returns the gradients.

        Every rank of the group must call this, and run the backward, in the same order of exchanges.

        Args:
            tensors: Tensors of the shape ``(rows, ...)``, sorted by the rank that receives the row. Ranks have tensors
                of the same dtypes and the same row shapes.

        Returns:
            The received rows of each tensor, sorted by the rank that sent the row.
        """
        return _Exchange.apply(self, *tensors)  # type: ignore[no-untyped-call, no-any-return]

    def move(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Do as :meth:`exchange`, without a graph."""
        rows = [_as_bytes(tensor) for tensor in tensors]
        sent = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        received = sent.new_empty(self.num_received, sent.shape[1])
        dist.all_to_all_single(received, sent, self.received, self.sent, group=self.group())
        ends = list(accumulate(row.shape[1] for row in rows))
        parts = [received[:, end - row.shape[1] : end] for row, end in zip(rows, ends, strict=True)]
        return tuple(map(_from_bytes, parts, tensors))


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of each row, ``(rows, bytes of a row)``."""
    row = tensor.shape[1:].numel() * tensor.itemsize
    # A tensor of at most one element is contiguous with any stride, but has no view of its bytes.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).view(len(tensor), row)


def _from_bytes(rows: Tensor, like: Tensor) -> Tensor:
    """Return rows of bytes as a tensor with the dtype and the row shape of another tensor."""
    tensor = like.new_empty(len(rows), *like.shape[1:])
    _as_bytes(tensor).copy_(rows)
    return tensor


class _Exchange(torch.autograd.Function):
    """The exchange with a graph."""

    @staticmethod
    def forward(ctx: Any, routes: Routes, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Send the rows."""
        ctx.routes = routes
        received = routes.move(tensors)
        needs = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(each for each, need in zip(received, needs, strict=True) if not need))
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Send the gradients of received rows to the ranks that sent the rows."""
        needed = [index for index, needs in enumerate(ctx.needs_input_grad[1:]) if needs]
        moved = dict(zip(needed, ctx.routes.back.move([gradients[index] for index in needed]), strict=True))
        return None, *map(moved.get, range(len(gradients)))

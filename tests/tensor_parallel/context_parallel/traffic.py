"""What ranks that share sequences send to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.tensor_parallel import sharding
from lightning_hybrid.tensor_parallel.context_parallel import mappings


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts the bytes that a rank sends to others, by kind: also where an operator reads a sequence."""
    sent: dict[str, int] = {}
    before = sharding.all_gather_single, mappings.reduce_scatter_single, dist.all_to_all_single
    send_and_receive = dist.batch_isend_irecv
    size = dist.get_world_size()

    def counting(name: str, function: Callable[..., Any], num_bytes: Callable[..., int]) -> Callable[..., Any]:
        def call(output: Tensor, own: Tensor, *args: Any, **kwargs: Any) -> Any:
            sent[name] = sent.get(name, 0) + num_bytes(output, own)
            return function(output, own, *args, **kwargs)

        return call

    sharding.all_gather_single = counting("all_gather", before[0], lambda _, own: own.nbytes * (size - 1))
    mappings.reduce_scatter_single = counting("reduce_scatter", before[1], lambda share, _: share.nbytes * (size - 1))
    dist.all_to_all_single = counting("all_to_all", before[2], lambda _, own: own.nbytes * (size - 1) // size)

    def send(operations: list[dist.P2POp]) -> list[dist.Work]:
        sends = [each.tensor.nbytes for each in operations if each.op is dist.isend]
        sent["ring"] = sent.get("ring", 0) + sum(sends)
        return send_and_receive(operations)

    dist.batch_isend_irecv = send
    try:
        yield sent
    finally:
        dist.batch_isend_irecv = send_and_receive
        sharding.all_gather_single, mappings.reduce_scatter_single, dist.all_to_all_single = before

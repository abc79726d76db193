from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.data_parallel import broadcast as replicas
from lightning_hybrid.data_parallel.broadcast import broadcast_tensors
from tests.pool import Pools


def make(rank: int) -> list[Tensor]:
    """Every kind of tensor that a module holds, other values on every rank."""
    torch.manual_seed(rank)
    return [
        torch.randn(3, 4),
        torch.randn(5, dtype=torch.float64),
        torch.rand(6) > 0.5,
        torch.randint(0, 1000, (), dtype=torch.int64),
        torch.randint(0, 100, (3,), dtype=torch.int8),
        torch.randn(2, 2, dtype=torch.bfloat16),
        torch.randn(2, 2, dtype=torch.float16),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(4, 3).t(),
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.empty(0),
        torch.randn(1000),
        torch.nn.Parameter(torch.randn(2, 3)),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ]


def as_bytes(tensors: list[Tensor]) -> list[list[int]]:
    return [tensor.detach().contiguous().view(-1).view(torch.uint8).tolist() for tensor in tensors]


def equalized(source: int, chunk_bytes: int) -> list[list[int]]:
    group = dist.group.WORLD
    assert group is not None
    tensors = make(dist.get_rank())
    strides = [tensor.stride() for tensor in tensors]
    with mock.patch.object(replicas, "CHUNK_BYTES", chunk_bytes):
        broadcast_tensors([torch.empty(7, device="meta"), *tensors], group, source)
    assert [tensor.stride() for tensor in tensors] == strides
    return as_bytes(tensors)


@pytest.mark.parametrize("chunk_bytes", [1, 64, 2**20])
@pytest.mark.parametrize("source", [0, 2])
def test_every_rank_gets_the_values_of_the_source(ranks: Pools, source: int, chunk_bytes: int) -> None:
    assert ranks(3).run(equalized, source, chunk_bytes) == [as_bytes(make(source))] * 3


def in_subgroup() -> float:
    groups = [dist.new_group([0]), dist.new_group([1, 3]), dist.new_group([2])]
    value = torch.tensor(float(dist.get_rank()))
    for group in groups:
        if dist.get_rank() in dist.get_process_group_ranks(group):
            broadcast_tensors([value], group, source=group.size() - 1)
    return value.item()


def test_the_source_is_counted_inside_the_group(ranks: Pools) -> None:
    assert ranks(4).run(in_subgroup) == [0.0, 3.0, 2.0, 3.0]


def count_collectives() -> int:
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        broadcast_tensors([torch.zeros(10) for _ in range(100)] + [torch.zeros(3, dtype=torch.int64)], group)
    return broadcast.call_count


def test_tensors_of_one_dtype_travel_together(ranks: Pools) -> None:
    assert ranks(2).run(count_collectives) == [2, 2]

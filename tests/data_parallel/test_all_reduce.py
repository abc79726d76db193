from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.data_parallel import all_reduce
from lightning_hybrid.data_parallel.all_reduce import start_all_reduce
from tests.pool import Pools

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]


def make(rank: int) -> list[Tensor]:
    """Small whole numbers, so that no order of a sum rounds; other ones on every rank."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(), (1,), (3, 5), (1000,), (0,)]
    return [torch.randint(0, 20, shape, generator=generator).to(dtype) for dtype in DTYPES for shape in shapes]


def reduced(op: str) -> list[tuple[Tensor, Tensor]]:
    """What comes of each tensor here, and by torch."""
    operation = getattr(dist.ReduceOp, op)
    tensors = [tensor for tensor in make(dist.get_rank()) if op == "SUM" or not tensor.is_complex()]
    expected = [tensor.clone() for tensor in tensors]
    started = [start_all_reduce(tensor, dist.group.WORLD, operation) for tensor in tensors]  # many under way
    for pending in started:
        pending.wait()
    for tensor in expected:
        dist.all_reduce(tensor, operation)
    return list(zip(tensors, expected, strict=True))


@pytest.mark.parametrize("op", ["SUM", "MAX"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_result_is_that_of_torch(ranks: Pools, size: int, op: str) -> None:
    for pairs in ranks(size).run(reduced, op):
        for actual, expected in pairs:
            assert torch.equal(actual, expected)


def rounded() -> Tensor:
    tensor = torch.randn(500, generator=torch.Generator().manual_seed(dist.get_rank()))
    start_all_reduce(tensor, dist.group.WORLD).wait()
    return tensor


def test_every_rank_has_the_same_bits(ranks: Pools) -> None:
    first, *others = ranks(4).run(rounded)
    assert all(torch.equal(first, other) for other in others)


def ways(num_bytes: int) -> tuple[int, int]:
    """How often torch's all-reduce, and an all-to-all, is taken for a tensor."""
    ring, exchange = mock.Mock(wraps=dist.all_reduce), mock.Mock(wraps=dist.all_to_all_single)
    with mock.patch.object(dist, "all_reduce", ring), mock.patch.object(dist, "all_to_all_single", exchange):
        start_all_reduce(torch.ones(num_bytes, dtype=torch.uint8), dist.group.WORLD).wait()
    return ring.call_count, exchange.call_count


def test_only_what_is_small_goes_to_everyone(ranks: Pools) -> None:
    most = all_reduce._MOST_BYTES
    assert ranks(2).run(ways, most) == [(0, 1)] * 2
    assert ranks(2).run(ways, most + 1) == [(1, 0)] * 2

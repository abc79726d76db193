"""The exchange of rows, against sums and selections of all rows, and the number of bytes that leave a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.expert_parallel.dispatch import dispatch_tokens
from lightning_hybrid.expert_parallel.exchange import Routes
from lightning_hybrid.tensor_parallel.experts import connected
from tests.pool import Pools
from tests.zoo.experts import DIM, EXPERTS, Experts

pytestmark = pytest.mark.distributed


def group() -> GroupRef:
    return GroupRef(dist.group.WORLD)


# -- rows --------------------------------------------------------------------------------------------------------------


def rows_of(rank: int, counts: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of three kinds that a rank sends."""
    generator = torch.Generator().manual_seed(rank)
    count = sum(counts[rank])
    wide = torch.randn(count, 2, 3, generator=generator, dtype=torch.float64)
    return wide, torch.arange(count, dtype=torch.int32), torch.rand(count, generator=generator)


def exchanged(counts: list[list[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the rows that this rank receives, and the gradients of its rows; a row has gradient r + 1 on rank r."""
    rank = dist.get_rank()
    wide, number, narrow = rows_of(rank, counts)
    routes = Routes.of(group(), torch.tensor(counts[rank]))
    received = routes.exchange(wide.requires_grad_(), number, narrow.requires_grad_())
    assert [each.requires_grad for each in received] == [True, False, True]
    (received[0].sum() * (rank + 1) + received[2].sum() * 2 * (rank + 1)).backward()
    return [each.detach() for each in received], [wide.grad, narrow.grad]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "counts", [[[1, 2, 3], [4, 0, 1], [2, 2, 2]], [[0, 0, 0], [0, 5, 0], [0, 1, 0]], [[0, 0, 0]] * 3]
)
def test_rows_and_gradients_arrive(ranks: Pools, counts: list[list[int]]) -> None:
    found = ranks(3).run(exchanged, counts)
    for rank, (received, gradients) in enumerate(found):
        for kind, part in enumerate(received):
            pieces = [rows_of(other, counts)[kind].split(counts[other])[rank] for other in range(3)]
            assert torch.equal(part, torch.cat(pieces))
        scale = torch.cat([torch.full((count,), to + 1.0) for to, count in enumerate(counts[rank])])
        assert torch.equal(gradients[0], scale.double()[:, None, None].expand(-1, 2, 3))
        assert torch.equal(gradients[1], 2 * scale)


def test_a_connected_tensor_has_zeros_for_the_others() -> None:
    tensor, other = torch.ones(2, requires_grad=True), torch.ones(0, 3, requires_grad=True)
    weight, frozen = torch.ones(3, requires_grad=True), torch.ones(3)
    (connected(tensor, [other, weight, frozen]) * 2).sum().backward()
    assert torch.equal(tensor.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]
    assert torch.equal(weight.grad, torch.zeros(3))  # type: ignore[arg-type]
    assert other.grad is not None
    assert frozen.grad is None


# -- tokens ------------------------------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that leave this rank, by collective."""
    sent: list[int] = []
    before = dist.all_to_all_single

    def call(received: Tensor, own: Tensor, outputs: Any = None, inputs: Any = None, **others: Any) -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        rows = inputs or [len(own) // size] * size
        sent.append(sum(count for to, count in enumerate(rows) if to != rank) * own[:1].nbytes if len(own) else 0)
        return before(received, own, outputs, inputs, **others)

    dist.all_to_all_single = call
    try:
        yield sent
    finally:
        dist.all_to_all_single = before


def routed(rank: int, num_tokens: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens; consecutive experts in turn, so that all are chosen equally often."""
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(num_tokens, DIM, generator=generator, dtype=torch.float64)
    index = torch.arange(num_tokens * k).view(num_tokens, k) % EXPERTS
    return hidden, index, torch.rand(num_tokens, k, generator=generator, dtype=torch.float64)


def made() -> Experts:
    torch.manual_seed(7)
    return Experts().double()


def dispatched(num_tokens: list[int], k: int) -> tuple[Tensor, Tensor, list[int], int]:
    """The results and gradients of a rank's tokens, its collectives, and the experts of the module afterwards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module, local = made(), EXPERTS // size
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(parameter.detach()[rank * local : (rank + 1) * local].clone()))
    module.num_experts = EXPERTS
    handles = dispatch_tokens(module, dict(module.named_parameters()), group())
    hidden, index, weights = routed(rank, num_tokens[rank], k)
    with counted() as sent:
        result = module(hidden.requires_grad_(), top_k_weights=weights.requires_grad_(), top_k_index=index)
        result.square().sum().backward()
    for handle in handles:
        handle.remove()
    assert hidden.grad is not None
    assert all(parameter.grad is not None for parameter in module.parameters())
    return result.detach(), hidden.grad, sent, module.num_experts


@pytest.mark.parametrize("num_tokens", [[8, 8], [5, 2], [0, 4], [1, 0]])
@pytest.mark.parametrize("k", [1, 3])
def test_tokens_have_the_results_of_all_experts(ranks: Pools, num_tokens: list[int], k: int) -> None:
    for rank, (result, gradient, _, num_experts) in enumerate(ranks(2).run(dispatched, num_tokens, k)):
        hidden, index, weights = routed(rank, num_tokens[rank], k)
        expected = made()(hidden.requires_grad_(), index, weights)
        (expected.square().sum() + 0 * hidden.sum()).backward()
        torch.testing.assert_close(result, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, hidden.grad, rtol=1e-12, atol=1e-12)
        assert num_experts == EXPERTS


@pytest.mark.parametrize("size", [2, 4])
def test_the_bytes_are_the_formula(ranks: Pools, size: int) -> None:
    tokens, k, wide, weight = 16, 2, 8 * DIM, 8
    rows = tokens * k * (size - 1) // size
    for _, _, sent, _ in ranks(size).run(dispatched, [tokens] * size, k):
        assert sent == [8 * (size - 1), rows * (wide + weight + 4), rows * wide, rows * wide, rows * (wide + weight)]

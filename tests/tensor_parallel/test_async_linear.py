"""The input's gradient is reduced beside the product for the weight's gradient, and no bit of them changes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.tensor_parallel import async_linear
from lightning_hybrid.tensor_parallel.async_linear import column_linear
from lightning_hybrid.tensor_parallel.mappings import TensorGroup
from tests.pool import Pools

CASES: dict[str, dict[str, Any]] = {
    "matrix": {"shape": (6, 8)},
    "sequence": {"shape": (3, 6, 8)},
    "no bias": {"shape": (3, 6, 8), "bias": False},
    "transposed": {"shape": (3, 6, 8), "transposed": True},
    "not contiguous": {"shape": (3, 6, 8), "swapped": True},
    "sequence parallel": {"shape": (3, 6, 8), "sequence_dim": 1},
    "three layers": {"shape": (3, 6, 8), "layers": 3},
    "frozen": {"shape": (3, 6, 8), "frozen": True},
    "bfloat16": {"shape": (3, 6, 8), "autocast": torch.bfloat16, "layers": 2},
    "leaf": {"shape": (3, 6, 8), "leaf": True},
}


def gradients(
    shape: tuple[int, ...],
    bias: bool = True,
    transposed: bool = False,
    swapped: bool = False,
    sequence_dim: int | None = None,
    layers: int = 1,
    frozen: bool = False,
    autocast: torch.dtype | None = None,
    leaf: bool = False,
) -> list[Tensor]:
    group = TensorGroup(dist.group.WORLD)
    torch.manual_seed(0 if sequence_dim is None else dist.get_rank())
    source = torch.randn(shape, requires_grad=True)
    torch.manual_seed(1 + dist.get_rank())
    weights = [nn.Parameter(torch.randn(8, 5) if transposed else torch.randn(5, 8)) for _ in range(layers)]
    biases = [nn.Parameter(torch.randn(5)) if bias else None for _ in range(layers)]
    if frozen:
        weights[0].requires_grad_(False)
    x = source if leaf else (source * 2).transpose(0, 1) if swapped else source * 2
    with nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast):
        outputs = [
            column_linear(x, weight.t() if transposed else weight, each, group, sequence_dim)
            for weight, each in zip(weights, biases, strict=True)
        ]
    sum((output.float() ** 3).sum() for output in outputs).backward()
    found = [source, *weights, *(each for each in biases if each is not None)]
    return [*(output.detach() for output in outputs), *(each.grad for each in found if each.grad is not None)]


def both(name: str) -> tuple[int, list[bool]]:
    results, overlapped = [], 0
    for least in (1, 2**62):
        with (
            mock.patch.dict(async_linear.OVERLAP_FROM, cpu=least),
            mock.patch.object(async_linear, "weight_gradient", wraps=async_linear.weight_gradient) as product,
        ):
            results.append(gradients(**CASES[name]))
            overlapped += product.call_count
    return overlapped, [
        torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(*results, strict=True)
    ]


@pytest.mark.parametrize("name", CASES)
def test_overlapping_changes_no_bit(ranks: Pools, name: str) -> None:
    for overlapped, equal in ranks(2).run(both, name):
        assert overlapped == (0 if name == "frozen" else CASES[name].get("layers", 1))
        assert all(equal), equal


def order(name: str) -> list[str]:
    done: list[str] = []
    collective = "all_reduce" if "sequence_dim" not in CASES[name] else "reduce_scatter_single"
    place = dist if collective == "all_reduce" else async_linear
    start, product, wait = getattr(place, collective), async_linear.weight_gradient, dist.Work.wait

    def starts(*args: Any, **kwargs: Any) -> Any:
        done.append("reduction begins")
        return start(*args, **kwargs)

    def multiplies(*args: Any, **kwargs: Any) -> Tensor:
        done.append("product")
        return product(*args, **kwargs)

    def waits(work: Any, *args: Any) -> Any:
        done.append("reduction ends")
        return wait(work, *args)

    with (
        mock.patch.dict(async_linear.OVERLAP_FROM, cpu=1),
        mock.patch.object(place, collective, starts),
        mock.patch.object(async_linear, "weight_gradient", multiplies),
        mock.patch.object(dist.Work, "wait", waits),
    ):
        gradients(**CASES[name])
    return done[-3:]


@pytest.mark.parametrize("name", ["sequence", "sequence parallel", "three layers"])
def test_the_product_runs_between_begin_and_end_of_the_reduction(ranks: Pools, name: str) -> None:
    """The product came first: on a GPU the links stood still during it, and the device during the reduction."""
    assert ranks(2).run(order, name) == [["reduction begins", "product", "reduction ends"]] * 2


def recomputed(least: int) -> list[Tensor]:
    """The input of a checkpoint is the layer's own: it is the same object when the layer runs again."""
    group = TensorGroup(dist.group.WORLD)
    torch.manual_seed(0)
    x = torch.randn(3, 6, 8, requires_grad=True) * 2
    weight = nn.Parameter(torch.randn(5, 8))
    with mock.patch.dict(async_linear.OVERLAP_FROM, cpu=least):
        y = checkpoint(lambda x: column_linear(x, weight, None, group, None).relu(), x, use_reentrant=False)
        return list(torch.autograd.grad((y**2).sum(), (x, weight)))


def test_a_layer_may_be_recomputed(ranks: Pools) -> None:
    for one, other in zip(ranks(2).run(recomputed, 1), ranks(2).run(recomputed, 2**62), strict=True):
        assert all(map(torch.equal, one, other))

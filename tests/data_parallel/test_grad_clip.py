from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.data_parallel import grad_clip
from lightning_hybrid.data_parallel.grad_clip import clip_by_total_norm, total_norm
from tests.pool import Pools

NORM_TYPES = [0.5, 1.0, 2.0, 3.0, float("inf")]
SHAPES = [(3, 4), (), (5,), (2, 3, 2), (0, 3), (7, 1), (4,)]


def whole_model(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """One process's parameters, with gradients for all but one."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in parameters[:-1]:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return parameters


# Of the 7 parameters: number 0 lives on ranks 0 and 2 and is counted on 0; rank 1 holds none.
PLACES = [[0, 1, 2], [], [0, 3, 4, 5, 6]]


def clip_stage(max_norm: float, norm_type: float, dtype: torch.dtype) -> tuple[Tensor, list[Tensor | None]]:
    model = whole_model(dtype)
    rank = dist.get_rank()
    mine = [model[index] for index in PLACES[rank]]
    norm = clip_by_total_norm(
        (p for p in mine),
        max_norm,
        norm_type,
        group=dist.group.WORLD,
        counts=lambda p: rank == 0 or p is not model[0],
    )
    return norm, [parameter.grad for parameter in mine]


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("max_norm", [0.3, 1e6])
def test_clipping_over_stages_equals_one_process(ranks: Pools, max_norm: float, norm_type: float) -> None:
    model = whole_model()
    nonempty = [parameter for parameter in model if parameter.numel()]  # torch has no maximum of nothing
    expected = clip_grad_norm_(nonempty, max_norm, norm_type)
    results = ranks(3).run(clip_stage, max_norm, norm_type, torch.float64)
    for rank, (norm, gradients) in enumerate(results):
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        assert torch.equal(norm, results[0][0]), "the same bits on every rank"
        for index, gradient in zip(PLACES[rank], gradients, strict=True):
            reference = model[index].grad
            assert (gradient is None) == (reference is None)
            if gradient is not None and reference is not None:
                torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=0)
    assert torch.equal(results[0][1][0], results[2][1][0]), "copies stay equal"  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision_takes_norms_in_float32(ranks: Pools, dtype: torch.dtype) -> None:
    wide = [g.double() for p in whole_model(dtype) if (g := p.grad) is not None]
    for norm, _ in ranks(3).run(clip_stage, 0.3, 2.0, dtype):
        torch.testing.assert_close(norm, get_total_norm(wide), rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_one_process_without_a_group(norm_type: float) -> None:
    model, reference = ([p for p in whole_model() if p.numel()] for _ in range(2))
    expected = clip_grad_norm_(reference, 0.5, norm_type)
    torch.testing.assert_close(clip_by_total_norm(model, 0.5, norm_type), expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(model, reference, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0)


def with_gradient(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    parameter.grad = torch.tensor(values, dtype=dtype)
    return parameter


def test_squares_of_float16_do_not_overflow() -> None:
    parameter = with_gradient(*[60000.0] * 100, dtype=torch.float16)
    norm = clip_by_total_norm([parameter], 1000.0)
    assert norm.item() == pytest.approx(600000.0, rel=1e-3)
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, torch.full((100,), 100.0, dtype=torch.float16), rtol=2e-3, atol=0)


def test_mixed_dtypes() -> None:
    kinds = [torch.float64, torch.bfloat16, torch.float16, torch.float32]
    parameters = [with_gradient(2.0, dtype=dtype) for dtype in kinds]
    assert clip_by_total_norm(parameters, 2.0).item() == 4.0
    for parameter in parameters:
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.item() == pytest.approx(1.0, rel=1e-6)


def test_complex_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    parameter.grad = torch.tensor([3 + 4j], dtype=torch.complex64)
    assert total_norm([parameter], 1.0).item() == 5.0


def test_nothing_to_clip() -> None:
    assert clip_by_total_norm([], 1.0).item() == 0.0
    assert clip_by_total_norm([nn.Parameter(torch.ones(2))], 1.0, float("inf")).item() == 0.0


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_without_foreach_kernels(norm_type: float) -> None:
    parameters = [with_gradient(1.0, -2.0, dtype=dtype) for dtype in (torch.bfloat16, torch.float64)]
    expected = total_norm(parameters, norm_type)
    with mock.patch.object(grad_clip, "foreach_norm", None):
        torch.testing.assert_close(total_norm(parameters, norm_type), expected, rtol=1e-7, atol=0)


def nonfinite(value: float, norm_type: float) -> Any:
    parameter = with_gradient(value if dist.get_rank() == 1 else 1.0)
    return clip_by_total_norm([parameter], 1.0, norm_type, group=dist.group.WORLD).item()


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_nonfinite_gradient_is_seen_on_every_rank(ranks: Pools, norm_type: float) -> None:
    assert ranks(2).run(nonfinite, float("inf"), norm_type) == [float("inf")] * 2
    assert all(norm != norm for norm in ranks(2).run(nonfinite, float("nan"), norm_type))


def count_collectives() -> int:
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gather:
        total_norm(whole_model(), group=dist.group.WORLD)
    return gather.call_count


def test_one_collective(ranks: Pools) -> None:
    assert ranks(2).run(count_collectives) == [1, 1]


class Conversions(TorchDispatchMode):
    """Counts tensors that change their dtype: a kernel each."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "_to_copy"
        return func(*args, **(kwargs or {}))


def test_norms_of_one_dtype_are_converted_together() -> None:
    parameters = whole_model(torch.float32)
    with Conversions() as conversions:
        norm = total_norm(parameters)
    assert norm.dtype == torch.float64
    assert conversions.count == 1

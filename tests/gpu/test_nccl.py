"""Two GPUs or more: NCCL between ranks. NCCL refuses two ranks on one device."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.gpu.fits import PP2, assert_alike, fail_on_own_device, fit, fit_on_own_device
from tests.pool import Pools

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"needs 2 CUDA devices for NCCL, there are {torch.cuda.device_count()}"
    ),
]

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": PP2,
    "pp2, interleaved": {**PP2, "schedule": "interleaved_1f1b", "num_chunks": 2},
    "pp2, dynamic shapes": {**PP2, "dynamic_shapes": True},
    "pp2, recompute": {**PP2, "recompute": True},
    "dp2": {"data_parallel_size": 2},
    "dp2, ZeRO 2": {"data_parallel_size": 2, "zero_stage": 2},
    "dp2, ZeRO 3": {"data_parallel_size": 2, "zero_stage": 3},
    "tp2": {"tensor_parallel_size": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_without_a_wait_in_a_step(ranks: Pools, name: str) -> None:
    settings = LAYOUTS[name]
    results = ranks(2, lightning=True).run(fit_on_own_device, settings, {}, timeout=120.0)
    if "data_parallel_size" in settings:
        expected = {**results[0], "losses": []}
        results = [{**result, "losses": []} for result in results]
    else:
        expected = fit("auto")
    for result in results:
        assert_alike(result, expected, 1e-4)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_precisions(ranks: Pools, precision: str) -> None:
    expected = fit("auto", precision=precision)
    for result in ranks(2, lightning=True).run(fit_on_own_device, PP2, {"precision": precision}, timeout=120.0):
        assert_alike(result, expected, 5e-2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_launches_that_wait(ranks: Pools, schedule: str) -> None:
    settings, environment = {**PP2, "schedule": schedule}, {"CUDA_LAUNCH_BLOCKING": "1"}
    results = ranks(2, lightning=True).run(fit_on_own_device, settings, {}, environment, timeout=120.0)
    for result in results:
        assert_alike(result, fit("auto"), 1e-4)


@pytest.mark.parametrize("name", ["pp2", "dp2", "tp2"])
def test_a_failure_of_one_rank_ends_all_soon(ranks: Pools, name: str) -> None:
    begin = time.monotonic()
    stories = ranks(2, lightning=True).run(fail_on_own_device, LAYOUTS[name], timeout=120.0)
    assert all("a fault of rank 1" in story for story in stories), stories
    assert time.monotonic() - begin < 60, "start-up included; NCCL's own time limit is ten minutes"


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 CUDA devices")
@pytest.mark.parametrize(
    "settings",
    [{**PP2, "data_parallel_size": 2}, {**PP2, "tensor_parallel_size": 2}, {**PP2, "zero_stage": 3}],
    ids=str,
)
def test_two_axes(ranks: Pools, settings: dict[str, Any]) -> None:
    results = ranks(4, lightning=True).run(fit_on_own_device, settings, {}, timeout=180.0)
    assert len({result["metrics"]["val_loss"] for result in results}) == 1

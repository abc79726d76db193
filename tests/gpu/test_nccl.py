"""NCCL between ranks: with a GPU each, or all of them on one, as hosts that are connected by sockets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from tests.gpu.fits import PP2, assert_alike, fit, fit_on_ranks
from tests.pool import Pools

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

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
    results = ranks(2, lightning=True).run(fit_on_ranks, settings, {}, timeout=60.0)
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
    for result in ranks(2, lightning=True).run(fit_on_ranks, PP2, {"precision": precision}, timeout=60.0):
        assert_alike(result, expected, 5e-2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_launches_that_wait(ranks: Pools, schedule: str) -> None:
    settings, environment = {**PP2, "schedule": schedule}, {"CUDA_LAUNCH_BLOCKING": "1"}
    how = {"max_epochs": 1, "limit_train_batches": 4}
    results = ranks(2, lightning=True).run(fit_on_ranks, settings, how, environment, timeout=60.0)
    for result in results:
        assert_alike(result, fit("auto", **how), 1e-4)


@pytest.mark.parametrize("name", ["pp2", "dp2", "tp2"])
def test_a_failure_of_one_rank_ends_all_soon(name: str) -> None:
    """NCCL may not let go of what is under way: then the process ends without it, and has printed the cause before."""
    begin = time.monotonic()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "tests.gpu.fits", json.dumps(LAYOUTS[name])]
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment |= {"LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "failure"}
    started = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]
    try:
        stories = [process.communicate(timeout=60.0)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all("a fault of rank 1" in story for story in stories), stories
    assert [process.returncode for process in started] == [1, 1], stories
    assert time.monotonic() - begin < 60, "start-up included; NCCL's own time limit is ten minutes"


@pytest.mark.parametrize(
    "settings",
    [{**PP2, "data_parallel_size": 2}, {**PP2, "tensor_parallel_size": 2}, {**PP2, "zero_stage": 3}],
    ids=str,
)
def test_two_axes(ranks: Pools, settings: dict[str, Any]) -> None:
    results = ranks(4, lightning=True).run(fit_on_ranks, settings, {}, timeout=60.0)
    assert len({result["metrics"]["val_loss"] for result in results}) == 1

"""Writes what the tests for GPUs found, with the device, the versions and the date, where ``make gpu`` asks for it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch

from tests.pool import Pool, Pools

# A process that has asked CUDA itself cannot be copied, and live ranks are copies.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


class FreshPools(Pools):
    """Ranks that live for one run: a second NCCL world in a process ends it (SIGSEGV, torch 2.11 with NCCL 2.28.9)."""

    def __call__(self, size: int, *, lightning: bool = False) -> Pool:
        pool = super().__call__(size, lightning=lightning)
        if size > 1:
            pool.close()
        return pool


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """The ranks of a module's tests."""
    pools = FreshPools()
    yield pools
    pools.close()


_FOUND: list[dict[str, Any]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the outcome of a test, and what it recorded."""
    if "tests/gpu/" in report.nodeid and (report.when == "call" or report.outcome != "passed"):
        found = {
            "test": report.nodeid.partition("tests/gpu/")[2],
            "outcome": report.outcome,
            "seconds": report.duration,
        }
        if report.failed:
            found["error"] = report.longreprtext[-4000:]
        _FOUND.append(found | dict(report.user_properties))
        _write()  # each time: what hangs on a lent machine is ended from outside


def _write() -> None:
    """Write ``gpu_tests.json`` into the folder that ``GPU_RESULTS`` names."""
    folder = os.environ.get("GPU_RESULTS")
    if folder is None or not torch.cuda.is_available():
        return
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": ".".join(map(str, _nccl_version()))}
    versions |= {"lightning": lightning.__version__, "python": platform.python_version()}
    result = {
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
        "tests": _FOUND,
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "gpu_tests.json").write_text(json.dumps(result, indent=2) + "\n")


def _nccl_version() -> tuple[int, ...]:
    nccl: Any = getattr(torch.cuda, "nccl", None)
    version: tuple[int, ...] = nccl.version() if torch.distributed.is_nccl_available() and nccl else ()
    return version

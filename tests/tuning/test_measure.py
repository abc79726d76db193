"""The figures of a machine are measured on all ranks together."""

from __future__ import annotations

import math
from typing import Any

import torch

from lightning_hybrid.tuning.measure import measure_machine
from tests.pool import Pools


def measured() -> dict[str, Any]:
    return vars(measure_machine(torch.device("cpu"), torch.float32, 1, math.inf))


def test_figures_are_measured_and_the_same_on_every_rank(ranks: Pools) -> None:
    first, second = ranks(2).run(measured)
    assert first == second
    assert first["ranks_per_node"] == 2
    assert 1e8 < first["flops"] < 1e13
    assert 1e8 < first["memory_bandwidth"] < 1e12
    assert 1e-7 <= first["operation_seconds"] < 1e-3
    assert 1e-7 < first["node_latency"] < 1e-1
    assert 1e6 < first["node_bandwidth"] < 1e12
    assert 0 <= first["collective_seconds"] < 1e-1

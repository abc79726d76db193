"""Optimizers that look at whole matrices, or at their norms: what a rank has of one is not taken for all of it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from examples.lamb import Lamb
from tests.pool import Pools
from tests.training_jobs import PP2, Regression, assert_same, loader, train

SHARED: dict[str, Any] = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"embed": "colwise_gather_output"}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 1": (2, {"zero_stage": 1}),
    "zero 2": (2, {"zero_stage": 2}),
    "zero 3": (2, {"zero_stage": 3}),
    "tp2": (2, SHARED),
    "pp2": (2, PP2),
    "tp2 zero 2": (4, {**SHARED, "zero_stage": 2}),
}


def zeropower(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Muon's Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon/), which torch rounds to bfloat16."""
    a, b, c = coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


class Matrices(Regression):
    """Trains its matrices alone: Muon takes nothing else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        if self.kind == "lamb":
            return Lamb(self.parameters(), lr=0.05, weight_decay=0.1)
        matrices = [p for p in self.parameters() if p.requires_grad_(p.ndim == 2).requires_grad]
        return torch.optim.Muon(matrices, lr=0.05)


def trained(layout: dict[str, Any] | None, batch_size: int) -> dict[str, dict[str, Tensor]]:
    states = {}
    for kind in ("muon", "lamb"):
        with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", zeropower):
            states[kind] = train(Matrices(kind), layout, loader(batch_size), max_epochs=2).weights
    return states


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.thorough] if name in ("zero 2", "pp2") else []) for name in LAYOUTS],
)
def test_steps_are_those_of_one_process(layout: str, ranks: Pools) -> None:
    size, arguments = LAYOUTS[layout]
    replicas = 2 if arguments.get("zero_stage") else 1
    expected = trained(None, 8)
    start = Matrices("muon").state_dict()
    assert all((expected["muon"][name] - start[name]).abs().max() > 1e-3 for name in start if name.endswith("weight"))
    for found in ranks(size, lightning=True).run(trained, arguments, 8 // replicas):
        assert_same(found, expected)

"""An optimizer that looks at whole matrices, under ZeRO: the rows of a replica are not taken for the matrix."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.pool import Pools
from tests.training_jobs import Regression, loader, make_trainer


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

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.requires_grad_(p.ndim == 2).requires_grad]
        return torch.optim.Muon(matrices, lr=0.05)


def train(layout: dict[str, Any] | None, batch_size: int) -> dict[str, Tensor]:
    module = Matrices()
    trainer = make_trainer(layout, max_epochs=2)
    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", zeropower):
        trainer.fit(module, loader(batch_size))
    if layout is not None:
        trainer.strategy.gather_module()
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_muon_takes_the_steps_of_one_process(zero_stage: int, ranks: Pools) -> None:
    (expected,) = ranks(1, lightning=True).run(train, None, 8)
    start = Matrices().state_dict()
    assert all((expected[name] - start[name]).abs().max() > 1e-3 for name in start if name.endswith("weight"))
    for found in ranks(2, lightning=True).run(train, {"zero_stage": zero_stage}, 4):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)

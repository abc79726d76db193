"""Spectral norm in microbatches: as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pools
from tests.training_jobs import Regression, Result, loader, train


class Spectral(Regression):
    """Spectral norm in every layer of the body, of either implementation of torch.

    Args:
        kind: ``"parametrization"``, or ``"hook"`` for the older one.
        iterations: Steps of the power iteration in a forward.
    """

    def __init__(self, kind: str, iterations: int) -> None:
        super().__init__()
        normalize = {
            "parametrization": nn.utils.parametrizations.spectral_norm,
            "hook": nn.utils.spectral_norm,
        }[kind]
        for layer in self.body:
            normalize(layer[0], n_power_iterations=iterations)


class Listed(Spectral):
    """The same layers in a list."""

    def __init__(self, kind: str, iterations: int) -> None:
        super().__init__(kind, iterations)
        self.body = nn.ModuleList(self.body)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.body:
            x = layer(x)
        return self.head(x)


def trained(layout: dict[str, Any] | None, cls: type[Spectral], *arguments: Any) -> Result:
    torch.manual_seed(0)
    return train(cls(*arguments).double(), layout, loader(8, 32))


@pytest.mark.parametrize("cls", [Spectral, Listed])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("parametrization", {"pipeline_parallel_size": 2, "num_microbatches": 4}),
        ("hook", {"pipeline_parallel_size": 2, "num_microbatches": 3}),
        ("parametrization", {"pipeline_parallel_size": 2, "num_microbatches": 4, "recompute": True}),
        ("parametrization", {"pipeline_parallel_size": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"}),
        ("parametrization", {"num_microbatches": 4}),
    ],
    ids=str,
)
def test_the_iteration_advances_once_in_a_step(
    ranks: Pools, kind: str, layout: dict[str, Any], cls: type[Spectral]
) -> None:
    expected = trained(None, cls, kind, 2)
    size = layout.get("pipeline_parallel_size", 1)
    for result in ranks(size, lightning=True).run(trained, layout, cls, kind, 2):
        assert result.losses == pytest.approx(expected.losses, rel=1e-10)
        for name, value in result.weights.items():
            torch.testing.assert_close(value, expected.weights[name], rtol=1e-10, atol=1e-12, msg=name)

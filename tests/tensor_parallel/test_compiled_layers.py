"""Layers that have shards and are compiled (`layer.compile()`): with one process's numbers, and compiled indeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.pool import Pools
from tests.training_jobs import Regression, assert_same, loader, train


class Packed(nn.Module):
    """Three projections in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 48), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.up(x).chunk(3, -1)
        return x + self.down(one.tanh() * two.sigmoid() + three)


class Encoding(Regression):
    """Layers of torch."""

    def __init__(self, compiles: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.compiles = nn.Sequential(*map(self.make_layer, range(2))), compiles
        self.double()

    def make_layer(self, index: int) -> nn.Module:
        return nn.TransformerEncoderLayer(8, 4, 16, 0.0, batch_first=True)

    def on_fit_start(self) -> None:
        for layer in self.body if self.compiles else ():
            layer.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x).unsqueeze(1).expand(-1, 4, -1)).mean(1))


class Packing(Encoding):
    """Layers of which one weight falls into blocks."""

    def make_layer(self, index: int) -> nn.Module:
        return Packed()


def trained(make: type[Encoding], layout: Mapping[str, Any] | None, compiles: bool = True) -> tuple[Any, int]:
    """Weights after some steps, and how many graphs were compiled for them."""
    counters.clear()
    return train(make(compiles), layout, loader()).weights, counters["stats"]["unique_graphs"]


TP2: dict[str, Any] = {"tensor_parallel_size": 2}
PACKED = {"body.*.up": "packed_colwise_3", "body.*.down": "rowwise"}


@pytest.mark.parametrize(
    ("make", "layout", "oracle"),
    [
        pytest.param(Encoding, TP2, None, id="1d"),
        pytest.param(
            Encoding,
            {**TP2, "tensor_parallel_mode": "2.5d", "tensor_parallel_depth": 2},
            None,
            id="2.5d",
            marks=pytest.mark.thorough,
        ),
        pytest.param(Packing, {**TP2, "tensor_parallel_plan": PACKED}, None, id="packed", marks=pytest.mark.thorough),
        pytest.param(Encoding, {"zero_stage": 3}, {}, id="zero 3", marks=pytest.mark.thorough),
    ],
)
def test_compiled_layers_train_as_in_one_process(
    ranks: Pools, make: type[Encoding], layout: Mapping[str, Any], oracle: Mapping[str, Any] | None
) -> None:
    outcomes = ranks(2, lightning=True).run(trained, make, layout, timeout=60)
    if oracle is None:
        expected, _ = trained(make, None, False)
    else:  # replicas see other batches
        (expected, _), _ = ranks(2, lightning=True).run(trained, make, oracle, False)
    for parameters, num_compiled in outcomes:
        assert num_compiled
        assert_same(parameters, expected)

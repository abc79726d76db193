"""Which models train equal to one process under which layouts: each model, its code unchanged, under each layout."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from torch.utils.data import DataLoader, TensorDataset

from tests.pool import Pools
from tests.training_jobs import Result, assert_same, train
from tests.zoo.layouts import MODELS, Model

pytestmark = [pytest.mark.timeout(300), pytest.mark.distributed]

SAMPLES, STEPS = 8, 5

PP2: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": PP2,
    "pp2 x dp2": {**PP2, "data_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2},
    "zero3": {"data_parallel_size": 2, "zero_stage": 3},
    "cp2": {"context_parallel_size": 2},
}
DAILY = {
    ("SimCLR", "pp2"),
    ("SimSiam", "pp2 x dp2"),
    ("L2Penalty", "tp2"),
    ("OrthogonalityPenalty", "cp2"),
    ("Curriculum", "cp2"),
    ("DroppedLayers", "zero3"),
    ("Listener", "pp2 x dp2"),
    ("VQVAE", "pp2 x dp2"),
}
CELLS = [(model, layout) for model in MODELS for layout in LAYOUTS if model.attends or layout != "cp2"]


def trained(model: type[Model], layout: dict[str, Any] | None, replicas: int) -> tuple[Result, set[str]]:
    """Train; return the result and the names of the buffers."""
    module = model(1 if layout else replicas)
    data = DataLoader(TensorDataset(*model.data(SAMPLES * STEPS)), SAMPLES // (replicas if layout else 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = train(module, layout, data)
    return result, {name for name, _ in module.named_buffers()}


def _marked(model: type[Model], layout: str) -> Any:
    marks = () if (model.__name__, layout) in DAILY else pytest.mark.thorough
    return pytest.param(model, layout, marks=marks, id=f"{model.__name__} {layout}")


@pytest.mark.parametrize(("model", "layout"), [_marked(*cell) for cell in CELLS])
def test_equals_one_process(ranks: Pools, model: type[Model], layout: str) -> None:
    arguments = LAYOUTS[layout]
    size = math.prod(number for name, number in arguments.items() if name.endswith("_parallel_size"))
    replicas = arguments.get("data_parallel_size", 1)
    expected, buffers = trained(model, None, replicas)
    results = [
        result for result, _ in ranks(size, lightning=True).run(trained, model, arguments, replicas, timeout=120)
    ]
    # Replicas have losses of their own, of which the mean is that of all.
    mean = [math.fsum(each) / size for each in zip(*[result.losses for result in results], strict=True)]
    assert_same(mean, expected.losses)
    assert_same(results[0].weights, expected.weights)
    assert len(expected.losses) == STEPS
    for result in results[1:]:  # buffers are each replica's own
        own, parameters = ({k: v for k, v in each.weights.items() if k not in buffers} for each in (result, expected))
        assert_same(own, parameters)

"""Which models train equal to one process under which layouts: each model, its code unchanged, under each layout."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.pool import Pools
from tests.training_jobs import Losses, assert_same, make_trainer, weights
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


def fitted(
    model: type[Model], layout: dict[str, Any] | None, replicas: int
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The losses of all steps, and in the end all weights, and all buffers."""
    losses = Losses()
    module = model(1 if layout else replicas)
    data = TensorDataset(*model.data(SAMPLES * STEPS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(layout, callbacks=[losses])
        trainer.fit(module, DataLoader(data, SAMPLES // (replicas if layout else 1)))
        if layout is not None:
            trainer.strategy.gather_module()
    return losses.values, weights(module), {name: buffer.clone() for name, buffer in module.named_buffers()}


def _marked(model: type[Model], layout: str) -> Any:
    marks = () if (model.__name__, layout) in DAILY else pytest.mark.thorough
    return pytest.param(model, layout, marks=marks, id=f"{model.__name__} {layout}")


@pytest.mark.parametrize(("model", "layout"), [_marked(*cell) for cell in CELLS])
def test_equals_one_process(ranks: Pools, model: type[Model], layout: str) -> None:
    arguments = LAYOUTS[layout]
    size = math.prod(number for name, number in arguments.items() if name.endswith("_parallel_size"))
    replicas = arguments.get("data_parallel_size", 1)
    losses, parameters, buffers = fitted(model, None, replicas)
    found = ranks(size, lightning=True).run(fitted, model, arguments, replicas, timeout=120)
    # Replicas have losses of their own, of which the mean is that of all.
    mean = [math.fsum(each) / size for each in zip(*[values for values, *_ in found], strict=True)]
    assert_same(mean, losses)
    assert_same({**found[0][1], **found[0][2]}, {**parameters, **buffers})
    assert len(losses) == STEPS
    for _, other, _ in found:  # buffers are each replica's own
        assert_same(other, parameters)

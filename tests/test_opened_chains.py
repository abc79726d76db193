"""A Sequential that is found, and that the first step does not call as a whole: its layers train as units."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from tests.pool import Pools
from tests.training_jobs import make_trainer
from tests.zoo import frame, tensor_frame
from tests.zoo.basic import Example


class SharedViews(tensor_frame.TwoViews):
    """Two views of a Sequential, whose layers tensor-parallel ranks share."""

    def build(self) -> None:
        super().build()
        self.blocks = nn.Sequential(*self.blocks)

    def embed(self, x: Tensor) -> Tensor:
        return self.projection(self.blocks(x)).mean(1)


MODULES: dict[str, type[Example]] = {
    "shared views": SharedViews,
    "two views": frame.TwoViews,
    "layer by layer": frame.LayerByLayer,
    "projected": frame.Projected,
}


def trained(name: str, layout: dict[str, Any] | None) -> dict[str, Tensor]:
    """The weights after three steps."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    module = MODULES[name](batch_size=8).double()
    trainer = make_trainer(layout, max_steps=3, max_epochs=-1)
    trainer.fit(module)
    if layout is None:
        return {name: value.detach().clone() for name, value in module.state_dict().items()}
    return dict(trainer.strategy.lightning_module_state_dict())


class Measured(Example):
    """A metric is called in validation, which writes its states."""

    def build(self) -> None:
        super().build()
        self.error = MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("error", self.error(self(x), y))


def told(kind: type[Example]) -> list[str]:
    """The lines of the log of a run that say that the chain is opened."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = rank_zero.log
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    module = kind(batch_size=8).double()
    make_trainer({"pipeline_parallel_size": 2, "num_microbatches": 2}, max_steps=1, max_epochs=-1).fit(module)
    logger.setLevel(level)
    logger.removeHandler(handler)
    return [line for line in lines if "can be called one by one" in line]


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "number"), [(Measured, 0), (frame.TwoViews, 1)])
def test_a_chain_stays_one_beside_a_metric_in_validation(ranks: Pools, kind: type[Example], number: int) -> None:
    assert len(ranks(2, lightning=True).run(told, kind, timeout=90)[0]) == number


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("two views", {"num_microbatches": 1}),
        ("projected", {"num_microbatches": 1}),
        ("layer by layer", {"num_microbatches": "auto"}),
        ("layer by layer", {"dynamic_shapes": True, "num_microbatches": 4}),
        ("two views", {"recompute": True, "num_microbatches": 2}),
        ("shared views", {"tensor_parallel_size": 2, "num_microbatches": 4}),
        ("shared views", {"context_parallel_size": 2, "num_microbatches": 2}),
    ],
    ids=str,
)
def test_its_layers_train_as_in_one_process(ranks: Pools, name: str, layout: dict[str, Any]) -> None:
    size = 2 * layout.get("tensor_parallel_size", 1) * layout.get("context_parallel_size", 1)
    expected = trained(name, None)
    got = ranks(size, lightning=True).run(trained, name, {"pipeline_parallel_size": 2, **layout}, timeout=90)[0]
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)

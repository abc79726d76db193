"""What half precision is too coarse for is said once: states of optimizers, and averages of weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.optim.swa_utils import AveragedModel

from tests.pool import Pools
from tests.training_jobs import Regression, loader, make_trainer

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "tp2": {"tensor_parallel_size": 2},
    "dp2": {},
    "zero 3": {"zero_stage": 3},
}


class Half(Regression):
    """Trains in the precision of its parameters.

    Args:
        average: Whether it keeps an average of its weights, as a submodule.
        dtype: Of its parameters at first.
    """

    def __init__(self, average: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.to(dtype)
        if average:
            self.average = AveragedModel(self.head)
            self.average.requires_grad_(False)

    def loss(self, batch: Any) -> Any:
        return super().loss([each.to(self.head.weight.dtype) for each in batch])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-3)


def warned(layout: Mapping[str, Any], precision: str, make: Callable[[], Any], averages: bool = False) -> list[str]:
    """The warnings of a run about half precision."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = [EMAWeightAveraging()] if averages else []
        make_trainer(layout, precision=precision, callbacks=callbacks, max_epochs=2).fit(make(), loader())
    texts = [str(each.message) for each in caught]
    return [text for text in texts if "HybridStrategy(master_weights=True)" in text]


def half() -> Half:
    return Half(dtype=torch.bfloat16)


def averaging() -> Half:
    return Half(average=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_states_of_an_optimizer_in_half_precision_are_told_once(ranks: Pools, name: str) -> None:
    first, *others = ranks(2, lightning=True).run(warned, LAYOUTS[name], "bf16-true", Half)
    (text,) = first
    assert text.startswith(
        "AdamW keeps its states (exp_avg, exp_avg_sq) in torch.bfloat16, the dtype of the parameters of Half"
    )
    assert "`HybridStrategy(master_weights=True)`" in text
    assert others == [[]]


class Hooked(Half):
    """Has a hook of its own that an optimizer calls after each step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self.current_epoch == 0:
            self.optimizers().register_step_post_hook(lambda *_: None)


@pytest.mark.parametrize("layout", [{}, {"zero_stage": 1}], ids=["dp2", "zero 1"])
def test_other_hooks_of_an_optimizer_run_too(ranks: Pools, layout: dict[str, Any]) -> None:
    """Torch iterates over the hooks after a step, and hooks that are removed meanwhile would raise an error."""
    first, *others = ranks(2, lightning=True).run(warned, layout, "bf16-true", Hooked)
    assert len(first) == 1
    assert others == [[]]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_states_in_float32_are_not_talked_about(ranks: Pools, name: str, precision: str) -> None:
    layout = {**LAYOUTS[name], "master_weights": precision == "bf16-true"}
    assert ranks(2, lightning=True).run(warned, layout, precision, Half) == [[], []]


def test_averages_of_weights_in_half_precision_are_told_once(ranks: Pools) -> None:
    pool = ranks(2, lightning=True)
    (states, text), others = pool.run(warned, LAYOUTS["dp2"], "bf16-true", half, True)
    assert states.startswith("AdamW keeps its states")
    assert text.startswith("Weight averages are stored in half precision: `EMAWeightAveraging._average_model`.")
    assert others == []
    (_, text), _ = pool.run(warned, LAYOUTS["dp2"], "bf16-true", averaging)
    assert text.startswith("Weight averages are stored in half precision: `Half.average`.")


def test_averages_of_weights_in_float32_are_not_talked_about(ranks: Pools) -> None:
    pool, masters = ranks(2, lightning=True), {"master_weights": True}
    assert pool.run(warned, masters, "bf16-true", Half, True) == [[], []]
    assert pool.run(warned, {}, "bf16-mixed", averaging) == [[], []]

"""The samples of an optimizer step stay, whatever the number of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_hybrid.distributed.sizes import accumulated_batches
from tests.pool import Pools
from tests.training_jobs import Manual, Regression, assert_same, dataset, loader, make_trainer, together, train

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1x1x1": (1, {}),
    "dp2": (2, {}),
    "pp2": (2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "dp2 x pp2": (4, {"pipeline_parallel_size": [4, 2], "data_parallel_size": 2, "num_microbatches": 2}),
    "dp4 zero 1": (4, {"zero_stage": 1}),
}


@pytest.mark.parametrize(
    ("size", "batch_size", "replicas", "expected"), [(16, 4, 2, 2), (16, 16, 1, 1), (24, 2, 3, 4), (8, 1, 8, 1)]
)
def test_batches_make_up_the_samples_of_a_step(size: int, batch_size: int, replicas: int, expected: int) -> None:
    assert accumulated_batches(size, batch_size, replicas) == expected


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (
            (16, 5, 2),
            [
                "global_batch_size=16",
                "5 samples",
                "2 replicas",
                "multiple of 10",
                "set the batch size of the loader to 4,",
            ],
        ),
        ((16, 4, 3), ["3 replicas", "multiple of 12", "another number of replicas"]),
        ((4, 8, 1), ["not a multiple of 8", "set the batch size of the loader to 4,"]),
    ],
)
def test_what_does_not_divide_is_refused(arguments: tuple[int, int, int], texts: list[str]) -> None:
    with pytest.raises(ValueError, match="is not a multiple of") as caught:
        accumulated_batches(*arguments)
    assert all(text in str(caught.value) for text in texts), caught.value


class Steps(Regression):
    """Plans as many steps as there will be."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        self.planned = steps
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trained(layout: Mapping[str, Any] | None, batch_size: int, num_samples: int = 48, accumulate: int = 1) -> Any:
    """Train, and return the weights, the number of steps, and that which was planned."""
    module = Steps()
    how: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    result = train(module, layout, loader(batch_size, num_samples), **how)
    assert result.trainer.accumulate_grad_batches == accumulate
    return result.weights, result.trainer.global_step, module.planned


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_is_that_of_one_process_with_all_samples(ranks: Pools, name: str) -> None:
    size, layout = LAYOUTS[name]
    found = ranks(size, lightning=True).run(trained, {**layout, "global_batch_size": 16}, 2)
    ((expected, steps, planned),) = ranks(1, lightning=True).run(trained, None, 16)
    assert_same(together([part for part, _, _ in found]), expected)
    assert {of_rank[1:] for of_rank in found} == {(steps, planned)} == {(6, 6)}


def test_the_rest_of_an_epoch_is_as_in_lightning(ranks: Pools) -> None:
    """40 samples are two steps of 16, and one of the two batches that are left."""
    ((found, steps, _),) = ranks(1, lightning=True).run(trained, {"global_batch_size": 16}, 4, 40)
    ((expected, expected_steps, _),) = ranks(1, lightning=True).run(trained, None, 4, 40, 4)  # Lightning's own
    assert_same(found, expected)
    assert steps == expected_steps == 6


def refused(case: str) -> str:
    arguments: dict[str, Any] = {"accumulate_grad_batches": 2} if case == "trainer" else {}
    if case == "scheduler":
        arguments["callbacks"] = [GradientAccumulationScheduler({1: 2})]
    data: Any = loader(3 if case == "not divided" else 4)
    if case == "batch sampler":
        data = DataLoader(dataset(), batch_sampler=BatchSampler(SequentialSampler(dataset()), 4, drop_last=False))
    if case == "several":
        data = [loader(4), loader(4)]
    trainer = make_trainer({"global_batch_size": 16}, **arguments)
    former = trainer.accumulate_grad_batches
    with pytest.raises(ValueError, match="global_batch_size=16") as caught:
        trainer.fit(Manual() if case == "manual" else Regression(), data)
    assert trainer.accumulate_grad_batches == former
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("trainer", ["but so does Trainer(accumulate_grad_batches=2)", "Use only one"]),
        ("scheduler", ["but so does GradientAccumulationScheduler"]),
        ("manual", ["but so does the manual optimization of Manual"]),
        ("batch sampler", ["requires a training loader with a `batch_size`", "DataLoader(..., batch_size=...)"]),
        ("several", ["requires a training loader with a `batch_size`"]),
        (
            "not divided",
            [
                "batches of 3 samples",
                "2 replicas",
                "not a multiple of 6",
                "set the batch size of the loader to 2,",
            ],
        ),
    ],
)
def test_wrong_use_is_refused_on_every_rank(ranks: Pools, case: str, texts: list[str]) -> None:
    for text in ranks(2, lightning=True).run(refused, case):
        assert all(part in text for part in texts), text


class Growing(Regression):
    """Has larger batches in its second epoch."""

    def train_dataloader(self) -> Any:
        return loader(4 * (1 + self.trainer.current_epoch), 48)


class Accumulated(Callback):
    """What the Trainer accumulates in each epoch."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.seen.append(trainer.accumulate_grad_batches)


def reloaded() -> list[int]:
    seen = Accumulated()
    trainer = make_trainer(
        {"global_batch_size": 16}, max_epochs=2, reload_dataloaders_every_n_epochs=1, callbacks=[seen]
    )
    trainer.fit(Growing())
    assert trainer.global_step == 6
    return seen.seen


def test_a_loader_that_is_made_anew_may_have_other_batches(ranks: Pools) -> None:
    assert ranks(2, lightning=True).run(reloaded) == [[2] * 6 + [1] * 3] * 2

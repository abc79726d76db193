"""Metrics of torchmetrics, logged or computed, are those of one process on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from tests.pool import Pools
from tests.test_logging_features import Snapshots
from tests.training_jobs import LAYOUTS, assert_same, make_trainer, plain

Layout = Mapping[str, Any] | None
CLASSES = 3


def classes(batch_size: int, num_samples: int = 36, seed: int = 3) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, x[:, :CLASSES].argmax(1)), batch_size)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.synchronised = MulticlassAccuracy(CLASSES, average="micro", dist_sync_on_step=True)
        scores = {"f1": MulticlassF1Score(CLASSES), "accuracy": MulticlassAccuracy(CLASSES)}
        self.scores = MetricCollection(scores, prefix="train_")
        self.auroc = MulticlassAUROC(CLASSES)  # keeps lists of all scores
        self.mean_loss = MeanMetric()
        self.val_accuracy = nn.ModuleList(MulticlassAccuracy(CLASSES) for _ in range(2))
        self.val_scores = MetricCollection(scores).clone(prefix="val_")
        self.val_auroc = MulticlassAUROC(CLASSES)
        self.val_samples = SumMetric()
        self.test_scores = self.val_scores.clone(prefix="test_")
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.body(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.synchronised(logits, y)
        self.log("synchronised", self.synchronised, on_step=True, on_epoch=False)
        self.scores(logits, y)
        self.log_dict(self.scores, on_step=True, on_epoch=True, prog_bar=True)
        self.auroc.update(logits.softmax(1), y)
        self.log("auroc", self.auroc, on_step=False, on_epoch=True)
        self.mean_loss.update(loss.detach(), weight=len(y))
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        logits = self.body(x)
        self.val_accuracy[dataloader_idx](logits, y)
        self.log("val_accuracy", self.val_accuracy[dataloader_idx], on_step=False, on_epoch=True)
        self.val_scores.update(logits, y)
        self.val_auroc.update(logits.softmax(1), y)
        self.val_samples.update(len(y))

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_scores.compute())
        self.val_scores.reset()
        self.log("val_auroc", self.val_auroc.compute(), prog_bar=True)
        self.val_auroc.reset()
        self.log("val_samples", self.val_samples)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.test_scores(self.body(x), y)
        self.log_dict(self.test_scores)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


def classified(layout: Layout, batch_size: int) -> dict[str, Any]:
    snapshots = Snapshots()
    trainer = make_trainer(layout, max_epochs=2, callbacks=[snapshots], log_every_n_steps=1)
    module = Classifier()
    trainer.fit(module, classes(batch_size), [classes(batch_size, 28, 4), classes(batch_size, 20, 5)])
    fitted = plain(trainer.callback_metrics)
    return {
        "batches": snapshots.batches,
        "fitted": fitted,
        "validated": [plain(result) for result in trainer.validate(module, [classes(batch_size, 28, 4)] * 2)],
        "tested": [plain(result) for result in trainer.test(module, classes(batch_size, 30, 5))],
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_metrics_are_those_of_one_process_on_every_rank(ranks: Pools, name: str) -> None:
    size, replicas, layout = LAYOUTS[name]
    expected = classified(None, 8 * replicas)
    assert 0.4 < expected["fitted"]["auroc"] < 1.0
    for result in ranks(size, lightning=True).run(classified, layout, 8):
        for key in ("fitted", "validated", "tested"):
            mine, other = result[key], expected[key]
            if replicas > 1:  # a batch's own value is the replica's
                mine, other = _without_steps(mine), _without_steps(other)
            assert_same(mine, other, 1e-6, key)
        for mine, other in zip(result["batches"], expected["batches"], strict=True):
            names = [key for key in other["callback"] if replicas == 1 or key in ("synchronised", "val_auroc")]
            assert_same({k: mine["callback"][k] for k in names}, {k: other["callback"][k] for k in names}, 1e-6)


def _without_steps(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_without_steps(value) for value in tree]
    epochs = {key[: -len("_epoch")] for key in tree if key.endswith("_epoch")}
    return {key: value for key, value in tree.items() if not key.endswith("_step") and key not in epochs}


def test_a_step_value_of_a_metric_is_the_same_on_all_ranks_of_a_model_group(ranks: Pools) -> None:
    results = ranks(4, lightning=True).run(classified, LAYOUTS["pp2 x dp2"][2], 8)
    assert_same(results[0]["batches"], results[2]["batches"], 0.0)
    assert_same(results[1]["batches"], results[3]["batches"], 0.0)
    assert results[0]["batches"] != results[1]["batches"]


class Ragged(Classifier):
    """Metrics alone, over replicas that see different numbers of samples in their last batches."""

    def on_validation_epoch_end(self) -> None:
        self.log("val_f1", self.val_scores["f1"].compute())
        self.log("val_samples", self.val_samples.compute())
        self.log("val_auroc", self.val_auroc.compute())
        for metric in (self.val_scores, self.val_samples, self.val_auroc):
            metric.reset()


def ragged(layout: Layout, num_samples: int, batch_size: int) -> dict[str, float]:
    trainer = make_trainer(layout)
    result = trainer.validate(Ragged(), [classes(batch_size, num_samples), classes(batch_size, 5)])
    return plain({key: value for found in result for key, value in found.items()})


@pytest.mark.parametrize("num_samples", [18, 34])
def test_metrics_with_a_ragged_end_at_two_replicas_are_those_of_one_process(ranks: Pools, num_samples: int) -> None:
    # The second loader has 5 samples; as in Lightning's DDP the first one is repeated, so that replicas get as many.
    results = ranks(4, lightning=True).run(ragged, LAYOUTS["pp2 x dp2"][2], num_samples, 8)
    replicated = ranks(2, lightning=True).run(ragged, {"data_parallel_size": 2}, num_samples, 8)
    for result in [*results, *replicated]:
        assert_same(result, results[0], 1e-6)
        assert result["val_samples"] == num_samples + 6
    one = ragged(None, num_samples, 16)
    for key in one:
        if key.endswith("dataloader_idx_0"):
            assert_same(results[0][key], one[key], 1e-6, key)


class Unregistered(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.body(x)
        metric = MulticlassAccuracy(CLASSES)
        metric(logits, y)
        self.log("x", metric)
        return nn.functional.cross_entropy(logits, y)


def unregistered(layout: Layout) -> str:
    with pytest.raises(Exception, match="metric_attribute") as error:
        make_trainer(layout).fit(Unregistered(), classes(8))
    return str(error.value)


def test_a_metric_that_is_no_attribute_is_refused_in_lightnings_words_on_every_rank(ranks: Pools) -> None:
    expected = unregistered(None)
    for text in ranks(2, lightning=True).run(unregistered, LAYOUTS["pp2"][2]):
        assert expected in text

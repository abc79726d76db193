"""Metrics of torchmetrics, logged or computed, are those of one process on every rank."""

from __future__ import annotations

from collections import UserList
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import ClasswiseWrapper, MaxMetric, MeanMetric, MetricCollection, MetricTracker, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.regression import MeanSquaredError
from torchmetrics.retrieval import RetrievalMAP
from torchmetrics.wrappers import MinMaxMetric, MultitaskWrapper, Running

from tests.pool import Pools
from tests.test_logging_features import Snapshots
from tests.training_jobs import LAYOUTS, assert_same, make_trainer, plain, train

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


@pytest.mark.rows(25, 46)
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


@pytest.mark.rows(25)
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


# -- in hooks, by hand -------------------------------------------------------------------------------------------------


class Trained(LightningModule):
    """A classifier without metrics, and a list for what hooks see."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.seen: UserList[Any] = UserList()  # no plain value: ranks do not get each other's
        self.build()
        self.double()

    def build(self) -> None:
        """Make metrics."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.body(x)
        self.measure(logits, y)
        return nn.functional.cross_entropy(logits, y)

    def measure(self, logits: Tensor, y: Tensor) -> None:
        """Update metrics in training."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.body(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


def fit(module: Trained, layout: Layout, batch_size: int, *callbacks: Callback, **arguments: Any) -> dict[str, Any]:
    snapshots = Snapshots()
    data = classes(batch_size), classes(batch_size, 28, 4)
    how = {"max_epochs": 3, "callbacks": [*callbacks, snapshots], "log_every_n_steps": 1, **arguments}
    result = train(module, layout, *data, **how)
    return {"fitted": result.metrics, "seen": list(module.seen), "batches": snapshots.batches}


class ByHand(Trained):
    """Computes and resets in hooks, as templates for projects have it; metrics of epoch 2 know nothing of epoch 1."""

    def build(self) -> None:
        self.train_acc = MulticlassAccuracy(CLASSES, average="micro")
        self.val_acc = MulticlassAccuracy(CLASSES, average="micro")
        self.val_loss, self.val_best = MeanMetric(), MaxMetric()
        self.confusion, self.auroc = MulticlassConfusionMatrix(CLASSES), MulticlassAUROC(CLASSES)
        self.precision_at_rank = RetrievalMAP()
        self.scores = MetricCollection([MulticlassF1Score(CLASSES), MulticlassPrecision(CLASSES)], prefix="val/")
        self.by_class = ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None))

    def on_train_start(self) -> None:
        for metric in (self.val_loss, self.val_acc, self.val_best):  # forget the sanity check
            metric.reset()

    def measure(self, logits: Tensor, y: Tensor) -> None:
        self.train_acc(logits, y)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.body(x)
        self.val_loss(nn.functional.cross_entropy(logits, y))
        self.val_acc(logits, y)
        self.log("val/loss", self.val_loss, on_epoch=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True)
        self.log("val/acc_so_far", self.val_acc.compute())
        for metric in (self.confusion, self.by_class, self.scores):
            metric.update(logits, y)
        self.auroc.update(logits.softmax(1), y)
        self.precision_at_rank.update(logits.softmax(1)[:, 0], y == 0, indexes=(x[:, 5] > 0).long())
        self.log_dict(self.scores)

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.train_acc.compute())

    def on_validation_epoch_end(self) -> None:
        self.val_best(self.val_acc.compute())
        self.log("val/best", self.val_best.compute(), sync_dist=True, prog_bar=True)
        self.log("val/diagonal", self.confusion.compute().diag().sum())
        self.log_dict(self.by_class.compute())
        self.log_dict({f"again/{name}": value for name, value in self.scores.compute().items()})
        self.log_dict({"val/auroc": self.auroc.compute(), "val/map": self.precision_at_rank.compute()})
        self.seen.append(self.confusion.compute())
        for metric in (self.confusion, self.by_class, self.auroc, self.precision_at_rank):
            metric.reset()


def by_hand(layout: Layout, batch_size: int) -> dict[str, Any]:
    return fit(ByHand(), layout, batch_size)


@pytest.mark.rows(25, 26)
@pytest.mark.parametrize("name", ["pp2", "pp2 x dp2"])
def test_metrics_computed_and_reset_in_hooks_are_those_of_one_process(ranks: Pools, name: str) -> None:
    size, replicas, layout = LAYOUTS[name]
    expected = by_hand(None, 8 * replicas)
    confusions = [int(matrix.sum()) for matrix in expected["seen"] if matrix.ndim == 2]
    assert confusions[1:] == [28] * 3, "the test must reset"
    for result in ranks(size, lightning=True).run(by_hand, layout, 8):
        assert_same(result, expected)


class Tracks(Trained):
    """Metrics that hooks make: one more at each epoch, and a new one in place of the old one."""

    def build(self) -> None:
        self.tracker = MetricTracker(MulticlassAccuracy(CLASSES, average="micro"))

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()
        self.samples = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.tracker.update(self.body(batch[0]), batch[1])
        self.samples.update(len(batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.seen += [self.tracker.compute(), self.samples.compute(), self.tracker.best_metric()]


def tracks(layout: Layout, batch_size: int) -> list[Any]:
    return fit(Tracks(), layout, batch_size, num_sanity_val_steps=0)["seen"]


@pytest.mark.parametrize("name", ["pp2", "pp2 x dp2"])
def test_metrics_that_hooks_make_are_those_of_one_process(ranks: Pools, name: str) -> None:
    size, replicas, layout = LAYOUTS[name]
    expected = tracks(None, 8 * replicas)
    for result in ranks(size, lightning=True).run(tracks, layout, 8):
        assert_same(result, expected)


class InContainers(Trained):
    """Keeps its metrics where Lightning does not look for them."""

    def build(self) -> None:
        self.by_name: dict[str, Any] = {"auroc": MulticlassAUROC(CLASSES), "accuracy": MulticlassAccuracy(CLASSES)}
        self.listed = [MulticlassF1Score(CLASSES), MetricCollection([MulticlassPrecision(CLASSES)])]
        self.counts = (SumMetric(),)

    def measure(self, logits: Tensor, y: Tensor) -> None:
        self.log("f1", self.listed[0](logits, y), on_step=True, on_epoch=False)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.body(batch[0])
        for metric in (*self.by_name.values(), self.listed[1]):
            metric.update(logits, batch[1])
        self.counts[0].update(len(batch[1]))

    def on_validation_epoch_end(self) -> None:
        for name, metric in self.by_name.items():
            self.log(name, metric.compute())
        self.log_dict(self.listed[1].compute())
        self.seen.append(self.counts[0].compute())
        for metric in (*self.by_name.values(), self.listed[1], self.counts[0]):
            metric.reset()


def in_containers(layout: Layout, batch_size: int) -> dict[str, Any]:
    return fit(InContainers(), layout, batch_size)


@pytest.mark.parametrize("name", ["pp2", "pp2 x dp2"])
def test_metrics_in_plain_containers_are_those_of_one_process(ranks: Pools, name: str) -> None:
    size, replicas, layout = LAYOUTS[name]
    expected = in_containers(None, 8 * replicas)
    for result in ranks(size, lightning=True).run(in_containers, layout, 8):
        fitted, other = dict(result["fitted"]), dict(expected["fitted"])
        if replicas > 1:  # a batch's own value is the replica's
            del fitted["f1"], other["f1"]
        assert_same((fitted, result["seen"]), (other, expected["seen"]))
        if replicas == 1:
            assert_same(result["batches"], expected["batches"])


# -- values of a step --------------------------------------------------------------------------------------------------


class StepAndEpoch(Trained):
    """One metric under two names, in both orders; the value of `forward` itself; a metric logged after the step."""

    def build(self) -> None:
        self.first, self.second, self.value, self.both, self.later = (MulticlassF1Score(CLASSES) for _ in range(5))
        self.collection = MetricCollection(
            {"f1": MulticlassF1Score(CLASSES), "precision": MulticlassPrecision(CLASSES)}
        )

    def measure(self, logits: Tensor, y: Tensor) -> None:
        self.first(logits, y)
        self.log("first_step", self.first, on_step=True, on_epoch=False)
        self.log("first_epoch", self.first, on_step=False, on_epoch=True)
        self.second(logits, y)
        self.log("second_epoch", self.second, on_step=False, on_epoch=True)
        self.log("second_step", self.second, on_step=True, on_epoch=False)
        self.log("value", self.value(logits, y), on_step=True, on_epoch=True)
        self.log("both_value", self.both(logits, y), on_step=True)
        self.log("both", self.both, on_step=False, on_epoch=True)
        self.log_dict(self.collection(logits, y), on_step=True, on_epoch=True)
        self.later(logits, y)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("later", self.later, on_step=True, on_epoch=True)


def step_and_epoch(layout: Layout, batch_size: int) -> dict[str, Any]:
    return fit(StepAndEpoch(), layout, batch_size)


def test_the_value_of_a_step_is_that_of_the_whole_batch_however_it_is_logged(ranks: Pools) -> None:
    expected = step_and_epoch(None, 8)
    results = ranks(2, lightning=True).run(step_and_epoch, LAYOUTS["pp2"][2], 8)
    for result in results:
        assert_same(result, expected)


class OfWrappers(Trained):
    """What `forward` of wrappers returns, which has a structure of its own."""

    def build(self) -> None:
        self.extremes = MinMaxMetric(MulticlassAccuracy(CLASSES))
        self.tasks = MultitaskWrapper({"classes": MulticlassAccuracy(CLASSES), "scores": MeanSquaredError()})
        self.by_class = ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None))
        self.recent = Running(MulticlassAccuracy(CLASSES), window=2)

    def measure(self, logits: Tensor, y: Tensor) -> None:
        self.log_dict(self.extremes(logits, y), on_step=True, on_epoch=True)
        score = logits[:, 0].contiguous()
        self.log_dict(self.tasks({"classes": logits, "scores": score}, {"classes": y, "scores": (y == 0).float()}))
        self.log_dict(self.by_class(logits, y))
        self.log("recent", self.recent(logits, y))


def of_wrappers(layout: Layout, batch_size: int) -> dict[str, Any]:
    return fit(OfWrappers(), layout, batch_size)


@pytest.mark.parametrize("num_microbatches", [3, 4])
def test_values_of_wrappers_are_those_of_the_whole_batch(ranks: Pools, num_microbatches: int) -> None:
    expected = of_wrappers(None, 8)
    layout = {"pipeline_parallel_size": 2, "num_microbatches": num_microbatches}
    for result in ranks(2, lightning=True).run(of_wrappers, layout, 8):
        assert_same(result, expected, 1e-6)


class MeansOfLosses(Trained):
    """As the common template for projects has it: a loss for each batch, and their mean."""

    def build(self) -> None:
        self.train_loss, self.value = MeanMetric(), MeanMetric()
        self.collected = MetricCollection({"collected": MeanMetric()})
        self.of_batches = nn.ModuleDict({"worst": MaxMetric(), "recent": Running(MeanMetric(), window=2)})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.body(x), y)
        self.train_loss(loss)
        self.log("loss", self.train_loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("value", self.value(loss.item()), on_step=True, on_epoch=False)
        self.collected.update(loss)
        return loss

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        for metric in self.of_batches.values():  # they count updates
            metric.update(outputs["loss"])

    def on_train_epoch_end(self) -> None:
        self.log_dict({name: metric.compute() for name, metric in self.of_batches.items()})
        self.log_dict(self.collected.compute())
        self.collected.reset()


def means_of_losses(layout: Layout, batch_size: int) -> dict[str, Any]:
    return fit(MeansOfLosses(), layout, batch_size)


@pytest.mark.parametrize("num_microbatches", [3, 8])
def test_a_mean_of_losses_counts_each_batch_once(ranks: Pools, num_microbatches: int) -> None:
    expected = means_of_losses(None, 10)  # the last batch has 6 samples, in fewer microbatches of 8
    layout = {"pipeline_parallel_size": 2, "num_microbatches": num_microbatches}
    for result in ranks(2, lightning=True).run(means_of_losses, layout, 10):
        assert_same(result, expected, 1e-6)


# -- in callbacks ------------------------------------------------------------------------------------------------------


class OwnMetrics(Callback):
    """Has metrics, makes one at each epoch, and one where it needs it."""

    def __init__(self) -> None:
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.confusion, self.samples = MulticlassConfusionMatrix(CLASSES), SumMetric()
        self.precision_at_rank = RetrievalMAP()

    def on_validation_epoch_start(self, *args: Any) -> None:
        self.late = SumMetric()
        self.number = 0

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        x, y = batch
        for metric in (self.accuracy, self.confusion):
            metric.update(outputs, y)
        for count in (self.samples, self.late):
            count.update(len(y))
        self.number += len(y)
        self.precision_at_rank.update(outputs.softmax(1)[:, 0], y == 0, indexes=(x[:, 5] > 0).long())

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        local = SumMetric()
        local.update(self.number)
        for name, metric in (("samples", self.samples), ("late", self.late), ("local", local)):
            pl_module.log(name, metric.compute())
        self.log("accuracy", self.accuracy.compute())
        self.log("map", self.precision_at_rank.compute())
        pl_module.seen.append(self.confusion.compute())
        for metric in (self.accuracy, self.confusion, self.samples, self.precision_at_rank):
            metric.reset()


def own_metrics(layout: Layout, batch_size: int) -> dict[str, Any]:
    return fit(Trained(), layout, batch_size, OwnMetrics())


@pytest.mark.rows(25)
@pytest.mark.parametrize("name", ["pp2", "pp2 x dp2"])
def test_metrics_of_callbacks_count_each_sample_once(ranks: Pools, name: str) -> None:
    size, replicas, layout = LAYOUTS[name]
    expected = own_metrics(None, 8 * replicas)
    assert expected["fitted"]["samples"] == expected["fitted"]["local"] == 28
    for result in ranks(size, lightning=True).run(own_metrics, layout, 8):
        assert_same(result, expected)


LOGGING = (Path(__file__).parent.parent / "docs" / "guides" / "logging.md").read_text()


def documented_example(layout: Layout, batch_size: int) -> dict[str, Any]:
    """The code block of the section, as it stands there, in a fit."""
    section = LOGGING.split("### Metrics in callbacks\n")[1].split("\n## ")[0]
    namespace: dict[str, Any] = {"num_classes": CLASSES}
    exec(section.split("```python\n")[1].split("```")[0], namespace)
    callback = next(cls for cls in namespace.values() if isinstance(cls, type) and cls.__module__ == "builtins")
    return fit(Trained(), layout, batch_size, callback(CLASSES))


@pytest.mark.rows(25)
@pytest.mark.parametrize("name", ["pp2", "pp2 x dp2"])
def test_the_documented_callback_is_that_of_one_process(ranks: Pools, name: str) -> None:
    size, replicas, layout = LAYOUTS[name]
    expected = documented_example(None, 8 * replicas)
    assert 0.2 < expected["fitted"]["val_accuracy"] < 1.0
    for result in ranks(size, lightning=True).run(documented_example, layout, 8):
        assert_same(result, expected)

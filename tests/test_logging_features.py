"""What modules and callbacks log arrives on every rank as one process would have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from torch import Tensor

from tests.pool import Pools
from tests.training_jobs import LAYOUTS, PP2, Regression, assert_same, loader, make_trainer, plain

Layout = Mapping[str, Any] | None


class Memory(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[tuple[int | None, dict[str, float]]] = []

    name = "memory"
    version = 0

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.history.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Snapshots(Callback):
    """What the Trainer shows after every batch."""

    def __init__(self) -> None:
        self.batches: list[dict[str, dict[str, float]]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        shown = {key: plain(getattr(trainer, f"{key}_metrics")) for key in ("callback", "logged", "progress_bar")}
        self.batches.append(shown)


def run(module: Regression, layout: Layout, batch_size: int, *callbacks: Callback, **arguments: Any) -> dict[str, Any]:
    """Fit two epochs with two kinds of validation data; everything that was logged."""
    snapshots, memory = Snapshots(), Memory()
    trainer = make_trainer(
        layout, max_epochs=2, callbacks=[*callbacks, snapshots], logger=memory, log_every_n_steps=1, **arguments
    )
    trainer.fit(module, loader(batch_size), loader(batch_size, 28, seed=2))
    return {
        "batches": snapshots.batches,
        "callback": plain(trainer.callback_metrics),
        "logged": plain(trainer.logged_metrics),
        "progress_bar": plain(trainer.progress_bar_metrics),
        "history": memory.history if trainer.is_global_zero else None,
    }


def check(ranks: Pools, name: str, job: Any, rtol: float = 1e-10) -> None:
    """`job` gives the same on every rank of a layout as in one process, which takes the joined batches."""
    size, replicas, layout = LAYOUTS[name]
    expected = job(None, 8 * replicas)
    history = expected.pop("history")
    for rank, result in enumerate(ranks(size, lightning=True).run(job, layout, 8)):
        logged = result.pop("history")
        if rank == 0:
            assert_same(logged, history, rtol)
        assert_same(result, expected, rtol)


# -- in steps ---------------------------------------------------------------------------------------------------------


class LogsInSteps(Regression):
    """Logs before and after the body, in all the ways there are."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        sync = {"sync_dist": True}
        self.log("before_body", x.mean(), on_step=True, on_epoch=True, **sync)
        prediction = self(x)
        errors = (prediction - y).square().squeeze(1)
        loss = errors.mean()
        self.log("default", loss, **sync)
        self.log("step", loss, on_step=True, on_epoch=False, **sync)
        self.log("epoch", loss, on_step=False, on_epoch=True, **sync)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True, **sync)
        self.log("bar_only", loss, prog_bar=True, logger=False, **sync)
        for fx in ("mean", "sum", "min", "max"):
            self.log(f"fx_{fx}", getattr(errors, fx)(), reduce_fx=fx, on_step=True, on_epoch=True, **sync)
        self.log("fx_torch_sum", errors.sum(), reduce_fx=torch.sum, on_step=False, on_epoch=True, **sync)
        self.log("fx_torch_max", errors.max(), reduce_fx=torch.max, on_step=False, on_epoch=True, **sync)
        # A mean over something else than samples: right with `batch_size`.
        tokens = 1 + (10 * x[:, 0].abs()).long()
        mean = (errors * tokens).sum() / tokens.sum()
        self.log("weighted", mean, batch_size=int(tokens.sum()), on_step=False, on_epoch=True, **sync)
        self.log("python_float", 0.125, **sync)
        self.log("python_int", 3, on_step=True, on_epoch=True, **sync)
        self.log("samples", len(x), reduce_fx="sum", on_step=False, on_epoch=True, **sync)
        self.log("bool", True, **sync)
        self.log("one_element", loss.reshape(1), **sync)
        self.log_dict({"in_dict": loss, "in_dict_float": 1.5}, on_epoch=True, on_step=True, **sync)
        if batch_idx % 3 == 0:
            self.log("every_third", loss, on_step=True, on_epoch=True, **sync)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_before_body", x.mean(), sync_dist=True)
        errors = (self(x) - y).square()
        self.log("val_loss", errors.mean(), prog_bar=True, sync_dist=True)
        self.log("val_both", errors.mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log("val_sum", errors.sum(), reduce_fx="sum", sync_dist=True)
        self.log("val_max", errors.max(), reduce_fx="max", sync_dist=True)
        self.log("val_min", errors.min(), reduce_fx="min", sync_dist=True)
        if batch_idx % 3 == 0:
            self.log("val_third", errors.mean(), sync_dist=True)


def logs_in_steps(layout: Layout, batch_size: int) -> dict[str, Any]:
    return run(LogsInSteps(), layout, batch_size)


@pytest.mark.rows(22, 23, 24, 40)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kind_of_log_in_steps_is_that_of_one_process_on_every_rank(ranks: Pools, name: str) -> None:
    check(ranks, name, logs_in_steps)


class LogsWithBatchSizes(Regression):
    """With the size of a batch that is known elsewhere, with a tensor, and with no samples in some microbatches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        errors = (self(x) - y).square().squeeze(1)
        loss = errors.mean()
        both: dict[str, Any] = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("constant", loss, batch_size=32, **both)
        self.log("of_parts", loss, batch_size=torch.tensor(len(batch)), **both)
        self.log("of_samples", loss, batch_size=torch.tensor(len(x)), **both)
        positive = x[:, 0] > 0
        self.log("of_some", errors[positive].mean(), batch_size=positive.sum(), **both)
        return loss


def logs_with_batch_sizes(layout: Layout, batch_size: int) -> dict[str, Any]:
    return run(LogsWithBatchSizes(), layout, batch_size)


@pytest.mark.parametrize("num_microbatches", [3, 5])
def test_logs_with_a_batch_size_are_those_of_one_process(ranks: Pools, num_microbatches: int) -> None:
    # The last batch has half of the samples: smaller microbatches, or fewer.
    expected = logs_with_batch_sizes(None, 8)
    layout = {"pipeline_parallel_size": 2, "num_microbatches": num_microbatches}
    first, last = ranks(2, lightning=True).run(logs_with_batch_sizes, layout, 8)
    assert_same(first, expected)
    assert_same(last, {**expected, "history": None})


class LogsUnsynchronised(Regression):
    """As most people write it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def logs_unsynchronised(layout: Layout, batch_size: int) -> dict[str, Any]:
    return run(LogsUnsynchronised(), layout, batch_size)


@pytest.mark.parametrize("name", ["pp2", "pp3", "chunks 2"])
def test_logs_without_sync_dist_are_exact_with_one_replica(ranks: Pools, name: str) -> None:
    check(ranks, name, logs_unsynchronised)


def test_logs_without_sync_dist_are_those_of_each_replica(ranks: Pools) -> None:
    results = ranks(4, lightning=True).run(logs_unsynchronised, LAYOUTS["pp2 x dp2"][2], 8)
    for first, last in ((0, 2), (1, 3)):  # the stages of one replica
        assert_same({**results[first], "history": None}, {**results[last], "history": None}, 0.0)
    assert results[0]["callback"] != results[1]["callback"]


class LogsInSomeMicrobatches(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch[0][0, 0] > 0:
            self.log("positive", batch[0][:, 1].mean(), on_step=True, on_epoch=False)
        return loss


def logs_in_some_microbatches(layout: Layout, batch_size: int) -> list[float | None]:
    result = run(LogsInSomeMicrobatches(), layout, batch_size)
    return [shown["callback"].get("positive") for shown in result["batches"]]


def test_a_log_in_some_microbatches_is_the_mean_of_those(ranks: Pools) -> None:
    x = loader().dataset.tensors[0]
    expected: list[float | None] = []
    for batch in x.split(8):
        chosen = [part[:, 1].mean() for part in batch.split(len(batch) // 4) if part[0, 0] > 0]
        expected.append(float(torch.stack(chosen).mean()) if chosen else None)
    for result in ranks(2, lightning=True).run(logs_in_some_microbatches, PP2, 8):
        assert_same(result[: len(expected)], expected)


# -- in hooks ---------------------------------------------------------------------------------------------------------


class LogsInCallback(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("callback_batch_end", outputs["loss"] * 3, sync_dist=True)
        self.log("callback_own_log", float(batch_idx), sync_dist=True)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("callback_train_epoch_end", torch.stack(pl_module.losses).max(), sync_dist=True)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.log("callback_val_batch_end", outputs, sync_dist=True)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("callback_val_epoch_end", torch.stack(pl_module.val_losses).min(), sync_dist=True)


class LogsInHooks(Regression):
    """Keeps lists for the ends of epochs, the common way to live without `training_epoch_end`."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.val_losses: list[Tensor] = []
        self.counts: list[int] = []
        self.by_name: dict[str, list[Tensor]] = {"mean": []}

    def on_train_epoch_start(self) -> None:
        self.log("epoch_start", float(self.current_epoch))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("batch_end", outputs["loss"] * 2, on_step=True, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("train_epoch_end", torch.stack(self.losses).mean(), sync_dist=True)
        self.losses.clear()

    def on_validation_epoch_start(self) -> None:
        self.counts = []  # reset at the start, and then filled with the same numbers again

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.val_losses.append(loss)
        self.by_name["mean"].append(loss)
        self.counts.append(len(batch[0]))
        return loss

    def on_validation_epoch_end(self) -> None:
        assert self.counts
        counts = torch.tensor(self.counts, dtype=torch.float64)
        self.log("val_epoch_end", torch.stack(self.val_losses).mean(), prog_bar=True, sync_dist=True)
        self.log("val_by_name", torch.stack(self.by_name["mean"]).sum(), sync_dist=True)
        self.log("val_weighted", (torch.stack(self.val_losses) * counts).sum() / counts.sum(), sync_dist=True)
        self.log_dict({"val_count": float(len(self.val_losses))}, sync_dist=True)
        self.val_losses.clear()
        self.by_name = {"mean": []}


def logs_in_hooks(layout: Layout, batch_size: int) -> dict[str, Any]:
    module = LogsInHooks()
    result = run(module, layout, batch_size, LogsInCallback())
    assert module.losses == module.val_losses == [], "the lists are reset on every rank"
    return result


@pytest.mark.rows(26)
@pytest.mark.parametrize("name", LAYOUTS)
def test_logs_in_hooks_and_lists_kept_for_them_are_those_of_one_process_on_every_rank(ranks: Pools, name: str) -> None:
    size, replicas, layout = LAYOUTS[name]
    # As many microbatches as divide every batch, so that a mean over a list of microbatches is a mean over batches.
    count = 2
    LAYOUTS_EQUAL = {**layout, "num_microbatches": count}
    expected = logs_in_hooks(None, 8 * replicas)
    history = expected.pop("history")
    for rank, result in enumerate(ranks(size, lightning=True).run(logs_in_hooks, LAYOUTS_EQUAL, 8)):
        logged = result.pop("history")
        if rank == 0:
            assert_same(_without_max(logged), _without_max(history))
        assert_same(_without_max(result), _without_max(expected))


def _without_max(tree: Any) -> Any:
    """A greatest loss over a list of microbatches is not that of batches: only equal on all ranks."""
    if isinstance(tree, dict):
        return {key: _without_max(value) for key, value in tree.items() if key != "callback_train_epoch_end"}
    return [_without_max(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


class ReadsWhatItLogged(Regression):
    def on_train_epoch_end(self) -> None:
        self.log("own", 1.0)
        self.log("again", self.trainer.callback_metrics["own"] + 1.0)

    def on_validation_epoch_end(self) -> None:
        self.log("val_own", self.trainer.callback_metrics["val_loss"] * 2)
        self.log("val_again", self.trainer.callback_metrics["val_own"] + 1.0)


def reads_what_it_logged(layout: Layout, batch_size: int) -> dict[str, Any]:
    return run(ReadsWhatItLogged(), layout, batch_size)


def test_a_hook_sees_in_callback_metrics_what_it_has_just_logged(ranks: Pools) -> None:
    check(ranks, "pp2", reads_what_it_logged)


def wrong_log(layout: Layout, kind: str) -> str:
    class Wrong(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            value = {"shape": torch.ones(2), "text": "text", "twice": loss}[kind]
            self.log("x", value)
            if kind == "twice":
                self.log("x", loss * 2, on_step=False, on_epoch=True)
            return loss

    with pytest.raises(Exception) as error:  # noqa: PT011 - Lightning's own types
        make_trainer(layout).fit(Wrong(), loader())
    return str(error.value)


@pytest.mark.parametrize("kind", ["shape", "text", "twice"])
def test_wrong_calls_of_log_are_refused_in_lightnings_words_on_every_rank(ranks: Pools, kind: str) -> None:
    expected = wrong_log(None, kind)
    for text in ranks(2, lightning=True).run(wrong_log, PP2, kind):
        assert expected.strip() in text

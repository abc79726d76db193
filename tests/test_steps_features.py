"""Steps as users write them: what they take, read, log, keep and return is in a pipeline what it is in one process."""

from __future__ import annotations

import functools
from collections import UserList, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F

from tests.pool import Pools
from tests.test_metrics_features import CLASSES, classes
from tests.training_jobs import (
    LAYOUTS,
    PP2,
    Regression,
    assert_same,
    loader,
    make_trainer,
    plain,
    together,
    train,
    weights,
)
from tests.transparency import SEED, OracleKey, accumulating

Layout = Mapping[str, Any] | None
BOTH = ["pp2", "pp2 x dp2"]
SYNC: dict[str, Any] = {"on_step": True, "on_epoch": True, "sync_dist": True}


class Shown(Callback):
    """What the Trainer shows after each batch."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.metrics.append(plain(trainer.callback_metrics))


def fit(
    module: LightningModule, layout: Layout, batch_size: int, *callbacks: Callback, loaders: Any = None
) -> dict[str, Any]:
    """Fit two epochs, then validate: metrics, weights, and what the module has put into `seen`."""
    shown = Shown()
    trainer = make_trainer(layout, max_epochs=2, callbacks=[shown, *callbacks], log_every_n_steps=1)
    train, val = loaders or (loader(batch_size), [loader(batch_size, 28, 2), loader(batch_size, 20, 3)])
    trainer.fit(module, train, val)
    result = {"shown": shown.metrics, "fitted": plain(trainer.callback_metrics)}
    validated = trainer.validate(module, val, verbose=False)
    return {**result, "validated": validated, "seen": list(getattr(module, "seen", [])), "weights": weights(module)}


def check(ranks: Pools, name: str, job: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """`job(*arguments, layout, batch_size)` gives on every rank what it gives in one process with joined batches."""
    size, replicas, layout = LAYOUTS[name]
    expected = job(*arguments, None, 8 * replicas)
    results = ranks(size, lightning=True).run(job, *arguments, layout, 8)
    whole = together([result.pop("weights") for result in results])
    assert_same(whole, {key: expected["weights"][key] for key in whole})
    left_out = ("weights", "seen") if replicas > 1 else ("weights",)  # what a module has seen is its replica's
    for result in results:
        assert_same(*({k: v for k, v in each.items() if k not in left_out} for each in (result, expected)))
    return expected


# -- signatures and helpers --------------------------------------------------------------------------------------------


class BatchOnly(Regression):
    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        loss = self.loss(batch)
        self.log("loss", loss, **SYNC)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.log(f"val_{dataloader_idx}", self.loss(batch), sync_dist=True, add_dataloader_idx=False)


class DefaultIndex(Regression):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch) * (1 + batch_idx + 10 * dataloader_idx), sync_dist=True)


def doubled(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * step(self, *args, **kwargs)

    return wrapper


class Helpers(Regression):
    """A shared helper, a decorated step, and the body called by itself."""

    @doubled
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step(batch, "train", on_step=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self._step(batch, "val")

    def _step(self, batch: Any, stage: str, **options: Any) -> Tensor:
        x, y = batch
        h = self.embed(x)
        h = h + self.body(h)
        loss = F.mse_loss(self.head(h), y)
        self.log_dict({f"{stage}/loss": loss, f"{stage}/mae": F.l1_loss(self.head(h), y)}, sync_dist=True, **options)
        return loss


class Reads(Regression):
    """Logs what the Trainer says."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.trainer.training
        assert self.training
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        loss = self.loss(batch)
        self.log_dict(
            {
                "epoch": float(self.current_epoch),
                "step": float(self.global_step + self.trainer.current_epoch),
                "batches": float(self.trainer.num_training_batches),
                "last": float(self.trainer.is_last_batch),
                "all_steps": float(self.trainer.estimated_stepping_batches > 0),
                "rate": self.trainer.optimizers[0].param_groups[0]["lr"],
                "same_rate": optimizer.param_groups[0]["lr"],  # type: ignore[union-attr]
                "last_rate": scheduler.get_last_lr()[0],  # type: ignore[union-attr]
                "groups": float(len(optimizer.param_groups[0]["params"]) > 0),  # type: ignore[union-attr]
                "batch_idx": float(batch_idx),
            },
            on_step=True,
            sync_dist=True,
        )
        return loss * (1 + self.current_epoch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        assert self.trainer.validating or self.trainer.sanity_checking or self.trainer.evaluating
        assert not self.training
        assert not torch.is_grad_enabled()
        self.log("val", self.loss(batch) + len(self.trainer.num_val_batches), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


# -- logs from elsewhere than the step ---------------------------------------------------------------------------------


class Probe(nn.Module):
    """A submodule with ways to log of its own."""

    def __init__(self, owner: LightningModule) -> None:
        super().__init__()
        self.owner = [owner]
        self.log = owner.log  # the method, before any Trainer is there
        self.on_value = lambda value: owner.log("by_function", value, **SYNC)

    def forward(self, value: Tensor) -> Tensor:
        self.owner[0].log("by_owner", value, **SYNC)
        self.log("by_method", value * 2, **SYNC)
        self.log("number", 0.5, batch_size=3, **SYNC)
        self.on_value(value * 3)
        return value


class LogsElsewhere(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.probe = Probe(self)

    def on_fit_start(self) -> None:
        self.late = self.log

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.probe(self.loss(batch))
        self.late("late", loss, **SYNC)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Observer):
                callback.observe(loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.probe.log("val", self.probe.owner[0].loss(batch), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.late("late_in_hook", float(self.current_epoch))
        self.log("of_numpy", np.float32(self.current_epoch))


class Observer(Callback):
    def observe(self, value: Tensor) -> None:
        self.log("by_callback", value, **SYNC)


# -- lists for the ends of epochs --------------------------------------------------------------------------------------


class Keeps(Regression):
    """Appends in steps, and puts together in hooks; the mean of losses is one over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self._predictions: list[Tensor] = []
        self._by_loader: dict[int, list[Tensor]] = {}
        self.window: deque[float] = deque(maxlen=2)
        self.histogram = np.zeros(3)
        self.same = self.losses  # another name for one list
        self.seen: UserList[Any] = UserList()  # no plain value: ranks do not get each other's

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        errors = (self(x) - y).square()
        self.losses.append(errors.detach())
        self.window.append(float(errors.detach().sum() * 0 + 1))
        return errors.mean()

    def on_train_epoch_end(self) -> None:
        self.seen += [torch.cat(self.losses).mean(), list(self.window), len(self.losses) > 0]
        self.log("kept", torch.cat(self.losses).mean(), sync_dist=True)
        self.same.clear()
        assert self.losses == []

    def on_validation_epoch_start(self) -> None:
        self._by_loader = {0: [], 1: []}
        self.histogram[:] = 0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        prediction = self(x)
        self._predictions.append(prediction)
        self._by_loader[dataloader_idx].append(F.mse_loss(prediction, y))
        self.histogram += np.histogram(prediction.numpy(), bins=[-9, 0, 0.2, 9])[0]

    def on_validation_epoch_end(self) -> None:
        predictions = torch.cat(self._predictions)
        self.seen += [predictions.mean(), predictions.square().sum(), self.histogram.tolist()]
        for index, losses in self._by_loader.items():
            self.log(f"val_{index}", torch.stack(losses).mean(), sync_dist=True)
        self._predictions.clear()


# -- values that steps return ------------------------------------------------------------------------------------------


class ReturnsExtras(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.seen: UserList[Any] = UserList()  # no plain value: ranks do not get each other's

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        prediction = self(x)
        loss = F.mse_loss(prediction, y)
        tensors = {"prediction": prediction, "label": y > 0, "mean": loss, "array": x.numpy(), "number": loss.item()}
        plain_values = {"names": [f"{value:.3f}" for value in y.flatten().tolist()], "float32": np.float32(2.5)}
        return {"loss": loss, **tensors, **plain_values, "nested": [{"a": (x, None)}, "text"]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({key: _without_graph(value) for key, value in outputs.items()})
        assert outputs["names"] == [f"{value:.3f}" for value in batch[1].flatten().tolist()]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return [None, self(batch[0]), {"text": batch[0].numpy()}][batch_idx % 3]

    def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
        self.seen.append(_without_graph(outputs))


def _without_graph(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_graph(entry) for key, entry in value.items()}
    return value.detach() if isinstance(value, Tensor) else value.tolist() if hasattr(value, "tolist") else value


STORIES: dict[str, type[Regression]] = {
    "batch only": BatchOnly,
    "default index": DefaultIndex,
    "helpers": Helpers,
    "reads": Reads,
    "logs elsewhere": LogsElsewhere,
    "keeps": Keeps,
    "returns extras": ReturnsExtras,
}


def tell(story: str, layout: Layout, batch_size: int) -> dict[str, Any]:
    return fit(STORIES[story](), layout, batch_size, Observer())


@pytest.mark.rows(20, 22, 46)
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("story", [story for story in STORIES if story != "returns extras"])
def test_a_step_does_in_a_pipeline_what_it_does_in_one_process(ranks: Pools, story: str, name: str) -> None:
    expected = check(ranks, name, tell, story)
    if story == "logs elsewhere":
        names = {"by_owner", "by_method", "by_function", "by_callback", "late", "number"}
        assert names < expected["fitted"].keys(), "the test must log"


@pytest.mark.rows(20)
def test_what_a_step_returns_is_put_together_as_if_it_had_run_once(ranks: Pools) -> None:
    check(ranks, "pp2", tell, "returns extras")


def test_what_a_step_returns_is_the_same_on_all_stages_of_a_replica(ranks: Pools) -> None:
    results = ranks(4, lightning=True).run(tell, "returns extras", LAYOUTS["pp2 x dp2"][2], 8)
    for first, last in ((0, 2), (1, 3)):
        assert_same(results[first]["seen"], results[last]["seen"], 0.0)


# -- batches -----------------------------------------------------------------------------------------------------------


class Record(NamedTuple):
    x: Tensor
    y: Tensor
    names: list[str]
    mixing: float
    scale: Tensor
    nothing: None


@dataclass
class Fields:
    x: Tensor
    y: Tensor
    names: list[str]
    mixing: float
    scale: Tensor
    nothing: None


def as_dict(**entries: Any) -> dict[str, Any]:
    return entries


def as_nested(**entries: Any) -> Any:
    return (entries["x"], entries["y"]), {"rest": as_dict(**entries)}


KINDS: dict[str, Callable[..., Any]] = {
    "dict": as_dict,
    "named tuple": Record,
    "dataclass": Fields,
    "nested": as_nested,
}


def collate(kind: str, samples: list[tuple[Tensor, Tensor]]) -> Any:
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    names = [f"{value:.6f}" for value in y.flatten().tolist()]
    scale = torch.tensor(0.5, dtype=torch.float64)
    return KINDS[kind](x=x, y=y, names=names, mixing=0.25, scale=scale, nothing=None)


class TakesRecords(Regression):
    """Checks that strings stay with their samples; what is no sample's comes whole."""

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, (tuple, list)) and not isinstance(batch, Record):
            batch = batch[1]["rest"]
        entries = batch if isinstance(batch, dict) else batch._asdict() if isinstance(batch, Record) else vars(batch)
        assert entries["names"] == [f"{value:.6f}" for value in entries["y"].flatten().tolist()]
        assert entries["nothing"] is None
        assert entries["scale"].shape == ()
        return F.mse_loss(self(entries["x"]), entries["y"]) * entries["mixing"] * entries["scale"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


def takes(kind: str, layout: Layout, batch_size: int) -> dict[str, Any]:
    options = {"collate_fn": functools.partial(collate, kind)}
    loaders = loader(batch_size, **options), loader(batch_size, 20, 2, **options)
    return fit(TakesRecords(), layout, batch_size, loaders=loaders)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_all_kinds_with_what_is_no_samples(ranks: Pools, kind: str, name: str) -> None:
    check(ranks, name, takes, kind)


# -- random numbers in steps -------------------------------------------------------------------------------------------


class MixUp(LightningModule):
    """Mix-up with label smoothing, as training scripts for ViT have it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        mixing = float(np.random.beta(0.4, 0.4))
        order = torch.randperm(len(x))
        logits = self.body(mixing * x + (1 - mixing) * x[order])
        loss = mixing * self.criterion(logits, y) + (1 - mixing) * self.criterion(logits, y[order])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mixing", torch.tensor(mixing, dtype=torch.float64), on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


def mixed(layout: Layout, microbatches: int) -> dict[str, Any]:
    seed_everything(SEED, verbose=False)
    cls = MixUp if layout is not None else accumulating(MixUp, OracleKey("mix_up", 1, True, microbatches))  # type: ignore[type-var]
    layout = None if layout is None else {**layout, "num_microbatches": microbatches}
    shown = Shown()
    result = train(cls(), layout, classes(8, 32), max_epochs=2, callbacks=[shown])
    return {"shown": shown.metrics, "losses": result.losses, "weights": result.weights}


@pytest.mark.parametrize("microbatches", [1, 3])
def test_mix_up_and_label_smoothing_are_those_of_one_process_that_draws_the_same(
    ranks: Pools, microbatches: int
) -> None:
    expected = mixed(None, microbatches)
    results = ranks(2, lightning=True).run(mixed, PP2, microbatches)
    whole = together([result["weights"] for result in results])
    assert_same(whole, expected["weights"])
    for result in results:
        assert_same(result["losses"], expected["losses"])
        assert_same(result["shown"], expected["shown"])
    assert len({shown["mixing"] for shown in expected["shown"]}) == len(expected["shown"]), "the test must draw"


def test_mix_up_differs_between_replicas_and_is_reproducible(ranks: Pools) -> None:
    pool, layout = ranks(4, lightning=True), LAYOUTS["pp2 x dp2"][2]
    first, again = pool.run(mixed, layout, 2), pool.run(mixed, layout, 2)
    assert_same(again, first, 0.0)
    assert_same(first[0]["shown"], first[2]["shown"], 0.0)
    assert first[0]["shown"] != first[1]["shown"]

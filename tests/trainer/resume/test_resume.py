"""A run that goes on from a checkpoint is the rest of the uninterrupted one, bit by bit, wherever that was."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric, MinMaxMetric, RunningMean

from lightning_hybrid.distributed.random import generator_states, set_generator_states
from lightning_hybrid.trainer.resume.replay import ReplayableLoader
from tests.daily import daily
from tests.pool import Pools
from tests.training_jobs import Regression, assert_same, dataset, make_trainer, weights

Layout = Mapping[str, Any]

PP2: Layout = {"pipeline_parallel_size": 2, "num_microbatches": 2}
LAYOUTS: dict[str, tuple[int, Layout]] = {
    "1x1x1": (1, {}),
    "dp2": (2, {}),
    "pp2 chunks 2": (2, {**PP2, "num_chunks": 2, "schedule": "interleaved_1f1b"}),
    "dp2 x tp2": (4, {"tensor_parallel_size": 2}),
    "dp2 x pp2": (4, PP2),
}
BATCHES = 6  # of an epoch on each rank
#: Where iterators end and begin again: that of the shorter stream, and of the longer one while its last batch is used.
ENDS = ("start 0.4", "batch 0.4", "start 0.5", "start 1.5", "batch 1.5")
SAVED_AT = (
    "batch 0.0",
    "inside 3.2",
    "validation 3",
    "start 0.4",
    "batch 0.5",
    "epoch 0",
    "batch 1.2",
    "validation 12",
)


RELOADING = {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 3}
SHARDED = {"sharded": True}
LATE = {"check_val_every_n_epoch": 2}


class Augmented(Dataset[Any]):
    """Features with noise from every generator that a data set may draw from."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(6, dtype=torch.float64) + np.random.rand() + random.random()
        return self.x[index] + 0.1 * noise, self.x[index].sum(0, keepdim=True).sin()


class Stream(IterableDataset[Any]):
    """Samples in an order of its own, without a length."""

    def __init__(self, num_samples: int) -> None:
        self.samples = Augmented(num_samples)

    def __iter__(self) -> Any:
        waiting = list(range(len(self.samples)))
        while waiting:
            yield self.samples[waiting.pop(random.randrange(min(4, len(waiting))))]


class Short(Stream):
    """Says that it has some more samples than it gives."""

    def __len__(self) -> int:
        return len(self.samples) + 4


class Noisy(Regression):
    """Draws random numbers wherever user code may, and logs means of an epoch."""

    def __init__(
        self,
        dropout: float = 0.3,
        half: bool = False,
        data: str = "map",
        plateau: str = "epoch",
        wrapped: bool = False,
        steps_of: int | None = None,
    ) -> None:
        super().__init__(4, dropout=dropout)
        self.mean, self.by_hand = MeanMetric(), MeanMetric()
        self.running, self.extremes = RunningMean(window=4), MinMaxMetric(MeanMetric())
        if half:
            self.float()
        else:
            for metric in (self.mean, self.by_hand):
                metric.set_dtype(torch.float64)

    def configure_callbacks(self) -> list[Any]:
        steps_of = self.hparams["steps_of"]  # batches, in the second epoch
        return [GradientAccumulationScheduler({0: 1, 1: steps_of})] if steps_of else []

    def train_dataloader(self) -> Any:
        torch.rand(3)  # what a run draws at its start is not drawn again in the middle
        data = self.hparams["data"]
        replicas = self.trainer.strategy.mesh.num_replicas
        if data in ("stateful", "sized"):
            return (Sized if data == "sized" else Stateful)(self.trainer.strategy.mesh.data_rank)
        if data == "joined":
            return DataLoader(dataset(8 * BATCHES), 8 // replicas, shuffle=True)
        if data in ("stream", "short"):
            return DataLoader((Short if data == "short" else Stream)(4 * BATCHES), 4)
        if data == "streams":
            return {"a": DataLoader(Stream(4 * BATCHES), 4), "b": DataLoader(Stream(16), 4)}
        workers = {"num_workers": 2, "multiprocessing_context": "fork"} if data == "workers" else {}
        samples = Augmented(4 * BATCHES * replicas)
        if data == "two":
            shared = torch.Generator().manual_seed(5)
            return {
                "a": DataLoader(samples, 4, shuffle=True, generator=shared),
                "b": DataLoader(Augmented(16), 4, shuffle=True, generator=shared),
            }
        return DataLoader(samples, 4, shuffle=True, **workers)

    def val_dataloader(self) -> Any:
        if self.hparams["data"] == "joined":
            return DataLoader(dataset(16), 4)
        torch.rand(3)  # now, or when there is a validation
        return DataLoader(Augmented(18), 4, shuffle=True, generator=torch.Generator().manual_seed(8))

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            batch = [0.5 * (batch["a"][i] + batch["b"][i]) for i in range(2)]
        return super().loss([each.to(self.embed.weight.dtype) for each in batch])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.hparams["dropout"]:
            loss = loss * (1 + 0.1 * torch.rand(()).to(loss))
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("least", loss.detach(), on_step=False, on_epoch=True, reduce_fx="min", sync_dist=True)
        if batch_idx == 0:
            self.log("first", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        if self.hparams["wrapped"]:
            self.running(loss.detach().float())
            self.log("running", self.running.compute())
            self.extremes.update(loss.detach().float())
            self.log("least mean", self.extremes.compute()["min"])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        noise = torch.rand(()).item() if self.hparams["dropout"] else 0.0
        loss = self.loss(batch) * (1 + noise)
        self.log("val_loss", loss, sync_dist=True)
        self.by_hand.update(loss)

    def on_validation_epoch_end(self) -> None:
        self.log("by hand", self.by_hand.compute())
        self.by_hand.reset()

    def on_train_epoch_start(self) -> None:
        torch.rand(2)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        interval = self.hparams["plateau"]
        if interval == "none":
            scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        scheduler = ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.5)
        monitor = "val_loss" if interval == "step" else "loss_epoch"
        every = {"scheduler": scheduler, "interval": interval, "monitor": monitor, "strict": interval == "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": every}


class Trail(Checkpoint):
    """Writes down what happened, and writes checkpoints where it is asked to.

    Args:
        directory: Of the checkpoints; `None` for no checkpoints.
        saved_at: After which hooks, with epoch and batch or step.
    """

    def __init__(self, directory: str | None = None, saved_at: Sequence[str] = SAVED_AT) -> None:
        self.directory = directory
        self.saved_at = saved_at
        self.saved: list[str] = []
        self.events: list[Any] = []

    def save(self, trainer: Trainer, name: str) -> None:
        if self.directory is not None and name in self.saved_at:
            self.saved.append(name)
            trainer.save_checkpoint(f"{self.directory}/{name}")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.save(trainer, f"start {trainer.current_epoch}.{batch_idx}")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        place = (trainer.current_epoch, batch_idx, trainer.fit_loop.total_batch_idx, trainer.global_step)
        samples = batch["a"][0] + batch["b"][0] if isinstance(batch, dict) else batch[0]
        self.events.append(
            (place, samples.double().sum().item(), float(outputs["loss"]), trainer.optimizers[0].param_groups[0]["lr"])
        )
        self.save(trainer, f"batch {trainer.current_epoch}.{batch_idx}")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.events.append(("validation", trainer.global_step, numbers(trainer.callback_metrics)))
            self.save(trainer, f"validation {trainer.global_step}")

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        batch = trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.ready
        self.save(trainer, f"inside {trainer.global_step}.{batch}")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.events.append(("epoch", trainer.current_epoch, numbers(trainer.callback_metrics)))
        self.save(trainer, f"epoch {trainer.current_epoch}")


def numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in metrics.items()}


def trained(
    layout: Layout | None,
    trail: Trail,
    resume: str | None,
    half: bool,
    hparams: Any,
    save: str | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Everything that a run leaves on a rank."""
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**12, growth_interval=3))
    how = {"plugins": plugin} if half else {}
    trainer = make_trainer(
        layout, **{"max_epochs": 2, "callbacks": [trail], "enable_checkpointing": True, **how, **arguments}
    )
    module = Noisy(half=half, **hparams)
    trainer.fit(module, ckpt_path=resume)
    if save is not None:
        torch.rand(7)  # what is drawn after the end is not of the run
        trainer.save_checkpoint(save)
    names = {parameter: name for name, parameter in module.named_parameters()}
    return {
        "weights": weights(module),
        "optimizer": {names[parameter]: state for parameter, state in trainer.optimizers[0].state.items()},
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "scaler": None if trainer.precision_plugin.state_dict() == {} else trainer.precision_plugin.state_dict(),
        "metrics": numbers(trainer.callback_metrics),
        "loops": {**trainer.fit_loop.state_dict(), "state_dict": None},
        "generators": generator_states(torch.device("cpu")),
    }


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Where two trees are not equal to the bit."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if left.keys() != right.keys():
            return [f"{where}: {list(left)} {list(right)}"]
        return [each for key in left for each in differences(left[key], right[key], f"{where}.{key}")]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            return [f"{where}: {len(left)} {len(right)}"]
        return [
            each for i, pair in enumerate(zip(left, right, strict=True)) for each in differences(*pair, f"{where}.{i}")
        ]
    if isinstance(left, DTensor) and isinstance(right, DTensor):
        left, right = left.to_local(), right.to_local()
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return [] if torch.equal(left, right) else [f"{where}: tensors"]
    return [] if left == right else [f"{where}: {left} {right}"]


def scramble(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def compared(resumed: dict[str, Any], again: Trail, straight: dict[str, Any], trail: Trail) -> list[str]:
    """Where a resumed run differs from the end of the uninterrupted one."""
    end = trail.events[len(trail.events) - len(again.events) :]
    if not any(isinstance(event[0], tuple) for event in again.events):  # no batch has shown what lives where
        held = straight["weights"].keys()
        resumed |= {
            key: {name: resumed[key][name] for name in resumed[key].keys() & held} for key in ("weights", "optimizer")
        }
        straight = {**straight, "optimizer": {name: straight["optimizer"][name] for name in resumed["optimizer"]}}
    found = differences(resumed, straight) + differences(again.events, end, "events")
    return found if again.events else [*found, "nothing has happened"]


def interrupted(layout: Layout, directory: str, half: bool, hparams: Any, arguments: Any) -> dict[str, list[str]]:
    """What is different in runs that continue from each checkpoint of an uninterrupted one."""
    trail = Trail(directory, ENDS if hparams.get("data") == "streams" else SAVED_AT)
    scramble(3)
    straight = trained(layout, trail, None, half, hparams, **arguments)
    found = {}
    for name in trail.saved:
        scramble(4)
        again = Trail()
        resumed = trained(layout, again, f"{directory}/{name}", half, hparams, **arguments)
        found[name] = compared(resumed, again, straight, trail)
    return found


CASES: dict[str, tuple[str, bool, dict[str, Any], dict[str, Any]]] = {
    "one": ("1x1x1", False, {}, {"val_check_interval": 0.5}),
    "one, stream": (
        "1x1x1",
        False,
        {"data": "stream", "plateau": "step", "wrapped": True, "steps_of": 3},
        {"val_check_interval": 3},
    ),
    "one, two streams": ("1x1x1", False, {"data": "streams", "plateau": "none"}, {**LATE, "num_sanity_val_steps": 0}),
    "one, shorter than it says": ("1x1x1", False, {"data": "short"}, {}),
    "one, two loaders": ("1x1x1", False, {"data": "two"}, LATE),
    "dp2, reloading": ("dp2", False, {"plateau": "step"}, {"val_check_interval": 3, **RELOADING}),
    "dp2, workers": ("dp2", False, {"data": "workers"}, {"val_check_interval": 3}),
    "pp2 chunks 2, half": ("pp2 chunks 2", True, {"plateau": "none"}, {"val_check_interval": 3}),
    "pp2 chunks 2, stream": ("pp2 chunks 2", False, {"data": "stream", **SHARDED}, {"val_check_interval": 3}),
    "dp2 x tp2, half": ("dp2 x tp2", True, {"plateau": "none"}, {"val_check_interval": 3}),
    "dp2 x pp2, half": ("dp2 x pp2", True, {"plateau": "none"}, {"val_check_interval": 3}),
    "dp2 x pp2": ("dp2 x pp2", False, SHARDED, {"val_check_interval": 3}),
}


@pytest.mark.parametrize("case", daily(CASES, "one, stream", "dp2, workers", "dp2 x pp2"))
def test_a_run_goes_on_bit_by_bit(ranks: Pools, tmp_path: Path, case: str) -> None:
    name, half, hparams, arguments = CASES[case]
    size, layout = LAYOUTS[name]
    hparams = dict(hparams)
    sharded = {"save_distributed_checkpoint": True, "async_save": True} if hparams.pop("sharded", False) else {}
    for found in ranks(size, lightning=True).run(
        interrupted, {**layout, **sharded}, str(tmp_path), half, hparams, arguments
    ):
        assert len(found) >= 5
        assert not any(found.values()), found


def accumulating(layout: Layout, directory: str) -> dict[str, tuple[bool, bool]]:
    """For each checkpoint whether the resumed run differs, and whether there was a warning."""
    trail = Trail(directory)
    scramble(3)
    straight = trained(layout, trail, None, False, {}, accumulate_grad_batches=3)
    found = {}
    for name in trail.saved:
        again = Trail()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resumed = trained(layout, again, f"{directory}/{name}", False, {}, accumulate_grad_batches=3)
        warned = any("between two optimizer steps" in str(each.message) for each in caught)
        found[name] = bool(compared(resumed, again, straight, trail)), warned
    return found


def test_a_run_goes_on_from_an_optimizer_step(ranks: Pools, tmp_path: Path) -> None:
    """Between two, accumulated gradients are lost, with a warning."""
    size, layout = LAYOUTS["pp2 chunks 2"]
    found, _ = ranks(size, lightning=True).run(accumulating, layout, str(tmp_path))
    lost = ("batch 0.0", "start 0.4")
    assert found == {name: (name in lost, name in lost) for name in found}
    assert set(lost) < set(found)


def saved_again(directory: str) -> list[str]:
    """The files after a run that goes on for two batches, where a step takes three."""
    arguments: dict[str, Any] = {"accumulate_grad_batches": 3, "enable_checkpointing": True, "max_epochs": -1}
    data = DataLoader(dataset(96), 8)
    for steps, resume in ((2, None), (9, f"{directory}/step=2.ckpt")):
        saving = ModelCheckpoint(directory, "{step}", every_n_train_steps=2)
        trainer = make_trainer({}, max_steps=steps, callbacks=[saving], **arguments)
        if resume:
            trainer.fit_loop.max_epochs, trainer.limit_train_batches = 1, 8
        trainer.fit(Regression(), data, ckpt_path=resume)
    checkpoint = torch.load(f"{directory}/step=2.ckpt", weights_only=True)
    return [*(each.name for each in Path(directory).iterdir()), checkpoint["hybrid_parallel"]["moment"]]


def test_a_checkpoint_is_not_replaced_between_two_steps(ranks: Pools, tmp_path: Path) -> None:
    (found,) = ranks(1, lightning=True).run(saved_again, str(tmp_path))
    assert found == ["step=2.ckpt", {"kind": "batch end", "epochs": 0, "batches": 6}]


# -- other ways to stop ------------------------------------------------------------------------------------------------


def stopped(layout: Layout, directory: str, steps: int, limits: dict[str, Any]) -> list[str]:
    """What is different after a run that `max_steps` ended and a checkpoint of its end."""
    hparams = {"data": "stream"} if steps == 9 else {}
    arguments = {"val_check_interval": 3, "max_epochs": 3, **limits}
    trail = Trail()
    scramble(3)
    straight = trained(layout, trail, None, False, hparams, **arguments)
    scramble(3)
    path = f"{directory}/stopped.ckpt"
    trained(layout, Trail(), None, False, hparams, save=path, **{**arguments, "max_steps": steps})
    scramble(4)
    again = Trail()
    resumed = trained(layout, again, path, False, hparams, **arguments)
    assert again.events[0][0] in ("validation", (steps // BATCHES, steps % BATCHES, steps, steps + 1))
    for run in (straight, resumed):  # that the first run was at its end is part of it
        run["loops"] = None
    return compared(resumed, again, straight, trail)


@pytest.mark.parametrize("limits", [{}, {"max_steps": 15}], ids=["epochs", "steps"])
@pytest.mark.parametrize("steps", [4, 9, 12])
def test_a_run_that_max_steps_ended_goes_on(ranks: Pools, tmp_path: Path, steps: int, limits: dict[str, Any]) -> None:
    """In the middle of an epoch, at a validation, and where an epoch has ended too."""
    size, layout = LAYOUTS["pp2 chunks 2" if steps == 4 else "1x1x1"]
    for found in ranks(size, lightning=True).run(stopped, layout, str(tmp_path), steps, limits):
        assert not found


def ended(layout: Layout, directory: str, resume: str | None, path: str) -> None:
    """A run without dropout, with the same samples in a step whatever the layout; its end is saved."""
    scramble(3 if resume is None else 4)
    trail = Trail(directory if resume is None else None)
    hparams = {"data": "joined", "dropout": 0.0, "plateau": "none"}
    trained(layout, trail, resume, False, hparams, save=path, val_check_interval=3, gradient_clip_val=0.5)


OTHERS = [("dp2 x pp2", "dp2 x tp2"), ("dp2", "pp2 chunks 2"), ("pp2 chunks 2", "1x1x1"), ("1x1x1", "dp2 x pp2")]


@pytest.mark.parametrize(("name", "other"), OTHERS)
def test_the_data_go_on_under_another_layout(ranks: Pools, tmp_path: Path, name: str, other: str) -> None:
    size, layout = LAYOUTS[name]
    ranks(size, lightning=True).run(ended, layout, str(tmp_path), None, str(tmp_path / "straight.ckpt"))
    expected = torch.load(tmp_path / "straight.ckpt", weights_only=True)
    size, layout = LAYOUTS[other]
    for saved_at in ("batch 1.2", "epoch 0", "validation 12"):
        path = tmp_path / "resumed.ckpt"
        ranks(size, lightning=True).run(ended, layout, str(tmp_path), str(tmp_path / saved_at), str(path))
        found = torch.load(path, weights_only=True)
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
            assert_same(found[key], expected[key], where=f"{saved_at}: {key}")


# -- loaders with a state of their own ---------------------------------------------------------------------------------


class Stateful:
    """A loader that knows where it is, with other samples on each data rank and in each epoch."""

    def __init__(self, rank: int) -> None:
        self.rank, self.epoch, self.at = rank, 0, 0
        self.loaded: int | None = None

    def __iter__(self) -> Any:
        self.epoch += self.loaded is None
        self.at, self.loaded = self.loaded or 0, None
        while self.at < BATCHES:
            generator = torch.Generator().manual_seed(100 * self.rank + 10 * self.epoch + self.at)
            self.at += 1
            yield [torch.randn(4, n, generator=generator, dtype=torch.float64) for n in (6, 1)]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.loaded = state["epoch"], state["at"]


class Sized(Stateful):
    def __len__(self) -> int:
        return BATCHES


@pytest.mark.parametrize(("name", "data"), [("dp2", "stateful"), ("dp2", "sized"), ("dp2 x pp2", "sized")])
def test_a_loader_with_a_state_gets_that_of_its_data_rank(ranks: Pools, tmp_path: Path, name: str, data: str) -> None:
    size, layout = LAYOUTS[name]
    hparams = {"data": data, "plateau": "none"}
    for found in ranks(size, lightning=True).run(interrupted, layout, str(tmp_path), False, hparams, {}):
        del found["start 0.4"]  # it has given that batch already, and knows nothing else
        assert not any(found.values()), found


# -- checkpoints that nothing begins with ------------------------------------------------------------------------------


def tuned(directory: str) -> list[Any]:
    """A learning rate is looked for at the start of the second epoch."""

    class Finder(LearningRateFinder):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            """Not yet."""

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                self.lr_find(trainer, pl_module)

    trail = Trail()
    finder = Finder(num_training_steps=3, update_attr=True, attr_name="learning_rate")
    arguments: Any = {"default_root_dir": directory, "callbacks": [finder, trail], "enable_checkpointing": True}
    trainer = make_trainer({}, max_epochs=3, **arguments)
    trainer.fit(Regression(), DataLoader(dataset(24), 8))
    return [each[0] for each in trail.events if each[0] != "epoch"]


def peeked(path: str) -> list[Any]:
    """A hook reads another checkpoint than the one that the run begins with."""

    class Peeking(Noisy):
        def on_fit_start(self) -> None:
            self.load_state_dict(self.trainer.strategy.load_checkpoint(path)["state_dict"])

    trail = Trail()
    make_trainer({}, callbacks=[trail], enable_checkpointing=True).fit(Peeking())
    return [each[0] for each in trail.events]


def test_a_run_goes_on_from_the_checkpoint_that_it_begins_with_and_no_other(ranks: Pools, tmp_path: Path) -> None:
    """Lightning's tuners and hooks of the user read some too."""
    pool = ranks(1, lightning=True)
    (events,) = pool.run(tuned, str(tmp_path))
    assert events == [
        (epoch, batch, 3 * epoch + batch, 3 * epoch + batch + 1) for epoch in range(3) for batch in range(3)
    ]
    pool.run(events_of, {}, str(tmp_path), None)
    (events,) = pool.run(peeked, str(tmp_path / "batch 1.2"))
    assert events[:BATCHES] == [(0, batch, batch, batch + 1) for batch in range(BATCHES)]


# -- the record --------------------------------------------------------------------------------------------------------


def events_of(layout: Layout | None, directory: str | None, resume: str | None) -> tuple[list[Any], list[str]]:
    """What happened in a run, and whether Lightning warned that the data do not go on."""
    trail = Trail(directory)
    scramble(3 if resume is None else 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(layout, trail, resume, False, {"data": "joined", "plateau": "none"})
    return trail.events, [text for text in (str(each.message) for each in caught) if "not resumable" in text]


@pytest.mark.parametrize("name", ["1x1x1", "dp2 x tp2"])
def test_without_the_record_a_run_does_not_go_on(ranks: Pools, tmp_path: Path, name: str) -> None:
    """Then it is a checkpoint as Lightning writes it."""
    size, layout = LAYOUTS[name]
    pool = ranks(size, lightning=True)
    straight = pool.run(events_of, layout, str(tmp_path), None)
    whole = torch.load(tmp_path / "batch 1.2", weights_only=True)
    coordinates = list(whole["hybrid_parallel"].pop("ranks"))
    assert coordinates == ([(0, 0, 0)] if size == 1 else [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)])
    torch.save(whole, tmp_path / "bare")
    goes_on = pool.run(events_of, layout, None, str(tmp_path / "batch 1.2"))
    does_not = pool.run(events_of, layout, None, str(tmp_path / "bare"))
    for rank in range(size):
        (events, _), (right, silent), (wrong, warned) = straight[rank], goes_on[rank], does_not[rank]
        assert right == events[-len(right) :]
        assert wrong != events[-len(wrong) :]
        assert not silent
        assert bool(warned) is (rank == 0)


def test_plain_lightning_resumes_what_a_resumed_run_wrote(ranks: Pools, tmp_path: Path) -> None:
    """Although loaders that were brought back have told Lightning that they have a state."""
    size, layout = LAYOUTS["pp2 chunks 2"]
    first, second = str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    ranks(size, lightning=True).run(part, layout, None, 4, first)
    ranks(size, lightning=True).run(part, layout, first, 9, second)
    assert "combined_loader" not in torch.load(second)["loops"]["fit_loop"]["state_dict"]
    assert part(None, second, 11, None) == 11
    assert ranks(size, lightning=True).run(part, layout, second, 11, None) == [11, 11]


def part(layout: Layout | None, resume: str | None, steps: int, save: str | None) -> int:
    trainer = make_trainer(layout, max_steps=steps, max_epochs=-1)
    trainer.fit(Regression(), DataLoader(dataset(48), 8, shuffle=True), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer.global_step


class Fails(Callback):
    def on_train_epoch_start(self, *args: Any) -> None:
        raise KeyError("of the user")


def failing(layout: Layout, directory: str) -> str:
    """Resume after an epoch, with a callback that fails before the first batch."""
    path = f"{directory}/first.ckpt"
    part(layout, None, 6, path)
    data = DataLoader(dataset(48), 8, shuffle=True)
    with pytest.raises(Exception, match="") as error:  # noqa: PT011
        make_trainer(layout, max_epochs=2, callbacks=[Fails()]).fit(Regression(), data, ckpt_path=path)
    return str(error.value)


def test_the_first_cause_is_shown_where_a_resumed_run_fails_before_its_first_batch(
    ranks: Pools, tmp_path: Path
) -> None:
    assert ranks(1, lightning=True).run(failing, {}, str(tmp_path)) == ["'of the user'"]


def in_double(layout: Layout, directory: str) -> list[str]:
    """Where a run differs that goes on from a checkpoint of half its steps, with a module made in float32."""
    found = []
    for resume in (None, f"{directory}/batch 0.2"):
        trail = Trail(directory if resume is None else None, ("batch 0.2",))
        trainer = make_trainer(layout, precision="64-true", callbacks=[trail], enable_checkpointing=True)
        module = Regression().float()
        scramble(3)
        trainer.fit(module, DataLoader(dataset(40), 8, shuffle=True), ckpt_path=resume)
        assert {value.dtype for value in weights(module).values()} == {torch.float64}
        found.append(weights(module))
    return differences(*found)


class Reloads(Callback):
    """Keeps a layer in float32, and loads the weights again in the run."""

    def __init__(self, directory: str) -> None:
        self.path = f"{directory}/again.ckpt"

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.head.float()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.path)
        trainer.strategy.load_checkpoint(self.path)


def keeps_float32(layout: Layout, directory: str) -> set[torch.dtype]:
    """The precision of a head after its weights have been loaded again in a run in double precision."""
    module = HeadInFloat32().float()
    trainer = make_trainer(layout, precision="64-true", callbacks=[Reloads(directory)], max_steps=2)
    trainer.fit(module, DataLoader(dataset(40), 8))
    return {parameter.dtype for parameter in module.head.parameters()}


class HeadInFloat32(Regression):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head((self.body(h) + h).float()).double()


def test_loading_in_a_run_leaves_what_the_user_has_made_of_the_precision(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(2, lightning=True).run(keeps_float32, PP2, str(tmp_path)) == [{torch.float32}] * 2


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_of_a_run_in_double_precision_are_not_rounded_as_they_are_loaded(
    ranks: Pools, tmp_path: Path, sharded: bool
) -> None:
    """Lightning loads them into the module as it was made, and gives it its precision then."""
    layout = {**PP2, "save_distributed_checkpoint": sharded}
    assert ranks(2, lightning=True).run(in_double, layout, str(tmp_path)) == [[], []]


def test_a_run_goes_on_twice(ranks: Pools, tmp_path: Path) -> None:
    """What a resumed run writes in the same epoch knows the whole epoch."""
    ranks(2, lightning=True).run(twice, LAYOUTS["dp2"][1], str(tmp_path))


def twice(layout: Layout, directory: str) -> None:
    hparams = {"data": "stream"}
    trail = Trail()
    scramble(3)
    straight = trained(layout, trail, None, False, hparams)
    resume = None
    for steps in (2, 4, 5):
        scramble(3 if resume is None else steps)
        path = f"{directory}/{steps}.ckpt"
        trained(layout, Trail(), resume, False, hparams, save=path, max_steps=steps)
        resume = path
    again = Trail()
    resumed = trained(layout, again, resume, False, hparams)
    straight["loops"] = resumed["loops"] = None
    assert not compared(resumed, again, straight, trail)


# -- loaders on their own ----------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def test_states_of_generators_that_nobody_draws_from_are_kept_once() -> None:
    scramble(3)
    loader = ReplayableLoader((torch.rand(2) for _ in range(9)), CPU)
    iterator = iter(loader)
    for number in range(9):
        torch.rand(1)  # as a step does
        if number == 5:
            np.random.rand()
        next(iterator)
    recorded = list(loader.record(9, 0, cycles=False)[0]["generators"].values())
    assert len(recorded) == 9
    assert len({states["torch"] for states in recorded}) == 9
    assert len({id(states["python"]) for states in recorded}) == len({id(states["numpy"]) for states in recorded}) == 2
    assert recorded[4]["numpy"] is recorded[0]["numpy"]
    assert recorded[5]["numpy"] is recorded[8]["numpy"]


@pytest.mark.parametrize("others_draw", [False, True])
@pytest.mark.parametrize("kind", ["shuffled", "own generator", "stream", "silent"])
def test_an_iterator_is_brought_back(kind: str, others_draw: bool) -> None:
    def loader() -> DataLoader[Any]:
        if kind == "stream":
            return DataLoader(Stream(24), 4)
        if kind == "silent":
            return DataLoader(dataset(24), 4)
        generator = torch.Generator().manual_seed(5) if kind == "own generator" else None
        return DataLoader(Augmented(24), 4, shuffle=True, generator=generator)

    def batches(iterator: Iterator[Any], number: int) -> list[Tensor]:
        found = []
        for _ in range(number):
            if others_draw:
                torch.rand(1)
            found.append(next(iterator)[0])
        return found

    scramble(3)
    first = ReplayableLoader(loader(), CPU)
    iterator = iter(first)
    batches(iterator, 3)
    record, states = first.record(3, 1, cycles=False), generator_states(CPU)
    rest = batches(iterator, 3)
    if kind == "silent" or not others_draw:  # drawn at the beginning only, or in one go
        assert len(record[0]["generators"]) == 1

    scramble(4)
    second = ReplayableLoader(loader(), CPU)
    second.replay(record, 2, 1)
    again = iter(second)
    batches(again, 2)
    third = next(again)
    assert second.record(3, 0, cycles=False)[0]["events"] == record[0]["events"]
    set_generator_states(states, CPU)
    for found, expected in zip(batches(again, 3), rest, strict=True):
        assert torch.equal(found, expected)
    assert next(again, None) is None
    assert third is not None

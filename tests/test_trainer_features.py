"""The Trainer's arguments, tools and plugins, in a pipeline as in one process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, Timer
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from lightning_hybrid import HybridStrategy
from tests.pool import Pools
from tests.training_jobs import (
    LAYOUTS,
    PP2,
    Losses,
    Regression,
    Result,
    assert_same,
    loader,
    make_trainer,
    together,
    train,
    weights,
)

Layout = Mapping[str, Any] | None


# -- other packages and launchers --------------------------------------------------------------------------------------


@pytest.mark.rows(4)
def test_the_other_package_of_lightning_says_that_it_is_another() -> None:
    other = pytest.importorskip("pytorch_lightning")
    with pytest.raises(ValueError, match=r"instance of `pytorch_lightning\.strategies\.Strategy`"):
        other.Trainer(accelerator="cpu", strategy=HybridStrategy())
    with pytest.raises(ValueError, match="'hybrid'"):
        other.Trainer(accelerator="cpu", strategy="hybrid")


# -- time and steps ----------------------------------------------------------------------------------------------------


class Slow(Regression):
    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(0.02 * (1 + self.trainer.global_rank))


def stopped_by_time(layout: Layout) -> tuple[int, int]:
    timer = Timer(timedelta(seconds=0.5))
    trainer = make_trainer(layout, callbacks=[timer], max_epochs=1000)
    trainer.fit(Slow(), loader())
    return trainer.global_step, trainer.current_epoch


@pytest.mark.rows(39)
def test_a_time_limit_stops_every_rank_at_the_same_step(ranks: Pools) -> None:
    first, other = ranks(2, lightning=True).run(stopped_by_time, PP2)
    assert first == other
    assert 0 < first[0] < 500


def stopped_by_steps(layout: Layout, arguments: Mapping[str, Any]) -> tuple[int, int]:
    trainer = make_trainer(layout, **arguments)
    trainer.fit(Regression(), loader())
    return trainer.global_step, trainer.current_epoch


@pytest.mark.rows(39)
@pytest.mark.parametrize(
    "arguments",
    [{"max_steps": 7, "max_epochs": -1}, {"max_epochs": 1, "min_epochs": 2}, {"max_epochs": 3, "min_steps": 12}],
    ids=["max_steps", "min_epochs", "min_steps"],
)
def test_limits_of_steps_and_epochs_hold(ranks: Pools, arguments: dict[str, Any]) -> None:
    expected = stopped_by_steps(None, arguments)
    assert ranks(2, lightning=True).run(stopped_by_steps, PP2, arguments) == [expected, expected]


def barebones(layout: Layout) -> list[Any]:
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if layout is None else 2,
        strategy="auto" if layout is None else HybridStrategy(**layout),
        barebones=True,
        max_epochs=1,
    )
    module = Regression()
    trainer.fit(module, loader())
    return [weights(module)]


@pytest.mark.rows(66)
def test_barebones_trains_the_same(ranks: Pools) -> None:
    results = ranks(2, lightning=True).run(barebones, PP2)
    assert_same(together([result[0] for result in results]), barebones(None)[0])


# -- inference mode ----------------------------------------------------------------------------------------------------


class InPlace(Regression):
    """Changes the batch, and a state made at the start of the epoch, in place."""

    def on_test_epoch_start(self) -> None:
        self.total = torch.zeros(1, dtype=torch.float64)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        x.sub_(0.5)
        self.total += self.loss((x, y)).detach() * len(x)
        self.log("total", self.total.sum(), reduce_fx="max")


def evaluated(layout: Layout, inference_mode: bool) -> Any:
    trainer = make_trainer(layout, inference_mode=inference_mode)
    metrics = trainer.test(InPlace(), loader(), verbose=False)
    return metrics, trainer.test_loop.inference_mode


@pytest.mark.rows(48)
@pytest.mark.parametrize("inference_mode", [True, False])
def test_evaluation_may_work_in_place(ranks: Pools, inference_mode: bool) -> None:
    expected = evaluated(None, inference_mode)
    assert expected[1] is inference_mode
    assert_same(ranks(2, lightning=True).run(evaluated, PP2, inference_mode), [expected, expected])


# -- tuning ------------------------------------------------------------------------------------------------------------


def tuned(layout: Layout, directory: str, as_callback: bool) -> Any:
    finder = LearningRateFinder(num_training_steps=12) if as_callback else None
    trainer = make_trainer(
        layout, callbacks=[finder] if finder else [], default_root_dir=directory, max_steps=15, max_epochs=9
    )
    module = Regression()
    if finder is None:
        found = Tuner(trainer).lr_find(module, loader(), num_training=12)
        assert found is not None
    else:
        trainer.fit(module, loader())
        found = finder.optimal_lr
    return {"results": found.results, "suggestion": found.suggestion(), "rate": module.hparams["learning_rate"]}


@pytest.mark.rows(49)
@pytest.mark.parametrize("as_callback", [False, True])
def test_the_learning_rate_finder_finds_what_it_finds_in_one_process(
    ranks: Pools, tmp_path: Path, as_callback: bool
) -> None:
    expected = tuned(None, str(tmp_path), as_callback)
    results = ranks(2, lightning=True).run(tuned, PP2, str(tmp_path), as_callback)
    assert_same(results, [expected, expected], rtol=1e-8)


def scaled(layout: Layout) -> str:
    with pytest.raises(MisconfigurationException) as caught:
        make_trainer(layout, callbacks=[BatchSizeFinder()]).fit(Regression(), loader())
    return str(caught.value)


@pytest.mark.rows(50)
def test_the_batch_size_finder_is_refused_by_lightning(ranks: Pools) -> None:
    for text in ranks(2, lightning=True).run(scaled, PP2):
        assert "not supported with distributed strategies" in text


# -- checkpoints and plugins -------------------------------------------------------------------------------------------


class Stamped(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint({**checkpoint, "stamp": storage_options or "none"}, path)


def saved(layout: Layout, path: str, asynchronous: bool) -> Any:
    plugin = AsyncCheckpointIO(Stamped()) if asynchronous else Stamped()
    trainer = make_trainer(layout, plugins=[plugin], max_steps=2)
    module = Regression()
    trainer.fit(module, loader())
    trainer.save_checkpoint(path, storage_options=None if asynchronous else "given")
    plugin.teardown()
    trainer.strategy.barrier()
    resumed = make_trainer(layout, plugins=[Stamped()], max_steps=4, max_epochs=2)
    module = Regression()
    resumed.fit(module, loader(), ckpt_path=path, weights_only=True)
    return resumed.global_step, weights(module)


def uninterrupted() -> dict[str, Tensor]:
    """Plain Lightning would begin the data anew after the two steps."""
    return train(Regression(), None, loader(), max_steps=4, max_epochs=2).weights


@pytest.mark.rows(56, 57, 58)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_plugin_writes_and_reads_checkpoints(ranks: Pools, tmp_path: Path, asynchronous: bool) -> None:
    results = ranks(2, lightning=True).run(saved, PP2, str(tmp_path / "two.ckpt"), asynchronous)
    assert [steps for steps, _ in results] == [4, 4]
    assert_same(together([result[1] for result in results]), uninterrupted())
    stamp = torch.load(tmp_path / "two.ckpt", weights_only=True)["stamp"]
    assert stamp == ("none" if asynchronous else "given")


def saved_with_options(layout: Layout, path: str) -> str:
    trainer = make_trainer(layout, max_steps=1)
    trainer.fit(Regression(), loader())
    with pytest.raises(TypeError) as caught:
        trainer.save_checkpoint(path, storage_options={"a": 1})
    return str(caught.value)


@pytest.mark.rows(58)
def test_storage_options_are_refused_on_every_rank_by_a_plugin_that_has_none(ranks: Pools, tmp_path: Path) -> None:
    texts = ranks(2, lightning=True).run(saved_with_options, PP2, str(tmp_path / "a.ckpt"))
    assert "storage_options" in texts[0]
    assert texts[0] == texts[1]


# -- the module --------------------------------------------------------------------------------------------------------


def compiled(layout: Layout) -> str:
    module: Any = torch.compile(Regression(), backend="eager")
    with pytest.raises(RuntimeError) as caught:
        make_trainer(layout).fit(module, loader())
    return str(caught.value)


@pytest.mark.rows(62)
def test_a_compiled_module_is_refused_by_lightning(ranks: Pools) -> None:
    for text in ranks(2, lightning=True).run(compiled, PP2):
        assert "compiled" in text


class CompiledLayers(Regression):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.body:
            layer.compile(backend="eager")


def with_compiled_layers(layout: Layout) -> Result:
    return train(CompiledLayers(), layout, loader(), max_steps=3)


@pytest.mark.rows(62)
def test_layers_that_are_compiled_one_by_one_train(ranks: Pools) -> None:
    expected = with_compiled_layers(None)
    results = ranks(2, lightning=True).run(with_compiled_layers, PP2)
    assert_same([result.losses for result in results], [expected.losses] * 2)
    assert_same(together([result.weights for result in results]), expected.weights)


class OnMeta(Regression):
    """Its body is made in `configure_model`, on the meta device where Lightning says so."""

    def __init__(self) -> None:
        super().__init__()
        self.body = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.body is None:
            with torch.random.fork_rng():
                torch.manual_seed(3)
                self.body = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]).double()


class MadeInSetup(Regression):
    """Its body is made in `setup`, with what only the data know."""

    def __init__(self) -> None:
        super().__init__()
        self.made = [self.body]
        del self.body

    def setup(self, stage: str) -> None:
        if self.made:
            self.body = self.made.pop()


def configured(layout: Layout, kind: type[Regression]) -> tuple[list[float], dict[str, Tensor]]:
    losses, module = Losses(), kind()
    trainer = make_trainer(layout, callbacks=[losses], max_epochs=2)
    trainer.fit(module, loader())
    trainer.validate(module, loader(), verbose=False)
    assert not {"setup", "configure_model"} & set(vars(module))
    return losses.values, weights(module)


@pytest.mark.rows(73)
@pytest.mark.parametrize("kind", [OnMeta, MadeInSetup])
def test_a_body_made_in_a_hook_trains(ranks: Pools, kind: type[Regression]) -> None:
    losses, expected = configured(None, kind)
    results = ranks(2, lightning=True).run(configured, PP2, kind)
    assert_same([result[0] for result in results], [losses, losses])
    assert_same(together([result[1] for result in results]), expected)


class Extending(Regression):
    def setup(self, stage: str) -> None:
        self.body = nn.Sequential(*self.body, nn.Linear(8, 8).double())


def extended(layout: Layout) -> str:
    with pytest.raises(ValueError, match="replaced") as caught:
        make_trainer(layout).fit(Extending(), loader())
    return str(caught.value)


@pytest.mark.rows(73)
def test_a_body_that_is_replaced_after_it_was_divided_is_refused_on_every_rank(ranks: Pools) -> None:
    texts = ranks(2, lightning=True).run(extended, PP2)
    assert texts[0] == texts[1]
    assert "`configure_model`" in texts[0]


class Gathering(Regression):
    """Uses the predictions of all replicas in the loss's logs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        prediction = self(x)
        everyone = self.all_gather(prediction.detach())
        self.log("mean_of_all", everyone.mean(), on_step=True, on_epoch=False)
        return nn.functional.mse_loss(prediction, y)


def gathered(layout: Layout, batch_size: int) -> float:
    return train(Gathering(), layout, loader(batch_size), max_steps=2).metrics["mean_of_all"]


@pytest.mark.rows(74)
@pytest.mark.parametrize("name", ["pp2", "pp2 x dp2"])
def test_all_gather_in_a_step_gathers_over_the_replicas(ranks: Pools, name: str) -> None:
    size, replicas, layout = LAYOUTS[name]
    layout = {**layout, "num_microbatches": 2}
    assert_same(ranks(size, lightning=True).run(gathered, layout, 4), [gathered(None, 4 * replicas)] * size)


class OnZeroOnly(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("zero", loss, rank_zero_only=True, on_step=True)
        return loss


def on_zero(layout: Layout) -> float | None:
    return train(OnZeroOnly(), layout, loader(), max_steps=2).metrics.get("zero")


@pytest.mark.rows(27)
def test_a_log_of_rank_zero_only_has_the_value_of_the_last_stage(ranks: Pools) -> None:
    assert_same(ranks(2, lightning=True).run(on_zero, PP2)[0], on_zero(None))


class Named(Regression):
    """Optimizer groups by name and by attribute, one of them empty on most ranks, and steps counted in advance."""

    def configure_optimizers(self) -> Any:
        decayed = [p for name, p in self.named_parameters() if name.startswith("body") and name.endswith("weight")]
        rest = [p for name, p in self.named_parameters() if name.startswith("body") and not name.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest}, {"params": self.head.parameters()}]
        groups += [{"params": [self.embed.weight], "lr": 0.02}, {"params": [self.embed.bias]}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def named_groups(layout: Layout) -> Any:
    result = train(Named(), layout, loader(), max_epochs=2, accumulate_grad_batches=2)
    rates = [group["lr"] for group in result.trainer.optimizers[0].param_groups]
    steps = result.trainer.estimated_stepping_batches
    return {"losses": result.losses, "rates": rates, "steps": steps}, result.weights


@pytest.mark.rows(31)
def test_optimizer_groups_by_name_and_attribute_and_estimated_steps(ranks: Pools) -> None:
    expected, whole = named_groups(None)
    results = ranks(3, lightning=True).run(named_groups, LAYOUTS["pp3"][2])
    assert_same([result[0] for result in results], [expected] * 3)
    assert_same(together([result[1] for result in results]), whole)

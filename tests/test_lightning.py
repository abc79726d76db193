"""What Lightning offers around training works on every rank as in one process: monitors, callbacks, loops."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_hybrid import HybridStrategy
from lightning_hybrid.distributed.pytree import map_leaves
from tests.pool import Pools
from tests.training_jobs import (
    LAYOUTS,
    PP2,
    Losses,
    Regression,
    assert_same,
    loader,
    make_trainer,
    plain,
    together,
    train,
    weights,
)

Layout = Mapping[str, Any] | None


# -- monitors ---------------------------------------------------------------------------------------------------------


class Monitored(Regression):
    """Learns too fast, so that the validation loss goes up and down."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.01)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def monitored(layout: Layout, batch_size: int, directory: str) -> dict[str, Any]:
    best = ModelCheckpoint(
        directory, "{epoch}-{val_loss:.6f}", monitor="val_loss", save_top_k=2, mode="min", save_last=True
    )
    stopping = EarlyStopping("val_loss", patience=2, min_delta=0.002)
    losses = Losses()
    trainer = make_trainer(
        layout, max_epochs=12, enable_checkpointing=True, callbacks=[best, stopping, losses], log_every_n_steps=1
    )
    module = Monitored()
    trainer.fit(module, loader(batch_size), loader(batch_size, seed=2))
    scheduler = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    return {
        "best": Path(best.best_model_path).name,
        "kept": {Path(path).name: float(score) for path, score in best.best_k_models.items()},
        "last": Path(best.last_model_path).name,
        "stopped": (stopping.stopped_epoch, trainer.global_step, trainer.current_epoch),
        "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
        "scheduler": {key: value for key, value in scheduler.items() if isinstance(value, (int, float))},
        "callback_metrics": plain(trainer.callback_metrics),
        "logged_metrics": plain(trainer.logged_metrics),
        "losses": losses.values,
    }


@pytest.mark.rows(28, 29, 30)
@pytest.mark.parametrize("name", LAYOUTS)
def test_monitors_agree_on_all_ranks_and_with_one_process(ranks: Pools, tmp_path: Path, name: str) -> None:
    size, replicas, layout = LAYOUTS[name]
    expected = monitored(None, 8 * replicas, str(tmp_path / "one"))
    assert expected["stopped"][0] > 0, "the test must stop early"
    assert expected["learning_rate"] < 0.05, "the plateau must be seen"
    results = ranks(size, lightning=True).run(monitored, layout, 8, str(tmp_path / "ranks"))
    for result in results:
        losses = result.pop("losses")
        if replicas == 1:
            assert_same(losses, expected["losses"])
        assert_same(result, {key: value for key, value in expected.items() if key != "losses"})
    assert sorted(path.name for path in (tmp_path / "ranks").iterdir()) == sorted(
        path.name for path in (tmp_path / "one").iterdir()
    )


# -- what steps return ------------------------------------------------------------------------------------------------


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class Outputs(Callback):
    """Keeps what callbacks are given."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, Any, Any]] = []

    def _keep(self, phase: str, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((phase, batch_idx, map_leaves(_detached, outputs), batch[0].sum()))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._keep("train", outputs, batch, batch_idx)

    def on_validation_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        self._keep("validate", *arguments[:3])

    def on_test_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        self._keep("test", *arguments[:3])

    def on_predict_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        self._keep("predict", *arguments[:3])


class Returns(Regression):
    """Steps that return all kinds of things."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        prediction = self(x)
        errors = (prediction - y).square()
        if batch_idx % 2 == 0:
            return errors.mean()
        tensors = {"prediction": prediction, "features": (x[:, :2], {"long": x.long()}), "mean": errors.mean()}
        values = {"scale": 0.25, "name": "odd", "number": batch_idx, "flag": True, "nothing": None}
        return {"loss": errors.mean(), **tensors, **values}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("val_loss", loss, sync_dist=True)
        return loss if batch_idx % 2 == 0 else None

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        prediction = self(x)
        self.log("test_loss", nn.functional.mse_loss(prediction, y), sync_dist=True)
        return {"prediction": prediction, "rank": "text", "shape": tuple(prediction.shape)}

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        prediction = self(batch[0])
        return prediction if batch_idx % 2 == 0 else {"prediction": prediction, "index": batch_idx}


def life(layout: Layout, batch_size: int) -> dict[str, Any]:
    """Fit, validate, test, predict, and fit again, with the same Trainer and with new ones."""
    outputs = Outputs()
    module = Returns()
    trainer = make_trainer(layout, max_epochs=1, callbacks=[outputs])
    trainer.fit(module, loader(batch_size), loader(batch_size, 20, seed=2))
    result: dict[str, Any] = {"validated": trainer.validate(module, loader(batch_size, 20, seed=2))}
    result["tested"] = trainer.test(module, loader(batch_size, 20, seed=3))
    result["predicted"] = trainer.predict(module, loader(batch_size, 20, seed=4))
    result["predicted_two"] = trainer.predict(module, [loader(batch_size, 20), loader(batch_size, 8)])
    assert trainer.predict(module, loader(batch_size, 8), return_predictions=False) is None
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(batch_size))
    result["steps"] = trainer.global_step
    again = make_trainer(layout, max_epochs=1, callbacks=[outputs])
    again.fit(module, loader(batch_size))
    result["tested_again"] = make_trainer(layout).test(module, loader(batch_size, 20, seed=3))
    result["seen"] = outputs.seen
    result["weights"] = weights(module)
    return result


@pytest.mark.rows(20, 45, 71)
@pytest.mark.parametrize("name", ["pp2", "pp3", "chunks 2"])
def test_what_steps_return_reaches_every_rank_in_a_whole_life_of_fits_and_tests(ranks: Pools, name: str) -> None:
    size, _, layout = LAYOUTS[name]
    expected = life(None, 8)
    results = ranks(size, lightning=True).run(life, layout, 8)
    assert_same(together([result.pop("weights") for result in results]), expected.pop("weights"))
    for result in results:
        assert_same(result, expected)


@pytest.mark.rows(20)
def test_what_steps_return_at_two_replicas_is_each_replicas_share(ranks: Pools) -> None:
    expected = life(None, 16)
    results = ranks(4, lightning=True).run(life, LAYOUTS["pp2 x dp2"][2], 8)
    assert_same(together([result.pop("weights") for result in results]), expected.pop("weights"))
    for first, last in ((0, 2), (1, 3)):  # the stages of one replica
        assert_same(results[first], results[last], 0.0)
    for key in ("validated", "tested", "steps"):
        for result in results:
            assert_same(result[key], expected[key])
    for index, whole in enumerate(expected["predicted"]):
        for replica in (0, 1):
            mine = results[replica]["predicted"][index]
            if isinstance(whole, dict):
                assert_same(mine["prediction"], whole["prediction"][replica::2])
            else:
                assert_same(mine, whole[replica::2])


class KeepPredictions(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[Tensor, list[int]]] = []
        self.epoch: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        self.batches.append((prediction, indices))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epoch.append((predictions, batch_indices))


class Predicts(Regression):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0])


def predictions(layout: Layout, batch_size: int, num_samples: int) -> tuple[Any, Any, Any]:
    writer = KeepPredictions()
    predicted = make_trainer(layout, callbacks=[writer]).predict(Predicts(), loader(batch_size, num_samples))
    return predicted, writer.batches, writer.epoch


@pytest.mark.rows(47)
def test_predictions_come_in_order_and_once_for_each_sample_with_their_indices(ranks: Pools) -> None:
    expected = predictions(None, 8, 33)
    for result in ranks(2, lightning=True).run(predictions, PP2, 8, 33):
        assert_same(result, expected)
    whole = torch.cat(expected[0])
    # 17 and 16 samples: one replica has a batch more.
    results = ranks(4, lightning=True).run(predictions, LAYOUTS["pp2 x dp2"][2], 8, 33)
    for rank, (predicted, batches, _) in enumerate(results):
        assert_same(torch.cat(predicted), whole[rank % 2 :: 2])
        assert [index for _, indices in batches for index in indices] == list(range(rank % 2, 33, 2))


def few(layout: Layout, num_samples: int) -> Any:
    """Evaluate few samples: what is predicted, and how it is written; a validation and a test."""
    module, batch_size = Predicts(), 4
    writer = KeepPredictions()
    trainer = make_trainer(layout, callbacks=[writer])
    predicted = trainer.predict(module, loader(batch_size, num_samples))
    several = trainer.predict(module, [loader(batch_size, num_samples), loader(batch_size, 8)])
    limited = make_trainer(layout, limit_predict_batches=1).predict(module, loader(batch_size, num_samples))
    module.test_step = module.validation_step  # type: ignore[method-assign]
    values = [*trainer.validate(module, loader(1, num_samples)), *trainer.test(module, loader(1, num_samples))]
    return {"predicted": predicted, "limited": limited, "several": several, "values": values}, writer.epoch


@pytest.mark.rows(47)
@pytest.mark.parametrize(
    ("size", "replicas", "layout"),
    [(2, 2, {}), (4, 2, LAYOUTS["pp2 x dp2"][2]), (4, 2, {"tensor_parallel_size": 2}), (3, 3, {})],
)
def test_replicas_without_samples_predict_nothing(
    ranks: Pools, size: int, replicas: int, layout: dict[str, Any]
) -> None:
    expected, _ = few(None, 1)
    for rank, (result, epochs) in enumerate(ranks(size, lightning=True).run(few, layout, 1)):
        replica = rank // layout.get("tensor_parallel_size", 1) % replicas  # stages are outermost
        assert_same(result["values"], expected["values"])
        for key in ("predicted", "limited"):
            assert_same(result[key], expected[key] if replica == 0 else [])
        assert_same(result["several"][0], expected["several"][0] if replica == 0 else [])
        assert_same(torch.cat(result["several"][1]), torch.cat(expected["several"][1])[replica::replicas])
        assert epochs[0][1] == [[[0]] if replica == 0 else []]
        assert_same(epochs[0][0], result["predicted"])


def refused() -> str:
    with pytest.raises(ValueError, match="zero_stage=0") as caught:
        make_trainer({"zero_stage": 2}).predict(Predicts(), loader(4, 1))
    return str(caught.value)


def test_shards_of_replicas_without_samples_are_not_waited_for(ranks: Pools) -> None:
    for text in ranks(2, lightning=True).run(refused):
        assert "fewer samples to predict than replicas (2)" in text


# -- gradients --------------------------------------------------------------------------------------------------------


class Tied(Regression):
    """The head is the embedding; the first, a middle and the last layer of the body share weights."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(8)
            self.embed, self.head = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.head.weight = self.embed.weight
        self.body[5][0].weight = self.body[0][0].weight
        self.body[3] = self.body[0]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(nn.functional.pad(x, (0, 2))).mean(1, keepdim=True), y)


class Norms(Callback):
    """Gradient norms before and after clipping, and what Lightning's own utility says of one process."""

    def __init__(self) -> None:
        self.values: list[tuple[float, ...]] = []

    def _norms(self, trainer: Any, module: Any) -> list[float]:
        if isinstance(trainer.strategy, HybridStrategy):
            return [float(trainer.strategy.grad_norm(p)) for p in (2.0, 1.0, float("inf"))]
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        return [float(torch.nn.utils.get_total_norm(gradients, p)) for p in (2.0, 1.0, float("inf"))]

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.values.append(tuple(self._norms(trainer, module)))

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.values.append(tuple(self._norms(trainer, module)))


def clipped(layout: Layout, batch_size: int, algorithm: str, value: float) -> dict[str, Any]:
    norms = Norms()
    how: dict[str, Any] = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
    result = train(Tied(), layout, loader(batch_size), max_epochs=2, callbacks=[norms], **how)
    return {"norms": norms.values, "weights": result.weights}


@pytest.mark.rows(8, 9, 60)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("algorithm", "value"), [("norm", 0.3), ("value", 0.05)])
def test_gradient_norm_and_clipping_with_tied_parameters_are_those_of_one_process(
    ranks: Pools, name: str, algorithm: str, value: float
) -> None:
    size, replicas, layout = LAYOUTS[name]
    expected = clipped(None, 8 * replicas, algorithm, value)
    before, after = expected["norms"][0], expected["norms"][1]
    assert before != after, "the test must clip"
    results = ranks(size, lightning=True).run(clipped, layout, 8, algorithm, value)
    for result in results:
        assert_same(result["norms"], expected["norms"])
    assert_same(together([result["weights"] for result in results]), expected["weights"])

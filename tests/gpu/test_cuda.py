"""CUDA: one process, and two stages that share one device through pinned host memory."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridStrategy
from lightning_hybrid.memory import offload
from tests.pool import Pools

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class Model(LightningModule):
    """A residual around the body, dropout off, so that the numbers are those of one process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 16)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True)) for _ in range(4)])
        self.head = nn.Linear(16, 3)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        h = self.embed(batch[0])
        return nn.functional.cross_entropy(self.head(h + self.body(h)), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.values.append(float(outputs["loss"]))


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(44, 6, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 8)


def fit(strategy: Any, **arguments: Any) -> dict[str, Any]:
    losses = Losses()
    module = Model()
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        strategy=strategy,
        callbacks=[losses],
        max_epochs=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(module, loader(), loader())
    weights = {name: p.detach().cpu() for name, p in module.named_parameters() if not p.is_meta}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"losses": losses.values, "weights": weights, "metrics": metrics}


def fit_as_node(settings: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """One of two nodes with one device each, which is the same device."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK=os.environ["RANK"], GROUP_RANK=os.environ["RANK"])
    strategy = HybridStrategy(process_group_backend="gloo", **settings)
    return fit(strategy, num_nodes=2, **arguments)


def assert_alike(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=tolerance)
    for name, weight in found["weights"].items():
        torch.testing.assert_close(weight, expected["weights"][name], rtol=tolerance, atol=tolerance)


def test_one_process_is_like_the_single_device_strategy() -> None:
    assert_alike(fit(HybridStrategy()), fit("auto"), 1e-6)


def test_micro_batches_on_one_device() -> None:
    assert_alike(fit(HybridStrategy(num_microbatches=4)), fit("auto"), 1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "schedule": "gpipe"},
        {"pipeline_parallel_size": 2, "schedule": "interleaved_1f1b", "num_chunks": 2},
        {"data_parallel_size": 2},
    ],
    ids=str,
)
def test_two_ranks_on_one_device(ranks: Pools, settings: dict[str, Any]) -> None:
    expected = fit("auto") if "data_parallel_size" not in settings else None
    results = ranks(2, lightning=True).run(fit_as_node, settings, {})
    if expected is None:  # replicas see halves of the data: compared with each other
        expected = results[0]
        results = [{**result, "losses": expected["losses"]} for result in results]
    for result in results:
        assert_alike(result, expected, 1e-4)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "64-true"])
def test_precisions_on_two_stages(ranks: Pools, precision: str) -> None:
    expected = fit("auto", precision=precision)
    for result in ranks(2, lightning=True).run(fit_as_node, {"pipeline_parallel_size": 2}, {"precision": precision}):
        assert_alike(result, expected, {"64-true": 1e-9}.get(precision, 5e-2))


@pytest.mark.parametrize("what", ["activations", "optimizer", ["activations", "optimizer"]], ids=str)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_what_lies_on_the_host_changes_nothing(what: Any, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.Offload.__init__, "__kwdefaults__", {"min_bytes": 0})
    found = fit(HybridStrategy(num_microbatches=4, offload=what), precision=precision)
    assert_alike(found, fit(HybridStrategy(num_microbatches=4), precision=precision), 1e-6)


def test_states_are_on_the_host_between_steps() -> None:
    class Places(Callback):
        seen: set[str] = set()  # noqa: RUF012

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            states = trainer.optimizers[0].state.values()
            self.seen.update(state["exp_avg"].device.type for state in states)

    places = Places()
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        strategy=HybridStrategy(offload="optimizer"),
        callbacks=[places],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Model(), loader())
    assert places.seen == {"cpu"}

"""Lightning's own callbacks and loops around training do on every rank what they do in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from tests.pool import Pools
from tests.test_logging_features import Memory
from tests.training_jobs import (
    LAYOUTS,
    PP2,
    Losses,
    Regression,
    assert_same,
    loader,
    make_trainer,
    together,
    train,
    weights,
)

Layout = Mapping[str, Any] | None


class Cycled(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    @property
    def backbone(self) -> nn.Module:
        return self.embed

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.body.parameters() if p.requires_grad]},
            {"params": [p for p in self.head.parameters() if p.requires_grad], "lr": 0.02},
        ]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)
        if self.embed.weight.requires_grad:
            optimizer.add_param_group({"params": list(self.embed.parameters())})
        rates = [0.02] * len(optimizer.param_groups)
        scheduler = OneCycleLR(optimizer, max_lr=rates, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Descending(Cycled):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class Finetuned(Cycled):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Configured(Finetuned):
    """Makes its body in `configure_model`, which averaging callbacks call before the Trainer does."""

    def __init__(self) -> None:
        super().__init__()
        self.made = [self.body]
        self.body = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.body is None:
            self.body = self.made.pop()


#: The modules of stories that are not about `Cycled`.
MODULES: dict[str, type[Cycled]] = {
    "finetuning": Finetuned,
    "stochastic average": Finetuned,
    "average of a late body": Configured,
}

#: Name: the callbacks, and further arguments of the Trainer.
STORIES: dict[str, tuple[Callable[[], list[Callback]], dict[str, Any]]] = {
    "accumulation": (lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})], {}),
    "accumulation with an incomplete window": (list, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}),
    "learning rates": (lambda: [LearningRateMonitor(log_momentum=True, log_weight_decay=True)], {}),
    "average": (lambda: [EMAWeightAveraging(decay=0.7)], {}),
    "average of a late body": (lambda: [EMAWeightAveraging(decay=0.5)], {}),
    "stochastic average": (lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)], {"max_epochs": 4}),
    "finetuning": (lambda: [BackboneFinetuning(1, lambda _: 1.5, backbone_initial_lr=0.01)], {}),
    "display": (lambda: [ModelSummary(2), TQDMProgressBar(), Timer(timedelta(hours=1))], {"enable_progress_bar": True}),
    "anomaly": (list, {"detect_anomaly": True}),
    "deterministic": (list, {"deterministic": True}),
    "profiler": (list, {"profiler": "simple"}),
}


def told(layout: Layout, name: str, batch_size: int) -> dict[str, Any]:
    callbacks, arguments = STORIES[name]
    memory = Memory()
    calls: list[str] = []
    spy = LambdaCallback(
        on_before_zero_grad=lambda *_: calls.append("zero_grad"),
        on_before_backward=lambda *_: calls.append("backward"),
        on_after_backward=lambda *_: calls.append("after"),
        on_before_optimizer_step=lambda *_: calls.append("step"),
        on_train_batch_start=lambda *_: calls.append("batch"),
    )
    defaults: dict[str, Any] = {"max_epochs": 3, "logger": memory, "log_every_n_steps": 1}
    data = loader(batch_size), loader(batch_size, 20, seed=2)
    how = {**defaults, **arguments, "callbacks": [*callbacks(), spy]}
    result = train(MODULES.get(name, Cycled)(), layout, *data, **how)
    return {
        "losses": result.losses,
        "weights": result.weights,
        "history": memory.history if result.trainer.is_global_zero else None,
        "rates": [group["lr"] for group in result.trainer.optimizers[0].param_groups],
        "steps": result.trainer.global_step,
        "calls": calls,
    }


def check(ranks: Pools, layout_name: str, name: str) -> None:
    size, replicas, layout = LAYOUTS[layout_name]
    expected = told(None, name, 8 * replicas)
    results = ranks(size, lightning=True).run(told, layout, name, 8)
    assert_same(together([result.pop("weights") for result in results]), expected.pop("weights"))
    for rank, result in enumerate(results):
        if rank > 0:
            result["history"] = expected["history"]
        if replicas > 1:
            result["losses"] = expected["losses"]
        # Backward comes before the step's own hooks are called, and gradients are zeroed before.
        for story in (result, expected):
            story["counts"] = {call: story["calls"].count(call) for call in ("batch", "zero_grad", "backward", "step")}
        assert_same({**result, "calls": None}, {**expected, "calls": None})


@pytest.mark.rows(7, 31, 32, 34, 35, 36, 39, 65, 72)
@pytest.mark.parametrize("name", STORIES)
def test_a_callback_in_a_pipeline_does_what_it_does_in_one_process(ranks: Pools, name: str) -> None:
    check(ranks, "pp2", name)


@pytest.mark.rows(7, 32, 34, 35, 36)
@pytest.mark.parametrize("name", ["accumulation", "learning rates", "average", "stochastic average", "finetuning"])
def test_a_callback_with_two_replicas_does_what_it_does_in_one_process(ranks: Pools, name: str) -> None:
    check(ranks, "pp2 x dp2", name)


class Buffered(Cycled):
    """Layers of both stages are tied, and there are buffers inside and outside of the body."""

    def __init__(self) -> None:
        super().__init__()
        self.body[5][0].weight = self.body[4][0].weight
        self.body[4][0].bias = self.body[1][0].bias
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.body[5].register_buffer("offset", torch.full((3,), 0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += self.all_gather(torch.tensor(float(len(batch[0])))).sum()  # over the replicas
        return super().training_step(batch, batch_idx)


#: Name: the module, the callbacks of a Trainer that goes on to an epoch, and the epochs of both runs.
RESUMED: dict[str, tuple[type[Cycled], Callable[[], list[Callback]], int, int]] = {
    "finetuning that is still frozen": (Finetuned, lambda: [BackboneFinetuning(5)], 1, 3),
    "finetuning with another optimizer": (Descending, lambda: [BackboneFinetuning(5)], 1, 3),
    "finetuning that has unfrozen": (Finetuned, lambda: [Unfreezing()], 2, 4),
    "average": (Buffered, lambda: [EMAWeightAveraging(decay=0.7)], 2, 4),
    "stochastic average": (Finetuned, lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)], 3, 5),
}


class Unfreezing(BaseFinetuning):
    """Unfreezes layers of both stages."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.body[1], pl_module.body[4]])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.body[1], pl_module.body[4]], optimizer, lr=1e-3)


def interrupted(layout: Layout, name: str, batch_size: int, directory: str, resume: str | None) -> dict[str, Any]:
    """Fit and save, or go on from a file and save."""
    kind, callbacks, first, last = RESUMED[name]
    losses = Losses()
    trainer = make_trainer(layout, max_epochs=last if resume else first, callbacks=[*callbacks(), losses])
    module = kind()
    trainer.fit(module, loader(batch_size), loader(batch_size, 20, seed=2), ckpt_path=resume)
    trainer.save_checkpoint(f"{directory}/{'last' if resume else 'first'}.ckpt")
    return {"losses": losses.values, "weights": weights(module)}


FILE = ("state_dict", "callbacks", "optimizer_states", "lr_schedulers", "current_model_state", "averaging_state")


def check_files(mine: Path, other: Path, *keys: str) -> None:
    saved, expected = (torch.load(path, weights_only=False) for path in (mine, other))
    assert [key for key in saved if key != "hybrid_parallel"] == list(expected)
    for key in keys or FILE:
        assert_same(saved.get(key), expected.get(key), where=key)
    assert ties(saved["state_dict"]) == ties(expected["state_dict"])


def ties(state: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of each value that has several."""
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(value.data_ptr(), []).append(name)
    return [each for each in names.values() if len(each) > 1]


@pytest.mark.rows(34, 35, 36)
@pytest.mark.parametrize("layout_name", ["pp2", "pp2 x dp2"])
@pytest.mark.parametrize("name", RESUMED)
def test_a_callback_resumes_in_a_pipeline_as_in_one_process(
    ranks: Pools, tmp_path: Path, name: str, layout_name: str
) -> None:
    size, replicas, layout = LAYOUTS[layout_name]
    pool = ranks(size, lightning=True)
    ours, one, mixed = (tmp_path / where for where in ("ours", "one", "mixed"))
    for directory in (ours, one, mixed):
        directory.mkdir()
    interrupted(None, name, 8 * replicas, str(one), None)
    pool.run(interrupted, layout, name, 8, str(ours), None)
    check_files(ours / "first.ckpt", one / "first.ckpt")

    expected = interrupted(None, name, 8 * replicas, str(one), f"{one}/first.ckpt")
    results = pool.run(interrupted, layout, name, 8, str(ours), f"{ours}/first.ckpt")
    assert_same(together([result["weights"] for result in results]), expected["weights"])
    check_files(ours / "last.ckpt", one / "last.ckpt")
    for result in results if replicas == 1 else []:
        assert_same(result["losses"], expected["losses"])
    # for plain Lightning
    assert_same(interrupted(None, name, 8 * replicas, str(mixed), f"{ours}/first.ckpt"), expected)


class SavesPlaceholders(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"copies": [{"weight": torch.ones(2)}, {"weight": torch.ones(2, device="meta")}]}


def saved_without_values(layout: Layout, path: str) -> str:
    trainer = make_trainer(layout, callbacks=[SavesPlaceholders()], max_steps=1)
    trainer.fit(Cycled(), loader())
    with pytest.raises(ValueError, match="which have no values") as caught:
        trainer.save_checkpoint(path)
    return str(caught.value)


@pytest.mark.rows(53)
def test_a_checkpoint_without_values_is_refused_on_every_rank(ranks: Pools, tmp_path: Path) -> None:
    texts = ranks(2, lightning=True).run(saved_without_values, PP2, str(tmp_path / "a.ckpt"))
    assert texts[0] == texts[1]
    assert "callbacks.SavesPlaceholders.copies.1.weight" in texts[0]
    assert not list(tmp_path.iterdir())


def averages_of_both(layout: Layout, directory: str) -> str:
    saver = ModelCheckpoint(directory, monitor="val_loss", filename="{epoch}")
    arguments: dict[str, Any] = {"callbacks": [EMAWeightAveraging(decay=0.5), saver], "enable_checkpointing": True}
    trainer = make_trainer(layout, max_epochs=2, **arguments)
    trainer.fit(Cycled(), loader(), loader(8, 20, seed=2))
    return saver.best_model_path


@pytest.mark.rows(28, 34)
def test_the_best_checkpoint_has_the_average_of_the_whole_model(ranks: Pools, tmp_path: Path) -> None:
    one = averages_of_both(None, str(tmp_path / "one"))
    ours, _ = ranks(2, lightning=True).run(averages_of_both, PP2, str(tmp_path / "ours"))
    assert Path(ours).name == Path(one).name
    check_files(Path(ours), Path(one), "state_dict", "current_model_state")


def test_an_average_that_replicas_shard_is_saved_whole(ranks: Pools, tmp_path: Path) -> None:
    """Each replica has a part of the average, as of the weights: all take part in saving it."""
    saved = []
    for layout in ({}, {"zero_stage": 3}):
        path, _ = ranks(2, lightning=True).run(averages_of_both, layout, str(tmp_path / f"{len(layout)}"))
        saved.append(torch.load(path, weights_only=False))
    for key in ("state_dict", "current_model_state"):
        assert_same(saved[1][key], saved[0][key], where=key)


def order_of_hooks(layout: Layout) -> list[str]:
    return told(layout, "accumulation with an incomplete window", 8)["calls"]


@pytest.mark.rows(6, 7)
def test_hooks_are_called_in_an_order_in_which_gradients_survive(ranks: Pools) -> None:
    for calls in ranks(2, lightning=True).run(order_of_hooks, PP2):
        windows = " ".join(calls).split("step")
        assert len(windows) > 3
        for window in windows[:-1]:
            words = window.split()
            assert words.count("zero_grad") == 1
            assert words.index("zero_grad") < words.index("backward")
            assert words.count("backward") == words.count("after") == words.count("batch")

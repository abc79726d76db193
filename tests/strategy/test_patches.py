"""Parts of Lightning that take one process for the whole model are told better."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    ModelPruning,
    ModelSummary,
    RichModelSummary,
    ThroughputMonitor,
)
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_summary import ModelSummary as Summary
from torch import Tensor, nn

from lightning_hybrid import Faults
from lightning_hybrid.strategy.patches import CALLBACK_ORDER, add_callbacks, remove_callbacks
from tests.pool import Pools
from tests.test_logging_features import Memory
from tests.training_jobs import LAYOUTS, PP2, Regression, loader, make_trainer

Layout = Mapping[str, Any] | None


class WithExample(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 6, dtype=torch.float64)


def summarized(layout: Layout, rich: bool) -> dict[str, Any]:
    summaries: list[Summary] = []

    class Kept(RichModelSummary if rich else ModelSummary):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_fit_start(trainer, pl_module)
            summaries.append(self._summary(trainer, pl_module))

    trainer = make_trainer(layout, callbacks=[Kept(max_depth=2)], enable_model_summary=True, max_steps=1)
    module = WithExample()
    trainer.fit(module, loader())
    (summary,) = summaries
    return {
        "names": summary.layer_names,
        "parameters": summary.param_nums,
        "total": (summary.total_parameters, summary.trainable_parameters),
        "size": summary.model_size,
        "example": module.example_input_array is not None,
    }


@pytest.mark.rows(33)
@pytest.mark.parametrize("rich", [False, True])
def test_the_summary_is_that_of_the_whole_model(ranks: Pools, rich: bool) -> None:
    expected = summarized(None, rich)
    assert expected["total"][0] == sum(parameter.numel() for parameter in Regression().parameters())
    assert ranks(2, lightning=True).run(summarized, PP2, rich) == [expected, expected]


class Counted(Regression):
    flops_per_batch = 1000

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def throughput(layout: Layout, batch_size: int) -> dict[str, float]:
    memory = Memory()
    monitor = ThroughputMonitor(lambda batch: len(batch[0]), window_size=2)
    trainer = make_trainer(layout, callbacks=[monitor], logger=memory, log_every_n_steps=1, max_steps=6)
    trainer.fit(Counted(), loader(batch_size, 96))
    last: dict[str, float] = {}
    for _, metrics in memory.history:
        last.update(metrics)
    return {key: value for key, value in last.items() if key.startswith("train")}


@pytest.mark.rows(38)
@pytest.mark.parametrize("name", ["pp2", "pp2 x dp2"])
def test_throughput_counts_replicas_and_not_stages(ranks: Pools, name: str) -> None:
    size, replicas, layout = LAYOUTS[name]
    counted = ranks(size, lightning=True).run(throughput, layout, 8)[0]
    if replicas == 1:
        assert "train/samples_per_sec" not in counted, "one replica is one device"
        return
    ratio = counted["train/samples_per_sec"] / counted["train/device/samples_per_sec"]
    assert ratio == pytest.approx(replicas)
    assert counted["train/samples"] == 6 * 8


class Peaks(ThroughputMonitor):
    """Knows a peak of the device, and keeps what each run takes it for."""

    def __init__(self) -> None:
        super().__init__(lambda batch: len(batch[0]))
        self.seen: list[set[float | None]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._throughputs[trainer.state.stage].available_flops = 100
        if stage == "fit":
            self._throughputs[RunningStage.VALIDATING].available_flops = 100

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.seen.append({throughput.available_flops for throughput in self._throughputs.values()})

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        self.on_train_start(trainer)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Nothing is measured."""

    on_validation_batch_end = on_validation_end = on_train_batch_end


def peaks(layout: Layout) -> tuple[list[set[float | None]], set[float | None]]:
    monitor, module = Peaks(), Counted()
    trainer = make_trainer(layout, callbacks=[monitor], max_steps=1, num_sanity_val_steps=0, logger=Memory())
    trainer.fit(module, loader(), loader())
    for _ in range(2):
        trainer.validate(module, loader(), verbose=False)
    return monitor.seen, {throughput.available_flops for throughput in monitor._throughputs.values()}


@pytest.mark.rows(38)
def test_the_peak_of_a_model_group_is_that_of_its_devices_in_every_run(ranks: Pools) -> None:
    for seen, after in ranks(2, lightning=True).run(peaks, PP2):
        assert len(seen) >= 3
        assert all(values == {200} for values in seen)
        assert after == {100}


def pruned(layout: Layout) -> str:
    module = Regression()
    pruning = ModelPruning("l1_unstructured", parameters_to_prune=[(module.head, "weight")], amount=0.5)
    with pytest.raises(ValueError, match="ModelPruning") as caught:
        make_trainer(layout, callbacks=[pruning]).fit(module, loader())
    return str(caught.value)


@pytest.mark.rows(36)
def test_pruning_is_refused_on_every_rank(ranks: Pools) -> None:
    texts = ranks(2, lightning=True).run(pruned, PP2)
    assert texts[0] == texts[1]
    assert "ModelPruning" in texts[0]
    assert "pipeline_parallel_size=1" in texts[0]


class ClipsByHand(Regression):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.norm = float(self.trainer.strategy.grad_norm())  # type: ignore[attr-defined]
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


def clipped(layout: Layout) -> tuple[float, float, list[str]]:
    module = ClipsByHand()
    trainer = make_trainer(layout, max_steps=3)
    if layout is None:
        gradients = lambda: nn.utils.get_total_norm([p.grad for p in module.parameters()])  # noqa: E731
        trainer.strategy.grad_norm = gradients  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader())
    texts = [str(warning.message) for warning in caught if "configure_gradient_clipping" in str(warning.message)]
    return module.norm, float(next(p.detach().sum() for p in module.parameters() if not p.is_meta)), texts


@pytest.mark.rows(10)
def test_clipping_by_hand_knows_the_whole_model_and_says_how(ranks: Pools) -> None:
    norm, weight, _ = clipped(None)
    first, other = ranks(2, lightning=True).run(clipped, PP2)
    assert [first[0], other[0]] == pytest.approx([norm, norm], rel=1e-10)
    assert first[1] == pytest.approx(weight, rel=1e-10)
    assert len(first[2]) == 1
    assert "`self.trainer.strategy.grad_norm()`, which use the gradients of the full model" in first[2][0]


def profiled(layout: Layout) -> dict[str, int]:
    trainer = make_trainer(layout, profiler="simple", max_steps=2, num_sanity_val_steps=0)
    trainer.fit(Regression(), loader())
    durations = trainer.profiler.recorded_durations  # type: ignore[attr-defined]
    return {name: len(seconds) for name, seconds in durations.items() if name.startswith("[pipeline]")}


@pytest.mark.rows(65)
def test_profilers_see_what_the_pipeline_does(ranks: Pools) -> None:
    first, last = ranks(2, lightning=True).run(profiled, PP2)
    work = {f"[pipeline]{name}": 2 * 4 for name in ("forward", "backward", "send", "receive")}
    assert first == last == {**work, "[pipeline]wait": 2 * 8, "[pipeline]reduce": 2}


def monitored(layout: Layout) -> bool:
    memory = Memory()
    trainer = make_trainer(
        layout, callbacks=[DeviceStatsMonitor(cpu_stats=True)], logger=memory, log_every_n_steps=1, max_steps=1
    )
    trainer.fit(Regression(), loader())
    return any("DeviceStatsMonitor" in key for _, metrics in memory.history for key in metrics)


@pytest.mark.rows(37)
def test_device_statistics_are_logged_by_each_rank_for_itself(ranks: Pools) -> None:
    pytest.importorskip("psutil")
    assert ranks(2, lightning=True).run(monitored, PP2) == [True, True]


class Order(Callback):
    """Looks at the callbacks of a run."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.types = [type(callback) for callback in trainer.callbacks]


def callback_types(layout: Layout) -> list[type]:
    order = Order()
    make_trainer(layout, max_steps=1, callbacks=[order]).fit(Regression(), loader())
    return order.types


def test_ours_go_before_the_users_in_the_order_that_is_written_down(ranks: Pools) -> None:
    for types in ranks(2, lightning=True).run(
        callback_types, {**PP2, "faults": Faults(on_nonfinite="skip"), "global_batch_size": 8}
    ):
        assert types[: len(CALLBACK_ORDER)] == list(CALLBACK_ORDER)
        assert Order in types[len(CALLBACK_ORDER) :]


def test_one_that_comes_later_takes_its_place_and_ours_are_taken_away() -> None:
    users: list[Callback] = [Order(), Order()]
    trainer = Trainer(callbacks=users, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    before = list(trainer.callbacks)  # type: ignore[attr-defined]
    ours = [object.__new__(kind) for kind in CALLBACK_ORDER]
    add_callbacks(trainer, ours[4], ours[2])
    add_callbacks(trainer, ours[3], ours[0], ours[6], ours[1], ours[5])
    assert trainer.callbacks == [*ours, *before]  # type: ignore[attr-defined]
    remove_callbacks(trainer)
    assert trainer.callbacks == before  # type: ignore[attr-defined]

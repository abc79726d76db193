"""Each function of `trainer/lightning_internals.py` alone, against the Lightning that is installed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.regression import MeanSquaredError
from torchmetrics.wrappers import Running

from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.trainer import lightning_internals as internals
from tests.pool import Pools


def quiet_trainer(**arguments: Any) -> Trainer:
    """A Trainer on the CPU that writes nothing."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**defaults, **arguments})


class Small(LightningModule):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(count: int = 4, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(count)).view(-1, 1), batch_size)  # type: ignore[arg-type]


# -- loops and their progress ------------------------------------------------------------------------------------------

# -- logged values -----------------------------------------------------------------------------------------------------


def test_results_are_intercepted_whoever_has_the_method() -> None:
    recorded: list[Any] = []

    class Logging(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            taken = self.log
            with internals.intercept_results(self.trainer, lambda *args, **kwargs: recorded.append((args, kwargs))):
                taken("inside", 2.0, on_step=True, batch_size=3)
            taken("outside", 3.0)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer()
    trainer.fit(Logging(), samples())
    (((name, value), arguments),) = recorded
    assert (name, float(value), arguments["on_step"], arguments["batch_size"]) == ("inside", 2.0, True, 3)
    assert trainer.callback_metrics.keys() == {"outside"}


def test_without_a_trainer_or_outside_of_a_run_there_are_no_results_to_intercept() -> None:
    for trainer in (None, quiet_trainer()):
        with internals.intercept_results(trainer, lambda *args, **kwargs: None):
            pass


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", [True, False])
def test_the_setting_of_distributed_samplers_is_found_and_changed(use: bool) -> None:
    trainer = quiet_trainer(use_distributed_sampler=use)
    assert internals.set_use_distributed_sampler(trainer, False) is use
    assert internals.set_use_distributed_sampler(trainer, True) is False


def test_lightning_reads_that_setting_when_it_prepares_a_loader() -> None:
    trainer = quiet_trainer(strategy="ddp")
    needs = trainer._data_connector._requires_distributed_sampler
    assert needs(samples())
    internals.set_use_distributed_sampler(trainer, False)
    assert not needs(samples())


def test_batch_samplers_are_unwrapped_and_wrapped_again() -> None:
    plain, other = BatchSampler(range(4), 2, False), BatchSampler(range(2), 1, False)
    wrapped = _IndexBatchSamplerWrapper(plain)
    assert internals.unwrap_batch_sampler(wrapped) is internals.unwrap_batch_sampler(plain) is plain
    assert internals.unwrap_batch_sampler(None) is None
    assert internals.rewrap_batch_sampler(other, plain) is other
    again = internals.rewrap_batch_sampler(other, wrapped)
    assert type(again) is _IndexBatchSamplerWrapper
    assert list(again) == [[0], [1]]


def test_indices_of_batches_are_those_that_lightning_records_in_predict() -> None:
    found: list[Any] = []

    class Predicting(Small):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            found.append(copy.deepcopy(internals.recorded_batch_indices(self.trainer.predict_dataloaders)))
            return super().predict_step(batch, batch_idx)

    quiet_trainer().predict(Predicting(), samples())
    assert found[-1] == [[0, 1], [2, 3]]


def test_indices_of_batches_are_set_where_lightning_reads_them() -> None:
    plain = samples()
    assert internals.recorded_batch_indices(plain) is None
    internals.set_recorded_batch_indices(plain, [])
    assert internals.recorded_batch_indices(plain) is None
    loader = DataLoader(range(4), batch_sampler=_IndexBatchSamplerWrapper(plain.batch_sampler))  # type: ignore
    indices: list[list[int]] = []
    internals.set_recorded_batch_indices(loader, indices)
    indices.append([3])
    assert internals.recorded_batch_indices(loader) == [[3]]
    assert quiet_trainer().predict_loop._get_batch_indices(loader) == [[3]]


# -- optimization and precision ----------------------------------------------------------------------------------------

# -- modules and callbacks ---------------------------------------------------------------------------------------------


def test_a_modules_trainer_is_found_if_there_is_one() -> None:
    module, trainer = Small(), quiet_trainer()
    assert internals.attached_trainer(module) is None
    assert internals.attached_trainer(nn.Linear(1, 1)) is None
    module.trainer = trainer
    assert internals.attached_trainer(module) is trainer


def test_attributes_of_lightning_are_not_taken_for_the_users() -> None:
    found: list[set[str]] = []

    class Storing(Small):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"a": 1})
            self.outputs: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            found.append(vars(self).keys() - internals.lightning_attributes())
            return super().training_step(batch, batch_idx)

    quiet_trainer().fit(Storing(), samples())
    assert found == [{"outputs"}]


def test_callbacks_log_through_the_function_that_is_set() -> None:
    recorded: list[Any] = []

    class Logging(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            internals.set_callback_log(trainer, lambda *args: recorded.append(args))

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            self.log("x", 1.0)

    quiet_trainer(callbacks=[Logging()]).fit(Small(), samples())
    assert recorded == [("x", 1.0)]


def test_the_hook_before_the_transfer_runs_inside_the_context() -> None:
    events: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        events.append("enter")
        yield
        events.append("leave")

    class Transferring(Small):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            events.append("hook")
            return batch

    module = Transferring()
    internals.wrap_before_batch_transfer(module, context)
    quiet_trainer().fit(module, samples())
    assert events == ["enter", "hook", "leave"]
    internals.unwrap_before_batch_transfer(module)
    assert "_on_before_batch_transfer" not in vars(module)
    quiet_trainer().fit(module, samples())
    assert events == ["enter", "hook", "leave", "hook"]


# -- torchmetrics ------------------------------------------------------------------------------------------------------


def test_the_value_of_forward_is_found_and_is_what_lightning_logs() -> None:
    class Logging(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            metric = MeanMetric()
            self.metric = metric
            assert internals.forward_value(metric) is None
            metric(3.0)
            assert internals.forward_value(metric) == 3.0
            internals.set_forward_value(metric, torch.tensor(5.0))
            self.log("x", metric, on_step=True, on_epoch=False)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer()
    trainer.fit(Logging(), samples())
    assert trainer.callback_metrics["x"] == 5.0


@pytest.mark.parametrize("on_step", [True, False])
def test_the_metric_of_a_batch_is_empty_and_synchronises_as_forward_does(on_step: bool) -> None:
    calls: list[Any] = []

    def gather(value: Tensor, group: Any = None) -> list[Tensor]:
        calls.append(value)
        return [value, value]

    arguments: dict[str, Any] = {"dist_sync_fn": gather, "distributed_available_fn": lambda: True}
    metric = SumMetric(dist_sync_on_step=on_step, **arguments)
    metric.update(7.0)
    copied = internals.batch_metric(metric)
    copied.update(2.0)
    assert copied.compute() == (4.0 if on_step else 2.0)
    assert len(calls) == (1 if on_step else 0)
    assert metric.sum_value == 7.0


def test_the_metric_of_a_batch_of_a_window_is_the_metric_in_the_window() -> None:
    assert type(internals.batch_metric(Running(SumMetric(), window=2))) is SumMetric


def test_arguments_are_those_that_update_takes() -> None:
    metric = MeanSquaredError()
    assert internals.update_arguments(metric, {"preds": 1, "target": 2, "other": 3}) == {"preds": 1, "target": 2}
    collection = MetricCollection([MeanSquaredError(), MeanMetric()])
    found = {name: internals.update_arguments(each, {"value": 1, "preds": 2}) for name, each in collection.items()}
    assert found == {"MeanSquaredError": {"preds": 2}, "MeanMetric": {"value": 1}}


def synchronised() -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = [dist.new_group([each]) for each in range(size)][rank]
    original, found = Metric.sync, []

    def total() -> float:
        metric = SumMetric()
        metric.update(1.0)
        return metric.compute().item()

    for reference in (GroupRef(own), GroupRef(own), None):
        internals.sync_metrics_over(reference)
        found.append(total())
    assert Metric.sync is original
    internals.sync_metrics_over(SimpleNamespace(is_alive=False))  # type: ignore[arg-type]
    found.append(total())  # groups that are gone leave torchmetrics' own choice
    internals.sync_metrics_over(None)
    return found


def test_metrics_synchronise_over_the_group_until_it_is_taken_back(ranks: Pools) -> None:
    assert ranks(2).run(synchronised) == [[1.0, 1.0, 2.0, 2.0]] * 2


# -- processes ---------------------------------------------------------------------------------------------------------

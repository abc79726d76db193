"""Each function of `trainer/lightning_internals.py` alone, against the Lightning that is installed."""

from __future__ import annotations

import ast
import copy
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.regression import MeanSquaredError
from torchmetrics.wrappers import Running

from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.trainer import lightning_internals as internals
from tests.make_internals_doc import FILE, document
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


BATCHES = 3


class Module(Small):
    """Has three batches of its own, a metric, and a value to log."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("batch", torch.tensor(float(batch_idx)))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Nothing to validate."""

    def train_dataloader(self) -> Any:
        return samples(2 * BATCHES)

    def val_dataloader(self) -> Any:
        return samples()


def make_trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    """Of one epoch, without validation."""
    defaults = {"max_steps": -1, "max_epochs": 1, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    return quiet_trainer(callbacks=list(callbacks), **{**defaults, **arguments})


class AtHook(Callback):
    """Calls a function with the Trainer whenever a hook is called, and keeps what it returns."""

    def __init__(self, hook: str, function: Callable[[Trainer], Any]) -> None:
        self.found: list[Any] = []
        setattr(self, hook, lambda trainer, *args: self.found.append(function(trainer)))


def at(hook: str, function: Callable[[Trainer], Any], **arguments: Any) -> list[Any]:
    """What a function returns at a hook of a short run."""
    callback = AtHook(hook, function)
    make_trainer(callback, **arguments).fit(Module())
    assert callback.found
    return callback.found


# -- loops and their progress ------------------------------------------------------------------------------------------


def test_is_last_batch() -> None:
    assert at("on_train_batch_end", internals.is_last_batch) == [False, False, True]


def test_is_accumulating() -> None:
    assert at("on_train_batch_end", internals.is_accumulating, accumulate_grad_batches=2) == [True, False, False]


def test_skips_backward() -> None:
    trainer = make_trainer()
    assert not internals.skips_backward(trainer)
    trainer.fit_loop._skip_backward = True  # what Lightning's callbacks do
    assert internals.skips_backward(trainer)


def test_end_restart() -> None:
    trainer = make_trainer(max_steps=9, max_epochs=-1)
    loops = trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop
    trainer.fit_loop.load_state_dict(trainer.fit_loop.state_dict())
    assert all(loop.restarting and loop.is_resuming for loop in loops)
    trainer.fit_loop.restarting = False
    assert trainer.fit_loop.restarting, "the public setter suffices"
    internals.end_restart(trainer)
    assert not any(loop.restarting or loop.is_resuming for loop in loops)


def test_skip_next_validation() -> None:
    def skip_second(trainer: Trainer) -> None:
        internals.skip_next_validation(trainer, skip=trainer.fit_loop.batch_idx == 1)

    validated = AtHook("on_validation_start", lambda trainer: trainer.fit_loop.batch_idx)
    trainer = make_trainer(
        validated, AtHook("on_train_batch_end", skip_second), limit_val_batches=1, val_check_interval=1
    )
    trainer.fit(Module())
    assert validated.found == [0, 2]


@pytest.mark.parametrize("runs", [True, False])
def test_replace_next_batch(runs: bool) -> None:
    calls: list[str] = []

    def action(run: Callable[[], None]) -> None:
        calls.append("action")
        if runs:
            run()

    begun = AtHook("on_train_batch_start", lambda trainer: calls.append("batch"))
    with ExitStack() as undo:
        trainer = make_trainer(
            begun,
            AtHook("on_train_start", lambda trainer: undo.enter_context(internals.replace_next_batch(trainer, action))),
        )
        trainer.fit(Module())
    assert calls == ["action", *["batch"] * BATCHES]


def test_no_batch_is_replaced_after_the_context() -> None:
    trainer = make_trainer()
    with internals.replace_next_batch(trainer, lambda run: pytest.fail("it was restored")):
        pass
    trainer.fit(Module())
    assert trainer.global_step == BATCHES


def test_before_validation() -> None:
    calls: list[str] = []
    started = AtHook("on_validation_start", lambda trainer: calls.append("validation"))
    trainer = make_trainer(started, limit_val_batches=1)
    with internals.before_validation(trainer, lambda: calls.append("action")):
        trainer.fit(Module())
    assert calls == ["action", "validation"]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Module())
    assert calls == ["action", "validation", "validation"]


# -- logged values -----------------------------------------------------------------------------------------------------


def log(trainer: Trainer, value: Any, batch_size: int = 1, **arguments: Any) -> None:
    """A call of `self.log` in a training step, behind what Lightning checks."""
    arguments = {"on_step": True, "on_epoch": True, "sync_dist_fn": trainer.strategy.reduce, **arguments}
    results: Any = internals.result_collection(trainer.fit_loop.epoch_loop)
    results.log("training_step", "key", value, batch_size=batch_size, **arguments)


def logged(trainer: Trainer, *, on_step: bool = False) -> float:
    results: Any = internals.result_collection(trainer.fit_loop.epoch_loop)
    return results.metrics(on_step)["callback"]["key"].item()


def resumed(trainer: Trainer) -> Trainer:
    """Another Trainer that continues what was logged."""
    other = make_trainer()
    internals.load_result_states(other, internals.result_states(trainer))
    return other


def test_result_collection() -> None:
    (entries,) = at(
        "on_train_epoch_end", lambda trainer: dict(internals.result_collection(trainer.fit_loop.epoch_loop))
    )
    assert list(entries) == ["training_step.batch"]
    assert entries["training_step.batch"].meta.metric_attribute is None
    assert internals.result_collection(make_trainer().fit_loop.epoch_loop.val_loop) == {}


def test_result_states() -> None:
    trainer = make_trainer()
    log(trainer, torch.tensor(3.0), 2, prog_bar=True)
    assert internals.result_states(trainer) == {
        "training_step.key": {
            "meta": {
                "fx": "training_step",
                "name": "key",
                "prog_bar": True,
                "logger": True,
                "on_step": True,
                "on_epoch": True,
                "enable_graph": False,
                "add_dataloader_idx": True,
                "dataloader_idx": None,
                "metric_attribute": None,
            },
            "reduction": ["torch", "mean"],
            "sync": [False, False],
            "numbers": {"value": torch.tensor(6.0), "cumulated_batch_size": torch.tensor(2)},
            "of_batch": torch.tensor(3.0),
            "updates": 1,
            "has_reset": False,
        }
    }


def test_results_over_a_process_group_of_the_users_have_no_state() -> None:
    trainer = make_trainer()
    log(trainer, torch.tensor(3.0), sync_dist_group="a group")
    assert internals.result_states(trainer) == {}


def test_load_result_states() -> None:
    trainer = make_trainer()
    log(trainer, torch.tensor(1.0), 2)
    other = resumed(trainer)
    assert logged(other) == logged(other, on_step=True) == 1.0
    log(other, torch.tensor(4.0), 1)
    assert logged(other) == 2.0
    assert logged(other, on_step=True) == 4.0
    assert logged(trainer) == 1.0


@pytest.mark.parametrize("reduction", [max, torch.max, "max"])
def test_results_continue_with_any_name_of_a_reduction(reduction: Any) -> None:
    trainer = make_trainer()
    log(trainer, torch.tensor(5.0), reduce_fx=max)
    other = resumed(trainer)
    log(other, torch.tensor(4.0), reduce_fx=reduction)
    assert logged(other) == 5.0
    log(other, torch.tensor(6.0), reduce_fx=reduction)
    assert logged(other) == 6.0


def test_the_first_log_after_a_resume_may_have_other_arguments() -> None:
    """Another layout has nothing to synchronise; within one run Lightning refuses it."""
    trainer = make_trainer()
    log(trainer, torch.tensor(1.0), sync_dist=True)
    other = resumed(resumed(trainer))
    log(other, torch.tensor(3.0), prog_bar=True)
    log(other, torch.tensor(5.0), prog_bar=True)
    assert logged(other) == 3.0
    results: Any = internals.result_collection(other.fit_loop.epoch_loop)
    assert results.metrics(on_step=True)["pbar"] == {"key_step": 5.0}
    (entry,) = results.values()
    assert not entry.meta.sync.should
    with pytest.raises(MisconfigurationException, match="twice"):
        log(other, torch.tensor(3.0), sync_dist=True)


def test_results_that_are_metrics_continue() -> None:
    trainer, module, other = make_trainer(), Module(), make_trainer()
    module.mean.update(3.0)
    log(trainer, module.mean, metric_attribute="mean")
    other.strategy.connect(module)
    internals.load_result_states(other, internals.result_states(trainer))
    (entry,) = internals.result_collection(other.fit_loop.epoch_loop).values()
    assert entry.value is module.mean
    assert logged(other) == 3.0


def test_noted_metrics() -> None:
    def noted(trainer: Trainer) -> Any:
        trainer.callback_metrics["mine"] = torch.tensor(1.0)
        return [dict(metrics) for metrics in internals.noted_metrics(trainer)]

    callback, logger, bar = at("on_train_batch_end", noted)[1]
    assert callback == {"mine": torch.tensor(1.0), "batch": torch.tensor(1.0)}
    assert logger == {"batch": torch.tensor(0.0)}  # the newest is not noted yet
    assert bar == {}


@pytest.mark.parametrize(("batches", "resets"), [(0, True), (1, True), (2, False)])
def test_set_num_logged_batches(batches: int, resets: bool) -> None:
    trainer = make_trainer()
    internals.set_num_logged_batches(trainer, batches)
    assert trainer._logger_connector.should_reset_tensors("training_step") is resets


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


def test_results_pass_through_a_function() -> None:
    def record(write: Any, name: str, value: Tensor, **arguments: Any) -> None:
        write(name, 10 * value, **{**arguments, "prog_bar": True})

    class Logging(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with internals.results_through(self.trainer, record):
                self.log("inside", 2.0, on_step=True)
            self.log("outside", 3.0)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer()
    trainer.fit(Logging(), samples())
    assert trainer.callback_metrics == {"inside": 20.0, "outside": 3.0}
    assert trainer.progress_bar_metrics == {"inside": 20.0}


def test_without_a_trainer_or_outside_of_a_run_there_are_no_results_to_intercept() -> None:
    for trainer in (None, quiet_trainer()):
        with internals.intercept_results(trainer, lambda *args, **kwargs: None):
            pass


def test_results_are_moved_only_where_they_are_not_yet() -> None:
    trainer = make_trainer()
    log(trainer, torch.tensor(3.0), 2)
    (entry,) = internals.result_collection(trainer.fit_loop.epoch_loop).values()
    move = mock.Mock(wraps=type(entry).to)
    with mock.patch.object(type(entry), "to", lambda *args: move(*args)):
        log(trainer, torch.tensor(5.0), 2)
        assert move.call_count == 1
        with internals.keep_results_in_place(), internals.keep_results_in_place():  # of another run
            log(trainer, torch.tensor(7.0), 4)
            assert move.call_count == 1
            assert logged(trainer) == 5.5
            entry.to(torch.device("meta"))
            assert move.call_count == 2
            assert entry.value.is_meta
        entry.to(torch.device("meta"))
        assert move.call_count == 3


# -- data --------------------------------------------------------------------------------------------------------------


def test_combined_loader() -> None:
    assert internals.combined_loader(make_trainer().fit_loop) is None
    (found,) = at("on_train_start", lambda trainer: internals.combined_loader(trainer.fit_loop))
    assert isinstance(found, CombinedLoader)
    assert len(found.flattened) == 1


def test_discard_loaders() -> None:
    def discard(trainer: Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        assert internals.combined_loader(loop) is not None
        internals.discard_loaders(loop)
        assert internals.combined_loader(loop) is None

    asked: list[int] = []

    class Asked(Module):
        def val_dataloader(self) -> Any:
            asked.append(self.trainer.global_step)
            return super().val_dataloader()

    make_trainer(AtHook("on_train_start", discard), limit_val_batches=1).fit(Asked())
    assert asked == [0, BATCHES]


def test_reload_epochs() -> None:
    found = at("on_train_epoch_end", internals.reload_epochs, max_epochs=3, reload_dataloaders_every_n_epochs=2)
    assert [training for training, _ in found] == [0, 0, 2]
    assert internals.reload_epochs(make_trainer()) == [-torch.inf, -torch.inf]


def test_set_reload_epochs() -> None:
    def postpone(trainer: Trainer) -> list[float]:
        found = internals.reload_epochs(trainer)
        internals.set_reload_epochs(trainer, [trainer.current_epoch, 0])
        return found

    found = at("on_train_epoch_end", postpone, max_epochs=4, reload_dataloaders_every_n_epochs=2)
    assert found == [[0, -torch.inf], [0, 0], [1, 0], [2, 0]]


def test_data_fetcher() -> None:
    assert internals.data_fetcher(make_trainer()) is None
    assert at("on_train_batch_end", lambda trainer: internals.data_fetcher(trainer).done) == [False, False, True]


class Unsized:
    def __iter__(self) -> Iterator[int]:
        return iter(range(2))


def fetcher() -> Any:
    made = _PrefetchDataFetcher()
    made.setup(CombinedLoader(Unsized()))
    return made


def test_start_fetching() -> None:
    ahead, started = fetcher(), fetcher()
    assert iter(ahead).fetched == 1
    internals.start_fetching(started)
    assert started.fetched == 0
    assert started.length is None
    assert not started.done
    assert next(started.iterator) == (0, 0, 0)


def test_fetch_ahead() -> None:
    started = fetcher()
    internals.start_fetching(started)
    internals.fetch_ahead(started)
    assert started.fetched == 1
    assert [(batch, started.done) for batch, *_ in started] == [(0, False), (1, True)]
    with pytest.raises(StopIteration):
        internals.fetch_ahead(started)


def test_batch_iterator() -> None:
    combined = CombinedLoader([range(2), range(3)], "max_size_cycle")
    assert internals.batch_iterator(combined) is None
    next(iter(combined))
    assert [next(iterator) for iterator in internals.batch_iterator(combined).iterators] == [1, 1]


def test_num_fetched() -> None:
    combined = CombinedLoader([range(5)], "max_size_cycle")
    iterator = iter(combined)
    for number in range(3):
        assert internals.num_fetched(internals.batch_iterator(combined)) == number
        next(iterator)


def test_begun_anew() -> None:
    combined = CombinedLoader([range(2), range(5)], "max_size_cycle")
    iterator = iter(combined)
    for _ in range(3):
        next(iterator)
    found = internals.begun_anew(internals.batch_iterator(combined))
    assert found == [True, False]
    found[1] = True
    next(iterator)
    with pytest.raises(StopIteration):  # the shorter one ends again, and all have ended once
        next(iterator)
    combined = CombinedLoader([range(2)], "min_size")
    iter(combined)
    assert internals.begun_anew(internals.batch_iterator(combined)) is None


def test_set_sampler_epoch() -> None:
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    internals.set_sampler_epoch(DataLoader(range(8), sampler=sampler), 5)  # type: ignore[arg-type]
    assert sampler.epoch == 5
    internals.set_sampler_epoch(object(), 5)


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


def test_few_workers_are_said_of_the_loader_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet_trainer()
    trainer.state.stage = RunningStage.TRAINING
    monkeypatch.setattr("lightning.fabric.utilities.data._num_cpus_available", lambda: 4)
    with pytest.warns(UserWarning, match="'train_dataloader' does not have many workers"):
        internals.warn_of_few_workers(samples(), trainer)


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


def test_replace_closure() -> None:
    calls: list[str] = []

    class Quiet(Closure):
        def __init__(self, step_fn: Any, backward_fn: Any, zero_grad_fn: Any) -> None:
            super().__init__(step_fn, backward_fn, zero_grad_fn)
            self.parts = {"zero_grad": zero_grad_fn, "step": step_fn, "backward": backward_fn}

        def closure(self, *args: Any, **kwargs: Any) -> Any:
            calls.extend(name for name, part in self.parts.items() if part is not None)
            return self.parts["step"]()

    trainer = make_trainer()
    epoch_loop = trainer.fit_loop.epoch_loop
    progress, own = epoch_loop.automatic_optimization.optim_progress, type(epoch_loop.automatic_optimization)
    trainer.fit_loop._skip_backward = True
    with internals.replace_closure(trainer, Quiet):
        replaced = epoch_loop.automatic_optimization
        assert internals.skips_backward(trainer)
        trainer.fit_loop._skip_backward = False
        assert isinstance(replaced, own)
        assert replaced.optim_progress is progress
        trainer.fit(Module())
    assert calls == ["zero_grad", "step", "backward"] * BATCHES
    restored = epoch_loop.automatic_optimization
    assert type(restored) is own
    assert restored.optim_progress is progress
    assert not internals.skips_backward(trainer)


def test_replaced_optimization_takes_a_step_without_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    monkeypatch.setattr(Trainer, "world_size", 2)
    with pytest.raises(RuntimeError, match="Skipping the `training_step` by returning None"):
        make_trainer().fit(Without())
    trainer = make_trainer()
    with internals.replace_closure(trainer, partial(Closure)):
        trainer.fit(Without())
    assert trainer.global_step == BATCHES


def test_is_about_several_optimizers() -> None:
    class Two(Small):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]

    with pytest.raises(RuntimeError) as error:
        quiet_trainer().fit(Two())
    assert internals.is_about_several_optimizers(error.value)
    assert not internals.is_about_several_optimizers(RuntimeError("another"))


def test_move_optimizer_states() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    internals.move_optimizer_states([optimizer], torch.device("meta"))
    state = optimizer.state[parameter]
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


# -- modules and callbacks ---------------------------------------------------------------------------------------------


def test_set_device_mesh() -> None:
    module, mesh = Module(), object()
    internals.set_device_mesh(module, mesh)  # type: ignore[arg-type]
    assert module.device_mesh is mesh
    internals.set_device_mesh(module, None)
    assert module.device_mesh is None


def test_without_example_input() -> None:
    module, example = Module(), torch.ones(1, 2)
    module.example_input_array = example
    with internals.without_example_input(module):
        assert module.example_input_array is None
    assert module.example_input_array is example


@pytest.mark.parametrize(("every", "step", "saves"), [(2, 4, False), (2, 3, True), (0, 4, True)])
def test_note_saved_step(tmp_path: Path, every: int, step: int, saves: bool) -> None:
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=every, every_n_epochs=None if every else 1)
    internals.note_saved_step(callback, step)
    assert (callback._last_global_step_saved != step) is saves


def test_throughputs() -> None:
    monitor = ThroughputMonitor(batch_size_fn=len)
    trainer = make_trainer()
    trainer.state.stage = RunningStage.TRAINING
    monitor.setup(trainer, Module(), "fit")
    (throughput,) = internals.throughputs(monitor)
    assert isinstance(throughput, Throughput)
    assert throughput.world_size == 1


def test_is_wrapping_io() -> None:
    assert internals.is_wrapping_io(AsyncCheckpointIO())
    assert AsyncCheckpointIO().checkpoint_io is None
    assert not internals.is_wrapping_io(TorchCheckpointIO())


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
    undo = ExitStack()

    class Logging(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            undo.enter_context(internals.replace_callback_log(trainer, lambda *args: recorded.append(args)))

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            self.log("x", 1.0)

    trainer, module = quiet_trainer(callbacks=[logging := Logging()]), Small()
    trainer.fit(module, samples())
    assert recorded == [("x", 1.0)]
    undo.close()
    assert logging.log == module.log


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
    with internals.wrap_before_batch_transfer(module, context):
        quiet_trainer().fit(module, samples())
    assert events == ["enter", "hook", "leave"]
    assert "_on_before_batch_transfer" not in vars(module)
    quiet_trainer().fit(module, samples())
    assert events == ["enter", "hook", "leave", "hook"]


# -- torchmetrics ------------------------------------------------------------------------------------------------------


def test_set_update_count() -> None:
    metric = MeanMetric()
    internals.set_update_count(metric, 3)
    assert metric.update_count == 3
    assert metric.update_called


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

    with internals.sync_metrics_over(GroupRef(own)):
        found.append(total())
    found.append(total())
    assert Metric.sync is original
    with internals.sync_metrics_over(SimpleNamespace(is_alive=False)):  # type: ignore[arg-type]
        found.append(total())  # groups that are gone leave torchmetrics' own choice
    return found


def test_metrics_synchronise_over_the_group_until_it_is_taken_back(ranks: Pools) -> None:
    assert ranks(2).run(synchronised) == [[1.0, 2.0, 2.0]] * 2


# -- processes ---------------------------------------------------------------------------------------------------------


def test_subprocess_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess_script.subprocess, "Popen", lambda command, env, cwd: seen.append(env))
    monkeypatch.setattr(subprocess_script, "_launch_process_observer", lambda processes: None)
    names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    for name in names:  # put back afterwards
        monkeypatch.setenv(name, os.environ.get(name, ""))
    for name in names[:-1]:
        monkeypatch.delenv(name)
    launcher = internals.subprocess_launcher(LightningEnvironment(), 2, 1, {"OF_CHILDREN": "1"}, nullcontext)
    assert not launcher.is_interactive_compatible
    assert "OF_CHILDREN" not in os.environ
    assert launcher.launch(lambda: "done") == "done"
    assert [each["OF_CHILDREN"] for each in seen] == ["1"]
    assert "OF_CHILDREN" not in os.environ


class Ranks:
    num_processes, root_device, local_rank = 2, torch.device("cpu"), 0
    cluster_environment = LightningEnvironment()


def refuse_workers(start_method: str, device: torch.device) -> None:
    raise RuntimeError(f"{start_method} on {device}")


def test_multiprocessing_launcher(capfd: pytest.CaptureFixture[str]) -> None:
    launcher = internals.multiprocessing_launcher(Ranks(), "fork", refuse_workers, lambda module: "why", nullcontext)  # type: ignore[arg-type]
    assert launcher.is_interactive_compatible
    with pytest.raises(RuntimeError, match="fork on cpu"):
        launcher.launch(lambda: "done")
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(Small(), DataLoader(torch.ones(4, 1), 1))
    trainer.state.fn = TrainerFn.FITTING
    with pytest.warns(UserWarning, match="why"):
        output = launcher._collect_rank_zero_results(trainer, "results")
    assert output is not None
    assert (output.weights_path, output.trainer_results) == (None, "results")


def test_is_interactive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not internals.is_interactive()
    monkeypatch.setattr("lightning.fabric.utilities.imports._IS_INTERACTIVE", True)
    assert internals.is_interactive()


def test_ended_loaders_know_their_length() -> None:
    loaders = CombinedLoader([samples(8)], "max_size_cycle")
    iter(loaders)
    next(loaders)
    internals.end_loaders(loaders)
    assert len(loaders) == 4
    assert len(list(iter(loaders))) == 4


def test_choose_checkpoint(tmp_path: Path) -> None:
    file, found = tmp_path / "chosen.ckpt", []
    data = DataLoader(torch.ones(4, 1), 1)
    trainer = quiet_trainer(max_steps=2)
    trainer.fit(Small(), data)
    trainer.save_checkpoint(file)

    def choose(path: Any) -> Path:
        found.append(path)
        return file

    again = quiet_trainer(max_steps=3, max_epochs=2)
    with internals.choose_checkpoint(again, choose):
        again.fit(Small(), data)
    assert (found, again.ckpt_path, again.global_step) == ([None], file, 3)
    again.predict(Small(), data)
    assert len(found) == 1


def test_find_last_remotely() -> None:
    original, files = ModelCheckpoint._find_last_checkpoints, fsspec.filesystem("memory")
    data = DataLoader(torch.ones(4, 1), 1)
    try:
        trainer = quiet_trainer(callbacks=[ModelCheckpoint("memory://find")], enable_checkpointing=True)
        for name in ("last-v1.ckpt", "last-v2.ckpt/inside"):
            files.pipe_file(f"/find/{name}", b"")
        (callback,) = trainer.checkpoint_callbacks
        with internals.find_last_remotely(lambda url: f"{url}/inside" if url.endswith("2.ckpt") else None):
            assert callback._find_last_checkpoints(trainer) == {"memory://find/last-v2.ckpt/inside"}  # type: ignore[attr-defined]
            with pytest.raises(EOFError):  # it is read
                trainer.fit(Small(), data, ckpt_path="last")
        assert ModelCheckpoint._find_last_checkpoints is original
    finally:
        files.rm("/find", recursive=True)


def test_in_place_launcher() -> None:
    events: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        events.append("enter")
        yield
        events.append("leave")

    launcher = internals.in_place_launcher(around)
    assert launcher.is_interactive_compatible
    assert launcher.launch(lambda: events.append("run") or "done", trainer=None) == "done"  # type: ignore[func-returns-value]
    launcher.kill(signal.SIGTERM)
    assert events == ["enter", "run", "leave"]


def test_connect_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # put back afterwards
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    environment = LightningEnvironment()
    environment.set_world_size(1)
    environment.set_global_rank(0)
    internals.connect_processes(environment, "gloo", timeout=timedelta(seconds=10), device=None)
    try:
        assert dist.get_world_size() == 1
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


class Signalled(Small):
    """Gets a signal in its first batch, under SLURM."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def on_fit_start(self) -> None:
        environment = mock.Mock(spec=SLURMEnvironment, auto_requeue=True, requeue_signal=signal.SIGUSR1)
        self.trainer._accelerator_connector.cluster_environment = environment

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        os.kill(os.getpid(), self.number)


def test_signal_handlers_are_replaced_and_restored() -> None:
    found: list[str] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        trainer = quiet_trainer()
        with internals.replace_signal_handlers(
            trainer, lambda signum: found.append(f"end {signum}"), lambda signum: found.append(f"requeue {signum}")
        ):
            trainer.fit(Signalled(number), samples())  # to its end
        assert not trainer.received_sigterm
    assert found == [f"end {signal.SIGTERM}", f"requeue {signal.SIGUSR1}"]
    trainer.fit_loop.epoch_loop.max_steps = 3
    with pytest.raises(SIGTERMException):
        trainer.fit(Signalled(signal.SIGTERM), samples())
    assert len(found) == 2


def test_sigterm_is_what_loops_are_told() -> None:
    class Stopping(Small):
        def on_train_batch_end(self, *args: Any) -> None:
            internals.set_received_sigterm(self.trainer)  # type: ignore[arg-type]

    trainer = quiet_trainer(max_steps=5)
    with pytest.raises(SIGTERMException):
        trainer.fit(Stopping(), samples())
    assert trainer.received_sigterm
    assert trainer.global_step == 1


def test_validations_by_time_can_be_told() -> None:
    class Timed(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            trainer = self.trainer
            assert isinstance(trainer, Trainer)
            due, self.last = internals.is_time_to_validate(trainer, getattr(self, "last", 0.0))
            found.append(due)
            internals.set_time_to_validate(trainer, is_due=batch_idx == 1)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            found.append(self.trainer.global_step)

    found: list[Any] = []
    trainer = quiet_trainer(max_steps=4, val_check_interval="00:01:00:00", num_sanity_val_steps=0)
    assert internals.validation_interval(trainer) == 3600
    assert internals.validation_interval(quiet_trainer()) is None
    trainer.fit(Timed(), samples(), samples())
    assert found[:3] == [False, False, 2]
    assert not {1, 3} & {each for each in found if each is not False}


def test_a_job_is_requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Requeued(Small):
        def on_train_batch_end(self, *args: Any) -> None:
            internals.requeue(self.trainer, signal.SIGUSR1)  # type: ignore[arg-type]

    commands: list[list[str]] = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(signal_connector, "call", lambda command: commands.append(command) or 0)
    quiet_trainer(default_root_dir=tmp_path).fit(Requeued(), samples())
    assert commands == [["scontrol", "requeue", "7"]]
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()


def asked() -> tuple[int, list[str], int]:
    """Batches with an agreement of ours, and without it."""
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    calls: list[str] = []
    with internals.replace_sigterm_broadcast(trainer, lambda: calls.append("asked")):
        trainer.fit(Small(), samples(12))
    before = len(calls)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(Small(), samples(12))
    return trainer.global_step, calls[:before], len(calls) - before


def test_another_function_says_before_each_batch_whether_to_stop(ranks: Pools) -> None:
    for _, calls, later in ranks(2, lightning=True).run(asked):
        assert calls == ["asked"] * 3
        assert later == 0


class Hooked(Small):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def on_after_backward(self) -> None:
        self.calls.append("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append("hook")

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("clipping")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.calls.append("step")


def test_something_is_done_between_the_closure_and_the_step() -> None:
    trainer, module = make_trainer(max_epochs=1), Hooked()

    def action(rest: Callable[[], None], optimizer: Any) -> None:
        module.calls.append(f"before {type(optimizer).__name__}")
        rest()
        module.calls.append("after")
        for parameter in module.parameters():
            parameter.grad = None

    before = [parameter.clone() for parameter in module.parameters()]
    with internals.replace_after_closure(trainer.precision_plugin, action):
        trainer.fit(module, samples(2))
    assert module.calls == ["backward", "before SGD", "hook", "clipping", "after", "step"]
    assert all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
    module.calls.clear()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, samples(2))
    assert module.calls == ["backward", "hook", "clipping", "step"]


class Reducing(Small):
    def __init__(self) -> None:
        super().__init__()
        self.metric, self.of_validation = MeanMetric(), MeanMetric()
        self.at_once: list[str] = []
        self.keys: list[list[str]] = []

    def log(self, *args: Any, **kwargs: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:  # in one process, Lightning reduces nothing
            patch.setattr(type(self.trainer._accelerator_connector), "is_distributed", True)
            super().log(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("step", loss, sync_dist=True)
        self.log("both", loss, on_epoch=True, sync_dist=True)
        self.log("own", loss, on_epoch=True)
        self.log("alone", loss, on_epoch=True, sync_dist=True, rank_zero_only=True)
        self.metric(loss)
        self.log("metric", self.metric, on_epoch=True)
        if self.trainer.current_epoch == 0:
            self.log("first", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.of_validation(1.0)
        self.log("metric", self.of_validation)

    def on_validation_epoch_end(self) -> None:
        self.log("end", 1.0, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("end", 1.0, sync_dist=True)
        self.log("own", 1.0)


def test_what_replicas_reduce_of_what_is_logged() -> None:
    module, trainer = Reducing(), make_trainer(max_epochs=2, limit_train_batches=1, limit_val_batches=1)
    update = _ResultCollection.update_metrics
    with internals.before_log_reductions(trainer, module.at_once.append, module.keys.append):
        trainer.fit(module, samples(), samples())
    validated = ["validation_step.metric"]  # asked for each loader, and at the end
    trained = ["training_step.both", "training_step.metric", "training_step.first"]
    assert module.keys == [validated, validated, trained, validated, validated, trained[:-1]]
    of_hooks = ["on_validation_epoch_end.end", "on_train_epoch_end.end"]
    assert module.at_once == 2 * ["training_step.step", "training_step.both", *of_hooks]
    assert _ResultCollection.update_metrics is update
    trainer.validate(module, samples(), verbose=False)
    assert len(module.keys) == 6
    assert len(module.at_once) == 8


def test_whether_anomalies_are_looked_for() -> None:
    assert internals.detects_anomaly(make_trainer(detect_anomaly=True))
    assert not internals.detects_anomaly(make_trainer())


def test_what_is_trained_with() -> None:
    found: list[Any] = []

    class Asks(Small):
        def setup(self, stage: str) -> None:
            found.append(internals.training_data(self.trainer))

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return samples()

    class HasLoader(Asks):
        def train_dataloader(self) -> Any:
            return samples()

    data, given = Data(), samples()
    quiet_trainer().fit(Asks(), given)
    quiet_trainer().fit(Asks(), datamodule=data)
    quiet_trainer().fit(HasLoader())
    assert found == [given, data, None]


def test_strategy_members() -> None:
    strategy = DDPStrategy(parallel_devices=[torch.device("cpu")])
    assert [name for name in internals.STRATEGY_MEMBERS if not hasattr(strategy, name)] == []


# -- the file and its document -----------------------------------------------------------------------------------------


def test_each_function_is_tried() -> None:
    tried = {
        node.attr
        for definition in ast.parse(Path(__file__).read_text()).body
        if isinstance(definition, (ast.FunctionDef, ast.ClassDef))
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "internals"
    }
    public = {name for name, value in vars(internals).items() if _is_own(value) and not name.startswith("_")}
    assert sorted((public | {"STRATEGY_MEMBERS"}) - tried) == []
    assert len(public) > 40


def _is_own(value: Any) -> bool:
    return getattr(value, "__module__", None) == internals.__name__


def test_the_document_is_made_from_the_docstrings() -> None:
    assert FILE.read_text() == document(), "python -m tests.make_internals_doc"

"""Everything private of Lightning and torchmetrics that this package reads or replaces, and nothing else.

Each function is called after what it does, and says in ``Touches`` which private names it uses and in ``Without`` what
would break if they went. ``tests/test_lightning_contract.py`` tries each one alone, so that an upgrade says within
seconds which of them moved; ``docs/project/lightning-internals.md`` is made from these docstrings.
"""

from __future__ import annotations

import builtins
import copy
import functools
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeGuard

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.utils import get_protocol  # type: ignore[import-untyped]
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities import imports
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.optimization.automatic import Closure, _AutomaticOptimization
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput
from lightning.pytorch.trainer.call import _call_strategy_hook
from lightning.pytorch.trainer.connectors.data_connector import _worker_check
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric
from torchmetrics.wrappers import Running

from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.distributed.pytree import map_leaves
from lightning_hybrid.distributed.replaced import replaced_attributes, replaced_entries
from lightning_hybrid.distributed.tensor_bytes import to_host

# -- loops and their progress ------------------------------------------------------------------------------------------


def is_last_batch(trainer: Trainer) -> bool:
    """Whether the batch that was asked for last is the last one of its epoch.

    Touches: ``_TrainingEpochLoop._num_ready_batches_reached``.

    Without: a run that ended in the middle of an epoch looks like one that ended with it, and its checkpoint
        continues with the wrong epoch.
    """
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def is_accumulating(trainer: Trainer) -> bool:
    """Whether the next optimizer step needs more batches than there have been since the last one.

    Touches: ``_TrainingEpochLoop._should_accumulate``.

    Without: nobody is warned that a checkpoint between two optimizer steps has no gradients.
    """
    return trainer.fit_loop.epoch_loop._should_accumulate()


def skips_backward(trainer: Trainer) -> bool:
    """Whether batches run without a backward, as `StochasticWeightAveraging` asks for to update batch norms.

    Touches: ``_AutomaticOptimization._skip_backward``.

    Without: a schedule runs backward where Lightning runs none.
    """
    return trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward


def end_restart(trainer: Trainer) -> None:
    """Make all loops of a fit run as if they had not been restarted.

    The public setter of the fit loop does the opposite where ``max_steps`` is given.

    Touches: ``_Loop._restarting``, ``_Loop._resuming_from_checkpoint``.

    Without: Lightning skips hooks, validations and new iterators of a resumed epoch that the uninterrupted run has.
    """
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop):
        loop._restarting = loop._resuming_from_checkpoint = False


def skip_next_validation(trainer: Trainer, *, skip: bool) -> None:
    """Say whether the validation after the present batch is over already.

    Touches: ``_TrainingEpochLoop._skip_next_val``.

    Without: a checkpoint that was written at the end of a validation repeats that validation.
    """
    trainer.fit_loop.epoch_loop._skip_next_val = skip


def replace_next_batch(trainer: Trainer, action: Callable[[Callable[[], None]], None]) -> AbstractContextManager[None]:
    """While entered, do something else, once, where the next batch would be trained with.

    Lightning's way of restarting in the middle of an epoch is taken up to that batch.

    Args:
        trainer: The Trainer.
        action: Gets a function that trains with the batch. The end of a batch follows in any case.

    Touches: the method ``advance`` of the private class ``_TrainingEpochLoop``, on one object.

    Without: a checkpoint that was written in the middle of an epoch continues with that epoch's beginning.
    """
    loop = trainer.fit_loop.epoch_loop

    def advance(data_fetcher: Any) -> None:
        del attributes["advance"]
        action(partial(loop.advance, data_fetcher))

    attributes: dict[str, Any] = loop.__dict__
    return replaced_entries([(attributes, {"advance": advance})])


def before_validation(trainer: Trainer, action: Callable[[], None]) -> AbstractContextManager[None]:
    """While entered, do something before each validation of a fit, ahead of loaders and hooks.

    Touches: the method ``run`` of the private class ``_EvaluationLoop``, on one object.

    Without: a checkpoint in the middle of a validation has random numbers and metrics of its middle, although the
        validation is run again from its beginning.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    run = loop.run

    def run_after_action() -> Any:
        action()
        return run()

    return replaced_entries([(vars(loop), {"run": run_after_action})])


# -- logged values -----------------------------------------------------------------------------------------------------


@contextmanager
def results_through(trainer: Trainer | None, record: Callable[..., None]) -> Iterator[None]:
    """While entered, what `LightningModule.log` would put among the Trainer's results passes through a function.

    Args:
        trainer: The Trainer; ``None`` if the module has none.
        record: Gets a function that puts a value among the results; and the name, the value and the other arguments of
            the call, by name, which that function takes.

    Touches:
        `Trainer._results`, and the signature of its `log`.
    Without:
        Replicas with unequal numbers of targets would log the plain mean of their losses.
    """
    results = getattr(trainer, "_results", None)
    if results is None:
        yield
        return
    write = results.log

    def log(fx: str, name: str, value: Any, **arguments: Any) -> None:
        record(partial(write, fx), name, value, **arguments)

    vars(results)["log"] = log
    try:
        yield
    finally:
        del vars(results)["log"]


@contextmanager
def intercept_results(trainer: Trainer | None, record: Callable[..., None]) -> Iterator[None]:
    """While entered, what `LightningModule.log` would put among the Trainer's results goes to a function.

    Args:
        trainer: The Trainer; ``None`` if the module has none.
        record: Gets the name, the value and the other arguments of the call, by name.

    Touches:
        `Trainer._results`, and the signature of its `log`.
    Without:
        A method that was taken before the step (`Head(log=self.log)`) would log on the last stage alone.
    """

    def instead(_: Callable[..., None], name: str, value: Any, *, sync_dist_fn: Any, **arguments: Any) -> None:
        record(name, value, **arguments)

    with results_through(trainer, instead):
        yield


def keep_results_in_place() -> AbstractContextManager[None]:
    """While entered, let `self.log` move what was logged before to the device of what is logged only if it must.

    Lightning moves it at every call, and copies all that belongs to it on the way, which takes as long as the rest of
    the call.

    Touches:
        `_ResultMetric.to`, which is replaced for all.
    Without:
        Each log of a step would take twice the time.
    """
    original = _ResultMetric.to

    def to(metric: _ResultMetric, *args: Any, **kwargs: Any) -> _ResultMetric:
        device = args[0] if len(args) == 1 and not kwargs else None
        for value in vars(metric).values():
            if isinstance(value, (Tensor, Metric)) and value.device != device:
                moved: _ResultMetric = original(metric, *args, **kwargs)
                return moved
        return metric

    return replaced_attributes(_ResultMetric, to=to)


_METADATA = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
_NUMBERS = ("value", "cumulated_batch_size")


def result_collection(loop: Any) -> dict[str, Any]:
    """What was logged in a loop since its epoch began: Lightning's entries, by hook and name.

    Args:
        loop: The epoch loop of training, or an evaluation loop.

    Touches: ``_TrainingEpochLoop._results``, ``_EvaluationLoop._results``.

    Without: metrics that Lightning resets before it uses them again are written to checkpoints as they were.
    """
    results: dict[str, Any] = loop._results
    return results


@contextmanager
def before_log_reductions(
    trainer: Trainer, at_once: Callable[[str], None], at_epoch_end: Callable[[list[str]], None]
) -> Iterator[None]:
    """While entered, call functions before replicas reduce what was logged, in training and evaluation.

    A key is a hook and a name, such as ``"training_step.loss"``. Every rank calls at the same point of its program:
    when it logs, or when an epoch ends. Progress bars read values, and so have them reduced, on rank 0 first.

    Args:
        trainer: The Trainer.
        at_once: Gets the key of a value that is reduced when it is logged, or that a hook outside of batches logs.
        at_epoch_end: Gets the keys of what batches of an epoch have logged and its end reduces, in order.

    Touches: ``_ResultCollection.update_metrics`` (replaced for all), ``_LoggerConnector`` (``epoch_end_reached``,
        replaced on one object; ``_first_loop_iter``), ``Trainer._results``, ``_ResultMetric`` (``meta``, ``is_tensor``,
        ``has_reset``), ``_Metadata`` (``on_step``, ``on_epoch``), ``_Sync`` (``should``, ``rank_zero_only``).

    Without: replicas that log different keys wait for each other, or mix values.
    """
    connector, update = trainer._logger_connector, _ResultCollection.update_metrics

    def update_metrics(results: _ResultCollection, key: str, value: Any, batch_size: int) -> None:
        if results is trainer._results:
            entry = results[key]
            is_by_step = entry.meta.on_step and entry.is_tensor
            is_outside = entry.meta.on_epoch and connector._first_loop_iter is None
            if (is_by_step or is_outside) and _is_reduced(entry):
                at_once(key)
        update(results, key, value, batch_size)

    def epoch_end_reached() -> None:
        logged = {key: entry for key, entry in (trainer._results or {}).items() if not entry.has_reset}
        at_epoch_end([key for key, entry in logged.items() if entry.meta.on_epoch and _is_reduced(entry)])
        type(connector).epoch_end_reached(connector)

    of_connector = vars(connector), {"epoch_end_reached": epoch_end_reached}
    with replaced_attributes(_ResultCollection, update_metrics=update_metrics), replaced_entries([of_connector]):
        yield


def _is_reduced(entry: _ResultMetric) -> bool:
    sync = entry.meta.sync
    return not entry.is_tensor or (sync.should and not sync.rank_zero_only)


def result_states(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """The running means and other reductions of what was logged in this training epoch.

    Returns:
        For each entry of :func:`result_collection` tensors on the host and plain values, but nothing for those that are
        reduced over a process group of the user's.

    Touches: ``_ResultMetric`` (``meta``, ``is_tensor``, ``has_reset``, ``_forward_cache``), ``_Metadata`` (all fields),
        ``_Sync`` (``should``, ``group``, ``rank_zero_only``).

    Without: means of a resumed epoch are those of its second part.
    """
    states = {}
    for key, entry in result_collection(trainer.fit_loop.epoch_loop).items():
        meta = entry.meta
        if meta.sync.group is not None:
            continue
        numbers = {name: vars(entry)[name] for name in _NUMBERS if entry.is_tensor and name in vars(entry)}
        states[key] = {
            "meta": {name: getattr(meta, name) for name in _METADATA},
            "reduction": [meta.reduce_fx.__module__, meta.reduce_fx.__name__],
            "sync": [meta.sync.should, meta.sync.rank_zero_only],
            "numbers": map_leaves(to_host, numbers),
            "of_batch": map_leaves(to_host, entry._forward_cache),
            "updates": entry.update_count,
            "has_reset": entry.has_reset,
        }
    return states


def load_result_states(trainer: Trainer, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Continue the running means and other reductions of :func:`result_states`.

    Args:
        trainer: The Trainer, before training continues.
        states: Of the same module; its tensors are on the device of this process.

    Touches: ``_TrainingEpochLoop._results`` (replaced), ``_ResultCollection`` (a subclass), ``_ResultMetric``,
        ``_Metadata``, ``_Sync`` (made, with all their fields).

    Without: means of a resumed epoch are those of its second part.
    """
    entries = {key: _result_metric(trainer, state) for key, state in states.items()}
    loop = trainer.fit_loop.epoch_loop
    if not isinstance(loop._results, _ResumedResults):
        loop._results = _ResumedResults(loop._results)
    loop._results.resume(entries)


def _result_metric(trainer: Trainer, state: Mapping[str, Any]) -> _ResultMetric:
    module, name = state["reduction"]
    meta = _Metadata(**state["meta"], reduce_fx=getattr(builtins if module == "builtins" else torch, name))
    should, rank_zero_only = state["sync"]
    meta.sync = _Sync(fn=trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only)
    entry = _ResultMetric(meta, is_tensor=bool(state["numbers"])).to(trainer.strategy.root_device)
    for number, value in state["numbers"].items():
        setattr(entry, number, value)
    if not entry.is_tensor:
        entry.value = trainer.lightning_module.get_submodule(state["meta"]["metric_attribute"])
    entry._forward_cache, entry._update_count = state["of_batch"], state["updates"]
    entry.has_reset = state["has_reset"]
    return entry


class _ResumedResults(_ResultCollection):
    """Lightning's results, some of them of the run that wrote a checkpoint.

    Lightning refuses two calls of `self.log` with one key and other arguments. The first call after a resume may have
    others than the one before the checkpoint: another layout has nothing to synchronise or writes `max` for
    `torch.max`, and the user may have changed the program. From that call on a value is logged as it says.
    """

    def __init__(self, results: _ResultCollection) -> None:
        super().__init__(results.training)
        vars(self).update(vars(results))
        self.update(results)
        self._not_logged_yet: set[str] = set()

    def resume(self, entries: Mapping[str, _ResultMetric]) -> None:
        """Take entries over."""
        self.update(entries)
        self._not_logged_yet.update(entries)

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value, in the way of the first call."""
        key = f"{fx}.{name}"  # training has no number of the loader behind it
        if key in self._not_logged_yet:
            self._not_logged_yet.remove(key)
            requested = _RequestedResults(self.training)
            requested.log(fx, name, value, *args, **kwargs)
            self[key].meta = requested[key].meta
        super().log(fx, name, value, *args, **kwargs)


class _RequestedResults(_ResultCollection):
    """How values are logged, without the values."""

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Nothing to add up."""


def noted_metrics(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The values that callbacks, loggers and progress bars have been given, without the newest.

    The public properties of the Trainer note the newest first, which may synchronise ranks.

    Touches: ``Trainer._logger_connector``, and of it ``_callback_metrics``, ``_logged_metrics``,
        ``_progress_bar_metrics``.

    Without: callbacks and plateau schedulers of a resumed run miss values that were logged before the checkpoint.
    """
    connector = trainer._logger_connector
    return connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics


def set_num_logged_batches(trainer: Trainer, batches: int) -> None:
    """Say how many batches of this epoch have been logged.

    Touches: ``_LoggerConnector._first_loop_iter``.

    Without: the first batch after a resume is taken for the first one of its epoch, which resets what was logged.
    """
    trainer._logger_connector._first_loop_iter = None if batches == 0 else batches == 1


# -- data --------------------------------------------------------------------------------------------------------------


def set_use_distributed_sampler(trainer: Trainer, use: bool) -> bool:
    """Say whether Lightning puts samplers of its own into loaders.

    Returns:
        What was said before: at first, the argument of the Trainer.

    Touches:
        `Trainer._accelerator_connector`
    Without:
        Lightning would divide the samples over all ranks, in an order of its own, after they have been divided here.
    """
    connector = trainer._accelerator_connector
    before, connector.use_distributed_sampler = connector.use_distributed_sampler, use
    return before


def warn_of_few_workers(loader: DataLoader[Any], trainer: Trainer) -> None:
    """Print the warning of Lightning about a loader with few workers.

    Touches:
        `_worker_check`, `RunningStage.dataloader_prefix`
    Without:
        Users would get no such warning for loaders that the strategy wraps.
    """
    stage = trainer.state.stage
    assert stage is not None, "loaders must be prepared for a stage of the Trainer"
    _worker_check(trainer, loader, f"{stage.dataloader_prefix}_dataloader")


def unwrap_batch_sampler(sampler: Any) -> Any:
    """A loader's batch sampler without what Lightning puts around it for predictions; ``None`` stays ``None``.

    Touches:
        `_IndexBatchSamplerWrapper`, `_IndexBatchSamplerWrapper._batch_sampler`
    Without:
        The samples of a loader could not be divided over replicas in `Trainer.predict`.
    """
    return sampler._batch_sampler if isinstance(sampler, _IndexBatchSamplerWrapper) else sampler


def rewrap_batch_sampler(sampler: Any, former: Any) -> Any:
    """A batch sampler with around it what Lightning had around the former one.

    Touches:
        `_IndexBatchSamplerWrapper`
    Without:
        A `BasePredictionWriter` would not learn which samples a batch has.
    """
    return _IndexBatchSamplerWrapper(sampler) if isinstance(former, _IndexBatchSamplerWrapper) else sampler


def recorded_batch_indices(loader: Any) -> list[list[int]] | None:
    """The samples of each batch so far, where Lightning records them; ``None`` where it does not.

    Touches:
        `_IndexBatchSamplerWrapper`
    Without:
        As for :func:`set_recorded_batch_indices`.
    """
    sampler = getattr(loader, "batch_sampler", None)
    return sampler.seen_batch_indices if isinstance(sampler, _IndexBatchSamplerWrapper) else None


def set_recorded_batch_indices(loader: DataLoader[Any], indices: list[list[int]]) -> None:
    """Set the list that :func:`recorded_batch_indices` gives, if Lightning has one.

    Touches:
        `_IndexBatchSamplerWrapper`
    Without:
        On ranks that receive their batches, a `BasePredictionWriter` would not learn which samples a batch has.
    """
    if isinstance(sampler := getattr(loader, "batch_sampler", None), _IndexBatchSamplerWrapper):
        sampler.seen_batch_indices = indices


def combined_loader(loop: Any) -> CombinedLoader | None:
    """The loaders of a loop, as Lightning has combined and prepared them; ``None`` if it has not asked for them yet.

    Args:
        loop: The fit loop, or an evaluation loop.

    Touches: ``_FitLoop._combined_loader``, ``_EvaluationLoop._combined_loader``.

    Without: no loader can be resumed in the middle of an epoch.
    """
    found: CombinedLoader | None = loop._combined_loader
    return found


def end_loaders(loaders: CombinedLoader) -> None:
    """End the workers of loaders and what they iterate; their length stays known, for which Lightning asks at the end.

    Args:
        loaders: From :func:`combined_loader`.

    Touches: ``CombinedLoader._iterator``.

    Without: an exception between here and the next epoch is hidden by another one, about a loader without an iterator.
    """
    iterator = loaders._iterator
    loaders.reset()
    loaders._iterator = iterator


def discard_loaders(loop: Any) -> None:
    """Let a loop ask for its loaders anew.

    Touches: as :func:`combined_loader`.

    Without: validation loaders of a resumed run are made earlier than those of the uninterrupted one, and shuffle with
        other random numbers.
    """
    loop._combined_loader = None


def reload_epochs(trainer: Trainer) -> list[float]:
    """The epochs in which training and validation loaders were made last.

    Touches: ``_FitLoop._last_train_dl_reload_epoch``, ``_EvaluationLoop._last_val_dl_reload_epoch``.

    Without: with ``reload_dataloaders_every_n_epochs`` a resumed run asks for loaders in other epochs.
    """
    fit_loop = trainer.fit_loop
    return [fit_loop._last_train_dl_reload_epoch, fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch]


def set_reload_epochs(trainer: Trainer, epochs: Iterable[float]) -> None:
    """Put back what :func:`reload_epochs` gave.

    Touches: as there.

    Without: as there.
    """
    fit_loop = trainer.fit_loop
    fit_loop._last_train_dl_reload_epoch, fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = epochs


def data_fetcher(trainer: Trainer) -> Any:
    """What takes batches from the training loaders, perhaps one ahead; ``None`` before and after a fit.

    Touches: ``_FitLoop._data_fetcher``.

    Without: no loader can be resumed in the middle of an epoch.
    """
    return trainer.fit_loop._data_fetcher


def start_fetching(fetcher: Any) -> None:
    """Make new iterators, without fetching a batch ahead.

    Touches: ``_DataFetcher.__iter__``.

    Without: a loader without a length gives a batch while its iterator is still being brought to its place.
    """
    _DataFetcher.__iter__(fetcher)


def fetch_ahead(fetcher: Any) -> None:
    """Fetch the batch that is fetched ahead.

    Raises:
        StopIteration: If there is none.

    Touches: ``_DataFetcher.__next__``, ``_PrefetchDataFetcher.batches``.

    Without: a loader without a length loses a batch at a resume, and its end is noticed too late.
    """
    fetcher.batches.append(_DataFetcher.__next__(fetcher))


def batch_iterator(combined: CombinedLoader) -> Any:
    """The iterator of one of Lightning's modes of combination, with ``iterators``; ``None`` if there is none yet.

    Touches: ``CombinedLoader._iterator``.

    Without: no loader can be resumed in the middle of an epoch.
    """
    return combined._iterator


def num_fetched(iterator: Any) -> int:
    """How many batches of this epoch a :func:`batch_iterator` has given.

    Touches: ``_ModeIterator._idx``.

    Without: a checkpoint does not know how many batches were fetched but not trained with.
    """
    number: int = iterator._idx
    return number


def begun_anew(iterator: Any) -> list[bool] | None:
    """For each loader of a :func:`batch_iterator` whether it began anew at its end; ``None`` if loaders never do.

    The list itself: changes of it are changes of the iterator.

    Touches: ``_MaxSizeCycle._consumed``.

    Without: a resumed epoch over a longer and a shorter loader does not end when the longer one does.
    """
    return getattr(iterator, "_consumed", None)


def set_sampler_epoch(loader: object, epoch: int) -> None:
    """Tell the samplers of a loader the number of the epoch, as the fit loop does.

    Touches: ``lightning.fabric.utilities.data._set_sampler_epoch``.

    Without: a resumed epoch has the order of the first one, with samplers that shuffle by epoch.
    """
    _set_sampler_epoch(loader, epoch)


# -- optimization and precision ----------------------------------------------------------------------------------------


@contextmanager
def replace_closure(trainer: Trainer, closure: Callable[..., Closure]) -> Iterator[None]:
    """While entered, automatic optimization calls another closure.

    Lightning zeroes gradients between step and backward, which would wipe what a schedule of both has computed. And
    with several processes it refuses a step that returns ``None``.

    Args:
        trainer: The Trainer.
        closure: Takes what ``Closure`` takes, by name.

    Touches: ``_TrainingEpochLoop.automatic_optimization`` (replaced; its progress, which checkpoints know, is shared),
        ``_AutomaticOptimization`` (a subclass), ``_make_closure``, ``_make_step_fn``, ``_make_backward_fn``,
        ``_make_zero_grad_fn``, ``_skip_backward``, ``_training_step`` (replaced), ``output_result_cls``,
        ``lightning.pytorch.trainer.call._call_strategy_hook``.

    Without: automatic optimization cannot train with a pipeline, nor skip a step with replicas.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    former, loop = epoch_loop.automatic_optimization, _OptimizationBy(trainer, closure)
    loop.optim_progress, loop._skip_backward = former.optim_progress, former._skip_backward
    with replaced_attributes(epoch_loop, automatic_optimization=loop):
        try:
            yield
        finally:
            former.optim_progress, former._skip_backward = loop.optim_progress, loop._skip_backward


class _OptimizationBy(_AutomaticOptimization):
    """Lightning's loop with another closure."""

    def __init__(self, trainer: Trainer, closure: Callable[..., Closure]) -> None:
        super().__init__(trainer)
        self.closure = closure

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        return self.closure(
            step_fn=self._make_step_fn(kwargs),
            backward_fn=self._make_backward_fn(optimizer),
            zero_grad_fn=self._make_zero_grad_fn(batch_idx, optimizer),
        )

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> Any:
        output = _call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        self.trainer.strategy.post_training_step()
        return self.output_result_cls.from_training_step_output(output, self.trainer.accumulate_grad_batches)


def is_about_several_optimizers(error: Exception) -> bool:
    """Whether Lightning refuses several optimizers: it advises manual optimization, which is not always possible.

    Touches: the text of ``lightning.pytorch.core.optimizer._validate_multiple_optimizers_support``.

    Without: users are sent from one refusal to the next.
    """
    return isinstance(error, RuntimeError) and "multiple optimizers" in str(error)


def move_optimizer_states(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Move the states of optimizers, all but the step counts that torch wants on the host.

    Touches: ``lightning.fabric.utilities.optimizer._optimizers_to_device``.

    Without: optimizers whose states were loaded on the host fail at the first step on a device.
    """
    _optimizers_to_device(optimizers, device)


# -- modules and callbacks ---------------------------------------------------------------------------------------------


def attached_trainer(module: nn.Module) -> Trainer | None:
    """The Trainer of a module, if it has one; the property `trainer` raises where there is none.

    Touches:
        `LightningModule._trainer`
    Without:
        Modules without a Trainer could not be run by the dry run.
    """
    return getattr(module, "_trainer", None)


@functools.cache
def lightning_attributes() -> frozenset[str]:
    """The names of the attributes that every module has from Lightning.

    Touches:
        The attributes of a `LightningModule`; `_log_hyperparams`, `_hparams`, `_hparams_initial` and `_hparams_name`,
        which `save_hyperparameters` sets.
    Without:
        Lightning's own state would be taken for results that the user's steps store, and be synchronised.
    """
    return frozenset([*vars(LightningModule()), "_log_hyperparams", "_hparams", "_hparams_initial", "_hparams_name"])


def replace_callback_log(trainer: Trainer, log: Callable[..., None]) -> AbstractContextManager[None]:
    """While entered, the Trainer's callbacks log through this function.

    Touches:
        The attribute `log` of callbacks, which Lightning sets to the module's method.
    Without:
        What callbacks log in hooks would differ between the stages.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return replaced_entries([(vars(callback), {"log": log}) for callback in callbacks])


def wrap_before_batch_transfer(
    module: LightningModule, context: Callable[[], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """While entered, the hook `on_before_batch_transfer`, which no method of a strategy surrounds, runs in a context.

    Touches:
        `LightningModule._on_before_batch_transfer`
    Without:
        The hook would draw different random numbers on the ranks of a model group.
    """
    transfer = module._on_before_batch_transfer

    @functools.wraps(transfer)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with context():
            return transfer(*args, **kwargs)

    return replaced_entries([(vars(module), {"_on_before_batch_transfer": wrapped})])


def set_device_mesh(module: LightningModule, mesh: DeviceMesh | None) -> None:
    """Say what ``module.device_mesh`` is, which has no public setter.

    Touches: ``LightningModule._device_mesh``.

    Without: `configure_model` cannot use the mesh.
    """
    module._device_mesh = mesh


def without_example_input(module: LightningModule) -> AbstractContextManager[None]:
    """While entered, a module has no example that was assigned to it; one of its class stays.

    Touches: ``LightningModule._example_input_array``.

    Without: `ModelSummary` runs a module of which this rank has some layers only.
    """
    return replaced_entries([(vars(module), {"_example_input_array": None})])


def choose_checkpoint(trainer: Trainer, choose: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Replace, while entered, the checkpoint from which a run resumes: the path found for ``ckpt_path``, or none.

    Args:
        trainer: The Trainer.
        choose: Receives the path that was found, or ``None``, and returns the path to use; called once in each run,
            when the process groups exist.

    Touches: ``Trainer._checkpoint_connector`` and its ``resume_start`` (replaced on one object).

    Without: if a node finds no last checkpoint on its disk, its ranks start from the beginning while the others resume.
    """
    connector = trainer._checkpoint_connector

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        type(connector).resume_start(connector, choose(checkpoint_path), weights_only=weights_only)

    return replaced_entries([(vars(connector), {"resume_start": resume_start})])


def find_last_remotely(dated: Callable[[str], str | None]) -> AbstractContextManager[None]:
    """While entered, ``ckpt_path="last"`` finds checkpoints that are not on a disk.

    Lightning lists them without their protocol, and then looks on the disk. It takes the one that was changed last, and
    a folder of an object store has no time.

    Args:
        dated: For where a checkpoint may be, the place with its time; ``None`` if there is no complete one.

    Touches: ``ModelCheckpoint._find_last_checkpoints`` (replaced in the class, as the Trainer calls it before anything
        of a strategy), ``ModelCheckpoint.__resolve_ckpt_dir``, ``ModelCheckpoint._fs``.

    Without: a run with such a folder begins anew, each time.
    """
    original = ModelCheckpoint._find_last_checkpoints

    @functools.wraps(original)
    def find_last_checkpoints(self: ModelCheckpoint, trainer: Trainer) -> set[str]:
        folder = str(self._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
        if get_protocol(folder) == "file":
            return original(self, trainer)
        self._fs = url_to_fs(folder)[0]
        names = {path.rpartition("/")[2] for path in original(self, trainer)}
        return {place for name in names if (place := dated(f"{folder.rstrip('/')}/{name}")) is not None}

    return replaced_attributes(ModelCheckpoint, _find_last_checkpoints=find_last_checkpoints)


def note_saved_step(callback: ModelCheckpoint, step: int) -> None:
    """Tell a callback that saves every so many steps that the checkpoint of this step is there.

    Touches: ``ModelCheckpoint._every_n_train_steps``, ``ModelCheckpoint._last_global_step_saved``.

    Without: the first batch after a resume, which may be between two optimizer steps, replaces the checkpoint of the
        step before it.
    """
    every = callback._every_n_train_steps
    if every >= 1 and step % every == 0:
        callback._last_global_step_saved = step


def throughputs(callback: ThroughputMonitor) -> Iterator[Throughput]:
    """What a monitor counts with, for each stage of the Trainer.

    Touches: ``ThroughputMonitor._throughputs``.

    Without: samples that ranks of one model group share are counted once for each of them.
    """
    yield from callback._throughputs.values()


def is_wrapping_io(plugin: CheckpointIO) -> TypeGuard[_WrappingCheckpointIO]:
    """Whether a plugin writes through another one, its ``checkpoint_io``, as `AsyncCheckpointIO` does.

    Touches: ``_WrappingCheckpointIO``.

    Without: files written by such a plugin are not replaced at one moment.
    """
    return isinstance(plugin, _WrappingCheckpointIO)


# -- torchmetrics ------------------------------------------------------------------------------------------------------


def forward_value(metric: Metric) -> Any:
    """What the metric's `forward` returned last, which Lightning logs by step; ``None`` before.

    Touches:
        `Metric._forward_cache`
    Without:
        A metric that is logged with ``on_step=True`` would have no value of the batch.
    """
    return metric._forward_cache


def set_forward_value(metric: Metric, value: Any) -> None:
    """Let this be what the metric's `forward` returned last.

    Touches:
        `Metric._forward_cache`
    Without:
        A metric that is logged with ``on_step=True`` would have the value of the last microbatch, on one stage.
    """
    metric._forward_cache = value


def batch_metric(metric: Metric) -> Metric:
    """An empty copy that computes what `forward` would: its `compute` synchronises where the metric's `forward` does.

    Touches:
        `Metric._to_sync`, which torchmetrics derives from `sync_on_compute` when a metric is made, and reads.
    Without:
        A value by step would be that of all replicas, with a collective that not all of them call.
    """
    # A window's value of a batch is that of its metric; the window itself may be shorter than a batch.
    copied = copy.deepcopy(metric.base_metric if isinstance(metric, Running) else metric)
    copied.sync_on_compute = copied._to_sync = metric.dist_sync_on_step
    copied.reset()
    return copied


def update_arguments(metric: Metric, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those named arguments of a `forward` that the metric's `update` takes.

    Touches:
        `Metric._filter_kwargs`
    Without:
        Metrics of a collection, which are all given the same arguments, would refuse those of the others.
    """
    return metric._filter_kwargs(**kwargs)


def sync_metrics_over(group: GroupRef) -> AbstractContextManager[None]:
    """While entered, every metric of this process that names no group of its own synchronizes over a group.

    Args:
        group: The ranks. Once they are gone, torchmetrics' own choice counts, which is WORLD.

    Touches:
        `Metric.sync`, which is replaced for all metrics.
    Without:
        Each sample would count once for every stage, in metrics of callbacks and those that hooks make too.
    """
    original = Metric.sync

    def sync(metric: Metric, dist_sync_fn: Any = None, process_group: Any = None, *args: Any, **kwargs: Any) -> None:
        if dist_sync_fn is None and process_group is None and metric.process_group is None and group.is_alive:
            process_group = group()
        original(metric, dist_sync_fn, process_group, *args, **kwargs)

    return replaced_attributes(Metric, sync=sync)


def set_update_count(metric: Metric, count: int) -> None:
    """Say how often a metric was updated, for which ``Metric.update_count`` has no setter.

    Touches: ``Metric._update_count``.

    Without: metrics of a resumed run warn that they were computed before they were updated, and means of their values
        have wrong weights.
    """
    metric._update_count = count


# -- processes ---------------------------------------------------------------------------------------------------------


class _InPlaceLauncher(_Launcher):
    is_interactive_compatible = True

    def __init__(self, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._around = around

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call a function in this process."""
        return _call_in(self._around, function, *args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Do nothing: no processes were started."""


def in_place_launcher(around: Callable[[], AbstractContextManager[None]]) -> _Launcher:
    """Return the launcher that starts no processes, and calls functions of the Trainer in this one.

    Args:
        around: Makes a context, which is entered around each of them: a whole run, from before its checkpoint is chosen
            until all is over.

    Touches: ``lightning.pytorch.strategies.launchers.launcher._Launcher``.

    Without: what a run changes before anything of a strategy is called stays changed after it.
    """
    return _InPlaceLauncher(around)


class _ScriptLauncher(_SubprocessScriptLauncher):
    def __init__(
        self, *arguments: Any, variables: Mapping[str, str], around: Callable[[], AbstractContextManager[None]]
    ) -> None:
        super().__init__(*arguments)
        self._variables, self._around = variables, around

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other processes, and call a function in this one."""
        with self._around():
            return super().launch(function, *args, trainer=trainer, **kwargs)

    def _call_children_scripts(self) -> None:
        """Start the processes, which inherit the environment of this one."""
        before = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)
        try:
            super()._call_children_scripts()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def subprocess_launcher(
    environment: ClusterEnvironment,
    num_processes: int,
    num_nodes: int,
    variables: Mapping[str, str],
    around: Callable[[], AbstractContextManager[None]],
) -> _SubprocessScriptLauncher:
    """Return the launcher that starts the other processes of this node by running the user's script in each of them.

    Args:
        environment: The cluster.
        num_processes: On this node.
        num_nodes: The number of nodes.
        variables: Environment variables of these processes, which this one does not keep.
        around: The argument of :func:`in_place_launcher`.

    Touches: ``lightning.pytorch.strategies.launchers._SubprocessScriptLauncher`` and its ``_call_children_scripts``.

    Without: several processes have to be started from outside, as by `torchrun`.
    """
    return _ScriptLauncher(environment, num_processes, num_nodes, variables=variables, around=around)


class _WorkerLauncher(_MultiProcessingLauncher):
    def __init__(
        self,
        strategy: ParallelStrategy,
        start_method: str,
        check: Callable[[str, torch.device], None],
        why: Callable[[LightningModule], str | None],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(strategy, start_method)  # type: ignore[arg-type]
        self._check, self._why, self._around = check, why, around

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call a function in worker processes."""
        self._check(self._start_method, self._strategy.root_device)
        in_worker = partial(_call_in, self._around, function)
        return super().launch(in_worker, *args, trainer=trainer, **kwargs)

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> _WorkerOutput | None:
        """Return what comes back; weights only if all of them are here."""
        why = self._why(trainer.lightning_module)
        if why is None:
            return super()._collect_rank_zero_results(trainer, results)
        if self._strategy.local_rank != 0:
            return None
        if trainer.state.fn == TrainerFn.FITTING:
            rank_zero_warn(why)
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        return _WorkerOutput(best, None, trainer.state, results, self.get_extra_results(trainer))


def multiprocessing_launcher(
    strategy: ParallelStrategy,
    start_method: str,
    check: Callable[[str, torch.device], None],
    why: Callable[[LightningModule], str | None],
    around: Callable[[], AbstractContextManager[None]],
) -> _MultiProcessingLauncher:
    """Return the launcher that calls functions of the Trainer in worker processes, and brings back what they change.

    Args:
        strategy: Whose processes are started.
        start_method: ``"fork"``, ``"spawn"`` or ``"forkserver"``.
        check: Called with it and a device of the strategy before processes start.
        why: Says why the weights of a module cannot come back; ``None`` if they can.
        around: The argument of :func:`in_place_launcher`; it can be pickled.

    Touches: ``lightning.pytorch.strategies.launchers._MultiProcessingLauncher`` and its
        ``_collect_rank_zero_results``, ``_start_method`` and ``_strategy``; ``_WorkerOutput`` beside it.

    Without: a notebook trains on one device only, or in processes that `torchrun` has started.
    """
    return _WorkerLauncher(strategy, start_method, check, why, around)


def _call_in(
    around: Callable[[], AbstractContextManager[None]], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with around():
        return function(*args, **kwargs)


def is_interactive() -> bool:
    """Return whether this process is a notebook or an interactive shell, whose script cannot be run again.

    Touches: ``lightning.fabric.utilities.imports._IS_INTERACTIVE``, which the Trainer asks when it refuses launchers.

    Without: `start_method` has to be given in a notebook.
    """
    return bool(imports._IS_INTERACTIVE)


def connect_processes(
    environment: ClusterEnvironment,
    backend: str,
    *,
    timeout: timedelta | None,
    device: torch.device | None,
    store: Store | None = None,
) -> None:
    """Make the process group of all processes, as Lightning's strategies do: with its log and its end at exit.

    Args:
        environment: The cluster, which knows the address and the ranks.
        backend: Of the group.
        timeout: Of the group.
        device: That the group is bound to; ``None`` for no device.
        store: Where the processes meet; ``None`` for the one that torch makes.

    Touches: ``lightning.fabric.utilities.distributed._init_dist_connection``.

    Without: there is no process group, unless the user makes one.
    """
    _init_dist_connection(environment, backend, timeout=timeout, device_id=device, store=store)


def replace_signal_handlers(
    trainer: Trainer, on_terminate: Callable[[int], None], on_requeue: Callable[[int], None]
) -> AbstractContextManager[None]:
    """While entered, do something else at SIGTERM, and where SLURM is about to requeue the job.

    Args:
        trainer: The Trainer.
        on_terminate: Gets the number of the signal, in the handler.
        on_requeue: Likewise; called only where Lightning would requeue.

    Touches: ``Trainer._signal_connector``, and of it ``_sigterm_notifier_fn`` and ``_slurm_sigusr_handler_fn``
        (replaced on one object, before it registers them).

    Without: handlers run collectives wherever the other ranks are, which waits for ever inside of a step.
    """
    handlers = {
        "_sigterm_notifier_fn": lambda signum, _: on_terminate(signum),
        "_slurm_sigusr_handler_fn": lambda signum, _: on_requeue(signum),
    }
    return replaced_entries([(vars(trainer._signal_connector), handlers)])


def set_received_sigterm(trainer: Trainer) -> None:
    """Have the Trainer's loops stop as soon as they can: ``trainer.received_sigterm`` is true.

    Touches: ``Trainer._signal_connector``.

    Without: callbacks that ask for it, as after an exception, are told that there was none.
    """
    trainer._signal_connector.received_sigterm = True


def requeue(trainer: Trainer, signum: int) -> None:
    """Save a checkpoint from which a requeued job goes on, and have SLURM requeue it; on every rank.

    Args:
        trainer: The Trainer.
        signum: The signal, for the log.

    Touches: ``_SignalConnector._slurm_sigusr_handler_fn``.

    Without: jobs are not requeued.
    """
    connector = trainer._signal_connector
    handle: Callable[..., None] = type(connector)._slurm_sigusr_handler_fn
    handle(connector, signum, None)


def replace_sigterm_broadcast(trainer: Trainer, agree: Callable[[], None]) -> AbstractContextManager[None]:
    """While entered, let another function decide before each batch of training whether all ranks stop.

    Args:
        trainer: The Trainer.
        agree: Raises an exception if they stop.

    Touches: ``_TrainingEpochLoop._broadcast_sigterm_tensor`` (replaced on one object).

    Without: only rank 0's SIGTERM counts, and each batch waits for the device.
    """
    attributes: dict[str, Any] = trainer.fit_loop.epoch_loop.__dict__
    return replaced_entries([(attributes, {"_broadcast_sigterm_tensor": agree})])


def validation_interval(trainer: Trainer) -> float | None:
    """Return the seconds between validations; ``None`` if batches are counted.

    Touches: ``Trainer._val_check_time_interval``.

    Without: ranks validate when their own clocks say so, and wait for each other forever.
    """
    seconds: float | None = vars(trainer)["_val_check_time_interval"]
    return seconds


def is_time_to_validate(trainer: Trainer, last: float) -> tuple[bool, float]:
    """Return whether the time between validations has passed on this rank, and when the last validation was.

    Args:
        trainer: A Trainer with a :func:`validation_interval`.
        last: What this function returned before; any number at first.

    Touches: ``Trainer._last_val_time`` and ``Trainer._val_check_time_interval``.

    Without: as of :func:`validation_interval`.
    """
    found: float = vars(trainer)["_last_val_time"]
    if math.isfinite(found):  # set by Lightning since
        last = found
    return time.monotonic() - last >= vars(trainer)["_val_check_time_interval"], last


def set_time_to_validate(trainer: Trainer, *, is_due: bool) -> None:
    """Have the Trainer validate after the next batch, or not.

    Touches: ``Trainer._last_val_time``.

    Without: as of :func:`validation_interval`.
    """
    vars(trainer)["_last_val_time"] = -math.inf if is_due else math.inf


def replace_after_closure(
    plugin: Precision, action: Callable[[Callable[[], None], Optimizer], None]
) -> AbstractContextManager[None]:
    """While entered, let another function run between the closure of an optimizer step and the step.

    Args:
        plugin: The precision plugin.
        action: Called with what Lightning does there - hooks, and clipping of gradients - and the optimizer.

    Touches: ``Precision._after_closure`` (replaced on one object).

    Without: whether gradients are finite would be known only once the optimizer has used them.
    """

    def after_closure(model: LightningModule, optimizer: Optimizer) -> None:
        action(partial(type(plugin)._after_closure, plugin, model, optimizer), optimizer)

    return replaced_entries([(vars(plugin), {"_after_closure": after_closure})])


def detects_anomaly(trainer: Trainer) -> bool:
    """Whether ``Trainer(detect_anomaly=True)`` was asked for.

    Touches: ``Trainer._detect_anomaly``.

    Without: torch would name a function of autograd, and not the stage, layer and microbatch.
    """
    return bool(trainer._detect_anomaly)


def training_data(trainer: Trainer) -> Any:
    """What the Trainer was given to train with, loaders or a datamodule; ``None`` if the module has loaders itself.

    Touches: ``fit_loop._data_source``.

    Without: no layout could be found at the start, as a step needs a batch.
    """
    source = trainer.fit_loop._data_source.instance
    return None if isinstance(source, LightningModule) else source


#: Private members of Lightning's ``Strategy`` and ``ParallelStrategy`` that strategies of this package, which inherit
#: from them, use or override; and what would break without.
STRATEGY_MEMBERS: Mapping[str, str] = {
    "_checkpoint_io": "its property would return Lightning's plugin, which does not replace files atomically",
    "_configure_launcher": "the Trainer would not create the launcher, so only this process would run",
    "_launcher": "the Trainer would not find the launcher, so only this process would run",
    "_layer_sync": "`Trainer(sync_batchnorm=True)` would have no effect",
    "_lightning_module": "after an error, a module without values would be moved to the CPU, which fails",
    "_precision_plugin": "the ranks of a model group would not agree on an overflow or on the norm for clipping",
    "_reset_optimizers_and_schedulers": "optimizers of an earlier run would still be set in the next run",
}

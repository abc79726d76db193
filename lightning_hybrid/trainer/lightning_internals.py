"""All access to private names of Lightning and torchmetrics.

Lightning has no public functions for some things that a strategy with a pipeline must know or change. Its private names
may change in each version, so no other file of the package uses them (``tests/private_names.py`` checks this), except
for the members of `Strategy` in :data:`STRATEGY_MEMBERS`, which `HybridStrategy` overrides. Callers are in `trainer`,
`strategy` and `tuning`.

The docstring of each function lists the private names that it uses under ``Touches``, and what would break without it
under ``Without``. ``tests/test_lightning_contract.py`` tests each function alone: after an upgrade of Lightning, the
tests show which functions no longer work. ``docs/project/lightning-internals.md`` is made from these docstrings.

A function that returns a context changes Lightning only while the context is entered, in most cases for a whole run.
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
    """Return True if the batch that was requested last is the last batch of its epoch.

    Touches: ``_TrainingEpochLoop._num_ready_batches_reached``.

    Without: A run that ended in the middle of an epoch could not be distinguished from a run that ended with the epoch,
        and would resume in the wrong epoch.
    """
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def is_accumulating(trainer: Trainer) -> bool:
    """Return True if the next optimizer step needs more batches.

    Touches: ``_TrainingEpochLoop._should_accumulate``.

    Without: There would be no warning that a checkpoint between two optimizer steps contains no gradients.
    """
    return trainer.fit_loop.epoch_loop._should_accumulate()


def skips_backward(trainer: Trainer) -> bool:
    """Return True if batches run without a backward, as `StochasticWeightAveraging` does to update batch norms.

    Touches: ``_AutomaticOptimization._skip_backward``.

    Without: A schedule would run backward although Lightning skips it.
    """
    return trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward


def end_restart(trainer: Trainer) -> None:
    """Make all loops of a fit run as if they had not been restarted.

    The public setter of the fit loop does the opposite if ``max_steps`` is set.

    Touches: ``_Loop._restarting``, ``_Loop._resuming_from_checkpoint``.

    Without: In a resumed epoch, Lightning would skip hooks, validations and new iterators of the uninterrupted run.
    """
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop):
        loop._restarting = loop._resuming_from_checkpoint = False


def skip_next_validation(trainer: Trainer, *, skip: bool) -> None:
    """Set if Lightning skips the validation after the current batch, because it is already done.

    Touches: ``_TrainingEpochLoop._skip_next_val``.

    Without: A run that resumes from a checkpoint at the end of a validation would repeat this validation.
    """
    trainer.fit_loop.epoch_loop._skip_next_val = skip


def replace_next_batch(trainer: Trainer, action: Callable[[Callable[[], None]], None]) -> AbstractContextManager[None]:
    """While entered, call a function once instead of training on the next batch.

    Up to that batch, Lightning restarts in the middle of an epoch as usual.

    Args:
        trainer: The Trainer.
        action: Receives a function that trains on the batch. The end of the batch follows in any case.

    Touches: The method ``advance`` of the private class ``_TrainingEpochLoop``, on one object.

    Without: A run that resumes in the middle of an epoch would start this epoch again.
    """
    loop = trainer.fit_loop.epoch_loop

    def advance(data_fetcher: Any) -> None:
        del attributes["advance"]
        action(partial(loop.advance, data_fetcher))

    attributes: dict[str, Any] = loop.__dict__
    return replaced_entries([(attributes, {"advance": advance})])


def before_validation(trainer: Trainer, action: Callable[[], None]) -> AbstractContextManager[None]:
    """While entered, call a function before each validation of a fit, before its loaders and hooks.

    Touches: The method ``run`` of the private class ``_EvaluationLoop``, on one object.

    Without: A checkpoint in the middle of a validation would contain the current random numbers and metrics, although
        the validation runs again from its start after a resume.
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
    """While entered, pass values that `LightningModule.log` adds to the Trainer's results through a function.

    Args:
        trainer: The Trainer; ``None`` if the module has none.
        record: Receives a function that adds a value to the results, and the name, the value and all other arguments
            for this function, by keyword.

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

    # An assignment, not `replaced_entries`: this is entered in every step.
    vars(results)["log"] = log
    try:
        yield
    finally:
        del vars(results)["log"]


@contextmanager
def intercept_results(trainer: Trainer | None, record: Callable[..., None]) -> Iterator[None]:
    """While entered, pass values that `LightningModule.log` would add to the Trainer's results to a function instead.

    Args:
        trainer: The Trainer; ``None`` if the module has none.
        record: Receives the name, the value and the other arguments of the call, by keyword.

    Touches:
        `Trainer._results`, and the signature of its `log`.
    Without:
        A reference to the method from before the step (`Head(log=self.log)`) would log only on the last stage.
    """

    def instead(_: Callable[..., None], name: str, value: Any, *, sync_dist_fn: Any, **arguments: Any) -> None:
        record(name, value, **arguments)

    with results_through(trainer, instead):
        yield


def keep_results_in_place() -> AbstractContextManager[None]:
    """While entered, make `self.log` move a result to the device of the logged value only if it is on another device.

    Lightning moves the result at every call and copies all its attributes, which takes as long as the rest of the call.

    Touches:
        `_ResultMetric.to`, which is replaced for all results.
    Without:
        Each log call of a step would take twice as long.
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
    """Return the values that a loop has logged since its epoch began: Lightning's entries, by hook and name.

    Args:
        loop: The epoch loop of training, or an evaluation loop.

    Touches: ``_TrainingEpochLoop._results``, ``_EvaluationLoop._results``.

    Without: Checkpoints would contain states of metrics that Lightning resets before their next use.
    """
    results: dict[str, Any] = loop._results
    return results


@contextmanager
def before_log_reductions(
    trainer: Trainer, at_once: Callable[[str], None], at_epoch_end: Callable[[list[str]], None]
) -> Iterator[None]:
    """While entered, call functions before replicas reduce logged values, in training and evaluation.

    A key consists of a hook and a name, such as ``"training_step.loss"``. Every rank makes the calls at the same point
    of its program: when it logs a value, or when an epoch ends. The reduction itself happens when a value is read; the
    progress bar on rank 0 is the first to read it.

    Args:
        trainer: The Trainer.
        at_once: Receives the key of a value that is reduced when it is logged, or that a hook outside of batches logs.
        at_epoch_end: Receives the keys of the values that batches have logged and the end of the epoch reduces, in
            order.

    Touches: ``_ResultCollection.update_metrics`` (replaced for all), ``_LoggerConnector`` (``epoch_end_reached``,
        replaced on one object; ``_first_loop_iter``), ``Trainer._results``, ``_ResultMetric`` (``meta``, ``is_tensor``,
        ``has_reset``), ``_Metadata`` (``on_step``, ``on_epoch``), ``_Sync`` (``should``, ``rank_zero_only``).

    Without: Replicas that log different keys would wait for each other, or mix values.
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
    """Return True if replicas reduce a logged value: a metric, or a number with `sync_dist` that all ranks log."""
    sync = entry.meta.sync
    return not entry.is_tensor or (sync.should and not sync.rank_zero_only)


def result_states(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return the running means and other reductions of values that were logged in this training epoch.

    Returns:
        For each entry of :func:`result_collection`, tensors on the host and plain values. Entries that are reduced over
        a process group of the user are omitted.

    Touches: ``_ResultMetric`` (``meta``, ``is_tensor``, ``has_reset``, ``_forward_cache``), ``_Metadata`` (all fields),
        ``_Sync`` (``should``, ``group``, ``rank_zero_only``).

    Without: In a resumed epoch, means would cover only the part after the resume.
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
        states: The states from a run of the same module, with tensors on the device of this process.

    Touches: ``_TrainingEpochLoop._results`` (replaced), ``_ResultCollection`` (a subclass), ``_ResultMetric``,
        ``_Metadata``, ``_Sync`` (made, with all their fields).

    Without: In a resumed epoch, means would cover only the part after the resume.
    """
    entries = {key: _result_metric(trainer, state) for key, state in states.items()}
    loop = trainer.fit_loop.epoch_loop
    if not isinstance(loop._results, _ResumedResults):
        loop._results = _ResumedResults(loop._results)
    loop._results.resume(entries)


def _result_metric(trainer: Trainer, state: Mapping[str, Any]) -> _ResultMetric:
    """Return the entry of Lightning's results for a state of :func:`result_states`, on the device of this rank."""
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
    """Lightning's results, with entries from the run that saved the checkpoint.

    Lightning raises an error if `self.log` is called twice with the same key and other arguments. The first call after
    a resume may have other arguments than earlier calls: another layout may have nothing to synchronize or may use
    `max` for `torch.max`, and the user may have changed the program. Therefore, the arguments of the first call after
    the resume replace the saved arguments.
    """

    def __init__(self, results: _ResultCollection) -> None:
        super().__init__(results.training)
        vars(self).update(vars(results))
        self.update(results)
        self._not_logged_yet: set[str] = set()

    def resume(self, entries: Mapping[str, _ResultMetric]) -> None:
        """Add entries from the run that saved the checkpoint."""
        self.update(entries)
        self._not_logged_yet.update(entries)

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value with the arguments of the first call after the resume."""
        key = f"{fx}.{name}"  # in training, Lightning does not append the number of the loader
        if key in self._not_logged_yet:
            self._not_logged_yet.remove(key)
            requested = _RequestedResults(self.training)
            requested.log(fx, name, value, *args, **kwargs)
            self[key].meta = requested[key].meta
        super().log(fx, name, value, *args, **kwargs)


class _RequestedResults(_ResultCollection):
    """Results that contain only the arguments of log calls, without values."""

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Do nothing."""


def noted_metrics(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the values that callbacks, loggers and progress bars have received, without the newest values.

    The public properties of the Trainer first add the newest values, which may synchronize ranks.

    Touches: ``Trainer._logger_connector`` with its ``_callback_metrics``, ``_logged_metrics``,
        ``_progress_bar_metrics``.

    Without: Callbacks and plateau schedulers of a resumed run would lack values logged before the checkpoint.
    """
    connector = trainer._logger_connector
    return connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics


def set_num_logged_batches(trainer: Trainer, batches: int) -> None:
    """Set the number of batches of this epoch that have been logged.

    Touches: ``_LoggerConnector._first_loop_iter``.

    Without: Lightning would treat the first batch after a resume as the first of its epoch, and reset logged values.
    """
    trainer._logger_connector._first_loop_iter = None if batches == 0 else batches == 1


# -- data --------------------------------------------------------------------------------------------------------------


def set_use_distributed_sampler(trainer: Trainer, use: bool) -> bool:
    """Set if Lightning adds its own samplers to loaders.

    Returns:
        The setting before; at first, the argument of the Trainer.

    Touches:
        `Trainer._accelerator_connector`
    Without:
        Lightning would split the samples over all ranks in its own order, after this package has split them.
    """
    connector = trainer._accelerator_connector
    before, connector.use_distributed_sampler = connector.use_distributed_sampler, use
    return before


def warn_of_few_workers(loader: DataLoader[Any], trainer: Trainer) -> None:
    """Print Lightning's warning about a loader with few workers.

    Touches:
        `_worker_check`, `RunningStage.dataloader_prefix`
    Without:
        This warning would not be printed for loaders that the strategy wraps.
    """
    stage = trainer.state.stage
    assert stage is not None, "loaders must be prepared for a stage of the Trainer"
    _worker_check(trainer, loader, f"{stage.dataloader_prefix}_dataloader")


def unwrap_batch_sampler(sampler: Any) -> Any:
    """Return a loader's batch sampler without Lightning's wrapper for predictions; ``None`` if the sampler is ``None``.

    Touches:
        `_IndexBatchSamplerWrapper`, `_IndexBatchSamplerWrapper._batch_sampler`
    Without:
        The samples of a loader could not be split over replicas in `Trainer.predict`.
    """
    return sampler._batch_sampler if isinstance(sampler, _IndexBatchSamplerWrapper) else sampler


def rewrap_batch_sampler(sampler: Any, former: Any) -> Any:
    """Return a batch sampler, with Lightning's wrapper for predictions if the former sampler had this wrapper.

    Touches:
        `_IndexBatchSamplerWrapper`
    Without:
        A `BasePredictionWriter` would not receive the indices of the samples in a batch.
    """
    return _IndexBatchSamplerWrapper(sampler) if isinstance(former, _IndexBatchSamplerWrapper) else sampler


def recorded_batch_indices(loader: Any) -> list[list[int]] | None:
    """Return the indices of the samples in each batch so far; ``None`` if Lightning does not record them.

    Touches:
        `_IndexBatchSamplerWrapper`
    Without:
        The same as without :func:`set_recorded_batch_indices`.
    """
    sampler = getattr(loader, "batch_sampler", None)
    return sampler.seen_batch_indices if isinstance(sampler, _IndexBatchSamplerWrapper) else None


def set_recorded_batch_indices(loader: DataLoader[Any], indices: list[list[int]]) -> None:
    """Set the list that :func:`recorded_batch_indices` returns, if Lightning records indices.

    Touches:
        `_IndexBatchSamplerWrapper`
    Without:
        On ranks that receive their batches, a `BasePredictionWriter` would not get the indices of samples in a batch.
    """
    if isinstance(sampler := getattr(loader, "batch_sampler", None), _IndexBatchSamplerWrapper):
        sampler.seen_batch_indices = indices


def combined_loader(loop: Any) -> CombinedLoader | None:
    """Return the combined and prepared loaders of a loop; ``None`` if the loop has not requested its loaders yet.

    Args:
        loop: The fit loop, or an evaluation loop.

    Touches: ``_FitLoop._combined_loader``, ``_EvaluationLoop._combined_loader``.

    Without: No loader could be resumed in the middle of an epoch.
    """
    found: CombinedLoader | None = loop._combined_loader
    return found


def end_loaders(loaders: CombinedLoader) -> None:
    """End the workers and iterators of loaders, but keep their lengths, which Lightning reads later.

    Args:
        loaders: The result of :func:`combined_loader`.

    Touches: ``CombinedLoader._iterator``.

    Without: An exception before the next epoch would be hidden by an exception about a loader without an iterator.
    """
    iterator = loaders._iterator
    loaders.reset()
    loaders._iterator = iterator


def discard_loaders(loop: Any) -> None:
    """Make a loop request its loaders again.

    Touches: The same as :func:`combined_loader`.

    Without: A resumed run would create its validation loaders earlier than the uninterrupted run, and shuffle with
        other random numbers.
    """
    loop._combined_loader = None


def reload_epochs(trainer: Trainer) -> list[float]:
    """Return the epochs in which the training and the validation loaders were created last.

    Touches: ``_FitLoop._last_train_dl_reload_epoch``, ``_EvaluationLoop._last_val_dl_reload_epoch``.

    Without: With ``reload_dataloaders_every_n_epochs``, a resumed run would request loaders in other epochs.
    """
    fit_loop = trainer.fit_loop
    return [fit_loop._last_train_dl_reload_epoch, fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch]


def set_reload_epochs(trainer: Trainer, epochs: Iterable[float]) -> None:
    """Restore the epochs that :func:`reload_epochs` returned.

    Touches: The same as :func:`reload_epochs`.

    Without: The same as without :func:`reload_epochs`.
    """
    fit_loop = trainer.fit_loop
    fit_loop._last_train_dl_reload_epoch, fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = epochs


def data_fetcher(trainer: Trainer) -> Any:
    """Return the object that fetches training batches, perhaps one batch ahead; ``None`` before and after a fit.

    Touches: ``_FitLoop._data_fetcher``.

    Without: No loader could be resumed in the middle of an epoch.
    """
    return trainer.fit_loop._data_fetcher


def start_fetching(fetcher: Any) -> None:
    """Create new iterators, without fetching a batch ahead.

    Touches: ``_DataFetcher.__iter__``.

    Without: A loader without a length would return a batch before its iterator has reached the saved position.
    """
    _DataFetcher.__iter__(fetcher)


def fetch_ahead(fetcher: Any) -> None:
    """Fetch the batch that Lightning fetches ahead.

    Raises:
        StopIteration: After the last batch.

    Touches: ``_DataFetcher.__next__``, ``_PrefetchDataFetcher.batches``.

    Without: After a resume, a loader without a length would lose a batch, and its end would be detected too late.
    """
    fetcher.batches.append(_DataFetcher.__next__(fetcher))


def batch_iterator(combined: CombinedLoader) -> Any:
    """Return the iterator over combined loaders, with an attribute ``iterators``; ``None`` if it does not exist yet.

    Touches: ``CombinedLoader._iterator``.

    Without: No loader could be resumed in the middle of an epoch.
    """
    return combined._iterator


def num_fetched(iterator: Any) -> int:
    """Return the number of batches in this epoch that a :func:`batch_iterator` has returned.

    Touches: ``_ModeIterator._idx``.

    Without: It would be unknown how many batches a run had fetched, but not trained on, when a checkpoint was saved.
    """
    number: int = iterator._idx
    return number


def begun_anew(iterator: Any) -> list[bool] | None:
    """Return a flag for each loader of a :func:`batch_iterator`, which is True if the loader has started again.

    Loaders that end before the longest loader start again. The list belongs to the iterator, so changes to the list
    change the iterator. The result is ``None`` if loaders never start again.

    Touches: ``_MaxSizeCycle._consumed``.

    Without: A resumed epoch over loaders of different lengths would not end with the longest loader.
    """
    return getattr(iterator, "_consumed", None)


def set_sampler_epoch(loader: object, epoch: int) -> None:
    """Set the epoch of a loader's samplers, as the fit loop does.

    Touches: ``lightning.fabric.utilities.data._set_sampler_epoch``.

    Without: Samplers that shuffle by epoch would use the order of the first epoch in a resumed epoch.
    """
    _set_sampler_epoch(loader, epoch)


# -- optimization and precision ----------------------------------------------------------------------------------------


@contextmanager
def replace_closure(trainer: Trainer, closure: Callable[..., Closure]) -> Iterator[None]:
    """Make automatic optimization use another closure while entered.

    Lightning zeroes gradients between step and backward, which would delete the gradients that a schedule has computed.
    In addition, Lightning raises an error for a step that returns ``None`` if there are several processes.

    Args:
        trainer: The Trainer.
        closure: Receives the arguments of ``Closure``, by keyword.

    Touches: ``_TrainingEpochLoop.automatic_optimization`` (replaced, with the same progress, which is in checkpoints),
        ``_AutomaticOptimization`` (a subclass), ``_make_closure``, ``_make_step_fn``, ``_make_backward_fn``,
        ``_make_zero_grad_fn``, ``_skip_backward``, ``_training_step`` (replaced), ``output_result_cls``,
        ``lightning.pytorch.trainer.call._call_strategy_hook``.

    Without: Automatic optimization could not train with a pipeline, or skip a step with replicas.
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
    """Lightning's optimization loop with another closure."""

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
    """Return True if the error is Lightning's error about several optimizers.

    Lightning's error suggests manual optimization, which this package does not support with every layout.

    Touches: The text of ``lightning.pytorch.core.optimizer._validate_multiple_optimizers_support``.

    Without: Users would follow the suggestion, and get another error.
    """
    return isinstance(error, RuntimeError) and "multiple optimizers" in str(error)


def move_optimizer_states(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Move the states of optimizers to a device, except step counts that torch requires on the host.

    Touches: ``lightning.fabric.utilities.optimizer._optimizers_to_device``.

    Without: Optimizers whose states were loaded on the host would fail at their first step on a device.
    """
    _optimizers_to_device(optimizers, device)


# -- modules and callbacks ---------------------------------------------------------------------------------------------


def attached_trainer(module: nn.Module) -> Trainer | None:
    """Return the Trainer of a module; ``None`` if it has no Trainer, for which the property `trainer` raises an error.

    Touches:
        `LightningModule._trainer`
    Without:
        The dry run could not run modules without a Trainer.
    """
    return getattr(module, "_trainer", None)


@functools.cache
def lightning_attributes() -> frozenset[str]:
    """Return the names of the attributes that Lightning adds to every module.

    Touches:
        The attributes of a `LightningModule`; `_log_hyperparams`, `_hparams`, `_hparams_initial` and `_hparams_name`,
        which `save_hyperparameters` sets.
    Without:
        Lightning's own attributes would be treated as results of the user's steps, and be synchronized.
    """
    return frozenset([*vars(LightningModule()), "_log_hyperparams", "_hparams", "_hparams_initial", "_hparams_name"])


def replace_callback_log(trainer: Trainer, log: Callable[..., None]) -> AbstractContextManager[None]:
    """While entered, make the Trainer's callbacks log through a function.

    Touches:
        The attribute `log` of callbacks, which Lightning sets to the module's method.
    Without:
        Values that callbacks log in hooks would differ between the stages.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return replaced_entries([(vars(callback), {"log": log}) for callback in callbacks])


def wrap_before_batch_transfer(
    module: LightningModule, context: Callable[[], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """While entered, run the hook `on_before_batch_transfer` in a context; no method of a strategy wraps this hook.

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
    """Set ``module.device_mesh``, which has no public setter.

    Touches: ``LightningModule._device_mesh``.

    Without: `configure_model` could not use the mesh.
    """
    module._device_mesh = mesh


def without_example_input(module: LightningModule) -> AbstractContextManager[None]:
    """While entered, remove the example input that was assigned to a module; an example input of its class stays.

    Touches: ``LightningModule._example_input_array``.

    Without: `ModelSummary` would run the module, of which this rank has only some layers.
    """
    return replaced_entries([(vars(module), {"_example_input_array": None})])


def choose_checkpoint(trainer: Trainer, choose: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """While entered, replace the checkpoint from which a run resumes: the path found for ``ckpt_path``, or ``None``.

    Args:
        trainer: The Trainer.
        choose: Receives the path that was found, or ``None``, and returns the path to use. Called once in each run,
            when the process groups exist.

    Touches: ``Trainer._checkpoint_connector`` and its ``resume_start`` (replaced on one object).

    Without: If a node had no last checkpoint on its disk, its ranks would start from the beginning, but others resume.
    """
    connector = trainer._checkpoint_connector

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        type(connector).resume_start(connector, choose(checkpoint_path), weights_only=weights_only)

    return replaced_entries([(vars(connector), {"resume_start": resume_start})])


def find_last_remotely(dated: Callable[[str], str | None]) -> AbstractContextManager[None]:
    """While entered, make ``ckpt_path="last"`` find checkpoints on remote file systems.

    Lightning lists remote paths without their protocol, so it then looks for them on the disk. In addition, it chooses
    the checkpoint by its modification time, which folders of object stores do not have.

    Args:
        dated: Receives the path of a possible checkpoint, and returns its path with its time; ``None`` if there is no
            complete checkpoint.

    Touches: ``ModelCheckpoint._find_last_checkpoints`` (replaced in the class, because the Trainer calls it before any
        method of a strategy), ``ModelCheckpoint.__resolve_ckpt_dir``, ``ModelCheckpoint._fs``.

    Without: A run with a remote folder would start from the beginning each time.
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
    """Tell a callback that saves every n steps that the checkpoint of the current step exists.

    Touches: ``ModelCheckpoint._every_n_train_steps``, ``ModelCheckpoint._last_global_step_saved``.

    Without: The first batch after a resume, which may be between two optimizer steps, would overwrite the checkpoint of
        the step before it.
    """
    every = callback._every_n_train_steps
    if every >= 1 and step % every == 0:
        callback._last_global_step_saved = step


def throughputs(callback: ThroughputMonitor) -> Iterator[Throughput]:
    """Yield the throughput counters of a monitor, one for each stage of the Trainer such as training.

    Touches: ``ThroughputMonitor._throughputs``.

    Without: The samples of a model group would be counted once for each of its ranks.
    """
    yield from callback._throughputs.values()


def is_wrapping_io(plugin: CheckpointIO) -> TypeGuard[_WrappingCheckpointIO]:
    """Return True if a plugin writes through another plugin, its ``checkpoint_io``, as `AsyncCheckpointIO` does.

    Touches: ``_WrappingCheckpointIO``.

    Without: Files written by this plugin would not be replaced atomically.
    """
    return isinstance(plugin, _WrappingCheckpointIO)


# -- torchmetrics ------------------------------------------------------------------------------------------------------


def forward_value(metric: Metric) -> Any:
    """Return the last result of the metric's `forward`, which Lightning logs for each step; ``None`` before.

    Touches:
        `Metric._forward_cache`
    Without:
        A metric that is logged with ``on_step=True`` would have no value for the batch.
    """
    return metric._forward_cache


def set_forward_value(metric: Metric, value: Any) -> None:
    """Set the last result of the metric's `forward`.

    Touches:
        `Metric._forward_cache`
    Without:
        A metric that is logged with ``on_step=True`` would have the value of the last microbatch, on one stage.
    """
    metric._forward_cache = value


def batch_metric(metric: Metric) -> Metric:
    """Return an empty copy of a metric whose `compute` synchronizes as `forward` does: only with `dist_sync_on_step`.

    Touches:
        `Metric._to_sync`, which torchmetrics reads, and sets to `sync_on_compute` when a metric is created.
    Without:
        The value of a step would be the value of all replicas, and would need a collective that not all of them call.
    """
    # For a running window, the value of a batch is the value of the inner metric; a window can be shorter than a batch.
    copied = copy.deepcopy(metric.base_metric if isinstance(metric, Running) else metric)
    copied.sync_on_compute = copied._to_sync = metric.dist_sync_on_step
    copied.reset()
    return copied


def update_arguments(metric: Metric, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a `forward` call that the metric's `update` accepts.

    Touches:
        `Metric._filter_kwargs`
    Without:
        Metrics of a collection all receive the same arguments, and would raise errors for arguments of other metrics.
    """
    return metric._filter_kwargs(**kwargs)


def sync_metrics_over(group: GroupRef) -> AbstractContextManager[None]:
    """While entered, synchronize every metric of this process that has no process group over a group.

    Args:
        group: The ranks. After the group was destroyed, metrics use torchmetrics' default, which is WORLD.

    Touches:
        `Metric.sync`, which is replaced for all metrics.
    Without:
        Each sample would count once per stage, also in metrics of callbacks and in metrics that hooks create.
    """
    original = Metric.sync

    def sync(metric: Metric, dist_sync_fn: Any = None, process_group: Any = None, *args: Any, **kwargs: Any) -> None:
        if dist_sync_fn is None and process_group is None and metric.process_group is None and group.is_alive:
            process_group = group()
        original(metric, dist_sync_fn, process_group, *args, **kwargs)

    return replaced_attributes(Metric, sync=sync)


def set_update_count(metric: Metric, count: int) -> None:
    """Set the update count of a metric; ``Metric.update_count`` has no setter.

    Touches: ``Metric._update_count``.

    Without: Metrics of a resumed run would warn that they were computed before they were updated, and means of their
        values would have wrong weights.
    """
    metric._update_count = count


# -- processes ---------------------------------------------------------------------------------------------------------


class _InPlaceLauncher(_Launcher):
    """A launcher without processes; see :func:`in_place_launcher`."""

    is_interactive_compatible = True

    def __init__(self, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._around = around

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call a function in this process."""
        return _call_in(self._around, function, *args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Do nothing, because no processes were started."""


def in_place_launcher(around: Callable[[], AbstractContextManager[None]]) -> _Launcher:
    """Return a launcher that starts no processes, and calls functions of the Trainer in this process.

    Args:
        around: Returns a context for each function. A function is a whole run, from before its checkpoint is chosen
            until its end.

    Touches: ``lightning.pytorch.strategies.launchers.launcher._Launcher``.

    Without: Changes that a run makes before it calls the strategy could not be undone after the run.
    """
    return _InPlaceLauncher(around)


class _ScriptLauncher(_SubprocessScriptLauncher):
    """A launcher that runs the user's script in other processes; see :func:`subprocess_launcher`."""

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
        """Start the processes, which inherit the environment of this process."""
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
    """Return a launcher that starts the other processes of this node by running the user's script in each of them.

    Args:
        environment: The cluster environment.
        num_processes: The number of processes on this node.
        num_nodes: The number of nodes.
        variables: Environment variables of the other processes, which this process does not keep.
        around: See :func:`in_place_launcher`.

    Touches: ``lightning.pytorch.strategies.launchers._SubprocessScriptLauncher`` and its ``_call_children_scripts``.

    Without: Users would have to start several processes with another program, such as `torchrun`.
    """
    return _ScriptLauncher(environment, num_processes, num_nodes, variables=variables, around=around)


class _WorkerLauncher(_MultiProcessingLauncher):
    """A launcher with worker processes; see :func:`multiprocessing_launcher`."""

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
        """Return the results of the worker; with weights only if this rank has all of them."""
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
    """Return a launcher that calls functions of the Trainer in worker processes, and returns what they change.

    Args:
        strategy: The strategy whose processes are started.
        start_method: ``"fork"``, ``"spawn"`` or ``"forkserver"``.
        check: Receives the start method and a device of the strategy, before processes start.
        why: Returns the reason why the weights of a module cannot be returned; ``None`` if they can.
        around: See :func:`in_place_launcher`; must support pickling.

    Touches: ``lightning.pytorch.strategies.launchers._MultiProcessingLauncher`` and its
        ``_collect_rank_zero_results``, ``_start_method`` and ``_strategy``; ``_WorkerOutput`` of the same module.

    Without: A notebook could train only on one device, or in processes that `torchrun` has started.
    """
    return _WorkerLauncher(strategy, start_method, check, why, around)


def _call_in(
    around: Callable[[], AbstractContextManager[None]], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a function in a context. Unlike a local function, this one can be pickled."""
    with around():
        return function(*args, **kwargs)


def is_interactive() -> bool:
    """Return True if this process is a notebook or an interactive shell, whose script cannot be run again.

    Touches: ``lightning.fabric.utilities.imports._IS_INTERACTIVE``, which the Trainer reads to check launchers.

    Without: Users would have to set `start_method` in a notebook.
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
    """Create the process group of all processes as Lightning's strategies do: with a log line, and destroyed at exit.

    Args:
        environment: The cluster environment, which knows the address and the ranks.
        backend: The backend of the group.
        timeout: The timeout of the group.
        device: The device to which the group is bound; ``None`` for no device.
        store: The store through which the processes connect; ``None`` for the store that torch creates.

    Touches: ``lightning.fabric.utilities.distributed._init_dist_connection``.

    Without: There would be no process group, unless the user creates it.
    """
    _init_dist_connection(environment, backend, timeout=timeout, device_id=device, store=store)


def replace_signal_handlers(
    trainer: Trainer, on_terminate: Callable[[int], None], on_requeue: Callable[[int], None]
) -> AbstractContextManager[None]:
    """Return a context that replaces the handlers of SIGTERM and of SLURM's signal before a requeue.

    Args:
        trainer: The Trainer.
        on_terminate: Receives the number of the signal, in the handler.
        on_requeue: Receives the number of the signal; called only if Lightning would requeue the job.

    Touches: ``Trainer._signal_connector``, and its ``_sigterm_notifier_fn`` and ``_slurm_sigusr_handler_fn``
        (replaced on one object, before it registers them).

    Without: Lightning's handlers would run collectives at any position of the program; inside a step, they would wait
        forever.
    """
    handlers = {
        "_sigterm_notifier_fn": lambda signum, _: on_terminate(signum),
        "_slurm_sigusr_handler_fn": lambda signum, _: on_requeue(signum),
    }
    return replaced_entries([(vars(trainer._signal_connector), handlers)])


def set_received_sigterm(trainer: Trainer) -> None:
    """Set ``trainer.received_sigterm``, so that the Trainer's loops stop as soon as possible.

    Touches: ``Trainer._signal_connector``.

    Without: Callbacks that read this attribute, for example after an exception, would find no SIGTERM.
    """
    trainer._signal_connector.received_sigterm = True


def requeue(trainer: Trainer, signum: int) -> None:
    """Save a checkpoint from which the requeued job resumes, and make SLURM requeue the job; on every rank.

    Args:
        trainer: The Trainer.
        signum: The signal, for the log.

    Touches: ``_SignalConnector._slurm_sigusr_handler_fn``.

    Without: Jobs would not be requeued.
    """
    connector = trainer._signal_connector
    handle: Callable[..., None] = type(connector)._slurm_sigusr_handler_fn
    handle(connector, signum, None)


def replace_sigterm_broadcast(trainer: Trainer, agree: Callable[[], None]) -> AbstractContextManager[None]:
    """Return a context that replaces the function with which ranks agree before each training batch to stop.

    Args:
        trainer: The Trainer.
        agree: The other function; raises an error if the ranks stop.

    Touches: ``_TrainingEpochLoop._broadcast_sigterm_tensor`` (replaced on one object).

    Without: Only a SIGTERM of rank 0 would count, and each batch would wait for the device.
    """
    attributes: dict[str, Any] = trainer.fit_loop.epoch_loop.__dict__
    return replaced_entries([(attributes, {"_broadcast_sigterm_tensor": agree})])


def validation_interval(trainer: Trainer) -> float | None:
    """Return the seconds between validations; ``None`` if the interval is a number of batches.

    Touches: ``Trainer._val_check_time_interval``.

    Without: Each rank would validate by its own clock, and ranks would wait for each other forever.
    """
    seconds: float | None = vars(trainer)["_val_check_time_interval"]
    return seconds


def is_time_to_validate(trainer: Trainer, last: float) -> tuple[bool, float]:
    """Return True if the time between validations has passed on this rank; and the time of the last validation.

    Args:
        trainer: A Trainer with a :func:`validation_interval`.
        last: The time that this function returned before; any number at first.

    Touches: ``Trainer._last_val_time`` and ``Trainer._val_check_time_interval``.

    Without: The same as without :func:`validation_interval`.
    """
    found: float = vars(trainer)["_last_val_time"]
    if math.isfinite(found):  # Lightning has set it since then
        last = found
    return time.monotonic() - last >= vars(trainer)["_val_check_time_interval"], last


def set_time_to_validate(trainer: Trainer, *, is_due: bool) -> None:
    """Make the Trainer validate after the next batch, or not.

    Touches: ``Trainer._last_val_time``.

    Without: The same as without :func:`validation_interval`.
    """
    vars(trainer)["_last_val_time"] = -math.inf if is_due else math.inf


def replace_after_closure(
    plugin: Precision, action: Callable[[Callable[[], None], Optimizer], None]
) -> AbstractContextManager[None]:
    """While entered, call a function between the closure of an optimizer step and the step itself.

    Args:
        plugin: The precision plugin.
        action: Receives a function that does Lightning's work at this point (hooks and gradient clipping), and the
            optimizer.

    Touches: ``Precision._after_closure`` (replaced on one object).

    Without: Gradients could be checked for infinities only after the optimizer has used them.
    """

    def after_closure(model: LightningModule, optimizer: Optimizer) -> None:
        action(partial(type(plugin)._after_closure, plugin, model, optimizer), optimizer)

    return replaced_entries([(vars(plugin), {"_after_closure": after_closure})])


def detects_anomaly(trainer: Trainer) -> bool:
    """Return True if the Trainer has ``detect_anomaly=True``.

    Touches: ``Trainer._detect_anomaly``.

    Without: Errors about NaNs would name an autograd function instead of the stage, the layer and the microbatch.
    """
    return bool(trainer._detect_anomaly)


def training_data(trainer: Trainer) -> Any:
    """Return the training loaders or the datamodule of the Trainer; ``None`` if the module has its own loaders.

    Touches: ``fit_loop._data_source``.

    Without: No layout could be found at the start, because a step needs a batch.
    """
    source = trainer.fit_loop._data_source.instance
    return None if isinstance(source, LightningModule) else source


#: Private members of Lightning's ``Strategy`` and ``ParallelStrategy`` that strategies of this package use or override,
#: each with what would break without it.
STRATEGY_MEMBERS: Mapping[str, str] = {
    "_checkpoint_io": "its property would return Lightning's plugin, which does not replace files atomically",
    "_configure_launcher": "the Trainer would not create the launcher, so only this process would run",
    "_launcher": "the Trainer would not find the launcher, so only this process would run",
    "_layer_sync": "`Trainer(sync_batchnorm=True)` would have no effect",
    "_lightning_module": "after an error, a module without values would be moved to the CPU, which fails",
    "_precision_plugin": "the ranks of a model group would not agree on an overflow or on the norm for clipping",
    "_reset_optimizers_and_schedulers": "optimizers of an earlier run would still be set in the next run",
}

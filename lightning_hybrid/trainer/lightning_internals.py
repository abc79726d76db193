"""Everything private of Lightning and torchmetrics that this package reads or replaces, and nothing else.

Each function is called after what it does, and says in ``Touches`` which private names it uses and in ``Without`` what
would break if they went. ``tests/test_lightning_contract.py`` tries each one alone, so that an upgrade says within
seconds which of them moved; ``docs/lightning-internals.md`` is made from these docstrings.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Metric
from torchmetrics.wrappers import Running

from lightning_hybrid.distributed.process_group import GroupRef

__all__ = [
    "attached_trainer",
    "batch_metric",
    "forward_value",
    "intercept_results",
    "lightning_attributes",
    "recorded_batch_indices",
    "rewrap_batch_sampler",
    "set_callback_log",
    "set_forward_value",
    "set_recorded_batch_indices",
    "set_use_distributed_sampler",
    "sync_metrics_over",
    "unwrap_batch_sampler",
    "unwrap_before_batch_transfer",
    "update_arguments",
    "wrap_before_batch_transfer",
]

# -- loops and their progress ------------------------------------------------------------------------------------------

# -- logged values -----------------------------------------------------------------------------------------------------


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
    results = getattr(trainer, "_results", None)
    if results is None:
        yield
        return

    def log(fx: str, name: str, value: Any, *, sync_dist_fn: Any, **arguments: Any) -> None:
        record(name, value, **arguments)

    vars(results)["log"] = log
    try:
        yield
    finally:
        del vars(results)["log"]


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
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, _IndexBatchSamplerWrapper):
        sampler.seen_batch_indices = indices


# -- optimization and precision ----------------------------------------------------------------------------------------

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


def set_callback_log(trainer: Trainer, log: Callable[..., None]) -> None:
    """Let the Trainer's callbacks log through this function.

    Touches:
        The attribute `log` of callbacks, which Lightning sets to the module's method.
    Without:
        What callbacks log in hooks would differ between the stages.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        callback.log = log


def wrap_before_batch_transfer(module: LightningModule, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter a context around the hook `on_before_batch_transfer`, which no method of a strategy surrounds.

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

    vars(module)["_on_before_batch_transfer"] = wrapped


def unwrap_before_batch_transfer(module: LightningModule) -> None:
    """Undo :func:`wrap_before_batch_transfer`.

    Touches:
        `LightningModule._on_before_batch_transfer`
    Without:
        As there.
    """
    vars(module).pop("_on_before_batch_transfer", None)


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
        A metric that is logged with ``on_step=True`` would have the value of the last micro-batch, on one stage.
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


def sync_metrics_over(group: GroupRef | None) -> None:
    """Let every metric of this process that names no group of its own synchronise over a group.

    Args:
        group: The ranks; ``None`` for torchmetrics' own choice, which is WORLD.

    Touches:
        `Metric.sync`, which is replaced for all metrics.
    Without:
        Each sample would count once for every stage, in metrics of callbacks and those that hooks make too.
    """
    original = getattr(Metric.sync, "original", Metric.sync)
    if group is None:
        Metric.sync = original  # type: ignore[method-assign]
        return

    def sync(metric: Metric, dist_sync_fn: Any = None, process_group: Any = None, *args: Any, **kwargs: Any) -> None:
        if dist_sync_fn is None and process_group is None and metric.process_group is None and group.is_alive:
            process_group = group()
        original(metric, dist_sync_fn, process_group, *args, **kwargs)

    sync.original = original  # type: ignore[attr-defined]
    Metric.sync = sync  # type: ignore[method-assign, assignment]


# -- processes ---------------------------------------------------------------------------------------------------------

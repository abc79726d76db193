"""What has been accumulated since an epoch began: means of logged values, states of metrics."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch import Tensor
from torchmetrics import Metric

from lightning_hybrid.distributed.pytree import map_leaves

__all__ = ["load_logged", "load_metrics", "logged", "metric_states", "plain_values"]

_PLAIN = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
_NUMBERS = ("value", "cumulated_batch_size")


class _FormerMetadata(_Metadata):
    """How a value was logged before; from the next call on, how it is logged then.

    Lightning refuses two calls of `self.log` that differ, and the call of another layout does: a single process has
    nothing to synchronise.
    """

    def __ne__(self, other: object) -> bool:
        if type(other) is _Metadata:
            self.__class__ = _Metadata  # type: ignore[assignment]
            vars(self).update(vars(other))
        return self != other if type(self) is _Metadata else True


def logged(trainer: Trainer, *, up_to_date: bool) -> dict[str, Any]:
    """What the Trainer knows of logged values: those that callbacks see, and the running means of the epoch.

    Args:
        trainer: The Trainer, during training.
        up_to_date: Whether what Lightning has not yet noted is noted first.

    Returns:
        Tensors on the host and plain values. Without what was logged over a process group of the user's.
    """
    entries = {}
    for key, entry in trainer.fit_loop.epoch_loop._results.items():
        meta = entry.meta
        if meta.sync.group is not None:
            continue
        entries[key] = {
            "meta": {name: getattr(meta, name) for name in _PLAIN},
            "reduction": [meta.reduce_fx.__module__, meta.reduce_fx.__name__],
            "sync": [meta.sync.should, meta.sync.rank_zero_only],
            "numbers": {name: _kept(vars(entry)[name]) for name in _NUMBERS if entry.is_tensor and name in vars(entry)},
            "of_batch": _kept(entry._forward_cache),
            "updates": entry._update_count,
            "has_reset": entry.has_reset,
        }
    connector = trainer._logger_connector
    if up_to_date:  # each of these properties notes it, and may synchronise
        trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics  # noqa: B018
    return {
        "entries": entries,
        "callback": _kept(dict(connector._callback_metrics)),
        "log": _kept(dict(connector._logged_metrics)),
        "bar": _kept(dict(connector._progress_bar_metrics)),
    }


def load_logged(trainer: Trainer, state: Mapping[str, Any], *, entries: bool) -> None:
    """Let the Trainer know of these values.

    Args:
        trainer: The Trainer, before training goes on.
        state: From :func:`logged`.
        entries: Whether the running means of the epoch too.
    """
    device = trainer.strategy.root_device
    connector = trainer._logger_connector
    connector._callback_metrics.update(_moved(state["callback"], device))
    connector._logged_metrics.update(_moved(state["log"], device))
    connector._progress_bar_metrics.update(state["bar"])
    results = trainer.fit_loop.epoch_loop._results
    for key, saved in state["entries"].items() if entries else ():
        meta = _FormerMetadata(**saved["meta"], reduce_fx=_reduction(*saved["reduction"]))
        should, rank_zero_only = saved["sync"]
        meta.sync = _Sync(fn=trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only)
        entry = _ResultMetric(meta, is_tensor=bool(saved["numbers"])).to(device)
        for name, value in saved["numbers"].items():
            setattr(entry, name, _moved(value, device))
        if not entry.is_tensor:
            entry.value = trainer.lightning_module.get_submodule(saved["meta"]["metric_attribute"])
        entry._forward_cache = _moved(saved["of_batch"], device)
        entry._update_count, entry.has_reset = saved["updates"], saved["has_reset"]
        results[key] = entry


def plain_values(module: LightningModule) -> dict[str, dict[str, Any]]:
    """What the metrics in a module keep beside their states: numbers and tensors, by name of metric and attribute."""
    return {
        name: {
            attribute: _kept(value)
            for attribute, value in vars(metric).items()
            if isinstance(value, (int, float, Tensor)) and attribute not in _OF_EVERY_METRIC | metric._defaults.keys()
        }
        for name, metric in module.named_modules()
        if isinstance(metric, Metric)
    }


def metric_states(module: LightningModule, fresh: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the metrics in a module have counted, by name; of those that have counted nothing, nothing.

    Args:
        module: The user's module.
        fresh: From :func:`plain_values`, before training.
    """
    found = {}
    for name, plain in plain_values(module).items():
        metric: Any = module.get_submodule(name)
        known = fresh.get(name, {})
        changed = {key: value for key, value in plain.items() if key not in known or not _equal(value, known[key])}
        if metric._update_count or changed:  # some wrappers do not count
            found[name] = [metric._update_count, _kept(metric.metric_state), changed]
    return found


def load_metrics(module: LightningModule, states: Mapping[str, Any]) -> None:
    """Put the metrics into these states.

    Args:
        module: The user's module.
        states: From :func:`metric_states`. What names no metric of this module is left out.
    """
    metrics = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
    for name in states.keys() & metrics.keys():
        metric = metrics[name]
        metric._update_count, values, plain = states[name]
        for attribute, value in {**values, **plain}.items():
            setattr(metric, attribute, _moved(value, metric.device))


class _Bare(Metric):
    """Has what every metric has."""

    def update(self) -> None:
        """Nothing to count."""

    def compute(self) -> None:
        """Nothing has been counted."""


_OF_EVERY_METRIC = vars(_Bare()).keys()


def _equal(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else bool(left == right)


def _kept(value: Any) -> Any:
    """A copy on the host, which later updates do not change."""
    return map_leaves(lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf, value)


def _moved(value: Any, device: torch.device) -> Any:
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def _reduction(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(builtins if module == "builtins" else torch, name)
    return found

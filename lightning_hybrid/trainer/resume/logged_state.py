"""What was added up since an epoch began: means of logged values, states of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from lightning_hybrid.distributed.pytree import map_leaves
from lightning_hybrid.distributed.tensor_bytes import to_host
from lightning_hybrid.trainer import lightning_internals as internals

_METRICS = ("callback", "log", "bar")  # as `internals.noted_metrics` gives them


def logged_state(trainer: Trainer, *, up_to_date: bool) -> dict[str, Any]:
    """What the Trainer knows of logged values: those that callbacks see, and the running means of the epoch.

    Args:
        trainer: The Trainer, during training.
        up_to_date: Whether what Lightning has not yet noted is noted first.

    Returns:
        Tensors on the host and plain values. Without what was logged over a process group of the user's.
    """
    entries = internals.result_states(trainer)
    if up_to_date:  # each of these properties notes it, and may synchronise
        trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics  # noqa: B018
    noted = zip(_METRICS, internals.noted_metrics(trainer), strict=True)
    return {"entries": entries, **{name: map_leaves(to_host, dict(metrics)) for name, metrics in noted}}


def load_logged_state(trainer: Trainer, state: Mapping[str, Any], *, entries: bool) -> None:
    """Let the Trainer know of these values.

    Args:
        trainer: The Trainer, before training continues.
        state: From :func:`logged_state`.
        entries: Whether the running means of the epoch too.
    """
    device = trainer.strategy.root_device
    for name, metrics in zip(_METRICS, internals.noted_metrics(trainer), strict=True):
        metrics.update(move_data_to_device(state[name], device))
    if entries:
        internals.load_result_states(trainer, move_data_to_device(state["entries"], device))


def plain_values(module: LightningModule) -> dict[str, dict[str, Any]]:
    """What metrics in a module have beside their states: numbers and tensors, by name of metric and attribute."""
    return {
        name: {
            attribute: to_host(value)
            for attribute, value in vars(metric).items()
            if isinstance(value, (int, float, Tensor))
            and attribute not in _OF_EVERY_METRIC | metric.metric_state.keys()
        }
        for name, metric in module.named_modules()
        if isinstance(metric, Metric)
    }


def metric_states(module: LightningModule, fresh: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The states of the metrics in a module, by name; of those that were not updated, nothing.

    Args:
        module: The user's module.
        fresh: From :func:`plain_values`, before training.
    """
    found = {}
    for name, plain in plain_values(module).items():
        metric: Any = module.get_submodule(name)
        known = fresh.get(name, {})
        changed = {key: value for key, value in plain.items() if key not in known or not _equal(value, known[key])}
        if metric.update_count or changed:  # some wrappers do not count
            found[name] = [metric.update_count, map_leaves(to_host, metric.metric_state), changed]
    return found


def load_metric_states(module: LightningModule, states: Mapping[str, Any]) -> None:
    """Put the metrics into these states.

    Args:
        module: The user's module.
        states: From :func:`metric_states`. What names no metric of this module is left out.
    """
    metrics = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
    for name in states.keys() & metrics.keys():
        metric = metrics[name]
        count, values, plain = states[name]
        internals.set_update_count(metric, count)
        for attribute, value in {**values, **plain}.items():
            setattr(metric, attribute, move_data_to_device(value, metric.device))


class _Bare(Metric):
    """Has what every metric has."""

    def update(self) -> None:
        """Nothing to count."""

    def compute(self) -> None:
        """Nothing has been counted."""


_OF_EVERY_METRIC = vars(_Bare()).keys()


def _equal(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else bool(left == right)

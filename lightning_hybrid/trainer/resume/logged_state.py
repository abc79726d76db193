"""Values that accumulate during an epoch, as part of a checkpoint: means of logged values, and states of metrics.

`ResumeCallback` saves these values in the record of each rank, and restores them in a resumed run. Metric states are
not saved by the module itself, because they are not persistent by default and differ between ranks.
"""

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

_METRICS = ("callback", "log", "bar")  # the order in which `internals.noted_metrics` returns them


def logged_state(trainer: Trainer, *, up_to_date: bool) -> dict[str, Any]:
    """Return the Trainer's logged values: the values that callbacks see, and the running means of the epoch.

    Args:
        trainer: The Trainer, during training.
        up_to_date: If True, first add values that are logged but not yet in the Trainer's public metrics. This may be a
            collective of all ranks.

    Returns:
        Tensors on the host and plain values, without values that were logged over one of the user's process groups.
    """
    entries = internals.result_states(trainer)
    if up_to_date:  # reading each of these properties updates it, and may synchronize ranks
        trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics  # noqa: B018
    noted = zip(_METRICS, internals.noted_metrics(trainer), strict=True)
    return {"entries": entries, **{name: map_leaves(to_host, dict(metrics)) for name, metrics in noted}}


def load_logged_state(trainer: Trainer, state: Mapping[str, Any], *, entries: bool) -> None:
    """Restore the Trainer's logged values.

    Args:
        trainer: The Trainer, before training continues.
        state: The result of :func:`logged_state`.
        entries: If True, also restore the running means of the epoch. Set it to False between two epochs, or if the
            number of replicas has changed.
    """
    device = trainer.strategy.root_device
    for name, metrics in zip(_METRICS, internals.noted_metrics(trainer), strict=True):
        metrics.update(move_data_to_device(state[name], device))
    if entries:
        internals.load_result_states(trainer, move_data_to_device(state["entries"], device))


def plain_values(module: LightningModule) -> dict[str, dict[str, Any]]:
    """Return the numbers and tensors in attributes of a module's metrics, without metric states, by metric name."""
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
    """Return the states of the metrics in a module, by metric name, without metrics that were not updated.

    Args:
        module: The user's module.
        fresh: The result of :func:`plain_values` before training.

    Returns:
        For each metric, a list of its update count, its states on the host, and the plain values that have changed.
    """
    found = {}
    for name, plain in plain_values(module).items():
        metric: Any = module.get_submodule(name)
        known = fresh.get(name, {})
        changed = {key: value for key, value in plain.items() if key not in known or not _equal(value, known[key])}
        if metric.update_count or changed:  # some metric wrappers do not count their updates
            found[name] = [metric.update_count, map_leaves(to_host, metric.metric_state), changed]
    return found


def load_metric_states(module: LightningModule, states: Mapping[str, Any]) -> None:
    """Restore the states of the metrics in a module.

    Args:
        module: The user's module.
        states: The result of :func:`metric_states`. Names that are not a metric of this module are ignored.
    """
    metrics = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
    for name in states.keys() & metrics.keys():
        metric = metrics[name]
        count, values, plain = states[name]
        internals.set_update_count(metric, count)
        for attribute, value in {**values, **plain}.items():
            setattr(metric, attribute, move_data_to_device(value, metric.device))


class _Bare(Metric):
    """A metric without states, whose attributes are the attributes of every metric."""

    def update(self) -> None:
        """Do nothing."""

    def compute(self) -> None:
        """Do nothing."""


_OF_EVERY_METRIC = vars(_Bare()).keys()


def _equal(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else bool(left == right)

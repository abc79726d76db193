"""Metrics of torchmetrics across stages: updated on the last stage, with results on every rank.

Each `StepContext` has one :class:`MetricsAcrossStages`. `Run.install` enters :meth:`MetricsAcrossStages.installed` for
the whole run, and the context enters :meth:`MetricsAcrossStages.step` for each step. The metrics themselves stay
unchanged, because users call and configure them, so only their `compute` and `update` are replaced on the objects.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import MeanMetric, Metric

from lightning_hybrid.distributed.messages.tree_broadcast import TreeBroadcast
from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.trainer import lightning_internals as internals


@dataclass
class _Batch:
    """The state of one batch, until the next batch begins.

    Attributes:
        num_microbatches: The number of runs of the user's step.
        weights: The weight of each microbatch.
        counted: The number of microbatches that have started.
        weight: The weight of the current microbatch in the batch; ``None`` for the weight of an ordinary call.
        forwards: The number of calls of each metric's `forward`.
    """

    num_microbatches: int = 1
    weights: Sequence[float] = ()
    counted: int = 0
    weight: float | None = None
    forwards: Counter[str] = field(default_factory=Counter)


class MetricsAcrossStages:
    """The replacements that make the metrics of a module work although only the last stage updates them.

    - ``compute()`` runs on the last stage, over the data-parallel group, and its result is broadcast to the model
      group. So all ranks must call it, as Lightning and hooks do.
    - A metric's value of a *batch* (``forward``, logged with ``on_step=True``) would be the value of the last
      microbatch. Therefore a copy of the metric, its *batch metric*, is reset at each batch, and updated with all
      microbatches.
    - A `MeanMetric` of losses counts each call as 1, and so counts each batch as 1. A microbatch counts as its fraction
      of the batch.
    - Every metric synchronizes over the data-parallel group, even if it belongs to a callback or was made by a hook.
      The ranks of a pipeline have the same samples, and over WORLD each sample would count once for every stage.
    - Metrics keep plain tensors in list states instead of sharded tensors.

    Args:
        module: The user's module.
        data_group: The process group of the replicas of this stage.
        exchange: Sends values from the last stage to its model group.
        remember_value: Called with each tensor that a metric's `forward` returned in a step, because the user may log
            the tensor, and with a function that returns the value for the whole batch after the batch has run.
        is_last: True if this rank has the last stage.
        unfollowed: Makes a context for code that is not part of the user's step.
        plain: Converts sharded tensors, which a metric may keep until it computes, to plain tensors; ``None`` if there
            are none.

    Attributes:
        exist: True if the module has metrics.
    """

    def __init__(
        self,
        module: nn.Module,
        data_group: dist.ProcessGroup,
        exchange: TreeBroadcast,
        remember_value: Callable[[Any, Callable[[], Any]], None],
        *,
        is_last: bool,
        unfollowed: Callable[[], AbstractContextManager[None]] = nullcontext,
        plain: Callable[[Any], Any] | None = None,
    ) -> None:
        self._module, self._plain = module, plain
        self._unfollowed = unfollowed
        self._only_seen = False
        self._metrics: dict[str, Metric] = {}
        self.exist = False
        self._patched: list[weakref.ref[Metric]] = []
        self._data_group = GroupRef(data_group)
        self._exchange = exchange
        self._remember_value = remember_value
        self._is_last = is_last
        self._is_local = False  # if True, `compute()` is local to this rank
        self._batch_metrics: dict[str, Metric] = {}
        self._logged_on_step: dict[str, bool] = {}
        self._batch = _Batch()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make ``compute()`` of every metric a collective of all ranks outside of steps, inside the context."""
        with internals.sync_metrics_over(self._data_group):
            self.find()
            try:
                yield
            finally:
                for metric in filter(None, (reference() for reference in self._patched)):
                    metric.compute = getattr(metric.compute, "original", metric.compute)  # type: ignore[method-assign]
                    metric.update = getattr(metric.update, "original", metric.update)  # type: ignore[method-assign]
                self._patched.clear()

    def find(self) -> None:
        """Find the metrics again, because hooks make new ones (a `MetricTracker` does at each increment)."""
        found = {name: metric for name, metric in _named_parts(self._module) if isinstance(metric, Metric)}
        self._batch_metrics = {
            name: metric for name, metric in self._batch_metrics.items() if found.get(name) is self._metrics[name]
        }
        self._metrics, self.exist = found, bool(found)
        for name, metric in found.items():
            if not hasattr(metric.compute, "original"):
                metric.compute = self._across_stages(name, metric.compute)  # type: ignore[method-assign]
                self._count_batches(metric)
                self._patched.append(weakref.ref(metric))

    # These are functions instead of methods: callbacks copy modules, and a method would copy this object, too.

    def _across_stages(self, name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        about = -zlib.crc32(name.encode())

        def computed(*args: Any, **kwargs: Any) -> Any:
            if self._is_local:
                return compute(*args, **kwargs)
            self._exchange.about = about
            if not self._is_last:
                return self._exchange.receive()
            with self._local():  # other ranks do not take part in metrics inside this metric
                value = compute(*args, **kwargs)
            return self._exchange(value)

        computed.original = compute  # type: ignore[attr-defined]
        return computed

    @contextmanager
    def _local(self) -> Iterator[None]:
        self._is_local = True
        try:
            yield
        finally:
            self._is_local = False

    def _count_batches(self, metric: nn.Module) -> None:
        """Let a `MeanMetric` weight a number without a weight by its microbatch's fraction of the batch."""
        # A subclass with its own `update` may do something else.
        if getattr(type(metric), "update", None) is not MeanMetric.update:
            self._keep_plain(metric)
            return
        assert isinstance(metric, MeanMetric)
        update = metric.update

        def updated(value: Any, weight: Any = None) -> None:
            if weight is None and getattr(value, "ndim", 0) == 0:  # otherwise the value has one entry per sample
                weight = self._batch.weight
            update(value) if weight is None else update(value, weight)

        updated.original = update  # type: ignore[attr-defined]
        metric.update = updated  # type: ignore[method-assign]

    def _keep_plain(self, metric: nn.Module) -> None:
        """Let a metric keep plain tensors in its list states. Each tensor is converted once, when it is added."""
        plain = self._plain
        if plain is None or not isinstance(metric, Metric):
            return
        update = metric.update

        def updated(*args: Any, **kwargs: Any) -> None:
            lengths = {name: len(state) for name, state in metric.metric_state.items() if isinstance(state, list)}
            update(*args, **kwargs)
            for name, state in metric.metric_state.items():
                if isinstance(state, list):
                    begin = lengths.get(name, 0)
                    state[begin:] = plain(state[begin:])

        updated.original = update  # type: ignore[attr-defined]
        metric.update = updated  # type: ignore[method-assign]

    @contextmanager
    def step(self, *, num_microbatches: int, counts: Sequence[int] = ()) -> Iterator[None]:
        """Make ``compute()`` local, and update batch metrics, while a step of a module with metrics runs.

        At the end, each metric's last ``forward`` value is replaced by the value of its batch metric.

        Args:
            num_microbatches: The number of runs of the user's step.
            counts: The number of samples of each microbatch; empty if microbatches have no weights.
        """
        for name in [name for name in self._batch_metrics if not self._logged_on_step.get(name, True)]:
            del self._batch_metrics[name]
        for metric in self._batch_metrics.values():
            metric.reset()
        batch = self._batch = _Batch(num_microbatches, [count / sum(counts) for count in counts])
        with ExitStack() as hooks, self._local():
            hooks.callback(setattr, batch, "weight", None)  # calls after the step do not belong to a microbatch
            if self._is_last and num_microbatches > 1:
                for name, metric in self._metrics.items():
                    if self._logged_on_step.get(name, True):
                        hooks.enter_context(metric.register_forward_pre_hook(self._update(name), with_kwargs=True))
                        hooks.enter_context(metric.register_forward_hook(self._remember(name, batch)))
            yield
        for name, metric in self._batch_metrics.items():
            if batch.forwards[name]:  # read by hooks after the step, and by `self.log` in these hooks
                with torch.no_grad():
                    internals.set_forward_value(self._metrics[name], metric.compute())

    def next_microbatch(self) -> None:
        """Start a microbatch on the last stage, where its metrics count."""
        batch = self._batch
        batch.weight = batch.weights[batch.counted] if batch.counted < len(batch.weights) else None
        batch.counted += 1

    @contextmanager
    def only_seen(self) -> Iterator[None]:
        """Start a microbatch in which metrics do not count, and leave batch metrics unchanged inside the context.

        `StepContext` uses this while a step is traced, so that metrics receive tensors without values, and
        `TrainingStep` for the forwards of a comparison.
        """
        self.uncounted_microbatch()
        self._only_seen = True
        try:
            yield
        finally:
            self._only_seen = False

    def uncounted_microbatch(self) -> None:
        """Start a microbatch in which metrics do not count, but must run the same code, such as on another stage."""
        self._batch.weight = self._batch.weights[0] if self._batch.weights else None

    def _update(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """Return a hook before a metric's `forward` that updates its batch metric with the same arguments."""

        def update(metric: nn.Module, args: Any, kwargs: Any) -> None:
            assert isinstance(metric, Metric)
            if self._only_seen:
                return
            with self._unfollowed():
                if name not in self._batch_metrics:
                    self._batch_metrics[name] = internals.batch_metric(metric)
                    for part in self._batch_metrics[name].modules():
                        self._count_batches(part)
                self._batch_metrics[name].update(*args, **internals.update_arguments(metric, kwargs))

        return update

    def _remember(self, name: str, batch: _Batch) -> Callable[[nn.Module, Any, Any], None]:
        """Return a hook after a metric's `forward` that remembers the result, because the user may log it."""

        def remember(metric: nn.Module, args: Any, value: Any) -> None:
            if self._only_seen:
                return
            batch.forwards[name] += 1
            for index, leaf in enumerate(flatten(value)[0]):
                self._remember_value(leaf, functools.partial(self._leaf_of_batch, batch, name, index))

        return remember

    def _leaf_of_batch(self, batch: _Batch, name: str, index: int) -> Any:
        """Return the value for the whole batch of a tensor that ``forward`` returned, and that the user logged."""
        self._logged_on_step[name] = True
        if batch.forwards[name] > batch.num_microbatches:  # twice in a step: the batch metric includes both calls
            return None
        return flatten(internals.forward_value(self._metrics[name]))[0][index]

    def batch_value(self, name: str, *, on_step: bool) -> Any:
        """Return the value of a logged metric for the batch that has just run.

        Args:
            name: The dotted name of the metric.
            on_step: True if it was logged with ``on_step=True``. A metric that is never logged so, under any name, gets
                no batch metric in later steps.

        Returns:
            The value over all microbatches; ``None`` if the metric's ``forward`` was never called.
        """
        if self._batch.num_microbatches > 1:
            self._logged_on_step[name] = on_step or self._logged_on_step.get(name, False)
        return internals.forward_value(self._metrics[name])


def _named_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module's `named_modules`, and modules in dictionaries, lists and tuples that its parts hold."""
    visited: set[nn.Module] = set()
    named = list(module.named_modules(visited))
    yield from named
    for name, part in named:
        for attribute, value in vars(part).items():
            items: Any = enumerate(value) if isinstance(value, (list, tuple)) else ()
            for key, entry in value.items() if isinstance(value, dict) else items:
                if isinstance(entry, nn.Module):
                    yield from entry.named_modules(visited, f"{name}.{attribute}[{key!r}]")

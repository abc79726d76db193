"""torchmetrics across stages: they live on the last stage, and every rank sees what they compute."""

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
    """The state of one batch, until the next one begins.

    Attributes:
        num_microbatches: How often the user's code runs.
        weights: Of the microbatches.
        counted: How many of them have begun.
        weight: What the microbatch that runs counts in the batch; ``None`` for as much as any other call.
        forwards: How often each metric's `forward` was called.
    """

    num_microbatches: int = 1
    weights: Sequence[float] = ()
    counted: int = 0
    weight: float | None = None
    forwards: Counter[str] = field(default_factory=Counter)


class MetricsAcrossStages:
    """Makes the metrics of a module work when only the last stage updates them.

    - ``compute()`` runs on the last stage, over the data-parallel group, and its result is broadcast; so it must be
      called on all ranks, as Lightning does and as hooks do.
    - A metric's value of a *batch* (``forward``, logged with ``on_step=True``) would be that of the last microbatch. A
      copy of the metric, its batch metric, is reset at each batch and updated with all of its microbatches.
    - A `MeanMetric` of losses counts each of them once, and so each batch. A microbatch counts its part of that.
    - Every metric synchronises over the data-parallel group, also one that belongs to a callback or that a hook has
      made: the ranks of a pipeline see the same samples, and over WORLD each would count once for every stage.

    Args:
        module: The user's module.
        data_group: The replicas of this stage.
        exchange: From the last stage to its model group.
        remember_value: Called with each tensor that a metric's `forward` returned in a step, and with a function that
            gives the same of the whole batch once it has run: the user may log the tensor.
        is_last: Whether this rank has the last stage.
        unfollowed: Around what is no part of the user's step.
        plain: Makes ordinary tensors of those that ranks share, which a metric may keep until one of them computes;
            ``None`` where there are none.

    Attributes:
        exist: Whether the module has metrics.
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
        self._is_local = False  # whether `compute()` is this rank's own
        self._batch_metrics: dict[str, Metric] = {}
        self._logged_on_step: dict[str, bool] = {}
        self._batch = _Batch()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While entered, ``compute()`` of every metric is one of all ranks."""
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
        """Find the metrics: hooks make new ones (a `MetricTracker` does, at each of its increments)."""
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

    # Functions, not methods: callbacks copy modules, and a method would take this object along.

    def _across_stages(self, name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        about = -zlib.crc32(name.encode())

        def computed(*args: Any, **kwargs: Any) -> Any:
            if self._is_local:
                return compute(*args, **kwargs)
            self._exchange.about = about
            if not self._is_last:
                return self._exchange.receive()
            with self._local():  # metrics inside this metric are no affair of the other ranks
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
        """Let a `MeanMetric` count a number that has no weight by the part that its microbatch has in the batch."""
        if getattr(type(metric), "update", None) is not MeanMetric.update:  # of a subclass's own nothing is known
            self._keep_plain(metric)
            return
        assert isinstance(metric, MeanMetric)
        update = metric.update

        def updated(value: Any, weight: Any = None) -> None:
            if weight is None and getattr(value, "ndim", 0) == 0:  # else it is one of samples
                weight = self._batch.weight
            update(value) if weight is None else update(value, weight)

        updated.original = update  # type: ignore[attr-defined]
        metric.update = updated  # type: ignore[method-assign]

    def _keep_plain(self, metric: nn.Module) -> None:
        """Let a metric keep ordinary tensors in its lists: each is looked at once, when it has come."""
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
        """While a step runs: ``compute()`` is this rank's own, and batch metrics take part. For modules with metrics.

        Args:
            num_microbatches: How often the user's code runs.
            counts: The samples of each microbatch; nothing if they are not to be counted by them.
        """
        for name in [name for name in self._batch_metrics if not self._logged_on_step.get(name, True)]:
            del self._batch_metrics[name]
        for metric in self._batch_metrics.values():
            metric.reset()
        batch = self._batch = _Batch(num_microbatches, [count / sum(counts) for count in counts])
        with ExitStack() as hooks, self._local():
            hooks.callback(setattr, batch, "weight", None)  # what comes after the step belongs to no microbatch
            if self._is_last and num_microbatches > 1:
                for name, metric in self._metrics.items():
                    if self._logged_on_step.get(name, True):
                        hooks.enter_context(metric.register_forward_pre_hook(self._update(name), with_kwargs=True))
                        hooks.enter_context(metric.register_forward_hook(self._remember(name, batch)))
            yield
        for name, metric in self._batch_metrics.items():
            if batch.forwards[name]:  # also for hooks after the step, and for `self.log` in them
                with torch.no_grad():
                    internals.set_forward_value(self._metrics[name], metric.compute())

    def next_microbatch(self) -> None:
        """Begin a microbatch on the last stage, where its metrics count."""
        batch = self._batch
        batch.weight = batch.weights[batch.counted] if batch.counted < len(batch.weights) else None
        batch.counted += 1

    @contextmanager
    def only_seen(self) -> Iterator[None]:
        """Inside, the user's step runs without values of what its metrics see."""
        self.uncounted_microbatch()
        self._only_seen = True
        try:
            yield
        finally:
            self._only_seen = False

    def uncounted_microbatch(self) -> None:
        """Begin a microbatch on another stage, where metrics do not count but must do the same."""
        self._batch.weight = self._batch.weights[0] if self._batch.weights else None

    def _update(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """Before a metric's `forward`: its batch metric sees the same."""

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
        """After a metric's `forward`: what it returned may be logged."""

        def remember(metric: nn.Module, args: Any, value: Any) -> None:
            if self._only_seen:
                return
            batch.forwards[name] += 1
            for index, leaf in enumerate(flatten(value)[0]):
                self._remember_value(leaf, functools.partial(self._leaf_of_batch, batch, name, index))

        return remember

    def _leaf_of_batch(self, batch: _Batch, name: str, index: int) -> Any:
        """For a tensor that ``forward`` returned, and the user logged: the same of the whole batch."""
        self._logged_on_step[name] = True
        if batch.forwards[name] > batch.num_microbatches:  # twice in a step; the batch metric has seen all of them
            return None
        return flatten(internals.forward_value(self._metrics[name]))[0][index]

    def batch_value(self, name: str, *, on_step: bool) -> Any:
        """The value of the batch that has just run, for a metric that was logged.

        Args:
            name: The dotted name of the metric.
            on_step: Whether it was logged with ``on_step=True``. Metrics that never are, under any name, get no batch
                metric any more.

        Returns:
            The value over all microbatches; ``None`` if the metric's ``forward`` was not called.
        """
        if self._batch.num_microbatches > 1:
            self._logged_on_step[name] = on_step or self._logged_on_step.get(name, False)
        return internals.forward_value(self._metrics[name])


def _named_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A module's `named_modules`, and those that it or a part of it has in a plain dictionary, list or tuple."""
    visited: set[nn.Module] = set()
    named = list(module.named_modules(visited))
    yield from named
    for name, part in named:
        for attribute, value in vars(part).items():
            items: Any = enumerate(value) if isinstance(value, (list, tuple)) else ()
            for key, entry in value.items() if isinstance(value, dict) else items:
                if isinstance(entry, nn.Module):
                    yield from entry.named_modules(visited, f"{name}.{attribute}[{key!r}]")

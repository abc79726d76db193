"""torchmetrics across stages: they live on the last stage, and every rank sees what they compute."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import MeanMetric, Metric
from torchmetrics.wrappers import Running

from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.distributed.tree_broadcast import TreeBroadcast

__all__ = ["MetricsAcrossStages"]


class MetricsAcrossStages:
    """Makes the metrics of a module work when only the last stage updates them.

    - ``compute()`` runs on the last stage, over the data-parallel group, and its result is broadcast; so it must be
      called on all ranks, as Lightning does and as hooks do.
    - A metric's value of a *batch* (``forward``, logged with ``on_step=True``) would be that of the last micro-batch. A
      twin, reset at each batch, gets all of them.
    - A `MeanMetric` of losses counts each of them once, and so each batch. A micro-batch counts its share of that.
    - Every metric synchronises over the data-parallel group, also one that belongs to a callback or that a hook has
      made: the ranks of a pipeline see the same samples, and over WORLD each would count once for every stage.

    Args:
        module: The user's module.
        data_group: The replicas of this stage.
        exchange: From the last stage to its model group.
        is_last: Whether this rank has the last stage.
    """

    def __init__(
        self, module: nn.Module, data_group: dist.ProcessGroup, exchange: TreeBroadcast, *, is_last: bool
    ) -> None:
        self._module = module
        self._metrics: dict[str, Metric] = {}
        self._divided: list[weakref.ref[Metric]] = []
        self._data_group = weakref.ref(data_group)
        self._exchange = exchange
        self._is_last = is_last
        self._is_local = False
        self._num_microbatches = 1
        self._shares: Iterator[float] = iter(())
        self._share: float | None = None
        self._epoch: Any = None
        self._twins: dict[str, Metric] = {}
        self._forwards: Counter[str] = Counter()
        self._logged: dict[str, bool] = {}
        self._logged_on_step: dict[str, bool] = {}

    def install(self) -> None:
        """Make ``compute()`` of every metric one of all ranks."""
        _synchronise_over(self._data_group)
        self._find()

    def remove(self) -> None:
        """Undo :meth:`install`."""
        _synchronise_over(None)
        for reference in self._divided:
            metric = reference()
            if metric is not None:
                metric.compute = getattr(metric.compute, "undivided", metric.compute)  # type: ignore[method-assign]
                metric.update = getattr(metric.update, "undivided", metric.update)  # type: ignore[method-assign]
        self._divided.clear()

    def _find(self) -> None:
        """Find the metrics: hooks make new ones (a `MetricTracker` does, at each of its increments)."""
        found = {name: metric for name, metric in _named_parts(self._module) if isinstance(metric, Metric)}
        self._twins = {name: twin for name, twin in self._twins.items() if found.get(name) is self._metrics[name]}
        self._metrics = found
        for metric in found.values():
            if not hasattr(metric.compute, "undivided"):
                metric.compute = self._across_stages(metric.compute)  # type: ignore[method-assign]
                self._count_batches(metric)
                self._divided.append(weakref.ref(metric))

    def _find_again(self) -> None:
        """At the first step of each epoch, after the hooks of its start."""
        trainer = getattr(self._module, "_trainer", None)
        epoch = None if trainer is None else (trainer.state.stage, trainer.current_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._find()

    # Functions, not methods: callbacks copy modules, and a method would take this object along.

    def _across_stages(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*args: Any, **kwargs: Any) -> Any:
            if self._is_local:
                return compute(*args, **kwargs)
            if not self._is_last:
                return self._exchange.receive()
            self._is_local = True  # metrics inside this metric are no affair of the other ranks
            try:
                value = compute(*args, **kwargs)
            finally:
                self._is_local = False
            return self._exchange(value)

        computed.undivided = compute  # type: ignore[attr-defined]
        return computed

    def _count_batches(self, metric: nn.Module) -> None:
        """Let a `MeanMetric` count a number that has no weight by the share that its micro-batch has in the batch."""
        if getattr(type(metric), "update", None) is not MeanMetric.update:  # of a subclass's own nothing is known
            return
        assert isinstance(metric, MeanMetric)
        update = metric.update

        def updated(value: Any, weight: Any = None) -> None:
            if weight is None and getattr(value, "ndim", 0) == 0:  # else it is one of samples
                weight = self._share
            update(value) if weight is None else update(value, weight)

        updated.undivided = update  # type: ignore[attr-defined]
        metric.update = updated  # type: ignore[method-assign]

    @contextmanager
    def step(self, *, num_microbatches: int, counts: Sequence[int] = ()) -> Iterator[None]:
        """While a step runs: ``compute()`` is this rank's own, and twins take part.

        Args:
            num_microbatches: How often the user's code runs.
            counts: The samples of each micro-batch; nothing if they are not to be counted by them.
        """
        self._find_again()
        self._give_up_twins()
        self._is_local = True
        self._num_microbatches = num_microbatches
        self._shares = iter([count / sum(counts) for count in counts])
        self._forwards.clear()
        handles: list[RemovableHandle] = []
        if self._is_last and num_microbatches > 1:
            for name, metric in self._metrics.items():
                if self._logged_on_step.get(name, True):
                    handles.append(metric.register_forward_pre_hook(self._to_twin(name), with_kwargs=True))
                    handles.append(metric.register_forward_hook(self._with_twin(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._is_local = False
            self._share = None
        for name, twin in self._twins.items():
            if self._forwards[name]:  # also for hooks after the step, and for `self.log` in them
                with torch.no_grad():
                    self._metrics[name]._forward_cache = twin.compute()

    def next_microbatch(self, *, keep: bool) -> None:
        """A micro-batch begins.

        Args:
            keep: Whether its metrics count. Code before the body also runs on the first stage, where they do not.
        """
        self._share = next(self._shares, None) if keep else None

    def _give_up_twins(self) -> None:
        """Metrics that are logged by epoch need none; one that is logged by step as well, under any name, does."""
        for name, on_step in self._logged.items():
            self._logged_on_step[name] = on_step or self._logged_on_step.get(name, False)
            if not self._logged_on_step[name]:
                self._twins.pop(name, None)
        self._logged.clear()
        for twin in self._twins.values():
            twin.reset()

    def _to_twin(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def update(metric: nn.Module, args: Any, kwargs: Any) -> None:
            assert isinstance(metric, Metric)
            if name not in self._twins:
                # A window's value of a batch is that of its metric; the window itself may be shorter than a batch.
                twin = copy.deepcopy(metric.base_metric if isinstance(metric, Running) else metric)
                # Torchmetrics reads the second of these, which it derives from the first when a metric is made.
                twin.sync_on_compute = twin._to_sync = metric.dist_sync_on_step
                twin.reset()
                for part in twin.modules():
                    self._count_batches(part)
                self._twins[name] = twin
            self._twins[name].update(*args, **metric._filter_kwargs(**kwargs))

        return update

    def _with_twin(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def remember(metric: nn.Module, args: Any, value: Any) -> None:
            self._forwards[name] += 1
            remember_value: Any = getattr(vars(self._module).get("log"), "remember_value", None)
            if remember_value is None:
                return
            for index, leaf in enumerate(flatten(value)[0]):
                remember_value(leaf, functools.partial(self._leaf_of_batch, name, index))

        return remember

    def _leaf_of_batch(self, name: str, index: int) -> Any:
        """For a tensor that ``forward`` returned, and the user logged: the same of the whole batch."""
        self._logged[name] = True
        if self._forwards[name] > self._num_microbatches:  # several in a step; the twin has seen all of them
            return None
        return flatten(self._metrics[name]._forward_cache)[0][index]

    def batch_value(self, name: str, *, on_step: bool) -> Any:
        """The value of the batch that has just run, for a metric that was logged.

        Args:
            name: The dotted name of the metric.
            on_step: Whether it was logged with ``on_step=True``. Metrics that never are get no twin any more.

        Returns:
            The value over all micro-batches; ``None`` if the metric's ``forward`` was not called.
        """
        if self._num_microbatches > 1:
            self._logged[name] = on_step or self._logged.get(name, False)
        return self._metrics[name]._forward_cache


def _named_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A module's `named_modules`, and those that it or a part of it keeps in a plain dictionary, list or tuple."""
    seen: set[nn.Module] = set()
    named = list(module.named_modules(seen))
    yield from named
    for name, part in named:
        for attribute, value in vars(part).items():
            items: Any = enumerate(value) if isinstance(value, (list, tuple)) else ()
            for key, kept in value.items() if isinstance(value, dict) else items:
                if isinstance(kept, nn.Module):
                    yield from kept.named_modules(seen, f"{name}.{attribute}[{key!r}]")


def _synchronise_over(reference: Callable[[], dist.ProcessGroup | None] | None) -> None:
    """Let every metric of this process that names no group of its own synchronise over a group.

    Args:
        reference: Gives the group; ``None`` for torchmetrics' own choice, which is WORLD.
    """
    original = getattr(Metric.sync, "undivided", Metric.sync)
    if reference is None:
        Metric.sync = original  # type: ignore[method-assign]
        return

    def sync(metric: Metric, dist_sync_fn: Any = None, process_group: Any = None, *args: Any, **kwargs: Any) -> None:
        if dist_sync_fn is None and process_group is None and metric.process_group is None:
            process_group = reference()
        original(metric, dist_sync_fn, process_group, *args, **kwargs)

    sync.undivided = original  # type: ignore[attr-defined]
    Metric.sync = sync  # type: ignore[method-assign, assignment]

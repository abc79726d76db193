"""torchmetrics across stages: they live on the last stage, and every rank sees what they compute."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_hybrid.exchange import TreeBroadcast

__all__ = ["MetricsAcrossStages"]


class MetricsAcrossStages:
    """Makes the metrics of a module work when only the last stage updates them.

    - ``compute()`` runs on the last stage, over the data-parallel group, and its result is broadcast; so it must be
      called on all ranks, as Lightning does and as hooks do.
    - A metric's value of a *batch* (``forward``, logged with ``on_step=True``) would be that of the last micro-batch. A
      twin, reset at each batch, gets all of them.

    Args:
        module: The user's module.
        data_group: The replicas of this stage.
        exchange: From the last stage to its model group.
        is_last: Whether this rank has the last stage.
    """

    def __init__(
        self, module: nn.Module, data_group: dist.ProcessGroup, exchange: TreeBroadcast, *, is_last: bool
    ) -> None:
        self._metrics = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
        self._data_group = weakref.ref(data_group)
        self._exchange = exchange
        self._is_last = is_last
        self._is_local = False
        self._num_microbatches = 1
        self._gathering: list[str] = []
        self._twins: dict[str, Metric] = {}
        self._needs_twin: dict[str, bool] = {}

    def install(self) -> None:
        """Make ``compute()`` of every metric one of all ranks."""

        # Functions, not methods: callbacks copy modules, and a method would take this object along.
        def gather(result: Tensor, group: Any = None) -> list[Tensor]:
            return gather_all_tensors(result, group=self._data_group())

        for name, metric in self._metrics.items():
            if metric.process_group is None and metric.dist_sync_fn is None:
                metric.dist_sync_fn = gather
                self._gathering.append(name)
            metric.compute = self._across_stages(metric.compute)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Undo :meth:`install`."""
        for metric in self._metrics.values():
            compute = getattr(metric.compute, "undivided", None)
            if compute is not None:
                metric.compute = compute  # type: ignore[method-assign]
        for name in self._gathering:
            self._metrics[name].dist_sync_fn = None
        self._gathering.clear()

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

    @contextmanager
    def step(self, *, num_microbatches: int) -> Iterator[None]:
        """While a step runs: ``compute()`` is this rank's own, and twins take part."""
        self._is_local = True
        self._num_microbatches = num_microbatches
        handles = []
        for twin in self._twins.values():
            twin.reset()
        if self._is_last and num_microbatches > 1:
            handles = [
                metric.register_forward_pre_hook(self._to_twin(name), with_kwargs=True)
                for name, metric in self._metrics.items()
                if self._needs_twin.get(name, True)
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._is_local = False

    def _to_twin(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def update(metric: nn.Module, args: Any, kwargs: Any) -> None:
            assert isinstance(metric, Metric)
            if name not in self._twins:
                twin = copy.deepcopy(metric)
                # Torchmetrics reads the second of these, which it derives from the first when a metric is made.
                twin.sync_on_compute = twin._to_sync = metric.dist_sync_on_step
                twin.reset()
                self._twins[name] = twin
            self._twins[name].update(*args, **metric._filter_kwargs(**kwargs))

        return update

    def batch_value(self, name: str, *, on_step: bool) -> Any:
        """The value of the batch that has just run, for a metric that was logged.

        Args:
            name: The dotted name of the metric.
            on_step: Whether it was logged with ``on_step=True``. Otherwise its twin is given up.

        Returns:
            The value over all micro-batches; ``None`` if the metric's ``forward`` was not called.
        """
        if self._num_microbatches == 1:
            return self._metrics[name]._forward_cache
        self._needs_twin[name] = on_step
        twin = self._twins.get(name) if on_step else self._twins.pop(name, None)
        if twin is None or not on_step or not twin.update_called:
            return self._metrics[name]._forward_cache
        with torch.no_grad():
            return twin.compute()

from __future__ import annotations

import copy
import pickle
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torchmetrics import MeanMetric, Metric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import BinaryAUROC
from torchmetrics.regression import MeanSquaredError, R2Score
from torchmetrics.wrappers import Running

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.messages.host_messages import connect
from lightning_hybrid.distributed.messages.posted_broadcast import PostedBroadcast
from lightning_hybrid.distributed.messages.tree_broadcast import TreeBroadcast
from lightning_hybrid.trainer.results.metrics import MetricsAcrossStages
from tests.pool import Pools


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.nested = nn.ModuleList([SumMetric()])
        self.wrapper = MinMaxMetric(SumMetric())
        self.collection = MetricCollection([MeanSquaredError(), R2Score()])
        self.total = SumMetric() + SumMetric()


def alone() -> dist.ProcessGroup:
    """A group of this rank only."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


_MADE: list[PostedBroadcast] = []
_INSTALLED = ExitStack()  # until the next one is made


def make(module: nn.Module, data_group: dist.ProcessGroup | None = None) -> MetricsAcrossStages:
    """The last rank has the last stage."""
    world = dist.group.WORLD
    assert world is not None
    last = dist.get_world_size() - 1
    _MADE.append(
        PostedBroadcast(connect(world, range(world.size()), default_pg_timeout), last, 1, "results")
    )  # what is under way is lost with it
    exchange = TreeBroadcast(_MADE[-1], world, torch.device("cpu"))
    across = MetricsAcrossStages(
        module, data_group or alone(), exchange, lambda value, of_batch: None, is_last=dist.get_rank() == last
    )
    _INSTALLED.close()
    _INSTALLED.enter_context(across.installed())
    return across


# -- compute() over the pipeline ---------------------------------------------------------------------------------------


def computed() -> list[Any]:
    module = Module()
    across = make(module)
    x, y = torch.arange(6.0), torch.arange(6.0) ** 2
    with across.step(num_microbatches=1):
        if dist.get_rank() == 1:  # only there the step runs to its end
            module.mean.update(torch.tensor([1.0, 3.0]))
            module.nested[0].update(5.0)
            module.wrapper.update(torch.tensor(4.0))
            module.collection.update(x, y)
            module.total.update(2.0)
            assert module.mean.compute() == 2.0  # in a step it is this rank's own affair
    values = [module.mean, module.nested[0], module.wrapper, module.collection, module.total]
    return [_plain(metric.compute()) for metric in values] + [_plain(module.mean.compute())]


def _plain(value: Any) -> Any:
    return {key: v.item() for key, v in value.items()} if isinstance(value, dict) else value.item()


def test_every_rank_sees_what_the_last_stage_computes(ranks: Pools) -> None:
    first, last = ranks(2).run(computed, timeout=20.0)
    assert first == last
    collection = MetricCollection([MeanSquaredError(), R2Score()])
    collection.update(torch.arange(6.0), torch.arange(6.0) ** 2)
    wrapper = {"raw": 4.0, "max": 4.0, "min": 4.0}
    assert last == [2.0, 5.0, wrapper, _plain(collection.compute()), 4.0, 2.0]


def computed_alone() -> str:
    module = Module()
    across = make(module)
    with across.step(num_microbatches=1):
        if dist.get_rank() == 1:
            module.mean.update(1.0)
            module.total.update(2.0)
    if dist.get_rank() == 1:
        module.mean.compute()
    try:
        return str(module.total.compute().item())
    except WrongUseError as error:
        return str(error)


def test_what_the_last_stage_computes_alone_is_not_taken_for_something_else(ranks: Pools) -> None:
    first, last = ranks(2).run(computed_alone, timeout=20.0)
    assert first.startswith("The ranks of a model group are out of step. Rank 1 sent")
    assert last == "4.0"


def over_replicas() -> list[float]:
    # Both ranks have the last stage of their own replica.
    module = nn.ModuleDict({"auroc": BinaryAUROC(), "mean": MeanMetric()})
    world = dist.group.WORLD
    assert world is not None
    own = alone()
    exchange = TreeBroadcast(
        PostedBroadcast(connect(own, range(own.size()), default_pg_timeout), 0, 1, "results"), own, torch.device("cpu")
    )
    across = MetricsAcrossStages(module, world, exchange, lambda value, of_batch: None, is_last=True)
    _INSTALLED.close()
    _INSTALLED.enter_context(across.installed())
    scores, labels = torch.linspace(0, 1, 8), torch.tensor([0, 1, 0, 0, 1, 0, 1, 1])
    half = slice(dist.get_rank(), None, 2)
    with across.step(num_microbatches=1):
        module["auroc"].update(scores[half], labels[half])
        module["mean"].update(scores[half])
    return [module["auroc"].compute().item(), module["mean"].compute().item()]


def test_metrics_are_over_all_replicas(ranks: Pools) -> None:
    scores, labels = torch.linspace(0, 1, 8), torch.tensor([0, 1, 0, 0, 1, 0, 1, 1])
    whole = BinaryAUROC()
    whole.update(scores, labels)
    for auroc, mean in ranks(2).run(over_replicas):
        assert abs(auroc - whole.compute().item()) < 1e-6
        assert abs(mean - 0.5) < 1e-6


def own_gather(value: Any, group: Any = None) -> Any:
    return [value]


def taken_back() -> list[Any]:
    module = nn.ModuleDict({"mean": MeanMetric(), "mine": MeanMetric(dist_sync_fn=own_gather)})
    make(module)
    copied = copy.deepcopy(module)  # by a callback
    replaced, module["mean"] = module["mean"], MeanMetric()
    pickle.dumps(module)
    _INSTALLED.close()
    for metric in (module["mean"], replaced):
        metric.update(float(dist.get_rank()))
    copied["mean"].update(1.0)
    return [
        module["mean"].compute().item() == 0.5,  # over WORLD, as torchmetrics does
        replaced.compute().item() == 0.5,
        module["mine"].dist_sync_fn is own_gather,
        not hasattr(replaced.compute, "original"),
        not hasattr(copied["mean"].compute, "original"),
        not hasattr(replaced.update, "original"),
        not hasattr(Metric.sync, "original"),
    ]


def test_metrics_are_given_back_as_they_were(ranks: Pools) -> None:
    assert ranks(2).run(taken_back) == [[True] * 7] * 2


def of_others() -> list[float]:
    make(nn.ModuleDict())  # two stages, one replica
    world = dist.group.WORLD
    found = []
    for arguments in ({}, {"process_group": world}, {"dist_sync_fn": own_gather}):
        metric = SumMetric(**arguments)
        metric.update(1.0)
        found.append(metric.compute().item())
    return found


def test_metrics_that_belong_to_nobody_count_a_replica_once_unless_they_name_a_group(ranks: Pools) -> None:
    assert ranks(2).run(of_others) == [[1.0, 2.0, 1.0]] * 2


# -- the value of a batch ----------------------------------------------------------------------------------------------


class Batches:
    """One process that has the last stage: what a metric's `forward` says of each batch."""

    def __init__(self, metric: Metric) -> None:
        self.module = nn.ModuleDict({"metric": metric})
        self.across = make(self.module)

    def run(self, *microbatches: Any, on_step: bool = True) -> Any:
        with self.across.step(num_microbatches=len(microbatches)):
            for arguments in microbatches:
                self.module["metric"](*arguments)
        value = self.across.batch_value("metric", on_step=on_step)
        return None if value is None else round(value.item(), 6)


def tensors(*values: float) -> tuple[Tensor, ...]:
    return (torch.tensor(values),)


def in_batches() -> dict[str, Any]:
    batches = Batches(MeanMetric())
    found: dict[str, Any] = {
        "several": batches.run(tensors(1, 2), tensors(6)),
        "next": batches.run(tensors(10, 10), tensors(40)),
        "one": batches.run(tensors(5)),
        "several after one": batches.run(tensors(1), tensors(3)),
        "evaluation": batches.run(tensors(7), on_step=False),
        "after evaluation": batches.run(tensors(1), tensors(3)),
        "evaluation on step": batches.run(tensors(9)),
        "again": batches.run(tensors(2), tensors(4)),
    }
    found["of the epoch"] = round(batches.module["metric"].compute().item(), 6)
    return found


def test_the_value_of_a_batch_is_over_its_microbatches(ranks: Pools) -> None:
    values = [1, 2, 6, 10, 10, 40, 5, 1, 3, 7, 1, 3, 9, 2, 4]
    assert ranks(1).run(in_batches)[0] == {
        "several": 3.0,
        "next": 20.0,
        "one": 5.0,
        "several after one": 2.0,
        "evaluation": 7.0,
        "after evaluation": 2.0,
        "evaluation on step": 9.0,
        "again": 3.0,
        "of the epoch": round(sum(values) / len(values), 6),
    }


def by_shares() -> dict[str, list[float]]:
    """Two batches of 3 samples, in microbatches of 2 and 1: what `MeanMetric` says of the second one and of both."""
    updates: dict[str, Any] = {
        "numbers": lambda metric, value, count: metric(value),
        "tensors": lambda metric, value, count: metric(value=torch.tensor(value)),
        "with a weight": lambda metric, value, count: metric(value, 1.0),
        "of samples": lambda metric, value, count: metric(torch.full((count,), value)),
        "in a window": lambda metric, value, count: metric(value),
        "a subclass": lambda metric, value, count: metric(value, value),
    }
    found = {}
    for kind, update in updates.items():
        metric: Metric = Running(MeanMetric(), window=4) if kind == "in a window" else MeanMetric()
        batches = Batches(Own() if kind == "a subclass" else metric)
        for values in ((1.0, 4.0), (7.0, 1.0)):
            with batches.across.step(num_microbatches=2, counts=[2, 1]):
                for value, count in zip(values, [2, 1], strict=True):
                    batches.across.uncounted_microbatch()
                    batches.across.next_microbatch()
                    update(batches.module["metric"], value, count)
        value = batches.across.batch_value("metric", on_step=True)
        found[kind] = [round(value.item(), 6), round(batches.module["metric"].compute().item(), 6)]
    return found


class Own(MeanMetric):
    def update(self, prediction: float, target: float) -> None:  # type: ignore[override]
        super().update((prediction + target) / 2)


def outside_of_steps() -> float:
    batches = Batches(MeanMetric())
    with batches.across.step(num_microbatches=2, counts=[2, 1]):
        batches.across.next_microbatch()
    batches.module["metric"].update(5.0)
    return batches.module["metric"].weight.item()


def test_a_mean_of_numbers_outside_of_steps_counts_them(ranks: Pools) -> None:
    assert ranks(1).run(outside_of_steps) == [1.0]


def test_a_mean_of_numbers_counts_each_batch_once(ranks: Pools) -> None:
    by_samples, by_calls = [5.0, 3.5], [4.0, 3.25]
    assert ranks(1).run(by_shares)[0] == {
        "numbers": by_samples,
        "tensors": by_samples,
        "with a weight": by_calls,
        "of samples": by_samples,
        "in a window": by_samples,
        "a subclass": by_calls,
    }


def nonlinear() -> tuple[float, float]:
    x, y = torch.rand(8), torch.rand(8)
    batches = Batches(R2Score())
    value = batches.run((x[:5], y[:5]), (x[5:], y[5:]))
    return value, round(R2Score()(x, y).item(), 6)


def test_values_that_are_no_means_are_exact_too(ranks: Pools) -> None:
    value, expected = ranks(1).run(nonlinear)[0]
    assert abs(value - expected) < 1e-5


def batch_metrics_of_logged() -> list[bool]:
    batches = Batches(MeanMetric())
    found = []
    for on_step in (False, False, True, True):
        batches.run(tensors(1), tensors(3), on_step=on_step)
        found.append(bool(batches.across._batch_metrics))
    return found


def test_metrics_that_are_logged_by_epoch_have_no_batch_metric(ranks: Pools) -> None:
    assert ranks(1).run(batch_metrics_of_logged)[0][1] is False


def logged_twice(*order: bool) -> list[Any]:
    """One metric under two names in a step: by step and by epoch."""
    module = nn.ModuleDict({"metric": MeanMetric()})
    across = make(module)
    found = []
    for values in ((1.0, 3.0), (5.0, 9.0)):
        with across.step(num_microbatches=2):
            for value in values:
                module["metric"](value)
        values_of_logs = [across.batch_value("metric", on_step=on_step).item() for on_step in order]
        found.append(values_of_logs[order.index(True)])
    return found


def test_a_metric_that_is_logged_by_step_and_by_epoch_has_the_value_of_the_batch(ranks: Pools) -> None:
    assert ranks(1).run(logged_twice, True, False) == [[2.0, 7.0]]
    assert ranks(1).run(logged_twice, False, True) == [[2.0, 7.0]]


def updated_only() -> Any:
    module = nn.ModuleDict({"metric": MeanMetric()})
    across = make(module)
    with across.step(num_microbatches=2):
        module["metric"].update(1.0)
        module["metric"].update(3.0)
    return across.batch_value("metric", on_step=True), module["metric"].compute().item()


def test_a_metric_that_was_only_updated_has_no_value_of_the_batch(ranks: Pools) -> None:
    assert ranks(1).run(updated_only) == [(None, 2.0)]


def hooks_are_removed() -> list[int]:
    module = nn.ModuleDict({"metric": MeanMetric()})
    across = make(module)
    try:
        with across.step(num_microbatches=2):
            module["metric"](torch.tensor(1.0))
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    return [len(module["metric"]._forward_pre_hooks), int(across._is_local)]


def test_nothing_is_left_after_an_error(ranks: Pools) -> None:
    assert ranks(1).run(hooks_are_removed) == [[0, 0]]

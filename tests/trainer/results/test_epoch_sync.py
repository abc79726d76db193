from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torchmetrics import SumMetric

from lightning_hybrid.trainer.results import epoch_sync
from lightning_hybrid.trainer.results.epoch_sync import EpochSync
from tests.pool import Pools
from tests.training_jobs import PP2, Regression, loader, make_trainer


class Module(LightningModule):
    """Keeps things; the last stage is rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(2))
        self.outputs: list[Any] = []
        self.logged: list[Any] = []

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.logged.append((name, value, args, kwargs))


def make(module: Module) -> EpochSync:
    group = dist.group.WORLD
    assert group is not None
    return EpochSync(module, group, source=dist.get_world_size() - 1)


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def epoch(phase: str, during: Callable[[Module], None], module: Module | None = None) -> Module:
    module = module or Module()
    boundary = make(module)
    trainer = mock.Mock()
    getattr(boundary, f"on_{phase}_epoch_start")(trainer, module)
    during(module)
    getattr(boundary, f"on_{phase}_epoch_end")(trainer, module)
    return module


# -- attributes --------------------------------------------------------------------------------------------------------


def keep_outputs(phase: str) -> Any:
    def step(module: Module) -> None:
        module.count = 7 if not is_last() else 3  # the first stage runs steps too
        if is_last():
            module.outputs.append({"y": torch.arange(3.0, requires_grad=True) * 2, "name": ["a"]})
            module.best = (0.5, None)
            module.made = torch.ones(2)

    module = epoch(phase, step)
    y = module.outputs[0]["y"]
    return y.tolist(), module.outputs[0]["name"], module.count, module.best, module.made.tolist(), y.requires_grad


def test_what_steps_keep_on_the_last_stage_reaches_every_rank(ranks: Pools) -> None:
    for phase in ("train", "validation", "test", "predict"):
        found = ranks(3).run(keep_outputs, phase)
        assert [rank[:-1] for rank in found] == [([0.0, 2.0, 4.0], ["a"], 3, (0.5, None), [1.0, 1.0])] * 3
        assert [rank[-1] for rank in found] == [False, False, True]  # a graph does not travel


def keep_in_training() -> Any:
    """Training keeps something, then validation runs, then the training epoch ends: the order of a Trainer."""
    module = Module()
    module.val_outputs: list[int] = []
    boundary, trainer = make(module), mock.Mock()
    seen = []
    for _ in range(2):
        boundary.on_train_epoch_start(trainer, module)
        if is_last():
            module.outputs.append(1)
        boundary.on_validation_epoch_start(trainer, module)
        if is_last():
            module.val_outputs.append(2)
        boundary.on_validation_epoch_end(trainer, module)
        seen.append(list(module.val_outputs))
        module.val_outputs.clear()
        if is_last():
            module.outputs.append(3)
        boundary.on_train_epoch_end(trainer, module)
        seen.append(list(module.outputs))
        module.outputs.clear()
    return seen


def test_validation_inside_training_does_not_hide_what_training_kept(ranks: Pools) -> None:
    assert ranks(2).run(keep_in_training) == [[[2], [1, 3]] * 2] * 2


def keep_references() -> Any:
    module = Module()
    module.branches = [module.layer]
    module.trainable = list(module.parameters())
    module.tables = {"table": module.table}
    own = module.table

    def step(module: Module) -> None:
        with torch.no_grad():
            for tensor in (*module.parameters(), module.table):
                tensor.fill_(dist.get_rank())

    epoch("train", step, module)
    return [
        module.branches[0] is module.layer,
        all(a is b for a, b in zip(module.trainable, module.parameters(), strict=True)),
        module.tables["table"] is own,
        own[0].item() == dist.get_world_size() - 1,
        module.layer.weight[0, 0].item() == dist.get_rank(),
    ]


def test_references_to_parts_of_the_module_are_no_data(ranks: Pools) -> None:
    assert ranks(2).run(keep_references) == [[True] * 5] * 2


class History(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[int] = []
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("grown", torch.zeros(2))
        self.register_buffer("elsewhere", torch.zeros(2, device=None if is_last() else "meta"))


def keep_in_parts() -> Any:
    """A part, a metric and a layer of the body, which keep something on the last stage."""
    module = Module()
    module.part, module.metric, module.body = History(), SumMetric(), nn.Sequential(History())
    module.metric.register_buffer("seen", torch.zeros(2))
    boundary = EpochSync(module, dist.group.WORLD, source=1, layers=list(module.body))  # type: ignore[arg-type]
    boundary.on_train_epoch_start(mock.Mock(), module)
    own = module.part.seen
    for part in (module.part, module.metric, module.body[0]):
        part.seen += dist.get_rank()
        part.values = [dist.get_rank()]
    if is_last():
        module.part.grown = torch.ones(3)
        module.part.elsewhere += 1
    boundary.on_train_epoch_end(mock.Mock(), module)
    assert module.part.seen is own
    kept = [[*part.seen.tolist(), *part.values] for part in (module.part, module.metric, module.body[0])]
    return kept, module.part.grown.tolist(), module.part.elsewhere.is_meta


def test_parts_of_the_module_are_shared_too_but_not_metrics_and_layers(ranks: Pools) -> None:
    first, last = ranks(2).run(keep_in_parts)
    assert first[0] == [[1, 1, 1], [0, 0, 0], [0, 0, 0]]
    assert last[0] == [[1, 1, 1]] * 3
    assert first[1:] == ([1, 1, 1], True)
    assert last[1:] == ([1, 1, 1], False)


def keep_others() -> Any:
    rank = dist.get_rank()

    def step(module: Module) -> None:
        module.function = lambda: rank  # no plain value
        module.functions = [lambda: rank]  # cannot travel
        module.shared = [rank]
        module._private = rank
        module._hparams_name = str(rank)  # Lightning's own

    module = Module()
    module.unchanged = rank  # different from the start, as a path or a rank may be
    epoch("train", step, module)
    functions = module.function(), module.functions[0]()
    return *functions, module.shared, module._private, module._hparams_name, module.unchanged


def test_plain_attributes_are_shared_and_others_are_left_alone(ranks: Pools) -> None:
    assert ranks(2).run(keep_others) == [(0, 0, [1], 1, "0", 0), (1, 1, [1], 1, "1", 1)]


def keep_in_place() -> list[Any]:
    module = Module()
    module.by_name: dict[str, Any] = {}
    module.window: deque[Any] = deque([0.0, 1.0], maxlen=2)
    module.counts = np.zeros(2)
    held = module.outputs, module.by_name, module.window

    def step(module: Module) -> None:
        if is_last():
            module.outputs.append(torch.ones(2))
            module.by_name["y"] = [torch.zeros(1)]
            module.window.append(torch.full((), 2.0, requires_grad=True) * 1)
            module.counts[1] += 3

    epoch("train", step, module)
    same = [a is b for a, b in zip(held, (module.outputs, module.by_name, module.window), strict=True)]
    values = module.outputs[0].tolist(), module.by_name["y"][0].tolist(), module.window[0], float(module.window[1])
    return [*same, *values, module.window.maxlen, module.counts.tolist()]


def test_containers_that_others_may_hold_stay_the_same_objects(ranks: Pools) -> None:
    assert ranks(2).run(keep_in_place) == [[True] * 3 + [[1.0, 1.0], [0.0], 1.0, 2.0, 2, [0.0, 3.0]]] * 2


def keep_equal() -> bool:
    module = Module()
    mine: list[Any] = []

    def step(module: Module) -> None:
        module.outputs = mine
        mine.append(torch.tensor(1.0))

    epoch("train", step, module)
    return module.outputs is mine


def test_what_changed_in_the_same_way_everywhere_stays_the_same_object(ranks: Pools) -> None:
    assert ranks(2).run(keep_equal) == [True, True]


def keep_meta() -> list[Any]:
    def step(module: Module) -> None:
        module.placeholders = [torch.empty(2, device="meta")]
        module.n = dist.get_rank()

    return [epoch("train", step).n]


def test_placeholders_among_attributes_are_no_error(ranks: Pools) -> None:
    assert ranks(2).run(keep_meta) == [[1], [1]]


# -- logs in hooks -----------------------------------------------------------------------------------------------------


def log_in_hooks() -> Any:
    module = Module()
    boundary, trainer = make(module), mock.Mock()
    other = Callback()
    trainer.callbacks = [other]
    with boundary.installed(trainer):
        assert other.log is module.log
        rank = dist.get_rank()
        module.log("tensor", torch.tensor(float(rank)), True, on_epoch=True)
        module.log("number", rank)
        module.log("flag", rank == 1)
        module.log_dict({"half": rank / 2})
        module.log("long" * 100, rank / 4)  # more than fits the usual message
        module.log("of_numpy", np.float32(rank))
        module.log("half_precision", torch.full((1,), 0.1 + rank, dtype=torch.bfloat16))
        if rank == 0:
            module.log("mine", rank, rank_zero_only=True)  # not a matter of the others
    assert trainer.callbacks == [other]
    assert "log" not in vars(module)
    module.log("after", rank)
    return [(name, float(value), kwargs) for name, value, _, kwargs in module.logged]


def test_hooks_log_what_the_last_stage_logs(ranks: Pools) -> None:
    first, last = ranks(2).run(log_in_hooks)
    assert [(name, value) for name, value, _ in last[:7]] == [
        ("tensor", 1.0),
        ("number", 1.0),
        ("flag", 1.0),
        ("half", 0.5),
        ("long" * 100, 0.25),
        ("of_numpy", 1.0),
        ("half_precision", torch.tensor(1.1, dtype=torch.bfloat16).item()),
    ]
    assert first[:7] == last[:7]
    assert last[0][2] == {"prog_bar": True, "on_epoch": True}
    assert first[7] == ("mine", 0.0, {"rank_zero_only": True})
    assert [found[-1][:2] for found in (first, last)] == [("after", 0.0), ("after", 1.0)]


class LogsNorms(Callback):
    """Takes the parameters of the optimizer, which here are those of one stage."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        norms = [parameter.grad.norm() for parameter in optimizer.param_groups[0]["params"]]
        pl_module.log("grad_norm", torch.stack(norms).norm())
        pl_module.log("whole_norm", trainer.strategy.grad_norm())
        pl_module.log("nan", float("nan"))


def log_norms() -> list[str]:
    trainer = make_trainer(PP2, callbacks=[LogsNorms()], limit_train_batches=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Regression(), loader())
    return [str(each.message) for each in caught if "A hook logs" in str(each.message)]


def test_a_number_of_one_stage_is_not_taken_for_that_of_the_model_in_silence(ranks: Pools) -> None:
    first, second = ranks(2, lightning=True).run(log_norms)
    assert [text.split(" is ")[0] for text in first] == ["A hook logs 'grad_norm', which"], (
        "once, and of no other number"
    )
    assert "trainer.strategy.grad_norm()" in first[0]
    assert not second


def log_often() -> list[bool]:
    module = Module()
    boundary, trainer = make(module), mock.Mock()
    trainer.callbacks = []
    with boundary.installed(trainer):
        described = []
        for number in range(103):
            with mock.patch.object(epoch_sync, "_described", wraps=epoch_sync._described) as described_value:
                module.log("x", torch.tensor(float(number + dist.get_rank())))
            described.append(described_value.called)
    assert [float(value) for _, value, *_ in module.logged] == [number + 1 for number in range(103)]
    return described


def test_numbers_are_read_on_other_stages_only_in_the_beginning_of_a_run(ranks: Pools) -> None:
    assert ranks(2).run(log_often) == [[True] * 100 + [False] * 3, [True] * 103]


def log_elsewhere() -> Any:
    module = Module()
    boundary, trainer = make(module), mock.Mock()
    trainer.callbacks = [Callback()]
    with boundary.installed(trainer):
        taken, recorded = module.log, []
        vars(module)["log"] = lambda *args, **kwargs: recorded.append((args, kwargs))  # as in a step
        if is_last():  # nobody else is there
            taken("x", 1.0, True, on_step=True)
        vars(module)["log"] = taken
    taken("y", dist.get_rank())
    return recorded, module.logged


def test_a_log_that_was_taken_in_a_hook_is_recorded_in_a_step(ranks: Pools) -> None:
    recorded = [(("x", 1.0, True), {"on_step": True})]
    assert ranks(2).run(log_elsewhere) == [([], [("y", 0, (), {})]), (recorded, [("y", 1, (), {})])]


def log_metric() -> Any:
    module = Module()
    module.metric = SumMetric()
    boundary, trainer = make(module), mock.Mock()
    trainer.callbacks = []
    with boundary.installed(trainer):
        module.log("unused", module.metric)
        found = [module.metric._forward_cache]
        if is_last():
            module.metric(torch.tensor(3.0))
        module.log("epoch", module.metric, on_step=False)
        found.append(None if is_last() else module.metric._forward_cache)
        module.log("step", module.metric)
        return [*found, float(module.metric._forward_cache)]


def test_a_metric_that_is_logged_after_the_step_has_the_last_stages_value(ranks: Pools) -> None:
    assert ranks(2).run(log_metric) == [[None, None, 3.0]] * 2


# -- in a Trainer ------------------------------------------------------------------------------------------------------


class Order(Callback):
    """A user's callback that looks at the callbacks of the Trainer."""

    names: tuple[str, ...] = ()

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.names = tuple(type(callback).__name__ for callback in trainer.callbacks)


def order_in_a_run() -> Any:
    order = Order()
    trainer = make_trainer(PP2, max_steps=1, callbacks=[order])
    before = list(trainer.callbacks)  # type: ignore[attr-defined]
    trainer.fit(Regression(), loader())
    return order.names, trainer.callbacks == before  # type: ignore[attr-defined]


def test_users_callbacks_come_after_it_and_are_alone_afterwards(ranks: Pools) -> None:
    for names, restored in ranks(2, lightning=True).run(order_in_a_run):
        assert names.index("SeededBatchHooks") < names.index("EpochSync") < names.index("Order")
        assert restored

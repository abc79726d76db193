from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import nn

from lightning_hybrid.epoch import EpochBoundary
from tests.pool import Pools


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


def make(module: Module) -> EpochBoundary:
    group = dist.group.WORLD
    assert group is not None
    return EpochBoundary(module, group, source=dist.get_world_size() - 1)


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
        own[0].item() == dist.get_rank(),
    ]


def test_references_to_parts_of_the_module_are_no_data(ranks: Pools) -> None:
    assert ranks(2).run(keep_references) == [[True] * 4] * 2


def keep_others() -> Any:
    rank = dist.get_rank()

    def step(module: Module) -> None:
        module._private = rank
        module.function = lambda: rank  # no plain value
        module.functions = [lambda: rank]  # cannot travel
        module.shared = [rank]

    module = Module()
    module.unchanged = rank  # different from the start, as a path or a rank may be
    epoch("train", step, module)
    return module._private, module.function(), module.functions[0](), module.shared, module.unchanged


def test_other_attributes_are_left_alone(ranks: Pools) -> None:
    assert ranks(2).run(keep_others) == [(0, 0, 0, [1], 0), (1, 1, 1, [1], 1)]


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
        module.stand_ins = [torch.empty(2, device="meta")]
        module.n = dist.get_rank()

    return [epoch("train", step).n]


def test_stand_ins_among_attributes_are_no_error(ranks: Pools) -> None:
    assert ranks(2).run(keep_meta) == [[1], [1]]


# -- logs in hooks -----------------------------------------------------------------------------------------------------


def log_in_hooks() -> Any:
    module = Module()
    boundary, trainer = make(module), mock.Mock()
    other = Callback()
    trainer.callbacks = [other]
    boundary.install(trainer)
    assert trainer.callbacks == [boundary, other]
    rank = dist.get_rank()
    module.log("tensor", torch.tensor(float(rank)), True, on_epoch=True)
    module.log("number", rank)
    module.log("flag", rank == 1)
    module.log_dict({"half": rank / 2})
    if rank == 0:
        module.log("mine", rank, rank_zero_only=True)  # not a matter of the others
    boundary.remove(trainer)
    assert trainer.callbacks == [other]
    assert "log" not in vars(module)
    module.log("after", rank)
    return [(name, float(value), kwargs) for name, value, _, kwargs in module.logged]


def test_hooks_log_what_the_last_stage_logs(ranks: Pools) -> None:
    first, last = ranks(2).run(log_in_hooks)
    assert [(name, value) for name, value, _ in last[:4]] == [
        ("tensor", 1.0),
        ("number", 1.0),
        ("flag", 1.0),
        ("half", 0.5),
    ]
    assert first[:4] == last[:4]
    assert last[0][2] == {"prog_bar": True, "on_epoch": True}
    assert first[4] == ("mine", 0.0, {"rank_zero_only": True})
    assert [found[-1][:2] for found in (first, last)] == [("after", 0.0), ("after", 1.0)]

"""What would train something else than one process does, without a word, is an error or a warning."""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tests.pool import Pools
from tests.training_jobs import PP2, Regression, assert_same, loader, make_trainer, train

UNITS = {**PP2, "body": ["body"]}


def said(layout: Any, module: Regression, *callbacks: Callback) -> str:
    """The error of a training."""
    try:
        make_trainer(layout, callbacks=list(callbacks)).fit(module, loader())
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- layers that change ------------------------------------------------------------------------------------------------


class Changes(Callback):
    """Changes the module before the second batch."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.change(pl_module)


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()


class Adapted(nn.Module):
    """A linear layer and a small one beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.small = linear, nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.small(x)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another layer": (lambda module: module.body.__setitem__(1, layer()), "'body.1' was replaced"),
    "one more": (lambda module: module.body.append(layer()), "'body' has 7 layers instead of 6"),
    "one less": (lambda module: module.body.__delitem__(5), "'body' has 5 layers instead of 6"),
    "another body": (lambda module: setattr(module, "body", nn.Sequential(layer())), "'body' was replaced"),
    "adapter": (
        lambda module: setattr(module.body[4], "0", Adapted(module.body[4][0])),
        "submodules with parameters were added or removed (Linear)",
    ),
}


def changed(layout: Any, name: str) -> str:
    return said(layout, Regression(), Changes(CHANGES[name][0]))


@pytest.mark.parametrize("layout", [PP2, pytest.param(UNITS, marks=pytest.mark.thorough)], ids=["chain", "units"])
@pytest.mark.parametrize("name", CHANGES)
def test_layers_that_change_during_training_are_refused(ranks: Pools, name: str, layout: Any) -> None:
    first, second = ranks(2, lightning=True).run(changed, layout, name)
    assert first == second
    assert first.startswith("ValueError: The layers of Regression were changed after they had been split into stages")
    assert CHANGES[name][1] in first


def without_dropout(layout: Any) -> list[float]:
    """What has no parameters may change inside of a layer."""
    change = Changes(lambda module: [setattr(part, "2", nn.Identity()) for part in module.body])
    return train(Regression(), layout, loader(), callbacks=[change]).losses


def test_parts_without_parameters_may_change(ranks: Pools) -> None:
    expected = without_dropout(None)
    for values in ranks(2, lightning=True).run(without_dropout, PP2):
        assert_same(values, expected)


# -- losses that train nothing -----------------------------------------------------------------------------------------


class Detached(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss.detach() if batch_idx >= self.first else loss

    first = 0


class DetachedLater(Detached):
    first = 2


class Frozen(Regression):
    def on_fit_start(self) -> None:
        self.requires_grad_(False)


def trained(layout: Any, kind: type[Regression]) -> str:
    return said(layout, kind())


NO_GRAPH = "ValueError: The loss of `training_step` has no autograd graph, so nothing would be trained"


@pytest.mark.parametrize("kind", [Detached, DetachedLater, Frozen])
@pytest.mark.parametrize(
    "layout",
    [PP2, {"tensor_parallel_size": 2}, pytest.param(UNITS, marks=pytest.mark.thorough)],
    ids=["pp2", "tp2", "units"],
)
def test_a_loss_that_trains_nothing_is_refused(ranks: Pools, layout: Any, kind: type[Regression]) -> None:
    assert "does not require grad" in trained(None, kind)
    for text in ranks(2, lightning=True).run(trained, layout, kind):
        assert text.startswith(NO_GRAPH)


class SomeDetached(Regression):
    """One microbatch has nothing to train, as where an image has no objects: the others do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        return self.loss(batch) if (x[:, 0] > -1.5).all() else torch.zeros((), dtype=x.dtype)


def with_some(layout: Any) -> str:
    return said(layout, SomeDetached())


def test_a_microbatch_that_trains_nothing_is_no_error_where_no_stage_waits_for_its_gradient(ranks: Pools) -> None:
    assert ranks(1, lightning=True).run(with_some, {"num_microbatches": 8}) == ["no error"]


# -- tensors that are as long as there are samples ---------------------------------------------------------------------


class Weighted(Regression):
    """Gets weights of 8 classes with every batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, weights = batch
        return self.loss((x, y)) * weights.sum()


CLASS_WEIGHTS = torch.linspace(0.1, 1.0, 8, dtype=torch.float64)


def with_class_weights(samples: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(samples)
    return x, y, CLASS_WEIGHTS.clone() if len(samples) < 8 else CLASS_WEIGHTS


def warnings_of(layout: Any, kind: type[Regression], **arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(layout).fit(kind(), loader(**arguments))
    return [
        text for text in map(str, [each.message for each in caught]) if "was split into microbatches because" in text
    ]


@pytest.mark.parametrize("num_samples", [16, 12], ids=["one tensor", "another number of samples"])
def test_a_tensor_that_happens_to_be_as_long_as_the_batch_is_a_warning(ranks: Pools, num_samples: int) -> None:
    job = functools.partial(warnings_of, num_samples=num_samples, collate_fn=with_class_weights)
    (found,) = ranks(1, lightning=True).run(job, {"num_microbatches": 4}, Weighted)
    assert len(found) == 1
    assert found[0].startswith("A tensor of length 8 in the batch was split")
    assert ranks(1, lightning=True).run(warnings_of, {"num_microbatches": 4}, Regression) == [[]]


# -- ranks that are not alike ------------------------------------------------------------------------------------------


class OfRank(Regression):
    """Depends on the rank in one way."""

    def __init__(self, kind: str) -> None:
        rank = int(os.environ["RANK"])
        super().__init__(num_layers=6 + rank * (kind == "depth"))
        self.kind, self.differs = kind, rank == 1
        if self.differs and kind == "width":
            self.body[2][0] = nn.Linear(8, 8, bias=False).double()
        elif self.differs and kind == "frozen":
            self.embed.requires_grad_(False)
        elif self.differs and kind == "dtype":
            self.head.float()

    def configure_optimizers(self) -> Any:
        if self.differs and self.kind == "optimizer":
            return torch.optim.SGD(self.parameters(), lr=1e-2)
        rate = 2e-2 if self.differs and self.kind == "learning rate" else 1e-2
        return torch.optim.AdamW(self.parameters(), lr=rate)


DIFFERENT = {
    "depth": "`body.6.0.weight` is not the same on every rank: nothing on rank 0; [8, 8] of float64 on rank 1.",
    "width": "`body.2.0.bias` is not the same on every rank: [8] of float64 on rank 0; nothing on rank 1.",
    "frozen": "`embed.weight` is not the same on every rank: [8, 6] of float64 on rank 0; [8, 6] of float64, frozen",
    "dtype": "`head.weight` is not the same on every rank: [1, 8] of float64 on rank 0; [1, 8] of float32 on rank 1.",
    "optimizer": "`optimizer 0, group 0` is not the same on every rank: AdamW of 16 tensors with {'lr': 0.01",
    "learning rate": "`optimizer 0, group 0` is not the same on every rank: AdamW of 16 tensors with {'lr': 0.01",
}


def of_ranks(layout: Any, kinds: list[str]) -> list[str]:
    return [said(layout, OfRank(kind)) for kind in kinds]


@pytest.mark.parametrize("layout", [PP2, {"zero_stage": 3}], ids=["pp2", "zero3"])
def test_ranks_that_made_different_models_or_optimizers_are_refused(ranks: Pools, layout: Any) -> None:
    first, second = ranks(2, lightning=True).run(of_ranks, layout, list(DIFFERENT))
    assert first == second
    for text, expected in zip(first, DIFFERENT.values(), strict=True):
        assert text.startswith(f"ValueError: {expected}")


# -- parts that ranks make by themselves -------------------------------------------------------------------------------


class OwnParts(Regression):
    """Each tensor-parallel rank makes its part of a layer in `configure_model`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up: nn.Parameter | None = None

    def configure_model(self) -> None:
        if self.up is None:
            mesh = self.device_mesh["tensor_parallel"]
            part = torch.full((4, 8), 1.0 + mesh.get_local_rank() * (self.kind != "same"), dtype=torch.float64)
            whole = DTensor.from_local(part, mesh, [Shard(0)]) if self.kind == "marked" else part
            self.up = nn.Parameter(whole)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up.to_local() if isinstance(self.up, DTensor) else self.up
        assert up is not None
        return super().forward(x) + up.sum()


def with_own_parts(kind: str) -> tuple[str, list[str]]:
    if kind == "no seed":
        os.environ.pop("PL_GLOBAL_SEED", None)
    else:
        os.environ["PL_GLOBAL_SEED"] = "1"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = said({"tensor_parallel_size": 2}, OwnParts(kind))
    return text, [str(each.message) for each in caught if "created in `configure_model` differ" in str(each.message)]


@pytest.mark.parametrize("kind", ["plain", "no seed", "same", "marked"])
def test_parts_that_ranks_make_by_themselves_are_asked_about(ranks: Pools, kind: str) -> None:
    """All ranks would train those of the first one."""
    (first, warned), (second, _) = ranks(2, lightning=True).run(with_own_parts, kind)
    if kind == "plain":
        assert first == second
        assert first.startswith(
            "ValueError: Parameters created in `configure_model` differ between ranks, although a seed is set:"
            " 'up'. They are plain tensors"
        )
        assert "DTensor.from_local(part" in first
    else:
        assert first == second == "no error"
        assert len(warned) == (kind == "no seed")


# -- parts of a state dict ---------------------------------------------------------------------------------------------


class TakesState(Callback):
    """In a run a part is what there is."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.state_dict()


def state_warnings(layout: Any, path: str) -> list[list[str]]:
    module, found = Regression(), []
    trainer = make_trainer({**layout, "gather_module_on_teardown": False}, callbacks=[TakesState()])
    for action in (
        lambda: trainer.fit(module, loader()),
        lambda: trainer.save_checkpoint(path),
        module.state_dict,
        module.zero_grad,
        lambda: copy.deepcopy(module).state_dict(),
        lambda: trainer.strategy.gather_module(),
        module.state_dict,
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            action()
        found.append([str(each.message) for each in caught if "This state dict" in str(each.message)])
    return found


@pytest.mark.parametrize(
    ("layout", "words"),
    [(PP2, "8 are on other stages"), ({"zero_stage": 3}, "15 are sharded over several ranks")],
    ids=["pp2", "zero3"],
)
def test_a_state_dict_that_is_not_all_of_it_is_a_warning(ranks: Pools, tmp_path: Path, layout: Any, words: str) -> None:
    found, _ = ranks(2, lightning=True).run(state_warnings, layout, str(tmp_path / "x.ckpt"))
    assert [len(each) for each in found] == [0, 0, 1, 0, 0, 0, 0]
    assert "This state dict of Regression is incomplete: of 16 tensors" in found[2][0]
    assert words in found[2][0]
    assert "gather_module()" in found[2][0]

"""With ZeRO modules may do what they do without it: use layers in any way, touch parameters, freeze them in a step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid import Tuning
from tests.pool import Pools
from tests.training_jobs import Regression, assert_same, loader, make_trainer, train


def blocks(count: int, width: int = 8) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]).double()


class Base(Regression):
    def __init__(self) -> None:
        super().__init__(num_layers=3)


class Twice(Base):
    """Calls its layers twice in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + 0.3 * self(batch[0].flip(1)).pow(2).mean()


class Reversed(Base):
    """Defines what comes last first."""

    def __init__(self) -> None:
        super().__init__()
        self.up = self.body
        del self.body
        self.down = blocks(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.down(self.embed(x))))


class Towers(Base):
    """Has two lists of layers, and calls the second one first."""

    def __init__(self) -> None:
        super().__init__()
        del self.body
        self.text, self.image = blocks(2, 6), blocks(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        image = self.image(x)
        return self.head(self.embed(image * self.text(x.flip(1))))


class Lists(Base):
    """Has lists in a list, which cannot be called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.ModuleList([layer[0], nn.Identity()]) for layer in self.body])

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for linear, other in self.body:
            h = h + other(torch.tanh(linear(h)))
        return self.head(h)


class Direct(Base):
    """Does not call its layers, but their `forward`."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.body:
            h = layer.forward(h)
        return self.head(h)


class Penalised(Base):
    """Adds a penalty on all parameters, after the forward or before it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before = 0.01 * sum(parameter.pow(2).sum() for parameter in self.parameters())
        return self.loss(batch) + before + 0.01 * sum(parameter.pow(2).sum() for parameter in self.parameters())


class Freezing(Base):
    """Freezes and thaws its body in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.body.requires_grad_(self.trainer.global_step % 2 == 1)
        return self.loss(batch)


class Averaged(Base):
    """Averages its body before gradients are zeroed."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.body).requires_grad_(False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            for target, parameter in zip(self.target.parameters(), self.body.parameters(), strict=True):
                target.lerp_(parameter, 0.3)


class Stepping(Base):
    """Optimizes by hand, past Lightning's optimizer, twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


class Adversarial(Base):
    """Toggles optimizers, and calls parts of itself one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        generator = [*self.embed.parameters(), *self.body.parameters()]
        return [torch.optim.Adam(generator, 1e-2), torch.optim.Adam(self.head.parameters(), 1e-2)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            made = self.head(self.body(self.embed(batch[0])))
            self.manual_backward((made - batch[1]).pow(2).mean() if number else made.mean())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class Single(Base):
    """Has parameters of one number, which stay whole, and one replica skips a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(layer[0], nn.PReLU().double()) for layer in self.body])

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for index, layer in enumerate(self.body):
            if index != 1 or self.trainer.global_rank == 0:
                h = layer(h)
        return self.head(h)


HABITS = [Twice, Reversed, Towers, Lists, Direct, Penalised, Freezing, Averaged, Stepping, Adversarial, Single]
LAYOUTS = [
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 3, "tuning": Tuning(reshard_after_forward=False)},
]


def trained(cls: type[Base], layout: Mapping[str, Any]) -> dict[str, Tensor]:
    return train(cls(), layout, loader(), max_epochs=2, limit_train_batches=3).weights


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(LAYOUTS[1:3], id="2 and 3"),
        pytest.param(LAYOUTS[::3], id="1 and per step", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("cls", HABITS)
def test_numbers_are_those_of_replicas_that_hold_everything(
    ranks: Pools, cls: type[Base], layouts: list[dict[str, Any]]
) -> None:
    expected = ranks(2, lightning=True).run(trained, cls, {})
    for layout in layouts:
        assert_same(ranks(2, lightning=True).run(trained, cls, layout), expected, rtol=1e-10, where=str(layout))


def two_runs() -> str:
    module = Base()
    make_trainer({"zero_stage": 2, "gather_module_on_teardown": False}).fit(module, loader())
    with pytest.raises(ValueError, match=r"An earlier run sharded Base over 2 replicas .* needs 1 ") as caught:
        make_trainer({}).fit(module, loader())
    return str(caught.value)


@pytest.mark.distributed
def test_a_divided_module_is_not_trained_without_zero(ranks: Pools) -> None:
    for text in ranks(2, lightning=True).run(two_runs):
        assert "strategy.gather_module()" in text

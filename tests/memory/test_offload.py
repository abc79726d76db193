"""What is kept on the host. The copies themselves need a device: ``tests/gpu``."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_hybrid import HybridStrategy
from lightning_hybrid.memory import offload
from lightning_hybrid.memory.offload import Offload, check_offload
from lightning_hybrid.strategy import strategy
from tests.pool import Pools
from tests.training_jobs import Regression, loader, make_trainer


class Elsewhere:
    """A copy, in the place of one on another device."""

    made: ClassVar[list[int]] = []

    def __init__(self, tensor: Tensor, stream: Any) -> None:
        self.made.append(tensor.nbytes)
        self.copy = tensor.clone()

    def back(self) -> Tensor:
        return self.copy


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(offload, "_Away", Elsewhere)
    monkeypatch.setattr(Elsewhere, "made", [])
    return Elsewhere.made


def switched_on(what: str, small: int = 0) -> Offload:
    """As on a device."""
    made = Offload([what], torch.device("cpu"), small=small)
    assert not made.has_effect
    vars(made).update(_activations=what == "activations", _states=what == "optimizer", _stream=object())
    return made


def test_activations_go_and_come_back(elsewhere: list[int]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(16, 4)
    net(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    with switched_on("activations").activations(net.parameters):
        loss = net(x).square().sum()
    assert sorted(elsewhere) == [16 * 2 * 4, 16 * 4 * 4, 16 * 8 * 4, 16 * 8 * 4]  # and no parameters
    loss.backward()
    assert all(torch.equal(parameter.grad, other) for parameter, other in zip(net.parameters(), expected, strict=True))


def test_small_activations_stay(elsewhere: list[int]) -> None:
    x = torch.randn(8, requires_grad=True)
    with switched_on("activations", small=64).activations(tuple):
        loss = x.exp().sum() + torch.randn(64, requires_grad=True).exp().sum()
    assert elsewhere == [256]
    loss.backward()


def test_states_move_and_counters_stay() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    before = dict(optimizer.state[parameter])
    moves = switched_on("optimizer")
    moves._move(optimizer, torch.device("cpu"), torch.device("meta"))
    state = optimizer.state[parameter]
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }
    assert state["step"] is before["step"]


@pytest.mark.parametrize("wish", [None, "activations", "optimizer", ["activations", "optimizer"], []])
def test_what_may_be_said(wish: Any) -> None:
    HybridStrategy(offload=wish)


@pytest.mark.parametrize(
    ("wish", "error", "text"),
    [
        ("parameters", ValueError, "must be of 'activations', 'optimizer', got 'parameters'"),
        (["optimizer", "all"], ValueError, "got"),
        (True, TypeError, "must be a name, a list of names, or None, got True"),
        ([1], TypeError, "must be a name"),
    ],
)
def test_what_may_not_be_said(wish: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_offload(wish)


class Fetched(Callback):
    """When the optimizer's states were fetched and put away."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.seen.append("gradients")


def train() -> tuple[list[str], str]:
    """Train two batches, and tell when states move; and what is said."""
    callback = Fetched()
    said: list[str] = []
    trainer = make_trainer(
        {"pipeline_parallel_size": 2, "offload": ["optimizer", "activations"]},
        callbacks=[callback],
        limit_train_batches=2,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "rank_zero_info", said.append)
        patch.setattr(Offload, "fetch", lambda self, optimizer: callback.seen.append("fetch"))
        patch.setattr(Offload, "put_away", lambda self, optimizer: callback.seen.append("put away"))
        trainer.fit(Regression(), loader())
    return callback.seen, "\n".join(said)


@pytest.mark.distributed
def test_states_are_on_the_device_for_the_step_alone(ranks: Pools) -> None:
    (seen, said), _ = ranks(2, lightning=True).run(train)
    assert seen == ["fetch", "gradients", "put away"] * 2
    assert "offload=['optimizer', 'activations'] has no effect: the device is the host." in said

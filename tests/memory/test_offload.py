"""What is offloaded to the host. The copies themselves need a device: ``tests/gpu``."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_hybrid import HybridStrategy
from lightning_hybrid.memory import offload as offload_module
from lightning_hybrid.memory.offload import Offload, check_offload
from lightning_hybrid.strategy import strategy
from tests.pool import Pools
from tests.training_jobs import Regression, loader, make_trainer


class HostCopy:
    """A copy on the same device, in the place of one on the host."""

    made: ClassVar[list[int]] = []

    def __init__(self, tensor: Tensor, stream: Any, before: Any) -> None:
        self.made.append(tensor.nbytes)
        self.copy = tensor.clone()

    def to_device(self) -> Tensor:
        return self.copy


@pytest.fixture
def copied_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(offload_module, "_OffloadedTensor", HostCopy)
    monkeypatch.setattr(HostCopy, "made", [])
    return HostCopy.made


def switched_on(name: str, min_bytes: int = 0) -> Offload:
    """As on a device."""
    made = Offload([name], torch.device("cpu"), min_bytes=min_bytes)
    assert not made.has_effect
    vars(made).update(moves_activations=name == "activations", _states=name == "optimizer", _stream=object())
    return made


def test_activations_go_and_come_back(copied_bytes: list[int]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(16, 4)
    net(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    with switched_on("activations").activations(net.parameters):
        loss = net(x).square().sum()
    assert sorted(copied_bytes) == [16 * 2 * 4, 16 * 4 * 4, 16 * 8 * 4, 16 * 8 * 4]  # and no parameters
    loss.backward()
    assert all(torch.equal(parameter.grad, other) for parameter, other in zip(net.parameters(), expected, strict=True))


def test_small_activations_stay(copied_bytes: list[int]) -> None:
    x = torch.randn(8, requires_grad=True)
    with switched_on("activations", min_bytes=64).activations(tuple):
        loss = x.exp().sum() + torch.randn(64, requires_grad=True).exp().sum()
    assert copied_bytes == [256]
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


@pytest.mark.parametrize("offload", [None, "activations", "optimizer", ["activations", "optimizer"], []])
def test_accepted_arguments(offload: Any) -> None:
    HybridStrategy(offload=offload)


@pytest.mark.parametrize(
    ("offload", "error", "text"),
    [
        ("parameters", ValueError, "must be one or more of 'activations', 'optimizer', got 'parameters'"),
        (["optimizer", "all"], ValueError, "got"),
        (True, TypeError, "must be a name, a list of names, or None, got True"),
        ([1], TypeError, "must be a name"),
    ],
)
def test_refused_arguments(offload: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_offload(offload)


class Order(Callback):
    """When the optimizer's states are moved."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.events.append("gradients")


def train() -> tuple[list[str], str]:
    """Train two batches, and tell when states move; and what is logged."""
    callback = Order()
    messages: list[str] = []
    trainer = make_trainer(
        {"pipeline_parallel_size": 2, "offload": ["optimizer", "activations"]},
        callbacks=[callback],
        limit_train_batches=2,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "rank_zero_info", messages.append)
        patch.setattr(Offload, "load_states", lambda self, optimizer: callback.events.append("load"))
        patch.setattr(Offload, "offload_states", lambda self, optimizer: callback.events.append("offload"))
        trainer.fit(Regression(), loader())
    return callback.events, "\n".join(messages)


@pytest.mark.distributed
def test_states_are_on_the_device_for_the_step_alone(ranks: Pools) -> None:
    (events, text), _ = ranks(2, lightning=True).run(train)
    assert events == ["load", "gradients", "offload"] * 2
    assert "offload=['optimizer', 'activations'] has no effect on the CPU." in text

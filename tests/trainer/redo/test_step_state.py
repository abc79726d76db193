from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_hybrid.trainer.redo.step_state import StepState


class Module(LightningModule):
    """Holds what a step may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.calls, self.seen, self.samples = 0, [1], list(range(2000))
        self.held = SimpleNamespace(total=torch.zeros(2), names={"a": [1]})
        self.register_buffer("large", torch.zeros(2, 1 << 20))

    @property
    def trainer(self) -> Any:
        return SHARED


SHARED = SimpleNamespace(should_stop=False)


def make() -> tuple[Module, StepState, list[Any]]:
    module = Module()
    state = StepState(module, list(module.parameters()), [module.layer], [module.layer])
    batch: list[Any] = [{"x": torch.ones(3, 2), "ids": [1, 2]}]
    state.keep(batch, copies_gradients=False)
    return module, state, batch


def test_everything_is_as_it_was() -> None:
    module, state, batch = make()
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    for _ in range(2):
        module.norm(module.layer(batch[0]["x"])).sum().backward()
        module.calls, module.held.added = module.calls + 1, 3
        module.seen.append(2)
        module.samples.append(5)
        module.held.total += 1
        module.held.names["a"].append(2)
        batch[0].pop("ids")
        SHARED.should_stop = True
        batch = state.put_back()
        assert list(batch[0]) == ["x", "ids"]
        assert (module.calls, module.seen, len(module.samples), SHARED.should_stop) == (0, [1], 2000, False)
        assert module.held.total.tolist() == [0.0, 0.0]
        assert module.held.names == {"a": [1]}
        assert not hasattr(module.held, "added")
        assert all(parameter.grad is None for parameter in module.parameters())
        assert all(torch.equal(value, kept[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("what", ["parameter", "batch", "large"])
def test_what_is_not_copied_is_refused(what: str) -> None:
    module, state, batch = make()
    tensors: dict[str, Tensor] = {"parameter": module.layer.weight, "batch": batch[0]["x"], "large": module.large}
    with torch.no_grad():
        tensors[what].add_(1)
    with pytest.raises(ValueError, match=r"had already changed a tensor of shape .*dynamic_shapes=True"):
        state.put_back()


def test_gradients_of_earlier_batches_are_put_back_where_they_are_copied() -> None:
    module, state, batch = make()
    module.layer(batch[0]["x"]).sum().backward()
    gradient = module.layer.weight.grad
    assert gradient is not None
    before = gradient.clone()
    for copies in (True, False):
        state.keep(batch, copies_gradients=copies)
        module.layer(batch[0]["x"]).sum().backward()
        if copies:
            state.put_back()
            assert module.layer.weight.grad is not None
            assert torch.equal(module.layer.weight.grad, before)
        else:
            with pytest.raises(ValueError, match="gradients of earlier batches"):
                state.put_back()

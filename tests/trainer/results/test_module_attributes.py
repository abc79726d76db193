from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import SumMetric

from lightning_hybrid.trainer.results.module_attributes import (
    assign,
    assign_scalars,
    attribute_versions,
    digest,
    pack,
    pack_scalars,
    scalars,
    unpack,
)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.save_hyperparameters({"a": 1})
        self.losses: list[Any] = [torch.ones(2)]
        self.weights = torch.ones(3)
        self.count = 0
        self.table = np.zeros(3)
        self.window: deque[Any] = deque([1.0])
        self._private: dict[str, Any] = {"x": [1]}
        self.parts = [self.layer]
        self.function = print
        self.functions = [lambda: 0]


def changed(change: Callable[[Module], Any]) -> set[str]:
    module = Module()
    before = attribute_versions(module)
    change(module)
    now = attribute_versions(module)
    return {name for name in now if before.get(name) != now[name]}


def test_what_has_a_version() -> None:
    own = {"losses", "weights", "count", "table", "window", "_private"}
    module = Module()
    assert attribute_versions(module, [module.layer]).keys() == own
    module.register_buffer("seen", torch.zeros(2))
    module.register_buffer("elsewhere", torch.zeros(2, device="meta"))
    module.metric = SumMetric()
    assert attribute_versions(module).keys() == own | {"layer.in_features", "layer.out_features", "seen"}


CHANGES: dict[str, tuple[Callable[[Module], Any], set[str]]] = {
    "nothing": (lambda m: None, set()),
    "appended": (lambda m: m.losses.append(torch.zeros(1)), {"losses"}),
    "in place": (lambda m: m.weights.add_(1), {"weights"}),
    "a view in place": (lambda m: m.weights[1:].zero_(), {"weights"}),
    "replaced": (lambda m: setattr(m, "weights", torch.zeros(3)), {"weights"}),
    "deep": (lambda m: m._private["x"].append(2), {"_private"}),
    "array": (lambda m: m.table.__setitem__(1, 2.0), {"table"}),
    "window": (lambda m: m.window.append(2.0), {"window"}),
    "type": (lambda m: setattr(m, "count", False), {"count"}),
    "back again": (lambda m: (setattr(m, "count", 1), setattr(m, "count", 0)), set()),
    "new": (lambda m: setattr(m, "other", 1), {"other"}),
    "parameters": (lambda m: m.layer.weight.data.zero_(), set()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed(name: str) -> None:
    change, expected = CHANGES[name]
    assert changed(change) == expected


def test_a_version_does_not_keep_its_value_alive() -> None:
    module = Module()
    before = attribute_versions(module)
    module.losses.clear()
    module.losses.append(torch.ones(2))  # perhaps at the same address
    assert attribute_versions(module)["losses"] != before["losses"]


def test_tensors_of_inference_mode_have_a_version_by_their_numbers() -> None:
    module = Module()
    with torch.inference_mode():
        module.losses = [torch.zeros(2)]
        before = attribute_versions(module)
        assert attribute_versions(module) == before
        module.losses[0].add_(1)
        assert attribute_versions(module)["losses"] != before["losses"]


def test_values_travel_without_graph_or_storage() -> None:
    whole = torch.zeros(10_000)
    value = {"a": [torch.ones(2, requires_grad=True) * 2, None], "w": deque([whole[:1]], maxlen=3), "n": np.ones(2)}
    packed = pack(value)
    assert packed is not None
    assert len(packed) < 10_000
    back = unpack(packed, torch.device("cpu"))
    assert not back["a"][0].requires_grad
    assert back["a"][0].tolist() == [2.0, 2.0]
    assert (list(back["w"]), back["w"].maxlen) == ([0.0], 3)
    assert digest(pack(value)) == digest(packed)
    assert pack([lambda: 0]) is None
    assert digest(None) is None


def test_containers_are_filled_and_other_values_replaced() -> None:
    module = Module()
    losses, private, weights = module.losses, module._private, module.weights
    assign(module, "losses", [1, 2])
    assign(module, "_private", {"y": 3})
    assign(module, "weights", torch.zeros(1))
    assign(module, "count", [1])
    assign(module, "new", [2])
    assert module.losses is losses
    assert module._private is private
    assert module.weights is not weights
    assert (losses, private, module.count, module.new) == ([1, 2], {"y": 3}, [1], [2])


def test_scalars_that_have_changed_travel_exactly() -> None:
    module, other = Module(), Module()
    module.text, module.best = "a", None
    before = scalars(module)
    assert before.keys() == {"count", "text", "best"}
    assert pack_scalars(before, scalars(module)) == {}
    module.text, module.count, module.best = "b", 2**60 + 1, 0.1
    module.flag, module.none = True, None
    packed = pack_scalars(before, scalars(module))
    assert [value for value in packed.values() if isinstance(value, torch.Tensor)] == [0.1, 1.0]
    assign_scalars(other, packed)
    assert (other.text, other.count, other.best, other.flag, other.none) == ("b", 2**60 + 1, 0.1, True, None)
    assert other.flag is True


def test_dictionaries_that_make_entries_still_do() -> None:
    module, other = Module(), Module()
    for each in (module, other):
        each.nested = defaultdict(lambda: defaultdict(list))
        each.mixed = {"by_name": defaultdict(int)}
        each.replaced = defaultdict(list) if each is module else None
    nested = other.nested
    module.nested["val"]["loss"].append(1.0)
    module.mixed["by_name"]["a"] += 2
    for name in ("nested", "mixed", "replaced"):
        packed = pack(getattr(module, name))
        assert packed is not None
        assign(other, name, unpack(packed, torch.device("cpu")))
    assert other.nested is nested
    assert other.nested["val"]["loss"] == [1.0]
    assert other.nested["val"]["missing"] == other.nested["test"]["loss"] == []
    assert (other.mixed["by_name"]["a"], other.mixed["by_name"]["b"]) == (2, 0)
    assert dict(other.replaced) == {}

"""One layer of each kind runs while a step is followed, and the plan is the one of a step in which all run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.pipeline_parallel.frame.alike import RepeatedUnits, first_alike
from tests.pipeline_parallel.frame.stages import check, cut_of, seed
from tests.zoo.basic import WIDTH

RUNS: list[int] = []


@pytest.fixture(autouse=True)
def _double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    RUNS.clear()
    yield
    torch.set_default_dtype(before)


class Layer(nn.Module):
    """A layer that knows its place, and notes that it runs."""

    def __init__(self, place: int, hidden: int = WIDTH, *, gates: bool = False) -> None:
        super().__init__()
        self.layer_idx, self.gates = place, gates
        self.rise, self.fall = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        RUNS.append(self.layer_idx)
        y = self.fall(self.rise(x).relu_())
        y = y if mask is None else y * mask
        return x + (y * torch.sigmoid(y) if self.gates else y)


class Counting(Layer):
    """A layer that writes an attribute."""

    count = 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.count = self.count + 1
        return super().forward(x, mask)


class Writing(Layer):
    """A layer that writes what it is given."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x.mul_(0.5), mask)


class Viewing(Layer):
    """A layer that returns a view of what it is given."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        super().forward(x, mask)
        return x.flip(0).view_as(x)[:]


class Caching(Layer):
    """A layer that fills an object that it is given."""

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        mask.entries = [*mask.entries, self.layer_idx]
        return super().forward(x)


class Cache:
    """What layers fill."""

    def __init__(self) -> None:
        self.entries = list[int]()


class Model(nn.Module):
    """Layers in a list."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x.sum(-1, keepdim=True) > 0).to(x.dtype)
        x = self.embed(x)
        cache = Cache()
        for number, layer in enumerate(self.layers):
            x = layer(x, cache) if isinstance(layer, Caching) else layer(x, mask if number % 2 else None)
        return x.pow(2).mean()


KINDS: dict[str, tuple[Callable[[int], nn.Module], list[int]]] = {
    "equal": (Layer, [0, 1]),  # with a mask, and without
    "of two widths": (lambda place: Layer(place, WIDTH * (1 + place // 4)), [0, 1, 4, 5]),
    "of two ways": (lambda place: Layer(place, gates=place > 5), [0, 1, 6, 7]),
    "frozen": (lambda place: Layer(place).requires_grad_(place > 3), [0, 1, 4, 5]),
    "counting": (Counting, list(range(8))),
    "writing": (Writing, list(range(8))),
    "caching": (Caching, list(range(8))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_run_once_for_each_kind_and_arguments(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, expected = KINDS[kind]
    model, x = Model(*map(make, range(8))), torch.randn(4, WIDTH)
    cut = cut_of(model, 2)
    with cut():
        graph = cut.find_plan(0, model, (x,), seed).graph
    assert expected == RUNS
    monkeypatch.setattr(RepeatedUnits, "_key_of", lambda *_: None)
    cut = cut_of(model, 2)
    with cut():
        whole = cut.find_plan(0, model, (x,), seed).graph
    assert RUNS[len(expected) :] == list(range(8))
    assert graph.texts() == whole.texts()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "caching"])
def test_repeated_layers_compute_what_the_whole_model_computes(kind: str) -> None:
    model = Model(*map(KINDS[kind][0], range(8)))
    played = check(model, model, (torch.randn(4, WIDTH),), 4)
    assert played.sends == [1, 1, 1]


def test_attributes_of_any_kind_are_compared() -> None:
    def made(table: Any) -> nn.Module:
        layer = nn.LSTM(2, 2)  # has weak references to its weights
        layer.table = table
        return layer

    layers = {f"layers.{number}": made(np.arange(number // 2 + 2.0)) for number in range(4)}
    layers |= {f"layers.{number}": made(None) for number in range(4, 6)}
    firsts = [list(layers.values()).index(first) for first in first_alike(layers).values()]
    assert firsts == [0, 0, 2, 2, 4, 4]


def test_a_hook_that_notes_something_sees_every_layer() -> None:
    model, seen = Model(*map(Layer, range(8))), list[int]()
    for layer in model.layers:
        layer.rise.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    cut = cut_of(model, 2)
    with cut():
        cut.find_plan(0, model, (torch.randn(4, WIDTH),), seed)
    assert seen == [4] * 8


def test_random_numbers_of_repeated_layers_are_those_of_the_whole_model() -> None:
    class Dropping(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(nn.functional.dropout(x, 0.5), mask)

    model = Model(*map(Dropping, range(8)))
    cut = cut_of(model, 2)
    with cut():
        calls = cut.find_plan(0, model, (torch.randn(4, WIDTH),), seed).graph.calls
    assert RUNS == [0, 1]
    assert [call.draws for call in calls if call.unit is not None] == [True] * 8


def test_parameters_that_are_placed_do_not_let_the_step_be_followed_again() -> None:
    model, x = Model(*map(Layer, range(8))), torch.randn(4, WIDTH)
    cut = cut_of(model, 2)
    with cut():
        cut.find_plan(0, model, (x,), seed)
        cut.place_parameters({"embed.weight": [0], "embed.bias": [0]})
        again = cut.find_plan(0, model, (x,), seed)
    assert cut.num_followed == 1
    fresh = cut_of(model, 2, holders={"embed.weight": [0], "embed.bias": [0]})
    with fresh():
        expected = fresh.find_plan(0, model, (x,), seed)
    assert [part.sent for part in again.parts] == [part.sent for part in expected.parts]
    assert again.parameters == expected.parameters
    check(model, model, (x,), 2, cut)

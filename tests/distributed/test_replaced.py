from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_hybrid.distributed.random import equal_states, generator_state
from lightning_hybrid.distributed.replaced import Preserved, copied_buffers, default_dtype, preserved_values

CPU = torch.device("cpu")


def batch_norm() -> nn.BatchNorm1d:
    module = nn.BatchNorm1d(3)
    vars(module).update(count=1, seen=[1, 2], table={"a": 1}, recent=deque([1]), names={"a"})
    return module


def state_of(module: Any) -> dict[str, Any]:
    state = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {**state, **dict(module.named_buffers()), **{name: value.copy() for name, value in contents(state).items()}}


def contents(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if isinstance(value, (list, dict, deque, set))}


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "count", 2),
        lambda module: setattr(module, "new", 2),
        lambda module: delattr(module, "count"),
        lambda module: module.eval(),
        lambda module: module.seen.append(3),
        lambda module: module.table.update(b=2),
        lambda module: module.recent.clear(),
        lambda module: module.names.add("b"),
        lambda module: module.register_buffer("other", torch.ones(1)),
        lambda module: module.register_buffer("running_mean", torch.ones(3)),
        lambda module: module._buffers.pop("running_var"),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_attributes_buffers_and_containers_are_put_back(change: Callable[[Any], None], *, fails: bool) -> None:
    module = batch_norm()
    before, attributes = state_of(module), dict(vars(module))
    state = Preserved([module], containers=contents(attributes).values())
    for _ in range(2):
        try:
            with state:
                change(module)
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        after = state_of(module)
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())
        assert after.keys() == before.keys()
        tensors = {name for name, value in before.items() if isinstance(value, torch.Tensor)}
        assert all(after[name] is before[name] for name in tensors)
        assert all(after[name] == before[name] for name in before.keys() - tensors)


def test_attributes_of_objects_are_put_back() -> None:
    owner = SimpleNamespace(count=1)
    with Preserved([owner]):
        owner.count, owner.new = 2, 3
    assert vars(owner) == {"count": 1}


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(3), lambda generator: torch.randn(2, generator=generator)),
        (lambda: np.random.default_rng(3), lambda generator: generator.normal()),
        (lambda: np.random.RandomState(3), lambda generator: generator.normal()),
        (lambda: random.Random(3), lambda generator: generator.random()),
    ],
)
def test_generators_are_put_back(make: Callable[[], Any], draw: Callable[[Any], Any]) -> None:
    generator = make()
    before = generator_state(generator)
    with Preserved(generators=[generator]):
        draw(generator)
        assert not equal_states(generator_state(generator), before)
    assert equal_states(generator_state(generator), before)


def test_a_try_takes_no_random_numbers_from_the_others() -> None:
    def drawn() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    with Preserved(device=CPU):
        first = drawn()
    assert drawn() == first


def test_numbers_are_put_back_in_place_and_autograd_does_not_notice() -> None:
    parameter = nn.Parameter(torch.ones(2))
    version = parameter._version
    with preserved_values([parameter]):
        parameter.data.fill_(3.0)
    assert parameter.tolist() == [1.0, 1.0]
    assert parameter._version == version


def test_a_module_writes_copies_of_its_buffers() -> None:
    module = batch_norm()
    mean = module.running_mean
    with copied_buffers(module):
        module(torch.randn(4, 3))
        assert module.running_mean is not mean
    assert module.running_mean is mean
    assert not mean.any()


def test_the_default_dtype_is_another_one_for_a_while() -> None:
    before = torch.get_default_dtype()
    with default_dtype(torch.float64):
        assert torch.ones(1).dtype == torch.float64
    assert torch.get_default_dtype() == before

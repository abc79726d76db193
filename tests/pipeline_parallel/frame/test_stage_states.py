"""What the code around the layers keeps from step to step is as in one process, however many stages a rank has."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from tests.pipeline_parallel.frame.stages import chunks, cut_of, drawing, one_process, seed
from tests.zoo.basic import WIDTH
from tests.zoo.frame import Block


@pytest.fixture(autouse=True)
def _double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    yield
    torch.set_default_dtype(before)


@dataclass
class Meter:
    """An object that is no module."""

    total: float = 0.0
    history: list[int] = field(default_factory=list)
    tensor: Tensor = field(default_factory=lambda: torch.zeros(2))


class Keeping(nn.Module):
    """Blocks, and a part that keeps something."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.part = nn.Module()
        self.part.register_buffer("buffer", torch.zeros(3))
        self.part.tensor = torch.zeros(2)
        self.part.calls, self.part.best, self.part.text = 0, 0.0, ""
        self.part.listed, self.part.deep, self.part.named = [], {"a": [torch.zeros(1)]}, {}
        self.part.members, self.part.latest, self.part.tally = set(), deque(maxlen=3), Counter()
        self.part.array, self.part.pair = np.zeros(3), (torch.zeros(1), [0], np.zeros(1))
        self.part.meter, self.part.meters = Meter(), [SimpleNamespace(calls=0, inner=Meter())]
        self.part.scale = nn.Parameter(torch.ones(()))

    def body(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.blocks:
            x = layer(x)
        return x.pow(2).mean()


def state_of(model: nn.Module) -> Any:
    """Everything that the part keeps, to be compared."""

    def plain(value: Any) -> Any:
        if isinstance(value, (Tensor, np.ndarray)):
            return np.asarray(value.detach() if isinstance(value, Tensor) else value).tolist()
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple, deque)):
            return type(value).__name__, [plain(entry) for entry in value]
        return plain(vars(value)) if hasattr(value, "__dict__") else value

    own = {key: value for key, value in vars(model.part).items() if key not in vars(nn.Module())}
    return plain(own | dict(model.part._buffers) | dict(model.part._parameters))


def calls(model: Any, x: Tensor) -> Tensor:
    model.part.calls += 1
    return model.body(x)


def calls_of_the_whole(model: Any, x: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    model.part.calls = model.calls
    return model.body(x)


def used(model: Any, x: Tensor) -> Tensor:
    """What is counted is used, on the first stage and on the last one."""
    model.part.calls += 1
    return model.body(x * model.part.calls) * model.part.calls


def a_list(model: Any, x: Tensor) -> Tensor:
    model.part.listed.append(len(model.part.listed))
    return model.body(x)


def a_deep_list(model: Any, x: Tensor) -> Tensor:
    model.part.deep["a"].append(1)
    model.part.deep["a"][0] += x.sum()
    return model.body(x)


def containers(model: Any, x: Tensor) -> Tensor:
    model.part.named["count"] = model.part.named.get("count", 0) + 1
    model.part.members.add(len(model.part.members))
    model.part.latest.append(len(model.part.listed))
    model.part.tally["x"] += 1
    model.part.listed = [*model.part.listed, 1]
    return model.body(x)


def a_buffer(model: Any, x: Tensor) -> Tensor:
    model.part.buffer += x.detach().sum()
    return model.body(x)


def a_buffer_that_is_used(model: Any, x: Tensor) -> Tensor:
    model.part.buffer.lerp_(x.mean(), 0.25)
    return model.body(x - model.part.buffer.mean()) + model.part.buffer.sum()


def a_view_of_a_buffer(model: Any, x: Tensor) -> Tensor:
    model.part.buffer[0] += 1
    model.part.buffer[1:].add_(x.sum())
    return model.body(x)


def another_buffer(model: Any, x: Tensor) -> Tensor:
    model.part.buffer = model.part.buffer + x.sum()
    return model.body(x)


def a_tensor(model: Any, x: Tensor) -> Tensor:
    model.part.tensor = 0.5 * model.part.tensor + x.sum()
    return model.body(x) + model.part.tensor.sum()


def a_parameter(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.part.scale.mul_(0.9)
    return model.body(x)


def a_parameter_that_is_used(model: Any, x: Tensor) -> Tensor:
    model.part.scale.data.mul_(0.9)
    return model.body(x + model.part.scale) + model.part.scale


def an_array(model: Any, x: Tensor) -> Tensor:
    model.part.array[1] += 1
    return model.body(x * float(model.part.array.sum()))


def a_tuple(model: Any, x: Tensor) -> Tensor:
    tensor, listed, array = model.part.pair
    tensor.add_(x.sum())
    listed[0] += 1
    array += 1
    return model.body(x)


def an_object(model: Any, x: Tensor) -> Tensor:
    model.part.meter.total += 1
    model.part.meter.history.append(len(model.part.meter.history))
    model.part.meter.tensor.add_(x.sum())
    return model.body(x * model.part.meter.total)


def objects_in_objects(model: Any, x: Tensor) -> Tensor:
    (meter,) = model.part.meters
    meter.calls += 1
    meter.inner.history.append(meter.calls)
    meter.inner.tensor = meter.inner.tensor + x.sum()
    return model.body(x)


def the_batch(model: Any, x: Tensor) -> Tensor:
    x.add_(1)
    x[0] *= 2
    return model.body(x) + x.mean()


STEPS = [
    *(calls, calls_of_the_whole, used, a_list, a_deep_list, containers, a_buffer, a_buffer_that_is_used),
    *(a_view_of_a_buffer, another_buffer, a_tensor, a_parameter, a_parameter_that_is_used, an_array, a_tuple),
    *(an_object, objects_in_objects, the_batch),
]


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_what_the_code_around_the_layers_keeps_counts_once(step: Any, num_stages: int) -> None:
    model = Keeping()
    whole = copy.deepcopy(model)
    steps = [[torch.randn(4, WIDTH) for _ in range(3)] for _ in range(2)]
    of_whole = copy.deepcopy(steps)
    expected = one_process(whole, step, of_whole)
    got = chunks(model, step, steps, num_stages)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert state_of(model) == state_of(whole)
    torch.testing.assert_close(steps, of_whole)
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        if one.grad is not None or other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12, msg=lambda t, n=name: f"{n}: {t}")


def test_a_step_that_is_followed_leaves_no_trace_in_objects() -> None:
    model = Keeping()
    model.part.frozen = (Meter(), {"key": [Meter()]})
    batch = SimpleNamespace(x=torch.randn(4, WIDTH), extra=[1], array=np.zeros(2), labels=1)
    x = batch.x.clone()

    def step(given: Any) -> Tensor:
        given.x *= 2
        given.extra.append(2)
        given.array += 1
        del given.labels
        given.new = 1
        for meter in (model.part.frozen[0], model.part.frozen[1]["key"][0], model.part.meter):
            meter.total += 1
            meter.history.append(1)
            meter.tensor += given.x.sum()
            meter.new = given
        model.part.array += 1
        model.part.pair[0].zero_().add_(1)
        model.part.pair[1].append(1)
        model.part.pair[2][:] = 7
        return model.body(given.x)

    before, of_batch = state_of(model), vars(batch).copy()
    cut = cut_of(model, 2)
    with cut():
        cut.find_plan(0, step, (batch,), seed)
    assert state_of(model) == before
    assert vars(batch).keys() == of_batch.keys()
    assert all(vars(batch)[name] is value for name, value in of_batch.items())
    assert (batch.extra, batch.array.tolist()) == ([1], [0, 0])
    assert torch.equal(batch.x, x)


class Graphs:
    """A batch that is no container."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.listed = x, [1]


@pytest.mark.parametrize("kind", ["dict", "object"])
def test_what_the_step_takes_out_of_the_batch_is_there_for_the_next_stage(kind: str) -> None:
    model = Keeping()

    def of_dict(batch: Any) -> Tensor:
        return model.body(batch.pop("x")) * len(batch)

    def of_object(batch: Any) -> Tensor:
        x = batch.x
        batch.listed.append(2)
        del batch.x
        return model.body(x) * len(batch.listed)

    step = {"dict": of_dict, "object": of_object}[kind]
    x = torch.randn(4, WIDTH)

    def batch() -> Any:
        return {"x": x.clone(), "y": 1} if kind == "dict" else Graphs(x.clone())

    expected, given = step(batch()), batch()
    cut = cut_of(model, 2, num_ranks=1)
    with cut():
        plan = cut.find_plan(0, step, (given,), seed)
        sent = cut.run(plan, 0, step, (given,), None, seed=seed, random=drawing)
        got = cut.run(plan, 1, step, (given,), sent, seed=seed, random=drawing)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert (kind == "dict" and list(given) == ["y"]) or vars(given) == {"listed": [1, 2]}


def test_hooks_between_steps_are_seen_by_all_stages() -> None:
    model = Keeping()
    whole = copy.deepcopy(model)
    steps = [[torch.randn(4, WIDTH) for _ in range(2)] for _ in range(3)]
    expected, got = [], []
    for microbatches in steps:
        expected += one_process(whole, an_object, [microbatches])
        whole.part.meter = Meter(total=-3.0)
    cut = cut_of(model, 2, num_ranks=1)
    for microbatches in steps:
        got += chunks(model, an_object, [microbatches], cut=cut)
        model.part.meter = Meter(total=-3.0)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert state_of(model) == state_of(whole)


def test_a_container_that_is_changed_later_is_refused() -> None:
    model, x = Keeping(), torch.randn(4, WIDTH)
    cut = cut_of(model, 2, num_ranks=1)

    def step(model: Any, x: Tensor) -> Tensor:
        model.part.calls += 1
        if model.part.calls > 1:
            model.part.listed.append(model.part.calls)
        return model.body(x)

    chunks(model, step, [[x]], cut=cut)
    with pytest.raises(
        WrongUseError, match=r"changes `part\.listed`, but did not change it when the step was traced for a batch"
    ):
        chunks(model, step, [[x]], cut=cut)


@pytest.mark.parametrize("make", [lambda: (number for number in range(9)), lambda: iter([1, 2]), itertools.count])
def test_an_iterator_of_the_modules_own_is_refused(make: Any) -> None:
    model, x = Keeping(), torch.randn(4, WIDTH)
    model.part.own = make()
    cut = cut_of(model, 2)
    with pytest.raises(WrongUseError, match="reads from an iterator"), cut():
        cut.find_plan(0, lambda x: model.body(x) * next(model.part.own), (x,), seed)
    assert next(model.part.own) == next(make())

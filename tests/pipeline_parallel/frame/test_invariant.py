"""What does not depend on the batch is computed once for all microbatches of a step, and only where nobody can tell."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.pipeline_parallel.frame import discovery
from tests.pipeline_parallel.frame.stages import chunks, cut_of, one_process
from tests.zoo.basic import WIDTH
from tests.zoo.frame import Block

NUM_MICROBATCHES = 3


@pytest.fixture(autouse=True)
def _double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    yield
    torch.set_default_dtype(before)


class Shifted(Block):
    """A block that is given a table, and may write it."""

    writes: Callable[[Tensor], object] | None = None

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = super().forward(x) + table
        if self.writes is not None:
            self.writes(table)
        return x


class Tables(nn.Module):
    """Blocks that get a table made of positions, as rotary ones are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Shifted() for _ in range(4))
        self.register_buffer("frequencies", torch.rand(WIDTH))
        self.factor, self.parts = 1.0, [torch.ones(WIDTH)]

    def table(self, x: Tensor) -> Tensor:
        return torch.cos(torch.arange(x.shape[-1]) * self.frequencies)

    def body(self, x: Tensor, table: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.blocks:
            x = layer(x, table)
        return x.pow(2).mean()


def plain(model: Any, x: Tensor) -> Tensor:
    return model.body(x, model.table(x))


def of_the_batch(model: Any, x: Tensor) -> Tensor:
    return model.body(x, model.table(x) * x.mean())


def another_number(model: Any, x: Tensor) -> Tensor:
    """A number that is no tensor, and another one each time."""
    model.factor += 0.5
    return model.body(x, torch.full((WIDTH,), model.factor))


def no_zero(model: Any, x: Tensor) -> Tensor:
    """0.0 and -0.0 are equal, and what is made of them is not."""
    model.factor = -0.0 if model.factor == 1.0 else 0.0
    return model.body(x, torch.full((WIDTH,), model.factor).reciprocal().sign())


def a_longer_list(model: Any, x: Tensor) -> Tensor:
    """The same list, with more in it."""
    model.parts.append(torch.ones(WIDTH))
    return model.body(x, torch.stack(model.parts).sum(0))


def written_buffer(model: Any, x: Tensor) -> Tensor:
    table = model.table(x)
    model.frequencies.mul_(0.5)
    return model.body(x, table)


def buffer_by_data(model: Any, x: Tensor) -> Tensor:
    table = model.table(x)
    model.frequencies.data = model.frequencies * 0.5
    return model.body(x, table)


def written_after_use(model: Any, x: Tensor) -> Tensor:
    table = model.table(x)
    loss = model.body(x, table.clone())
    table.view(-1)[0] += 1.0
    return loss * table.sum()


def written_by_numpy(model: Any, x: Tensor) -> Tensor:
    table = model.table(x)
    table.numpy()[0] += 1.0
    return model.body(x, table)


def written_after_the_value(model: Any, x: Tensor) -> Tensor:
    """Behind a number of the last stage nothing is followed any more."""
    table = model.table(x)
    loss = model.body(x, table * 1.0)
    if loss.item() > -1.0:
        table.add_(1.0)
    return loss * table.sum()


def written_by_others(model: Any, x: Tensor) -> Tensor:
    """As collectives and extensions write: no operator of torch is seen, and there is no new version."""
    table = model.table(x)
    with torch._C.DisableTorchFunction():
        array = table.numpy()
    array[0] += 1.0
    return model.body(x, table)


def without_versions(model: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        table = model.table(x)
    return model.body(x, table.clone())


def number_of_the_table(model: Any, x: Tensor) -> Tensor:
    table = model.table(x)
    return model.body(x, table if (table < 2.0).all() else -table)


def random_numbers(model: Any, x: Tensor) -> Tensor:
    return model.body(x, torch.rand(WIDTH).cos())


STEPS = [
    plain,
    of_the_batch,
    another_number,
    no_zero,
    a_longer_list,
    written_buffer,
    buffer_by_data,
    written_after_use,
    written_by_numpy,
    written_by_others,
    written_after_the_value,
    without_versions,
    number_of_the_table,
]
WRITES: list[Callable[[Tensor], object]] = [
    lambda table: table.add_(1.0),
    lambda table: table.data.add_(1.0),
    lambda table: table[:2].zero_(),
]


def compare(model: Tables, step: Callable[..., Any]) -> None:
    whole = copy.deepcopy(model)
    steps = [[torch.randn(4, WIDTH) for _ in range(NUM_MICROBATCHES)] for _ in range(2)]
    expected = one_process(whole, step, steps)
    losses = chunks(model, step, steps, cut=cut_of(model, 2, num_ranks=1))
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-12, atol=1e-12)
    for got, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_steps_compute_what_they_compute_one_microbatch_after_the_other(step: Callable[..., Any]) -> None:
    compare(Tables(), step)


@pytest.mark.parametrize("writes", WRITES, ids=["adds", "data", "view"])
def test_a_layer_may_write_what_it_is_given(writes: Callable[[Tensor], object]) -> None:
    model = Tables()
    model.blocks[-1].writes = writes
    compare(model, plain)


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("step", "tables"), [(plain, 1), (of_the_batch, 1), (another_number, 0)])
def test_a_table_is_made_once_for_all_microbatches_of_a_step(step: Callable[..., Any], tables: int) -> None:
    model, microbatches = Tables(), [torch.randn(4, WIDTH) for _ in range(NUM_MICROBATCHES)]
    cut = cut_of(model, 2, num_ranks=1)
    chunks(model, step, [microbatches], cut=cut)  # followed
    with Operators() as operators:
        chunks(model, step, [microbatches, microbatches], cut=cut)
    assert operators.counts["cos"] == 2 * tables


def test_a_number_of_a_table_is_read_once_for_all_microbatches_of_a_step() -> None:
    model, microbatches = Tables(), [torch.randn(4, WIDTH) for _ in range(NUM_MICROBATCHES)]
    cut = cut_of(model, 2, num_ranks=1)
    chunks(model, number_of_the_table, [microbatches], cut=cut)  # followed
    with Operators() as operators:
        chunks(model, number_of_the_table, [microbatches, microbatches], cut=cut)
    assert operators.counts["_local_scalar_dense"] == 2 * (1 + NUM_MICROBATCHES)  # and once for each plan asked for


def test_random_numbers_are_drawn_for_each_microbatch() -> None:
    model, x = Tables(), torch.randn(4, WIDTH)
    cut = cut_of(model, 2, num_ranks=1)
    with Operators() as operators:
        chunks(model, random_numbers, [[x] * NUM_MICROBATCHES], cut=cut)
    assert operators.counts["rand"] >= NUM_MICROBATCHES


def test_dropout_that_did_nothing_when_the_step_was_first_seen_is_drawn_for_each_microbatch() -> None:
    model, x = Tables(), torch.randn(4, WIDTH)
    drop, cut = nn.Dropout(0.0), cut_of(model, 2, num_ranks=1)

    def step(model: Any, x: Tensor) -> Tensor:
        return model.body(x, drop(model.table(x)))

    chunks(model, step, [[x]], cut=cut)  # followed
    drop.p = 0.5
    with Operators() as operators:
        chunks(model, step, [[x] * NUM_MICROBATCHES], cut=cut)
    assert operators.counts["native_dropout"] + operators.counts["bernoulli_"] >= NUM_MICROBATCHES


def test_what_is_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "MOST_KEPT", 0)
    model, x = Tables(), torch.randn(4, WIDTH)
    cut = cut_of(model, 2, num_ranks=1)
    chunks(model, plain, [[x]], cut=cut)
    with Operators() as operators:
        chunks(model, plain, [[x] * NUM_MICROBATCHES], cut=cut)
    assert operators.counts["cos"] == 2 * NUM_MICROBATCHES  # on each stage

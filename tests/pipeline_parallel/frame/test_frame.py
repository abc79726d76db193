"""Any code around the layers, divided into stages, computes what it computes undivided."""

from __future__ import annotations

import gc
import itertools
import random
import re
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.watch.watched_thread import read_stack
from lightning_hybrid.memory.activation_checkpoint.checkpoint import ActivationCheckpointing
from lightning_hybrid.pipeline_parallel.frame.discovery import Discovery
from lightning_hybrid.pipeline_parallel.frame.routes import Travel
from lightning_hybrid.pipeline_parallel.partition import uniform
from tests.pipeline_parallel.frame.stages import check, cut_of, drawing, play, seed, without_values
from tests.zoo.basic import VOCABULARY, WIDTH
from tests.zoo.frame import Block, Coupling, Decoder

STAGES = [2, 3, 4]


@pytest.fixture(autouse=True)
def _double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    yield
    torch.set_default_dtype(before)


class Model(nn.Module):
    """Blocks in a list, with parameters around them."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x))).pow(2).mean()


def inputs(rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH)


# -- what code around the layers may be --------------------------------------------------------------------------------


def collected(self: Model, x: Tensor) -> Tensor:
    states = [self.embed(x)]
    for layer in self.blocks[:-1]:
        states.append(layer(states[-1]))
    return self.head(torch.stack(states).mean(0) + self.blocks[-1](x=states[-1])).pow(2).mean()


def skipped(self: Model, x: Tensor) -> Tensor:
    kept = []
    for layer in self.blocks[:3]:
        x = layer(x)
        kept.append(x)
    for layer in self.blocks[3:]:
        x = layer(x + kept.pop(), scale=0.5)
    return x.pow(2).mean()


def twice(self: Model, x: Tensor) -> Tensor:
    return F.cosine_similarity(self.body(x), self.body(x.flip(1))).mean()


def written(self: Model, x: Tensor) -> Tensor:
    x = self.embed(x)
    for layer in self.blocks:
        x = layer(x)
        x += 0.1
        x[:, 0] = x[:, 1] * 2
        x.view(-1).mul_(0.9)
    return x.mean()


def filled(self: Model, x: Tensor) -> Tensor:
    """A tensor that is there on every stage is written with values that are not."""
    out = torch.zeros(len(self.blocks), *x.shape)
    for index, layer in enumerate(self.blocks):
        x = layer(x)
        out[index] = x
    return out.pow(2).mean()


def filled_by_views(self: Model, x: Tensor) -> Tensor:
    out = torch.zeros(len(self.blocks), *x.shape)
    for index, layer in enumerate(self.blocks):
        x = layer(x)
        out[index].copy_(x.mul(2))
    return out.pow(2).mean()


def one_after_another(self: Model, x: Tensor) -> Tensor:
    """A layer is called again on its own result; both calls are on one stage."""
    for layer in self.blocks:
        x = layer(layer(x))
    return x.mean()


def detached(self: Model, x: Tensor) -> Tensor:
    h = self.body(self.embed(x))
    with torch.no_grad():
        target = h.softmax(-1)
    return F.kl_div(h.log_softmax(-1), target.roll(1, 0).detach(), reduction="batchmean") + h.detach().mean()


def recomputed(self: Model, x: Tensor) -> Tensor:
    for layer in self.blocks:
        x = checkpoint(layer, x, use_reentrant=False)
    return x.mean()


def unpacked(self: Model, x: Tensor) -> Tensor:
    for layer in self.blocks:
        a, b = layer(x).chunk(2, -1)
        values, _ = torch.cat([b, a], -1).sort(-1)
        x = values
    return x.pow(2).mean()


def hooked(self: Model, x: Tensor) -> Tensor:
    """Hooks on gradients, of what is made on one stage and used on others too."""
    x = self.embed(x)
    x.register_hook(lambda gradient: gradient * 0.1)
    for layer in self.blocks:
        x = layer(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return self.head(x).pow(2).mean()


def hooked_and_used_again(self: Model, x: Tensor) -> Tensor:
    """What the hook sees is the gradient of all uses, though the last stage could make the tensor itself."""
    first = self.embed(x)
    first.register_hook(lambda gradient: gradient.clamp(-0.003, 0.003))
    y = 2 * first
    return (self.head(self.body(first)) + y).pow(2).mean()


def hooked_and_written(self: Model, x: Tensor) -> Tensor:
    x = self.embed(x)
    x.register_hook(lambda gradient: gradient.clamp(-0.003, 0.003))
    x = x.mul_(2)
    return (self.head(self.body(x)) + x).pow(2).mean()


def written_by_data(self: Model, x: Tensor) -> Tensor:
    x = self.embed(x)
    for layer in self.blocks:
        x = layer(x)
        x.data.mul_(0.5)
    return x.mean()


def after_the_model(self: Model, x: Tensor) -> Tensor:
    """What comes after the layers reads numbers, and depends on them."""
    h = self.head(self.body(self.embed(x)))
    kept = h[h > 0]
    scale = 2.0 if h.abs().max().item() > 0.5 else 1.0
    return kept.sum() * scale + float(h.detach().mean()) * h.mean()


FRAMES = {
    f.__name__: f
    for f in (
        *(
            Model.forward,
            collected,
            skipped,
            twice,
            written,
            filled,
            filled_by_views,
            one_after_another,
            detached,
            recomputed,
        ),
        *(unpacked, after_the_model, hooked_and_used_again, hooked_and_written),
    )
}
SENDS = {"forward": 1, "twice": 2, "written": 1, "one_after_another": 1, "detached": 1, "recomputed": 1, "unpacked": 1}


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("name", FRAMES)
def test_loss_and_gradients_are_those_of_the_whole_model(name: str, num_stages: int) -> None:
    model = Model()
    played = check(model, lambda x: FRAMES[name](model, x), (inputs(),), num_stages)
    if name in SENDS:
        assert played.sends == [SENDS[name]] * (num_stages - 1)


class TwoStacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.between = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Decoder() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.shared(tokens)
        for layer in self.encoder:
            memory = layer(memory)
        memory, x, bias = self.between(memory), self.shared(tokens.flip(1)), None
        for layer in self.decoder:
            x, bias = layer(x, memory, bias)
        return F.cross_entropy((x @ self.shared.weight.T).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize(("num_stages", "sends"), [(2, [1]), (3, [1, 3]), (6, [1, 1, 1, 3, 3])])
def test_an_encoder_and_a_decoder(num_stages: int, sends: list[int]) -> None:
    """After the encoder only its normed end travels, with the stream of the decoder and the bias it hands on."""
    model = TwoStacks()
    assert check(model, model.forward, (torch.randint(VOCABULARY, (3, 5)),), num_stages).sends == sends


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.ModuleList(Coupling() for _ in range(4))

    def forward(self, z: Tensor) -> dict[str, Tensor]:
        log_det = z.new_zeros(len(z))
        for flow in self.flows:
            z, log_det = flow(z, log_det)
        return {"loss": (z.pow(2).sum(-1) - log_det).mean(), "z": z.detach()}


@pytest.mark.parametrize("num_stages", STAGES)
def test_two_streams(num_stages: int) -> None:
    model = Flow()
    assert check(model, model.forward, (inputs(),), num_stages).sends == [2] * (num_stages - 1)


class Normed(nn.Module):
    """Batch norm around the layers: its statistics belong to the stage that computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.middle = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.middle(self.blocks[1](self.blocks[0](x)))
        return self.blocks[3](self.blocks[2](x)).pow(2).mean()


def test_discovery_leaves_no_trace() -> None:
    class Counting(Model):
        def __init__(self) -> None:
            super().__init__(4)
            self.norm = nn.BatchNorm1d(WIDTH)
            self.seen, self.kept, self.by_name, self.latest = 0, [], {}, deque(maxlen=2)
            self.deep = {"losses": []}
            self.total, self.queue = torch.zeros(()), deque([torch.zeros(())])

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            self.kept.append(x)
            self.by_name["x"] = x
            self.deep["losses"].append(x)
            self.latest.append(x)
            self.total += x.sum()
            self.queue[0] += x.sum()
            x = self.body(self.norm(x)) + torch.rand(1) * random.random() * np.random.rand()
            self.last = x
            print("must not be seen twice")
            return x.mean()

    model = Counting()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    cut = cut_of(model, 2)
    x = inputs()
    copy = x.clone()
    with cut():
        cut.find_plan(0, model, (x,), seed)
    assert (model.seen, model.kept, model.by_name, list(model.latest), float(model.total)) == (0, [], {}, [], 0.0)
    assert float(model.queue[0]) == 0.0
    assert not hasattr(model, "last")
    assert model.deep == {"losses": []}
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in parameters)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(x, copy)
    assert "forward" not in vars(model.blocks[0])


class Registering(Model):
    """A model that registers a mask when it is first needed."""

    def forward(self, x: Tensor) -> Tensor:
        for name, persistent in (("mask", False), ("scale", True)):
            if not hasattr(self, name):
                self.register_buffer(name, torch.full((WIDTH,), 2.0), persistent=persistent)
        return (self.body(x) * self.mask * self.scale).mean()


def test_a_buffer_that_the_step_registers_is_kept() -> None:
    model = Registering(4)
    cut = cut_of(model, 2)
    with cut():
        cut.find_plan(0, model, (inputs(),), seed)
    assert set(dict(model.named_buffers())) == {"mask", "scale"}
    assert "scale" in model.state_dict()
    assert "mask" not in model.state_dict()
    model.register_buffer("mask", torch.ones(2))


@pytest.mark.parametrize("number", range(4))
def test_a_signal_while_the_module_gets_fake_parameters_leaves_no_trace(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader's worker that is killed raises in the main thread, wherever that is."""
    model, numbers = Normed(), itertools.count()
    make = Discovery.parameter

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == number:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
        return make(*args, **kwargs)

    monkeypatch.setattr(Discovery, "parameter", interrupted)
    parameters = list(model.parameters())
    cut = cut_of(model, 2)
    with cut(), pytest.raises(RuntimeError, match="killed by signal"):
        cut.find_plan(0, model, (inputs(),), seed)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_statistics_of_batch_norm_are_right_on_the_last_stage() -> None:
    model = Normed()
    whole = Normed()
    whole.load_state_dict(model.state_dict())
    x = inputs()
    whole(x)
    last = Normed()  # the stages share buffers in here, so the last one gets a copy
    cut = cut_of(model, 2)
    with cut():
        plan = cut.find_plan(0, model, (x,), seed)
        sent = cut.run(plan, 0, model, (x,), None, seed=seed, random=lambda number: None)
    assert len(sent) == 1 + 2 + 2  # the stream, and the statistics of both
    last.load_state_dict(Normed().state_dict() | {k: v for k, v in model.state_dict().items() if "block" in k})
    cut = cut_of(last, 2)
    with cut():
        plan = cut.find_plan(0, last, (x,), seed)
        cut.run(plan, 1, last, (x,), sent, seed=seed, random=lambda number: None)
    expected = whole.state_dict()
    for name, value in last.state_dict().items():
        if "running" in name or "tracked" in name:
            torch.testing.assert_close(value, expected[name])


# -- paths -------------------------------------------------------------------------------------------------------------


class Masked(Model):
    """The mask is ``None`` where it masks nothing, and the rows that count are chosen by the batch."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = None if mask.all() else mask.to(x.dtype)
        rows = x[mask.any(-1)]
        for layer in self.blocks:
            rows = layer(rows, None if weights is None else weights[mask.any(-1)])
        return rows.mean()


def test_every_path_has_a_plan_of_its_own() -> None:
    model, full = Masked(), torch.ones(4, WIDTH, dtype=torch.bool)
    some, fewer = full.clone(), full.clone()
    some[0, 1], fewer[2] = False, False
    cut = cut_of(model, 3)
    plans = [check(model, model, (inputs(), mask), 3, cut).plan for mask in (full, some, fewer, full, some.flip(0))]
    assert [plan.number for plan in plans] == [0, 1, 2, 0, 1]


def test_reading_again_changes_nothing() -> None:
    class Counting(Model):
        def __init__(self) -> None:
            super().__init__(4)
            self.norm = nn.BatchNorm1d(WIDTH, momentum=None)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.steps += 1
            mask = y > 0
            mask[:, 0].fill_(False)
            x = self.norm(self.embed(x)) + F.one_hot(y.sum(-1).clamp(max=WIDTH - 1), WIDTH)
            return self.body(x if self.steps < 3 or mask.any() else x * 2).mean()

    model = Counting()
    cut = cut_of(model, 2)
    found = []
    with cut():
        for y in (torch.eye(4, dtype=torch.long), torch.ones(4, 4, dtype=torch.long), torch.eye(4, dtype=torch.long)):
            found.append(cut.find_plan(0, model, (inputs(), y), seed).number)
    assert found == [0, 0, 0]
    assert model.steps == 0
    assert model.norm.num_batches_tracked == 0


def test_arrays_that_were_read_are_compared() -> None:
    model = Model()
    cut = cut_of(model, 2)

    def step(x: Tensor, lengths: Tensor) -> Tensor:
        return model(x) * float(lengths.numpy().max())

    with cut():
        batches = [torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])]
        found = [cut.find_plan(0, step, (inputs(), lengths), seed).number for lengths in batches]
    assert found == [0, 0, 1]


def test_a_buffer_that_is_made_once_stays_a_buffer() -> None:
    class Caching(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", None)

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(WIDTH).cos()
            return super().forward(x + self.table)

    model = Caching()
    play(cut_of(model, 2), model, model, (inputs(),), 2)
    assert "table" not in vars(model)
    assert torch.equal(model.table, torch.arange(WIDTH).cos())
    assert list(dict(model.named_buffers())) == ["table"]


def sliced(self: Model, x: Tensor, length: Tensor) -> Tensor:
    """A number of the batch decides about shapes, of values that other stages have too."""
    number = int(length.item())
    h = self.body(self.embed(x))[:number]
    return (self.head(h) * torch.arange(len(h))[:, None]).mean()


def test_numbers_of_the_batch_have_plans_of_their_own_and_the_user_is_told_once() -> None:
    model = Model()
    cut = cut_of(model, 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(1, 41):
            x, length = inputs(50), torch.tensor(number)
            got = play(cut, model, lambda x, n: sliced(model, x, n), (x, length), 2).value
            torch.testing.assert_close(got, sliced(model, x, length), rtol=1e-12, atol=1e-12)
    (text,) = [str(each.message) for each in told if "path" in str(each.message)]
    assert re.search(r"has taken 8 different paths .*`item` at test_frame.py:\d+", text)
    assert len(cut.plans) == 32


def by_length(model: Model, batch: dict[str, Any]) -> Tensor:
    x = model.embed(batch["x"])[: batch["length"]]
    scale = 1.0 / x.shape[0]  # on the last stage, of a tensor that is not there
    return model.head(model.body(x)).pow(2).sum() * scale


def by_count(model: Model, batch: dict[str, Any]) -> Tensor:
    x = model.embed(batch["x"])
    for index in range(batch["length"]):
        x = model.blocks[index](x)
    return x.pow(2).mean()


def by_size(model: Model, batch: dict[str, Any]) -> Tensor:
    return model.body(model.embed(batch["x"]) + torch.ones(batch["length"], 1).sum()).pow(2).mean()


@pytest.mark.parametrize("step", [by_length, by_count, by_size])
def test_integers_of_the_batch_may_decide(step: Any) -> None:
    model = Model()
    cut = cut_of(model, 2)
    for length in (3, 4, 3, 5):
        check(model, lambda batch: step(model, batch), ({"x": inputs(6), "length": length},), 2, cut)
    assert len(cut.plans) == 3


def test_integers_that_go_by_samples_do_not_decide() -> None:
    model = Model()
    cut = cut_of(model, 2)
    for number in range(3):
        check(model, lambda batch: model(batch["x"]), ({"x": inputs(2), "ids": [number, number + 1]},), 2, cut)
    assert len(cut.plans) == 1


def test_plans_of_many_shapes_are_not_kept_forever() -> None:
    model = Model(2)
    cut = cut_of(model, 2)
    with cut():
        for number in range(515):
            cut.find_plan(number, model, (inputs(2),), seed)
        assert len(cut.plans) == 512
        assert cut.find_plan(514, model, (inputs(2),), seed) is cut.plans[-1]


def test_what_is_made_once_stays() -> None:
    class Caching(Model):
        table = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(WIDTH).cos()
            return super().forward(x + self.table)

    model = Caching()
    cut, x = cut_of(model, 2), inputs()
    first, again = play(cut, model, model, (x,), 2), play(cut, model, model, (x,), 2)
    assert again.plan is first.plan
    torch.testing.assert_close(again.value, first.value)


def test_parameters_around_the_layers_may_be_written() -> None:
    """On every stage alike; here the stages share them, so the write has to be one that can be repeated."""

    class Clamped(Model):
        def __init__(self) -> None:
            super().__init__(4)
            self.gain = nn.Parameter(torch.linspace(-1, 2, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            self.gain.data.clamp_(0, 1)
            return super().forward(x * self.gain)

    model = Clamped()
    played = play(cut_of(model, 2), model, model, (inputs(),), 2)
    assert all(
        any(a.function is torch.Tensor.clamp_ and a.answer is None for a in p.actions) for p in played.plan.parts
    )
    assert model.gain.min() == 0


def test_a_step_that_takes_another_path_is_refused() -> None:
    class Changing(Model):
        late = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sin() if self.late else x.cos())

    model = Changing()
    cut = cut_of(model, 2)
    play(cut, model, model, (inputs(),), 2)
    model.late = True
    with pytest.raises(
        WrongUseError, match=r"call 0 of Changing is now `sin`, but was `cos` at test_frame.py:\d+.*dynamic"
    ):
        play(cut, model, model, (inputs(),), 2)


def test_after_the_last_layer_a_step_may_change() -> None:
    class Logging(Model):
        number = 0

        def forward(self, x: Tensor) -> Tensor:
            h = self.body(x)
            if self.number % 2:
                self.spread = float(h.std())
            return F.dropout(h, 0.5).mean()

    model = Logging()
    cut = cut_of(model, 3)
    first = play(cut, model, model, (x := inputs(),), 3)
    model.number = 1
    again = play(cut, model, model, (x,), 3)
    assert model.spread > 0
    assert again.plan is first.plan


# -- modules that are not looked into ----------------------------------------------------------------------------------


class Meeting(nn.Linear):
    """A linear layer that meets others when it runs, and makes other calls than it did before it was shared."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.meetings: list[torch.Size] = []

    def forward(self, x: Tensor) -> Tensor:
        self.meetings.append(x.shape)
        assert not isinstance(x, FakeTensor)
        return x @ self.weight.T + self.bias


class Shared(Model):
    """Around the layers are two that are shared; the first one is used again behind the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Meeting(), Meeting()

    def forward(self, x: Tensor) -> Tensor:
        first = self.embed(x)
        return (self.head(self.body(first) * first.mean()) + self.embed(x[:1])).pow(2).mean()

    @contextmanager
    def undivided(self) -> Iterator[None]:
        self.embed.__class__ = self.head.__class__ = nn.Linear
        yield
        self.embed.__class__ = self.head.__class__ = Meeting


@pytest.mark.parametrize("num_stages", STAGES)
def test_calls_of_leaf_modules_are_made_as_a_whole_or_not_at_all(num_stages: int) -> None:
    model, x = Shared(), inputs()
    leaves = [("embed", model.embed), ("head", model.head)]
    cut = cut_of(model, num_stages, around_discovery=model.undivided, leaf_modules=leaves)
    played = check(model, model, (x,), num_stages, cut)
    calls = [call.name for call in played.plan.graph.calls]
    assert [name for name in calls if name in ("'embed'", "'head'")] == ["'embed'", "'head'", "'embed'"]
    assert not any("linear" in name or "matmul" in name for name in calls)
    assert [set(names) for names in played.plan.parameters] == [
        {"embed.weight", "embed.bias"},
        *[set()] * (num_stages - 2),
        {"embed.weight", "embed.bias", "head.weight", "head.bias"},
    ]
    whole = 2  # calls of `embed` in the whole model, which `check` compares with
    assert model.embed.meetings[whole:].count(x.shape) == 2  # its first value is made again where it is needed
    assert model.embed.meetings[whole:].count(x[:1].shape) == 1
    assert len(model.head.meetings) == 2


def test_another_leaf_module_than_before_is_refused() -> None:
    model, x = Shared(), inputs()
    leaves = [("embed", model.embed), ("head", model.head)]
    cut = cut_of(model, 2, around_discovery=model.undivided, leaf_modules=leaves)
    play(cut, model, model, (x,), 2)
    model.forward = lambda x: model.body(model.head(x)).mean()
    with pytest.raises(WrongUseError, match=r"call 0 of Shared is now 'head', but was 'embed' at test_frame.py"):
        play(cut, model, model, (x,), 2)


class Switched(Block):
    """A layer that may give back what it is given, and hands a mask on."""

    on = False

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return (super().forward(x, mask) if self.on else x), mask


@pytest.mark.parametrize("hands_on", [False, True])
@pytest.mark.parametrize("num_stages", STAGES)
def test_a_layer_that_was_dropped_when_it_was_first_seen_runs_later(num_stages: int, hands_on: bool) -> None:
    model, x = Model(), inputs()
    model.blocks = nn.ModuleList(Switched() for _ in range(6))

    def step(x: Tensor) -> Tensor:
        h, mask = model.embed(x), x > 0
        for layer in model.blocks:
            h, given = layer(h, mask)
            mask = given if hands_on else mask
        return model.head(h * mask).pow(2).mean()

    cut = cut_of(model, num_stages)
    for on in ("", "135", "024", "012345"):
        for index, layer in enumerate(model.blocks):
            layer.on = str(index) in on
        played = check(model, step, (x,), num_stages, cut)
    assert played.plan.number == 0


def test_what_a_layer_only_hands_on_does_not_travel() -> None:
    model, x = Model(), inputs()
    model.blocks = nn.ModuleList(Switched() for _ in range(6))
    for layer in model.blocks:
        layer.on = True

    def step(x: Tensor) -> Tensor:
        h, mask = model.embed(x), x > 0
        for layer in model.blocks:
            h, mask = layer(h, mask)
        return model.head(h * mask).pow(2).mean()

    assert check(model, step, (x,), 3).sends == [1, 1]


def test_a_function_that_gave_back_its_argument_does_something_later() -> None:
    model, x = Model(4), inputs()
    rate = 0.0

    def step(x: Tensor) -> Tensor:
        h = model.embed(x)
        for index, layer in enumerate(model.blocks):
            h = F.dropout(layer(h), rate) if index == 1 else layer(h)
        return model.head(h).pow(2).mean()

    cut = cut_of(model, 2)
    check(model, step, (x,), 2, cut)
    rate = 1.0
    check(model, step, (x,), 2, cut)


def test_a_container_that_a_layer_returns_is_new_each_time() -> None:
    class Boxed(Block):
        def forward(self, x: Tensor) -> tuple[dict[str, Tensor], list[Any]]:  # type: ignore[override]
            return {"x": super().forward(x)}, []

    model, x = Model(), inputs()
    model.blocks = nn.ModuleList(Boxed() for _ in range(6))

    def step(x: Tensor) -> Tensor:
        for layer in model.blocks:
            box, seen = layer(x)
            seen.append(x)
            x = box.pop("x") * len(seen)
        return x.mean()

    cut = cut_of(model, 3)
    for _ in range(2):
        check(model, step, (x,), 3, cut)


@pytest.mark.parametrize("collects", [False, True])
def test_what_travels_does_not_depend_on_garbage_collection(collects: bool) -> None:
    class Node:
        def __init__(self, value: Tensor) -> None:
            self.value, self.me = value, self

    model = Model(4)

    def step(x: Tensor) -> Tensor:
        for layer in model.blocks:
            x = layer(x)
            Node(x * 2)
            if collects:
                gc.collect()
        return x.mean()

    gc.disable()
    try:
        cut = cut_of(model, 2)
        assert check(model, step, (inputs(),), 2, cut).sends == [1]
    finally:
        gc.enable()
    assert cut.plans[0].graph.texts()[-1].startswith("the end of the step, which keeps `mean` at test_frame.py:")


def test_what_travels_does_not_depend_on_a_watcher_that_reads_the_stack() -> None:
    """Who has the frame of a call has its variables: they are there until it lets go."""
    model, thread, is_over = Model(2), threading.get_ident(), threading.Event()

    def read() -> None:
        while not is_over.is_set():
            read_stack(thread)

    def last(x: Tensor) -> Tensor:
        doubled = x * 2  # of this call, which is over when the step is
        return doubled.mean()

    def step(x: Tensor) -> Tensor:
        return last(model.body(model.embed(x)))

    reader, interval = threading.Thread(target=read), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reader.start()
    try:
        cut = cut_of(model, 2)
        with cut():
            for key in range(40):
                wanted = cut.find_plan(key, step, (inputs(),), seed).graph.wanted
                assert len(wanted) == 1
    finally:
        is_over.set()
        reader.join()
        sys.setswitchinterval(interval)


class Biased(Block):
    """Returns a table of its own beside what it computes, as layers of T5 do."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), torch.zeros(2)


def test_what_travels_does_not_depend_on_whose_memory_is_used_again() -> None:
    model = Model()
    model.blocks = nn.ModuleList(Biased() for _ in range(4))

    def step(x: Tensor) -> Tensor:
        x = model.embed(x)
        for layer in model.blocks:
            x, _ = layer(x)
        return x.mean()

    plan = check(model, step, (inputs(),), 2).plan
    (loss,) = plan.graph.wanted  # and not a table that nobody holds any more
    assert plan.graph.calls[loss.call].name == "`mean`"


def test_a_stage_that_only_hands_on_counts_too() -> None:
    model, x = Model(), inputs()
    model.register_buffer("steps", torch.zeros(()))
    skipped = torch.tensor([False, False, True, True, False, False])

    def step(x: Tensor, skipped: Tensor) -> Tensor:
        model.steps += 1
        model.head.weight.data.mul_(0.5)
        for layer, skips in zip(model.blocks, skipped.tolist(), strict=True):
            x = x if skips else layer(x)
        return model.head(x).mean()

    cut = cut_of(model, 3)
    weight = float(model.head.weight[0, 0])
    play(cut, model, step, (x, skipped), 3)  # the stages share the module in here
    assert model.steps == 3
    assert float(model.head.weight[0, 0]) == weight / 8


# -- random numbers ----------------------------------------------------------------------------------------------------


class Drawing(Model):
    """Dropout around and in the layers, LayerDrop, stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.embed(x), 0.3)
        for layer in self.blocks:
            if torch.rand([]) < 0.3:
                continue
            x = x + layer(x) * torch.rand(len(x), 1)
        return F.dropout(self.head(x), 0.3).pow(2).mean()


def test_random_numbers_do_not_depend_on_the_stages() -> None:
    model, x = Drawing(), inputs()
    played = [play(cut_of(model, stages), model, model, (x,), stages) for stages in (1, 2, 3, 4, 6)]
    assert len(played[0].plan.graph.decisions) == 6
    for other in played[1:]:
        torch.testing.assert_close(other.value, played[0].value)
        torch.testing.assert_close(other.gradients, played[0].gradients)


def test_a_microbatch_that_draws_another_path_has_another_plan() -> None:
    model, x = Drawing(), inputs()
    cut = cut_of(model, 2)
    with cut():
        plans = [cut.find_plan(0, model, (x,), lambda n, k=k: torch.manual_seed(100 * k + n)) for k in range(6)]
        again = [cut.find_plan(0, model, (x,), lambda n, k=k: torch.manual_seed(100 * k + n)) for k in range(6)]
    assert len(set(plans)) > 1
    assert again == plans


class DropBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x + F.dropout(self.linear(x), 0.3), 0.3)


@pytest.mark.skipif(
    hasattr(torch.utils.checkpoint, "_NoopSaveInputs"),
    reason="a checkpoint of this torch makes calls of its own, and each call has a stream of random numbers",
)
def test_checkpointed_layers_draw_again_what_they_drew() -> None:
    model, x = Model(), inputs()
    model.blocks = nn.ModuleList(DropBlock() for _ in range(4))

    def kept(x: Tensor) -> Tensor:
        for layer in model.blocks:
            x = layer(x)
        return x.pow(2).mean()

    def again(x: Tensor) -> Tensor:
        for layer in model.blocks:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.pow(2).mean()

    expected, found = (play(cut_of(model, 2), model, step, (x,), 2) for step in (kept, again))
    torch.testing.assert_close(found.value, expected.value)
    torch.testing.assert_close(found.gradients, expected.gradients)


def test_dropout_that_did_nothing_when_it_was_first_seen_draws_the_same_on_every_stage() -> None:
    model, x = Model(), inputs()
    rate = 0.0

    def step(x: Tensor) -> Tensor:
        start = model.embed(x)
        dropped, used_again = F.dropout(start, rate), F.dropout(start * 2, rate)
        return (model.body(dropped + used_again) + used_again).pow(2).mean()

    cut = cut_of(model, 2)
    play(cut, model, step, (x,), 2)
    rate = 0.5
    found, expected = (play(each, model, step, (x,), 2) for each in (cut, cut_of(model, 2)))
    torch.testing.assert_close(found.value, expected.value)
    torch.testing.assert_close(found.gradients, expected.gradients)


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(model: nn.Module, match: str, step: Any = None, num_stages: int = 2) -> None:
    with pytest.raises(WrongUseError, match=match):
        play(cut_of(model, num_stages), model, step or model, (inputs(),), num_stages)


def test_layers_in_another_order_are_refused_with_the_order() -> None:
    class Reversed(Model):
        def body(self, x: Tensor) -> Tensor:
            for layer in reversed(self.blocks):
                x = layer(x)
            return x

    refused(
        Reversed(4),
        r"At test_frame.py:\d+, 'blocks.1' on stage 0 needs the result of 'blocks.2' on stage 1.*"
        r"\n    HybridStrategy\(body=\['blocks.3', 'blocks.2', 'blocks.1', 'blocks.0'\]\)",
    )


def test_a_second_pass_that_depends_on_the_first_is_refused() -> None:
    model = Model()
    refused(model, r"'blocks.0' is called more than once", lambda x: model.body(model.body(x)).mean())


def test_a_decision_between_the_layers_is_refused() -> None:
    class Deciding(Model):
        def body(self, x: Tensor) -> Tensor:
            for layer in self.blocks:
                x = layer(x)
                if x.sum() > 0:
                    x = x * 2
            return x

    refused(Deciding(), r"`__bool__` at test_frame.py:\d+ reads the value .* the layer 'blocks.1' is called afterward")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Reversed(torch.autograd.Function):
    """Its result is a view, and what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class ReversedItself(Reversed):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("function", [Doubled, Reversed, ReversedItself])
def test_a_function_with_its_own_backward_is_refused_around_the_layers(function: Any) -> None:
    model = Model()
    refused(model, "autograd.Function", lambda x: function.apply(model.body(x)).mean())


def test_hooks_on_gradients_belong_to_parts_of_layers() -> None:
    for outside in ("blocks.1", "embed"):
        model = Model(4)
        model.get_submodule(outside).register_full_backward_hook(lambda module, given, made: None)
        refused(model, r"A module's backward hook was applied at test_frame.py:\d+ outside the pipelined layers")
    model = Model(4)
    model.blocks[1].linear.register_full_backward_hook(lambda module, given, made: (given[0] * 0.5,))
    check(model, model, (inputs(),), 2)


def test_a_hook_on_the_gradient_of_what_several_stages_must_make_is_refused() -> None:
    model = Model()

    def step(x: Tensor) -> Tensor:
        x = model.embed(x).mul_(2)
        x.register_hook(lambda gradient: gradient.clamp(-0.003, 0.003))
        return (model.head(model.body(x)) + x).pow(2).mean()

    refused(model, r"`register_hook` at test_frame.py:\d+ registers a gradient hook .* stages 0 and 1 compute", step)


def test_checkpoints_of_several_layers_are_refused() -> None:
    model = Model()
    refused(model, "`torch.utils.checkpoint`", lambda x: checkpoint(model.body, x, use_reentrant=False).mean())
    gc.collect()  # before torch 2.13 the hooks of a checkpoint that failed stay as long as its frames


def test_derivatives_in_the_step_are_refused() -> None:
    model = Model()

    def penalty(x: Tensor) -> Tensor:
        x = model.embed(x)
        (gradient,) = torch.autograd.grad(model.body(x).sum(), x, create_graph=True, allow_unused=True)
        return gradient.pow(2).mean()

    refused(model, r"`grad` at test_frame.py:\d+ computes derivatives through layers on several stages", penalty)


class Halving(Block):
    """Gives what it made, and a view of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x).clone()
        return y, y[:2]


def test_a_view_that_was_sent_must_not_be_written_through_its_base() -> None:
    model = Model(4)
    model.blocks[1] = Halving()

    def step(x: Tensor) -> Tensor:
        y, view = model.blocks[1](model.blocks[0](x))
        z = model.blocks[2](view.sin())
        y += 1
        return model.blocks[3](z + view).mean() + y.mean()

    refused(model, "but an earlier stage has already sent a view of this tensor", step)


@pytest.mark.parametrize(
    ("returns", "text"),
    [
        (lambda x, late: (x, 7 if late else 4), "returned 7, but it returned 4 when"),
        (lambda x, late: (x, None if late else x.sum()), "returned None, but it returned a tensor when"),
        (
            lambda x, late: (x * 1.5, x * late) if late else (x * 1.5, None),
            "returned a tensor, but it returned None when",
        ),
        (
            lambda x, late: (x, {"b": 1, "a": 2} if late else {"a": 2, "b": 1}),
            r"dict\(b: \*, a: \*\)\), but it returned",
        ),
    ],
)
def test_what_a_layer_returns_beside_tensors_is_always_the_same(returns: Any, text: str) -> None:
    class Returning(Block):
        late = False

        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return returns(super().forward(x), self.late)

    model, x = Model(), inputs()
    model.blocks = nn.ModuleList(Returning() for _ in range(6))

    def step(x: Tensor) -> Tensor:
        for layer in model.blocks:
            x, _ = layer(x)
        return x.mean()

    cut = cut_of(model, 2)
    play(cut, model, step, (x,), 2)
    model.blocks[2].late = True
    with pytest.raises(WrongUseError, match=rf"'blocks.2' at test_frame.py:\d+ .*{text}"):
        play(cut, model, step, (x,), 2)


def test_what_a_layer_handed_on_when_it_was_first_seen_it_always_hands_on() -> None:
    model, x = Model(), inputs()

    class Handing(Block):
        late = False

        def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x), mask * 2 if self.late else mask

    model.blocks = nn.ModuleList(Handing() for _ in range(4))

    def step(x: Tensor) -> Tensor:
        mask = x > 0
        for layer in model.blocks:
            x, mask = layer(x, mask)
        return (x * mask).mean()

    cut = cut_of(model, 2)
    play(cut, model, step, (x,), 2)
    model.blocks[1].late = True
    with pytest.raises(
        WrongUseError, match=r"'blocks.1' at .* returned a new value, but it returned one of its arguments"
    ):
        play(cut, model, step, (x,), 2)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda own: float(torch.rand((), generator=own))),
        (lambda: np.random.default_rng(1), lambda own: own.random()),
        (lambda: np.random.RandomState(1), lambda own: own.rand()),
        (lambda: random.Random(1), lambda own: own.random()),
    ],
)
def test_a_generator_of_the_modules_own_is_refused(make: Any, draw: Any) -> None:
    model = Model()
    model.own = make()
    refused(model, r"from its own generator, 'own' of Model", lambda x: model(x) * draw(model.own))
    assert draw(model.own) == draw(make())


@pytest.mark.parametrize("kind", ["list", "dict", "attribute"])
def test_a_list_that_a_layer_changes_is_refused(kind: str) -> None:
    class Appending(Block):
        def forward(self, x: Tensor, given: Any) -> Tensor:  # type: ignore[override]
            loss = self.linear(x).pow(2).mean()
            if kind == "dict":
                given["losses"] = given["losses"] + loss
            else:
                (self.losses if kind == "attribute" else given).append(loss)
            return super().forward(x)

    model = Model()
    model.losses = []
    model.blocks = nn.ModuleList(Appending() for _ in range(4))
    for layer in model.blocks:
        layer.losses = model.losses

    def step(x: Tensor) -> Tensor:
        model.losses.clear()
        given: Any = {"losses": torch.zeros(())} if kind == "dict" else []
        for layer in model.blocks:
            x = layer(x, given)
        return x.mean() + sum(given["losses"] if kind == "dict" else [*given, *model.losses])

    text = "stores in an attribute" if kind == "attribute" else "'blocks.0' at .* changes a list or a dictionary"
    refused(model, text, step)


def test_a_list_that_a_layer_changes_later_is_refused() -> None:
    class Appending(Block):
        late = False

        def forward(self, x: Tensor, given: list[Tensor]) -> Tensor:  # type: ignore[override]
            given += [x] * self.late
            return super().forward(x)

    model, x = Model(), inputs()
    model.blocks = nn.ModuleList(Appending() for _ in range(4))

    def step(x: Tensor) -> Tensor:
        given: list[Tensor] = []
        for layer in model.blocks:
            x = layer(x, given)
        return x.mean() + sum(given)

    cut = cut_of(model, 2)
    play(cut, model, step, (x,), 2)
    model.blocks[1].late = True
    with pytest.raises(WrongUseError, match=r"'blocks.1' at .* changes a list or a dictionary"):
        play(cut, model, step, (x,), 2)


class Remembering(Model):
    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("memory", torch.zeros(WIDTH))


def test_a_buffer_that_another_stage_reads_in_the_next_step_is_refused() -> None:
    model = Remembering()

    def written(x: Tensor) -> Tensor:
        x = model.body(model.embed(x) + model.memory)
        model.memory.copy_(x.detach().mean(0))
        return x.mean()

    def replaced(x: Tensor) -> Tensor:
        x = model.body(model.embed(x) + model.memory)
        model.memory = x.detach().mean(0)
        return x.mean()

    for step in (written, replaced):
        refused(model, "updates a buffer or an attribute of the module on stage 1, but `?add", step)


class Centering(nn.Module):
    """Subtracts a running mean, which it moves afterwards; another module holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.scale = nn.Module(), nn.Linear(WIDTH, WIDTH)
        self.state.register_buffer("mean", torch.zeros(WIDTH))
        self.has_gradient = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale(x - self.state.mean)
        if self.training:
            self.state.mean.lerp_((x if self.has_gradient else x.detach()).mean(0).to(x), 0.5)
        return y


class Between(Model):
    def __init__(self) -> None:
        super().__init__(6)
        self.between = Centering()

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.blocks):
            x = layer(self.between(x) if at == 3 else x)
        return x.pow(2).mean() + self.between.state.mean.sum()


@pytest.mark.parametrize("num_stages", STAGES)
def test_a_module_that_keeps_a_buffer_is_computed_where_the_layer_before_it_is(num_stages: int) -> None:
    """It is one unit: the innermost module that has the buffer and is called. What it keeps is there afterwards."""
    model, one = Between(), Between()
    one.load_state_dict(model.state_dict())
    cut = cut_of(model, num_stages, [(f"blocks.{at}", each) for at, each in enumerate(model.blocks)])
    for training in (False, True, True, False):
        x = inputs()
        for each in (model, one):
            each.train(training)
            each.zero_grad()
        loss = one(x)
        loss.backward()
        played = play(cut, model, model.forward, (x,), num_stages, key=training)
        torch.testing.assert_close(played.value, loss)
        torch.testing.assert_close(model.between.state.mean, one.between.state.mean)
        for name, parameter in one.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(played.gradients[name], parameter.grad)
    made = [[call.name for call, action in zip(played.plan.graph.calls, part.actions, strict=True) if not action.answer]
            for part in played.plan.parts]  # fmt: skip
    assert ["'between'" in names for names in made] == [2 in stage for stage in uniform(6, num_stages)]
    assert not vars(model.between).get("forward")


class Clipping(nn.Module):
    """Decides by the numbers that it is given; they may decide the shape of what it returns too."""

    def __init__(self, *, keeps_all: bool = True) -> None:
        super().__init__()
        self.scale, self.keeps_all = nn.Linear(WIDTH, WIDTH), keeps_all
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        largest = x.abs().max().item()
        self.seen.append(largest)
        x = self.scale(x / largest if largest > 0.1 else x)
        return x if self.keeps_all else x[x[:, 0] > 0]


@pytest.mark.parametrize("num_stages", STAGES)
def test_a_module_between_layers_may_need_numbers(num_stages: int) -> None:
    """It is one unit, on one stage."""
    model = Model()
    model.between = Clipping()

    def step(x: Tensor) -> Tensor:
        for at, layer in enumerate(model.blocks):
            x = layer(model.between(x) if at == 3 else x)
        return x.pow(2).mean()

    cut = cut_of(model, num_stages, [(f"blocks.{at}", each) for at, each in enumerate(model.blocks)])
    for scale in (1, 0.001):
        check(model, step, (scale * inputs(),), num_stages, cut)
    model.between.seen.clear()
    play(cut, model, step, (inputs(),), num_stages)
    assert len(model.between.seen) == 1


def test_a_module_behind_the_layers_that_needs_numbers_stays_free() -> None:
    """What comes after the last layer may have other shapes in each step."""
    model = Model()
    model.between = Clipping(keeps_all=False)

    def step(x: Tensor) -> Tensor:
        return model.between(model.body(x)).pow(2).sum()

    cut, plans = cut_of(model, 2, [(f"blocks.{at}", each) for at, each in enumerate(model.blocks)]), []
    for _ in range(3):
        plans.append(check(model, step, (inputs(16),), 2, cut).plan)
    assert [plan.number for plan in plans] == [0, 0, 0]
    assert plans[0].graph.needed is not None


def test_a_module_between_layers_whose_shapes_depend_on_values_is_refused() -> None:
    model = Model()
    model.between = Clipping(keeps_all=False)

    def step(x: Tensor) -> Tensor:
        x = model.between(model.blocks[0](x))
        for layer in model.blocks[1:]:
            x = layer(x)
        return x.pow(2).mean()

    cut = cut_of(model, 2, [(f"blocks.{at}", each) for at, each in enumerate(model.blocks)])
    with pytest.raises(WrongUseError, match="reads the value of a tensor"):
        check(model, step, (inputs(),), 2, cut)
    assert "forward" not in vars(model.between)


def test_a_buffer_that_keeps_a_graph_is_refused() -> None:
    model = Between()
    model.between.has_gradient = True
    with pytest.raises(WrongUseError, match=r"'state\.mean' of Centering requires gradients"):
        play(cut_of(model, 2), model, model.forward, (inputs(),), 2)


@pytest.mark.parametrize("reads", ["to compute", "to decide"])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_buffer_that_is_written_where_nothing_is_followed_is_refused(reads: str, replaces: bool) -> None:
    model = Remembering()

    def step(x: Tensor) -> Tensor:
        x = x * (1 + model.memory) if reads == "to compute" else x * 2 if model.memory.sum() < 8 else x
        loss = model(x)
        loss.item()
        if replaces:
            model.memory = model.memory + 1
        else:
            model.memory += 1
        return loss

    refused(
        model,
        r"updates ('memory'|a tensor) of Remembering after `item` at .* but `\w+` at test_frame.py:\d+ reads \1 on",
        step,
    )


def test_a_buffer_that_only_the_last_stage_uses_may_be_written_there() -> None:
    model = Remembering()

    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.item()
        model.memory += 1
        return loss * model.memory.sum()

    cut = cut_of(model, 2)
    for _ in range(2):
        play(cut, model, step, (inputs(),), 2)
    assert model.memory[0] == 2


def test_ranks_that_read_other_numbers_follow_the_step_together() -> None:
    model, asked = Remembering(), []
    elsewhere = 0

    def agrees(number: int) -> bool:
        asked.append(number)
        return number == elsewhere

    def step(x: Tensor, mask: Tensor) -> Tensor:
        x = x if mask.all() or model.memory.sum() > 1 else x * 2
        return model(x)

    cut = cut_of(model, 2, agrees=agrees)
    full = torch.ones(2, dtype=torch.bool)
    with cut():
        numbers = [cut.find_plan(0, step, (inputs(), full), seed).number for _ in range(2)]
        assert not asked  # what the batch decides is the same on every rank
        for other in (1, 1, 0):
            elsewhere = other
            numbers.append(cut.find_plan(0, step, (inputs(), ~full), seed).number)
    assert numbers == [0, 0, 1, 1, 2]
    assert asked == [1, 1]


def test_what_a_layer_keeps_is_not_what_it_returns() -> None:
    class Keeping(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.extra = x.mean()
            return super().forward(x)

    model = Model()
    model.blocks = nn.ModuleList(Keeping() for _ in range(4))
    refused(model, "stores in an attribute", lambda x: model.body(x).mean() + model.blocks[0].extra * 2)


def test_a_layer_must_not_fill_what_is_used_elsewhere() -> None:
    class Filling(Block):
        def forward(self, x: Tensor, out: Tensor) -> Tensor:
            out[0] = x[0]
            return super().forward(x)

    model = Model()
    model.blocks = nn.ModuleList(Filling() for _ in range(4))

    def step(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for layer in model.blocks:
            x = layer(x, out)
        return x.mean() + out.pow(2).mean()

    refused(model, "changes a tensor in place, but another stage uses the tensor afterward", step)


def test_a_value_that_was_not_used_before_is_not_there() -> None:
    class Later(Model):
        late = False

        def forward(self, x: Tensor) -> Tensor:
            embedded = self.body(self.embed(x).sin())
            first = self.blocks[0](x)
            return embedded.mean() + (first.mean() if self.late else 0)

    model = Later()
    cut = cut_of(model, 3)
    play(cut, model, model, (inputs(),), 3)
    model.late = True
    with pytest.raises(WrongUseError, match=r"`mean` at test_frame.py:\d+ uses a tensor from another pipeline stage"):
        play(cut, model, model, (inputs(),), 3)


# -- where parameters are ----------------------------------------------------------------------------------------------


def test_a_plan_says_which_stages_use_a_parameter() -> None:
    model, x = Model(), inputs()
    with (cut := cut_of(model, 3))():
        plan = cut.find_plan(0, model, (x,), seed)
    embed, head = {"embed.weight", "embed.bias"}, {"head.weight", "head.bias"}
    assert [set(names) for names in plan.parameters] == [embed, set(), head]


def test_a_parameter_that_only_one_stage_has_is_used_there() -> None:
    """The embedding is needed again at the end: its result travels, where the last stage could make it before."""

    def step(x: Tensor) -> Tensor:
        start = model.embed(x)
        return (model.head(model.body(start)) + start).pow(2).mean()

    model, x = Model(), inputs()
    assert check(model, step, (x,), 3).sends == [1, 1]
    holders = {"embed.weight": {0}, "embed.bias": {0}}
    assert check(model, step, (x,), 3, cut_of(model, 3, holders=holders)).sends == [2, 2]


def held(model: nn.Module, **stages: int) -> dict[str, set[int]]:
    """Parameters of parts of the model live on one stage each."""
    return {
        f"{part}.{name}": {stage}
        for part, stage in stages.items()
        for name, _ in model.get_submodule(part).named_parameters()
    }


def behind_the_layers(self: Model, x: Tensor) -> Tensor:
    return self.head(self.body(x)).pow(2).mean()


def among_the_layers(self: Model, x: Tensor) -> Tensor:
    for layer in self.blocks:
        x = self.head(x) + layer(x)
    return x.pow(2).mean()


def itself_and_a_view(self: Model, x: Tensor) -> Tensor:
    x = self.body(x) @ self.head.weight.relu().T
    return (x + F.linear(x, self.head.weight)).pow(2).mean()


def handed_to_layers(self: Model, x: Tensor) -> Tensor:
    for layer in self.blocks:
        x = layer(x, scale=self.head.bias)
    return x.pow(2).mean()


def without_gradient(self: Model, x: Tensor) -> Tensor:
    x = self.body(x)
    with torch.no_grad():
        scale = self.head(x).mean()
    return x.mul(scale).pow(2).mean()


def numbers_before(self: Model, x: Tensor) -> Tensor:
    """What comes behind a number is not followed."""
    x = self.head(self.body(x))
    return self.head(x[x[:, 0] >= x[:, 0].mean().item()]).pow(2).mean()


LATER_USES = [
    behind_the_layers,
    among_the_layers,
    itself_and_a_view,
    handed_to_layers,
    without_gradient,
    numbers_before,
]


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("step", LATER_USES, ids=lambda step: step.__name__)
def test_a_parameter_travels_to_later_stages(step: Any, stages: int) -> None:
    model, x = Model(), inputs()
    check(model, lambda x: step(model, x), (x,), stages, cut_of(model, stages, holders=held(model, head=0)))


def test_a_parameter_travels_from_the_nearest_stage_that_has_it() -> None:
    model, x = Model(), inputs()
    holders = {"head.weight": {0, 2}, "head.bias": {1, 3}}
    played = check(model, lambda x: behind_the_layers(model, x), (x,), 4, cut_of(model, 4, holders=holders))
    assert played.sends == [1, 1, 2]
    assert played.plan.travels == (Travel(("head.weight",), (3,), 8 * WIDTH * WIDTH),)


def test_a_plan_says_what_travels_of_parameters() -> None:
    """Of functions of parameters alone only what is as large: a transposed weight, and not its norm."""
    model, x = Model(), inputs()

    def step(x: Tensor) -> Tensor:
        x = model.body(x * model.head.bias) @ model.head.weight.T
        return (x * model.head.weight.norm() + model.head.weight[0]).mean()

    played = check(model, step, (x,), 3, cut_of(model, 3, holders=held(model, head=0)))
    assert played.plan.travels == (Travel(("head.weight",), (2,), 2 * model.head.weight.nbytes),)


def test_what_is_sent_is_no_memory_of_a_parameter() -> None:
    """It may be under way when the step is over, and the optimizer or a hook writes parameters."""
    model, x = Model(), inputs()

    def step(x: Tensor) -> Tensor:
        x = model.body(model.embed(x))
        return (F.linear(x, model.head.weight) + model.head.bias[:]).mean()

    with (cut := cut_of(model, 2, holders=held(model, head=0)))():
        plan = cut.find_plan(0, step, (x,), seed)
        sent = cut.run(plan, 0, step, (x,), None, seed=seed, random=drawing)
    assert len(sent) == 3
    assert not {each.untyped_storage().data_ptr() for each in sent} & {
        each.untyped_storage().data_ptr() for each in model.head.parameters()
    }


def test_a_tied_parameter_travels_under_all_its_names() -> None:
    model, x = Model(), inputs()
    model.embed.weight = model.head.weight
    holders = held(model, embed=0) | {"head.weight": {0}}

    def step(x: Tensor) -> Tensor:
        return F.linear(model(model.embed(x)) * model.body(x), model.embed.weight).pow(2).mean()

    check(model, step, (x,), 3, cut_of(model, 3, holders=holders))


def test_hooks_of_parameters_that_travel_see_the_whole_gradient() -> None:
    model, x = Model(), inputs()

    def step(x: Tensor) -> Tensor:
        model.head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return among_the_layers(model, x)

    check(model, step, (x,), 3, cut_of(model, 3, holders=held(model, head=0)))


def test_a_network_that_the_module_does_not_name_is_on_every_stage() -> None:
    """A teacher or the network of a loss, kept in a list so that no optimizer or checkpoint sees it."""
    model, x = Model(), inputs()
    model.hidden = [nn.Linear(WIDTH, WIDTH)]
    check(model, lambda x: model.hidden[0](model.body(model.hidden[0](x))).pow(2).mean(), (x,), 3)


def test_parameters_of_later_stages_are_fetched_where_there_are_no_gradients() -> None:
    model, x = Model(), inputs()
    step = torch.no_grad()(lambda x: among_the_layers(model, x) + behind_the_layers(model, x))
    expected, cut = step(x), cut_of(model, 3, holders=held(model, head=1))
    fetched = {f"head.{name}": parameter.detach().clone() for name, parameter in model.head.named_parameters()}
    with cut(), torch.no_grad():
        plan = cut.find_plan(0, step, (x,), seed)
        assert plan.travels == tuple(Travel((name,), (0, 2), 2 * fetched[name].nbytes) for name in sorted(fetched))
        value = None
        for stage in range(3):
            with without_values(model, list(fetched) if stage != 1 else []):
                value = cut.run(plan, stage, step, (x,), value, seed=seed, random=drawing, fetched=fetched)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_nothing_travels_to_earlier_stages() -> None:
    model, x = Model(), inputs()
    with (
        (cut := cut_of(model, 3, holders=held(model, embed=1)))(),
        pytest.raises(WrongUseError, match=r"'embed\.bias' on stage 0.*is on stage 1"),
    ):
        cut.find_plan(0, model, (x,), seed)


def test_a_parameter_that_the_step_writes_does_not_travel() -> None:
    model, x = Model(), inputs()

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            model.head.weight.clamp_(-0.01, 0.01)
        return model.head(model.head(x) * 0 + model.body(x)).pow(2).mean()

    with (
        (cut := cut_of(model, 2, holders=held(model, head=0)))(),
        pytest.raises(WrongUseError, match=r"`clamp_` at .* updates"),
    ):
        cut.find_plan(0, step, (x,), seed)


def test_a_parameter_that_one_stage_has_is_written_there() -> None:
    model, x = Model(), inputs()

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            model.head.weight.clamp_(-0.01, 0.01)
        return model.body(model.head(x)).pow(2).mean()

    before = model.head.weight.detach().clone()
    check(model, step, (x,), 2, cut_of(model, 2, holders=held(model, head=0)))
    assert not torch.equal(model.head.weight, before)


def test_what_is_made_again_in_backward_has_no_parameter_that_travels() -> None:
    model, x = Model(), inputs()

    def step(x: Tensor) -> Tensor:
        return checkpoint(model.head, model.body(x), use_reentrant=False).mean()

    check(model, step, (x,), 2)
    with (
        (cut := cut_of(model, 2, holders=held(model, head=0)))(),
        pytest.raises(WrongUseError, match=r"`torch\.utils\.checkpoint`"),
    ):
        cut.find_plan(0, step, (x,), seed)


# -- units that look at numbers ----------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Data choose which expert computes which row; one buffer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows) and float(x[rows].abs().sum()) >= 0:
                out.index_add_(0, rows, expert(x[rows]))
        return x + out


def test_a_unit_may_look_at_numbers() -> None:
    model, x = Model(), inputs()
    model.blocks = nn.ModuleList(Experts() for _ in range(4))
    played = check(model, model, (x,), 2)
    assert played.sends == [1]
    assert [int(unit.calls) for unit in model.blocks] == [2, 2, 2, 2]  # undivided, and as stages; not when followed


class Cache:
    """What layers keep for their next call, as transformers' caches do: attributes, in a list."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.lengths: list[int] = []
        self.all: list[Tensor] = []


class Caching(Experts):
    """Puts what it computes into an object that it is given, before it looks at numbers."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:  # type: ignore[override]
        keys = self.router(x)
        cache.keys = keys if cache.keys is None else torch.cat([cache.keys, keys])
        cache.lengths.append(len(cache.keys))
        cache.all.append(keys)
        return super().forward(x + 0 * cache.keys.mean())


@pytest.mark.parametrize("is_used", [False, True])
def test_a_unit_that_looks_at_numbers_may_fill_a_cache(is_used: bool) -> None:
    """What the attempt without values has put there is taken out again; the zeros are not taken for values."""

    def step(x: Tensor) -> Tensor:
        x, caches = model.embed(x), [Cache() for _ in model.blocks]
        for layer, cache in zip(model.blocks, caches, strict=True):
            x = layer(x, cache)
            found.append((cache.lengths, len(cache.all)))
        return x.pow(2).mean() + (caches[0].all[0].sum() if is_used else 0)

    model, x = Model(), inputs()
    model.blocks = nn.ModuleList(Caching() for _ in range(4))
    found: list[Any] = []
    if is_used:
        with (cut := cut_of(model, 2))(), pytest.raises(WrongUseError, match="a layer of the body computed"):
            cut.find_plan(0, step, (x,), seed)
    else:
        check(model, step, (x,), 2)
        assert found[:8] == [([len(x)], 1)] * 8  # of one process, and of the step that is followed


class Packed(nn.Module):
    """A recurrent layer over texts of several lengths; without a total length the longest one decides the shape."""

    def __init__(self, *, total: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.total = total

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        total = x.shape[1] if self.total else None
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=total)[0]


@pytest.mark.parametrize("total", [False, True])
def test_layers_may_pack_texts_by_their_lengths(total: bool) -> None:
    """Lengths keep their values; they decide which plan is used only where shapes depend on them."""

    def step(x: Tensor, lengths: Tensor) -> Tensor:
        x = model.embed(x)
        for layer in model.blocks:
            x = layer(x, lengths)
        log_probs = x.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, torch.ones(4, 2, dtype=torch.long), lengths, torch.full((4,), 2))

    model, plans = Model(), []
    model.blocks = nn.ModuleList(Packed(total=total) for _ in range(4))
    cut = cut_of(model, 2)
    for lengths in ([8, 7, 9, 5], [6, 8, 5, 7], [6, 8, 5, 7]):
        plans.append(check(model, step, (torch.randn(4, 9, WIDTH), torch.tensor(lengths)), 2, cut).plan.number)
    assert plans == ([0, 0, 0] if total else [0, 1, 1])


def packed_between(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    """Lengths that unpacking gives are known too, and are the user's to write."""
    for layer in self.blocks[:3]:
        x = layer(x)
    for lstm in self.lstms:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        x, lengths = pad_packed_sequence(lstm(packed)[0], batch_first=True)
        lengths -= 1
    x = x.sum(1) / lengths[:, None]
    for layer in self.blocks[3:]:
        x = layer(x)
    return x.pow(2).mean()


def masked_between(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    """Layers see the words of all texts in one row."""
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    for layer in self.blocks[:3]:
        x = layer(x)
    words = x[mask]
    for layer in self.blocks[3:]:
        words = layer(words)
    return (x.masked_scatter(mask[..., None], words) + words.new_zeros(x.shape).index_put((mask,), words)).pow(2).mean()


def repeated_between(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    """Each sound is as long as the batch says, as in FastSpeech."""
    for layer in self.blocks[:3]:
        x = layer(x)
    x = x[:, 0].repeat_interleave(lengths, 0)
    for layer in self.blocks[3:]:
        x = layer(x)
    return x.pow(2).mean()


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("step", [packed_between, masked_between, repeated_between])
def test_lengths_of_the_batch_may_decide_shapes_between_layers(step: Callable[..., Tensor], num_stages: int) -> None:
    """Other lengths are another path: what is between the stages has another shape."""
    model = Model()
    model.lstms = nn.ModuleList(nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True) for _ in range(2))
    cut, plans = cut_of(model, num_stages, [(f"blocks.{at}", each) for at, each in enumerate(model.blocks)]), []
    for lengths in ([8, 7, 9, 5], [6, 8, 5, 7], [6, 8, 5, 7], [3, 4, 4, 4], [4, 4, 4, 4], [8, 7, 9, 5]):
        batch = torch.randn(4, 9, WIDTH), torch.tensor(lengths)
        plans.append(check(model, partial(step, model), batch, num_stages, cut).plan.number)
    assert plans == [0, 1, 1, 2, 3, 0]


def test_lengths_that_decide_shapes_behind_the_layers_need_no_path_of_their_own() -> None:
    def step(x: Tensor, lengths: Tensor) -> Tensor:
        x = model.body(x)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(packed, batch_first=True)[0].pow(2).mean()

    model = Model()
    cut, plans = cut_of(model, 2), []
    for lengths in ([8, 7, 9, 5], [6, 8, 5, 7]):
        plans.append(check(model, step, (torch.randn(4, 9, WIDTH), torch.tensor(lengths)), 2, cut).plan.number)
    assert plans == [0, 0]


def shape_of_values(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    x = self.blocks[0](x)[:, 0]
    x = x[x.sum(-1) > 0]
    return self.blocks[1](x).sum()


def lengths_of_values(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    x = self.blocks[0](x)[:, 0]
    x = x.repeat_interleave((x.sum(-1).abs() + lengths).long(), 0)
    return self.blocks[1](x).sum()


@pytest.mark.parametrize("step", [shape_of_values, lengths_of_values])
def test_shapes_that_absent_values_decide_are_refused(step: Callable[..., Tensor]) -> None:
    model, batch = Model(2), (torch.randn(4, 9, WIDTH), torch.tensor([8, 7, 9, 5]))
    with pytest.raises(WrongUseError, match=r"reads the value of a tensor .* layer 'blocks.1' is called afterward"):
        check(model, partial(step, model), batch, 2)


def test_an_attempt_without_values_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Torch logs what its fake kernels refuse as errors, and layers that look at numbers run on zeros then."""

    class Grouped(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = F.pad(super().forward(x).float(), (0, 2))
            ends = torch.tensor([len(x)], dtype=torch.int32)
            return F.grouped_mm(x, torch.eye(WIDTH + 2, dtype=x.dtype)[None], offs=ends)[:, :WIDTH].double()

    model, x = Model(), inputs()
    model.blocks = nn.ModuleList(Grouped() for _ in range(4))
    check(model, model, (x,), 2)
    assert not caplog.records


def test_an_error_in_a_unit_is_the_users() -> None:
    class Broken(Block):
        def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
            return x @ torch.zeros(3, 3)

    model, x = Model(), inputs()
    model.blocks[2] = Broken()
    with (cut := cut_of(model, 2))(), pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        cut.find_plan(0, model, (x,), seed)
    assert "fake" not in str(error.value)
    assert "meta" not in str(error.value)
    assert isinstance(model.blocks[2].linear.weight, nn.Parameter)
    assert model.blocks[2].linear.weight.abs().sum() > 0


@pytest.mark.parametrize("is_view", [False, True])
def test_what_a_unit_writes_and_returns_may_be_a_tensor_of_the_step(is_view: bool) -> None:
    class Adding(Block):
        def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x = super().forward(x)
            total += x.sum(-1)
            return x, total

    def step(x: Tensor) -> Tensor:
        x, total = model.embed(x), torch.zeros(len(x), 1)[:, 0] if is_view else torch.zeros(len(x))
        for layer in model.blocks:
            x, total = layer(x, total)
        return (total + x.sum(-1)).pow(2).mean()

    model, x = Model(), inputs()
    model.blocks = nn.ModuleList(Adding() for _ in range(4))
    assert check(model, step, (x,), 3).sends == [2, 2]  # the first total is nobody's any more


@pytest.mark.parametrize("num_stages", STAGES)
def test_a_unit_that_is_recomputed_changes_its_argument_too(num_stages: int) -> None:
    def step(x: Tensor) -> Tensor:
        x = model.embed(x)
        for layer in model.blocks:
            before = x
            x = layer(x)
        return (x * before).pow(2).mean()  # one tensor, where the last layer works in place

    model, x = Model(), inputs()
    model.blocks = nn.ModuleList([Block(), nn.ReLU(inplace=True)] * 3)
    checkpointing = ActivationCheckpointing(model.blocks, torch.device("cpu"))
    cut = cut_of(model, num_stages, [(f"blocks.{index}", layer) for index, layer in enumerate(model.blocks)])
    for _ in range(2):  # once not knowing what the layers change, and once knowing
        with checkpointing():
            check(model, step, (x,), num_stages, cut)


@pytest.mark.parametrize("where", ["operand", "in place", "logged"])
def test_what_was_not_used_before_cannot_be_used_after_the_last_layer(where: str) -> None:
    """The step is not followed there any more; a tensor without values refuses by itself."""
    buffer = torch.zeros(WIDTH)
    late = False

    def step(x: Tensor) -> Tensor:
        start = model.embed(x)
        out = model.head(model.body(start))
        if late and where == "operand":
            out = out + start
        if late and where == "in place":
            buffer.add_(start.detach().mean(0))
        if late and where == "logged":
            float(start.sum())
        return out.pow(2).mean()

    model, x = Model(), inputs()
    with (cut := cut_of(model, 2))():
        plan = cut.find_plan(0, step, (x,), seed)
        sent = cut.run(plan, 0, step, (x,), None, seed=seed, random=drawing)
        late = True
        with pytest.raises(
            WrongUseError, match=r"^`\w+` at test_frame.py:\d+ uses a tensor from another pipeline stage"
        ):
            cut.run(plan, 1, step, (x,), sent, seed=seed, random=drawing)
    assert buffer.abs().sum() == 0


class DrawsInAWay(nn.Module):
    """A layer that draws in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.way.startswith("attention"):
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1 if self.way == "attention, dropout" else 0.0)
        return F.dropout(x) if self.way == "torch" else x * (1 + np.random.rand() if self.way == "numpy" else 1)


@pytest.mark.parametrize(
    ("way", "draws", "elsewhere"),
    [
        ("nothing", False, False),
        ("attention", False, False),
        ("attention, dropout", True, False),
        ("torch", True, False),
        ("numpy", True, True),
    ],
)
def test_only_what_draws_has_numbers_of_its_own(way: str, draws: bool, elsewhere: bool) -> None:
    """Starting a stream costs as much as a small layer, and numpy's ten times as much."""
    model = nn.Module()
    model.layers = nn.ModuleList(DrawsInAWay(way) for _ in range(2))
    cut = cut_of(model, 2, [(f"layers.{index}", layer) for index, layer in enumerate(model.layers)])

    def step(x: Tensor) -> Tensor:
        for layer in model.layers:
            x = layer(x)
        return x.sum()

    with cut():
        plan = cut.find_plan(0, step, (torch.randn(2, 3, WIDTH),), seed)
    calls = [call for call in plan.graph.calls if call.unit is not None]
    assert [(call.draws, call.draws_elsewhere) for call in calls] == [(draws, elsewhere)] * 2


class _Compiler:
    """A backend of `torch.compile` that counts: the graphs that it is given, and their calls."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1

        def call(*args: Any) -> Any:
            self.calls += 1
            return graph(*args)

        return call


@pytest.mark.parametrize("outside", [False, True], ids=["layers", "layers and what is around them"])
def test_compiled_layers_are_called_compiled_and_compiled_once(outside: bool) -> None:
    """Not for the fake tensors with which a step is followed, and not again in a later step or for validation."""
    model, compiler = Model(), _Compiler()
    for layer in model.blocks:
        layer.compile(backend=compiler)
    if outside:
        model.head.compile(backend=compiler)
        model.compile(backend=compiler)
    before = [dict(vars(part)) for part in model.modules()]

    def step(x: Tensor) -> Tensor:
        for layer in model.blocks:
            x = layer(x)
        return model.head(x).mean()

    cut = cut_of(model, 2)
    with cut():
        plan = cut.find_plan(0, step, (inputs(),), seed)
    assert (compiler.graphs, compiler.calls) == (0, 0)
    assert plan.parts[0].sent
    for number in range(1, 4):
        play(cut, model, step, (inputs(),), 2)
        assert compiler.calls == number * len(model.blocks)
        assert compiler.graphs <= len(model.blocks)
    graphs = compiler.graphs
    check(model, step, (inputs(),), 2, cut)
    step(inputs())
    assert compiler.graphs <= graphs + outside  # the whole model's layers are those of a step; its head is run compiled
    assert [dict(vars(part)) for part in model.modules()] == before


def test_reentrant_checkpoints_are_torchs_again_afterwards() -> None:
    """The name that `torch.utils.checkpoint.checkpoint` finds its function by: torch has it, and gets it back."""
    names = vars(sys.modules["torch.utils.checkpoint"])
    function, model = names["CheckpointFunction"], Model()
    assert issubclass(function, torch.autograd.Function)

    def step(x: Tensor) -> Tensor:
        for layer in model.blocks:
            x = checkpoint(layer, x, use_reentrant=True)
            assert type(x.grad_fn).__name__ == "CheckpointFunctionBackward" or names["CheckpointFunction"] != function
        return model.head(x).mean()

    check(model, step, (inputs().requires_grad_(),), 2)
    assert names["CheckpointFunction"] is function
    with pytest.raises(ZeroDivisionError), cut_of(model, 2)():
        raise ZeroDivisionError
    assert names["CheckpointFunction"] is function


def test_a_layer_that_has_a_reentrant_checkpoint_keeps_it() -> None:
    """Inside of a layer there is nothing to divide."""

    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(super().forward, x, use_reentrant=True)
            kinds.append(type(y.grad_fn).__name__)
            return y

    kinds: list[str] = []
    model = Model()
    model.blocks = nn.ModuleList(Inside() for _ in range(4))

    def step(x: Tensor) -> Tensor:
        for layer in model.blocks:
            x = layer(x)
        return model.head(x).mean()

    check(model, step, (inputs().requires_grad_(),), 2)
    assert set(kinds[-4:]) == {"CheckpointFunctionBackward"}


def test_a_reentrant_checkpoint_around_several_layers_is_refused() -> None:
    model = Model()
    with pytest.raises(WrongUseError, match="Checkpoint each layer separately"):
        check(model, lambda x: checkpoint(model.body, x, use_reentrant=True).mean(), (inputs().requires_grad_(),), 2)

"""Any code around the layers, divided into stages, computes what it computes undivided."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.distributed.failure import WrongUseError
from tests.frame_modules import Block, Coupling, Decoder
from tests.modules import VOCABULARY, WIDTH
from tests.pipeline_parallel.frame.stages import check, cut_of, drawing, play, seed

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
        *(unpacked, after_the_model),
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
            self.deep, self.generator = {"losses": []}, torch.Generator()
            self.total = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            self.kept.append(x)
            self.by_name["x"] = x
            self.deep["losses"].append(x)
            self.latest.append(x)
            self.total += x.sum()
            x = x + torch.rand(1, generator=self.generator)
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
    assert not hasattr(model, "last")
    assert model.deep == {"losses": []}
    assert torch.equal(model.generator.get_state(), torch.Generator().get_state())
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in parameters)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(x, copy)
    assert "forward" not in vars(model.blocks[0])


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
        WrongUseError, match=r"call 0 of Changing is `sin`, and was `cos` at test_frame.py:\d+.*dynamic"
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
    with pytest.raises(WrongUseError, match=r"call 0 of Shared is 'head', and was 'embed' at test_frame.py"):
        play(cut, model, model, (x,), 2)


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
        r"'blocks.1', on stage 0, needs at test_frame.py:\d+ what 'blocks.2' makes, on stage 1.*"
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

    refused(Deciding(), r"The layer 'blocks.1' is called after `__bool__` at test_frame.py:\d+ .*asked for the number")


def test_parameters_of_a_layer_are_refused_around_it() -> None:
    model = Model()
    refused(model, "lives|live on other stages", lambda x: model(x) + model.blocks[0].linear.weight.norm())


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_function_with_its_own_backward_is_refused_around_the_layers() -> None:
    model = Model()
    refused(model, "autograd.Function", lambda x: Doubled.apply(model.body(x)).mean())


def test_checkpoints_of_several_layers_are_refused() -> None:
    model = Model()
    refused(model, "`torch.utils.checkpoint`", lambda x: checkpoint(model.body, x, use_reentrant=False).mean())


def test_derivatives_in_the_step_are_refused() -> None:
    model = Model()

    def penalty(x: Tensor) -> Tensor:
        x = model.embed(x)
        (gradient,) = torch.autograd.grad(model.body(x).sum(), x, create_graph=True, allow_unused=True)
        return gradient.pow(2).mean()

    refused(model, r"`grad` at test_frame.py:\d+ differentiates in the step", penalty)


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

    refused(model, "of which an earlier stage has sent a view", step)


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
        refused(model, "writes a buffer or an attribute of the module on stage 1, and `?add", step)


def test_what_a_layer_keeps_is_not_what_it_returns() -> None:
    class Keeping(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.extra = x.mean()
            return super().forward(x)

    model = Model()
    model.blocks = nn.ModuleList(Keeping() for _ in range(4))
    refused(model, "made and did not return", lambda x: model.body(x).mean() + model.blocks[0].extra * 2)


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

    refused(model, "changes a tensor in place that is used afterwards on another stage", step)


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
    with pytest.raises(WrongUseError, match="uses a value that is on another stage, and did not use it when"):
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


def test_a_parameter_that_is_needed_where_it_is_not_is_refused() -> None:
    model, x = Model(), inputs()
    with (cut := cut_of(model, 2, holders={"head.weight": {0}}))(), pytest.raises(WrongUseError, match=r"head\.weight"):
        cut.find_plan(0, model, (x,), seed)


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


def test_what_a_unit_writes_and_returns_may_be_a_tensor_of_the_step() -> None:
    class Adding(Block):
        def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x = super().forward(x)
            total += x.sum(-1)
            return x, total

    def step(x: Tensor) -> Tensor:
        x, total = model.embed(x), torch.zeros(len(x))
        for layer in model.blocks:
            x, total = layer(x, total)
        return (total + x.sum(-1)).pow(2).mean()

    model, x = Model(), inputs()
    model.blocks = nn.ModuleList(Adding() for _ in range(4))
    check(model, step, (x,), 3)


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
        with pytest.raises(WrongUseError, match="a value that is on another stage"):
            cut.run(plan, 1, step, (x,), sent, seed=seed, random=drawing)
    assert buffer.abs().sum() == 0

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.pipeline_parallel.engine import Engine
from lightning_hybrid.pipeline_parallel.p2p import BlankMessageError
from lightning_hybrid.pipeline_parallel.schedules import (
    Action,
    Kind,
    Placement,
    Schedule,
    build,
    build_forward,
    complete,
)
from lightning_hybrid.pipeline_parallel.schedules.generators import gpipe
from tests.pipeline_parallel.channels import CountingGroup, open_channels
from tests.pool import Pools

SCHEDULES = [("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3)]
WIDTH = 4


@dataclass
class Masked:
    """What travels in the model `trees`."""

    x: Tensor
    mask: Tensor
    ids: Tensor
    rest: dict[str, Any]


class Plain(nn.Module):
    """Linear and tanh."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class InPlace(Plain):
    """The first thing that happens to the input changes it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2.0).relu_())


class Frozen(Plain):
    """Every second layer learns nothing, and so does the first."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.requires_grad_(index % 2 == 1)


class AllFrozen(Plain):
    """Nothing to learn at all: backward has nothing to do anywhere."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.requires_grad_(False)


class Trees(nn.Module):
    """Tensors of several types, values and nothing, in a tree that changes from layer to layer.

    ``loose`` requires grad and is used every third layer only; ``never`` gets no gradient at all.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(3, WIDTH)

    def forward(self, tree: Any) -> Masked:
        if isinstance(tree, Tensor):
            ids = torch.arange(len(tree)) % 3
            tree = Masked(tree, tree > 0, ids, {"scale": 0.5, "name": "first", "pair": (tree, None), "even": True})
        assert isinstance(tree.rest["even"], bool)
        assert tree.ids.dtype == torch.int64
        x = self.linear(tree.x) + self.embedding(tree.ids)
        x = torch.where(tree.mask, x, x * tree.rest["scale"])
        loose = tree.rest["pair"][0]
        if self.index % 3 == 0:
            x, loose = x + loose, x * 2
        rest = {"pair": (loose, None), "scale": 0.25, "name": str(self.index), "even": not tree.rest["even"]}
        rest["never"] = x + 1
        return Masked(x.tanh(), ~tree.mask, tree.ids, rest)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "plain": Plain,
    "in place": InPlace,
    "frozen": Frozen,
    "all frozen": AllFrozen,
    "trees": Trees,
}


class Job:
    """The same model on every rank; one process would run all of it."""

    def __init__(self, model: str, num_stages: int, sizes: list[int]) -> None:
        torch.manual_seed(0)
        self.layers = [MODELS[model](index).double() for index in range(num_stages)]
        self.last = num_stages - 1
        self.batch = [torch.randn(size, WIDTH, dtype=torch.float64) for size in sizes]

    def compute(self, stage: int, microbatch: int, inputs: Any) -> Any:
        outputs = self.layers[stage](self.batch[microbatch].clone() if stage == 0 else inputs)
        return self.loss(outputs) if stage == self.last and torch.is_grad_enabled() else outputs

    def loss(self, outputs: Any) -> Tensor:
        return (outputs.x if isinstance(outputs, Masked) else outputs).pow(2).mean()

    def in_one_process(self) -> list[Any]:
        """Gradients accumulate in the layers; returns the outputs."""
        results = []
        for x in self.batch:
            outputs = x.clone()
            for layer in self.layers:
                outputs = layer(outputs)
            if torch.is_grad_enabled() and self.loss(outputs).requires_grad:
                self.loss(outputs).backward()
            results.append(outputs)
        return results

    def gradients(self, stages: Sequence[int]) -> list[Tensor | None]:
        return [parameter.grad for stage in stages for parameter in self.layers[stage].parameters()]

    def zero_grad(self) -> None:
        for layer in self.layers:
            layer.zero_grad()


def sizes_of(num_microbatches: int) -> list[int]:
    return [1 + i % 3 for i in range(num_microbatches)]


def assert_gradients_of_one_process(job: Job, stages: Sequence[int]) -> int:
    ours = job.gradients(stages)
    job.zero_grad()
    job.in_one_process()
    for own, theirs in zip(ours, job.gradients(stages), strict=True):
        assert (own is None) == (theirs is None)
        if own is not None:
            torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-14)
    job.zero_grad()
    return len(ours)


def train(model: str, name: str, num_chunks: int, numbers: list[int]) -> int:
    """Steps of several numbers of microbatches on one engine, each twice, compared with one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stages = range(rank, size * num_chunks, size)
    channels, _ = open_channels()
    engine = Engine(rank, channels)
    compared = 0
    for num_microbatches in numbers:
        sizes = sizes_of(num_microbatches)
        job = Job(model, size * num_chunks, sizes)
        schedule = build(name, size, num_microbatches, num_chunks)
        for _ in range(2):
            assert engine.run(schedule, job.compute, sizes) == []
            assert engine.position is None
            compared += assert_gradients_of_one_process(job, stages)
    engine.retire()
    return compared


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "num_chunks"), SCHEDULES)
def test_same_gradients_as_one_process(ranks: Pools, name: str, num_chunks: int, size: int) -> None:
    assert all(ranks(size).run(train, "plain", name, num_chunks, [1, 2, 4, 9]))


def train_there_and_back(model: str, num_microbatches: int) -> tuple[int, int]:
    """Each rank has a stage on the way to the last rank, and one on the way back, as in ZB-V and DualPipeV."""
    rank, size = dist.get_rank(), dist.get_world_size()
    placement, sizes = Placement((*range(size), *reversed(range(size)))), sizes_of(num_microbatches)
    order = gpipe(placement, num_microbatches, [0] * size)
    schedule = complete(Schedule("there and back", placement, num_microbatches, order))
    channels, _ = open_channels()
    engine, job = Engine(rank, channels), Job(model, placement.num_stages, sizes)
    stages, compared = placement.stages_of(rank), 0
    for _ in range(2):
        engine.run(schedule, job.compute, sizes)
        compared += assert_gradients_of_one_process(job, stages)
    engine.run(build_forward(placement, num_microbatches), job.compute, [("evaluate", s) for s in sizes])
    engine.retire()
    return compared, sum(action.kind.is_send for action in schedule.actions[rank])


@pytest.mark.parametrize("model", ["plain", "trees"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_may_have_the_first_stage_and_the_last(ranks: Pools, model: str, size: int) -> None:
    found = ranks(size).run(train_there_and_back, model, 5)
    assert all(compared for compared, _ in found)
    # A rank in the middle sends 2 activations and 2 gradients of each microbatch; the ends have one neighbor.
    assert [sent for _, sent in found] == [10, *[20] * (size - 2), 10]


@pytest.mark.parametrize("model", ["in place", "trees", "frozen", "all frozen"])
@pytest.mark.parametrize(
    ("size", "name", "num_chunks"), [(1, "gpipe", 3), (2, "1f1b", 1), (2, "interleaved_1f1b", 2), (3, "1f1b", 1)]
)
def test_every_kind_of_model(ranks: Pools, model: str, size: int, name: str, num_chunks: int) -> None:
    assert all(ranks(size).run(train, model, name, num_chunks, [1, 5]))


def evaluate(model: str, num_chunks: int, numbers: list[int]) -> list[int]:
    """Forward only, without gradients and with; training in between."""
    rank, size = dist.get_rank(), dist.get_world_size()
    channels, _ = open_channels()
    engine = Engine(rank, channels)
    returned = []
    for num_microbatches in numbers:
        sizes = sizes_of(num_microbatches)
        job = Job(model, size * num_chunks, sizes)
        engine.run(build("gpipe", size, num_microbatches, num_chunks), job.compute, [("train", s) for s in sizes])
        with torch.no_grad():
            outputs = engine.run(
                build_forward(Placement.in_turns(size, num_chunks), num_microbatches), job.compute, sizes
            )
            expected = job.in_one_process()
        returned.append(len(outputs))
        for ours, theirs in zip(outputs, expected if outputs else [], strict=True):
            ours, theirs = (tree.x if isinstance(tree, Masked) else tree for tree in (ours, theirs))
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
            assert not ours.requires_grad
    engine.retire()
    return returned


@pytest.mark.parametrize(("size", "num_chunks"), [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("model", ["plain", "in place", "trees"])
def test_forward_only_returns_the_outputs_of_the_last_stage(
    ranks: Pools, model: str, size: int, num_chunks: int
) -> None:
    *others, last = ranks(size).run(evaluate, model, num_chunks, [1, 5])
    assert last == [1, 5]
    assert others == [[0, 0]] * (size - 1)


class LoggedLayer(torch.autograd.Function):
    """The identity that tells when its forward and backward really run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: Callable[[str], None]) -> Tensor:
        ctx.log = log
        log("F")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.log("B")
        return gradient, None


def executed(name: str, num_chunks: int, num_microbatches: int) -> tuple[list[str], list[str], list[str]]:
    """What the engine says, what really happened (calls of autograd and of the process groups), and the schedule."""
    rank, size = dist.get_rank(), dist.get_world_size()
    said: list[str] = []
    happened: list[str] = []
    channels, groups = open_channels()
    for (_, _, kind), group in groups.items():
        letter = kind[0].upper().replace("A", "F").replace("G", "B")
        group.log = lambda call, letter=letter: happened.append(f"{call.upper()}_{letter}")  # type: ignore[misc]
    engine = Engine(rank, channels, trace=said.append)
    job = Job("plain", size * num_chunks, [2] * num_microbatches)

    def compute(stage: int, microbatch: int, inputs: Any) -> Any:
        if stage == 0:
            inputs = job.batch[microbatch].clone().requires_grad_()
        outputs = job.layers[stage](LoggedLayer.apply(inputs, happened.append))
        return job.loss(outputs) if stage == job.last else outputs

    schedule = build(name, size, num_microbatches, num_chunks)
    for _ in range(2):  # the first time metas travel, too
        said.clear()
        happened.clear()
        engine.run(schedule, compute, ["key"] * num_microbatches)
    engine.retire()
    return said, happened, list(map(str, schedule.actions[rank]))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("name", "num_chunks"), SCHEDULES[1:4])
def test_executed_is_scheduled(ranks: Pools, name: str, num_chunks: int, size: int) -> None:
    for said, happened, scheduled in ranks(size).run(executed, name, num_chunks, 6):
        assert said == scheduled
        assert happened == [Action.parse(text).kind.value for text in scheduled]


class BrokenOffError(Exception):
    """What a step that is done again is broken off with."""


def break_off(model: str, name: str, num_chunks: int, stages: str, is_known: bool) -> list[str]:
    """Break a run off at one microbatch after the other, each time with a run before or behind it that is whole."""
    rank, size = dist.get_rank(), dist.get_world_size()
    num_stages, number = size * num_chunks, 6
    channels, _ = open_channels()
    engine = Engine(rank, channels)
    schedule, breaks, raised = build(name, size, number, num_chunks), (BrokenOffError, BlankMessageError), list[str]()
    for broken in range(number):
        job = Job(model, num_stages, [3] * number)

        def compute(stage: int, microbatch: int, inputs: Any, job: Job = job, broken: int = broken) -> Any:
            if microbatch == broken and (stages == "all" or stage == num_stages - 1):
                raise BrokenOffError
            return job.compute(stage, microbatch, inputs)

        keys = ["key" if is_known else f"key {broken}"] * number
        if is_known:
            engine.run(schedule, job.compute, keys)
        try:
            engine.run(schedule, compute, keys, breaks_off=breaks)
        except breaks as error:
            assert engine.broke_off is not None
            raised.append(type(error).__name__)
        job = Job(model, num_stages, [3] * number)
        engine.run(schedule, job.compute, keys, breaks_off=breaks)
        assert_gradients_of_one_process(job, range(rank, num_stages, size))
        assert engine.position is None
    engine.retire()
    return raised


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("stages", ["last", "all"])
@pytest.mark.parametrize(
    ("model", "name", "num_chunks"),
    [("plain", "1f1b", 1), ("plain", "gpipe", 1), ("plain", "interleaved_1f1b", 2), ("trees", "1f1b", 1)],
)
def test_a_run_that_is_broken_off_ends_on_every_rank_and_the_next_one_is_whole(
    ranks: Pools, model: str, name: str, num_chunks: int, stages: str, is_known: bool
) -> None:
    """Every rank hears of it on the host, before its last backward."""
    for raised in ranks(3).run(break_off, model, name, num_chunks, stages, is_known):
        assert len(raised) == 6


def count_messages(dynamic_shapes: bool, same_keys: bool) -> list[tuple[int, int]]:
    """Sends and receives of each of three steps of four microbatches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    channels, groups = open_channels(dynamic_shapes)
    engine = Engine(rank, channels)
    counts = []
    for step in range(3):
        job = Job("plain", size, [1 + step] * 4 if same_keys else [1, 2, 1, 2])
        for group in groups.values():
            group.calls.clear()
        engine.run(build("1f1b", size, 4), job.compute, [len(x) for x in job.batch])
        assert_gradients_of_one_process(job, range(rank, size, size))
        calls = [call for group in groups.values() for call, _ in group.calls]
        counts.append((calls.count("send"), calls.count("recv")))
    engine.retire()
    return counts


@pytest.mark.parametrize(
    ("dynamic_shapes", "same_keys", "expected"),
    [
        (False, False, [4 + 2, 4, 4]),  # two keys, a meta each, in the first step only
        (False, True, [4 + 1, 4 + 1, 4 + 1]),  # a new shape with every step
        (True, False, [4 * 2, 4 * 2, 4 * 2]),
    ],
)
def test_the_meta_travels_when_the_key_is_new(
    ranks: Pools, dynamic_shapes: bool, same_keys: bool, expected: list[int]
) -> None:
    for counts in ranks(2).run(count_messages, dynamic_shapes, same_keys):
        assert counts == [(number, number) for number in expected]


def shapes_by_value(dynamic_shapes: bool) -> str:
    """The first stage keeps only rows whose first element is positive; each microbatch another number of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    channels, _ = open_channels(dynamic_shapes)
    engine = Engine(rank, channels)
    weights = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)
    batch = [torch.ones(4, WIDTH, dtype=torch.float64) for _ in range(4)]
    for i, x in enumerate(batch):
        x[: i % 4, 0] = -1

    def compute(stage: int, microbatch: int, inputs: Any) -> Any:
        if stage == 0:
            x = batch[microbatch]
            return x[x[:, 0] > 0] * weights
        return inputs.sum() if stage == size - 1 else inputs * 1

    if not dynamic_shapes:
        if rank == 1:  # what the first stage has sent before it fails
            return str(channels[0, 1, "activation"].post((0, "key")).wait()[0][0].shape)
        with pytest.raises(ValueError, match=r"float64\[4, 4\](.|\n)*float64\[3, 4\](.|\n)*dynamic_shapes=True"):
            engine.run(build_forward(Placement.in_turns(size), 4), compute, ["key"] * 4)
        engine.retire()
        return str(engine.position)
    engine.run(build("1f1b", size, 4), compute, ["key"] * 4)
    engine.retire()
    return str(weights.grad)


def test_shapes_that_depend_on_values(ranks: Pools) -> None:
    assert ranks(2).run(shapes_by_value, False) == ["0SEND_F1", "torch.Size([4, 4])"]
    assert ranks(3).run(shapes_by_value, True)[0] == str(torch.full((WIDTH,), 10.0, dtype=torch.float64))


def saved_microbatches(name: str, num_microbatches: int) -> int:
    """The largest number of microbatches whose saved tensors were alive at the same time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    channels, _ = open_channels()
    job = Job("plain", size, [2] * num_microbatches)
    alive = peak = 0

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal alive, peak
            self.tensor = tensor.detach()  # an output would hold its own graph
            alive += 1
            peak = max(peak, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        job.in_one_process()
        job.zero_grad()
        assert alive == 0
        peak = 0
        job.compute(rank, 0, torch.randn(2, WIDTH, dtype=torch.float64, requires_grad=True))
        per_microbatch, peak = peak, 0
        engine = Engine(rank, channels)
        engine.run(build(name, size, num_microbatches), job.compute, ["key"] * num_microbatches)
        engine.retire()
    assert alive == 0
    return -(-peak // per_microbatch)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 3, 12])
def test_1f1b_saves_as_many_microbatches_as_the_paper_says(ranks: Pools, size: int, num_microbatches: int) -> None:
    saved = ranks(size).run(saved_microbatches, "1f1b", num_microbatches)
    assert saved == [min(num_microbatches, size - rank) for rank in range(size)]


def test_gpipe_saves_every_microbatch(ranks: Pools) -> None:
    assert ranks(2).run(saved_microbatches, "gpipe", 5) == [5, 5]


def long_run(name: str, num_chunks: int, num_microbatches: int, forward_only: bool) -> tuple[int, int]:
    """Sends that were under way at most, and sends left over at the end, over all channels of this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    channels, groups = open_channels()
    engine = Engine(rank, channels)
    job = Job("plain", size * num_chunks, [1] * num_microbatches)
    with torch.set_grad_enabled(not forward_only):
        if forward_only:
            engine.run(
                build_forward(Placement.in_turns(size, num_chunks), num_microbatches),
                job.compute,
                ["key"] * num_microbatches,
            )
        else:
            engine.run(build(name, size, num_microbatches, num_chunks), job.compute, ["key"] * num_microbatches)
    engine.retire()
    return max(group.peak for group in groups.values()), sum(group.unwaited for group in groups.values())


@pytest.mark.parametrize(("name", "num_chunks"), [("1f1b", 1), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize("size", [2, 4])
def test_sends_under_way_do_not_grow_with_microbatches(ranks: Pools, name: str, num_chunks: int, size: int) -> None:
    for forward_only in (False, True):
        short = ranks(size).run(long_run, name, num_chunks, 16, forward_only)
        long = ranks(size).run(long_run, name, num_chunks, 120, forward_only)
        assert [left for _, left in short + long] == [0] * (2 * size)
        assert [peak for peak, _ in long] == [peak for peak, _ in short]
        assert max(peak for peak, _ in long) <= 4 + 2 * size * num_chunks


def hooks() -> list[int]:
    """Calls of a hook on the stage's input, by step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    channels, _ = open_channels()
    engine = Engine(rank, channels)
    job = Job("plain", size, [2] * 3)
    calls = [0]

    def count(gradient: Tensor) -> None:
        calls[-1] += 1

    def compute(stage: int, microbatch: int, inputs: Any) -> Any:
        if inputs is not None:
            inputs.register_hook(count)
        return job.compute(stage, microbatch, inputs)

    for _ in range(3):
        engine.run(build("1f1b", size, 3), compute, ["key"] * 3)
        calls.append(0)
    engine.retire()
    return calls


def test_hooks_on_inputs_do_not_accumulate(ranks: Pools) -> None:
    assert ranks(2).run(hooks)[1] == [3, 3, 3, 0]


def watched_backwards(num_chunks: int) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    channels, _ = open_channels()
    events: list[str] = []
    engine = Engine(
        rank, channels, trace=lambda text: events.append(text) if Action.parse(text).kind is Kind.B else None
    )
    job = Job("plain", size * num_chunks, [1] * 4)
    engine.run(
        build("interleaved_1f1b", size, 4, num_chunks),
        job.compute,
        ["key"] * 4,
        backward_begins=lambda stage, is_last: events.append(f"{stage} begins {is_last}"),
        backward_ends=lambda stage, is_last: events.append(f"{stage} ends {is_last}"),
    )
    engine.retire()
    return events


def test_callbacks_enclose_each_backward_and_know_the_last_one(ranks: Pools) -> None:
    for rank, events in enumerate(ranks(2).run(watched_backwards, 2)):
        for stage in (rank, rank + 2):
            for microbatch in range(4):
                place, is_last = events.index(f"{stage}B{microbatch}"), microbatch == 3
                assert events[place - 1 : place + 2 : 2] == [f"{stage} begins {is_last}", f"{stage} ends {is_last}"]
        assert len(events) == 2 * 4 * 3


def test_failure_tells_its_position() -> None:
    job = Job("plain", 3, [1] * 4)

    def compute(stage: int, microbatch: int, inputs: Any) -> Any:
        if (stage, microbatch) == (1, 2):
            raise ArithmeticError("planted")
        return job.compute(stage, microbatch, inputs)

    engine = Engine(0, {})
    assert engine.position is None
    with pytest.raises(ArithmeticError, match="planted"):
        engine.run(build("gpipe", 1, 4, 3), compute, ["key"] * 4)
    assert engine.position == Action(1, Kind.F, 2)


def test_wrong_use_is_told() -> None:
    engine = Engine(0, {})
    with pytest.raises(ValueError, match="a schedule of 3 microbatches needs 3 keys, got 2"):
        engine.run(build("1f1b", 1, 3), lambda *_: None, ["key"] * 2)
    with pytest.raises(ValueError, match=r"0\w+0 .*'1f1b'.*\(\d, \d, '\w+'\), but rank 0 has none"):
        engine.run(build("1f1b", 2, 1), lambda *_: None, ["key"])


def test_schedule_written_by_hand() -> None:
    """The engine needs nothing but a list: here the backwards of two stages on one rank, in another order."""
    order = "0F0 0F1 1F1 1F0 1B0 0B0 1B1 0B1"
    schedule = Schedule("by hand", Placement.in_turns(1, 2), 2, (tuple(map(Action.parse, order.split())),))
    job, said = Job("in place", 2, [1, 3]), list[str]()
    Engine(0, {}, trace=said.append).run(schedule, job.compute, ["a", "b"])
    assert said == order.split()
    assert assert_gradients_of_one_process(job, range(2)) == 4


def against_torch(num_chunks: int) -> float:
    """The largest difference to the gradients of torch's own pipeline."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    rank, size, number = dist.get_rank(), dist.get_world_size(), 4
    stages = range(rank, size * num_chunks, size)
    job = Job("plain", size * num_chunks, [2] * number)
    channels, _ = open_channels()
    name = "1f1b" if num_chunks == 1 else "interleaved_1f1b"
    engine = Engine(rank, channels)
    engine.run(build(name, size, number, num_chunks), job.compute, ["key"] * number)
    engine.retire()
    ours = [gradient.clone() for gradient in job.gradients(stages) if gradient is not None]
    job.zero_grad()

    theirs = [PipelineStage(job.layers[s], s, size * num_chunks, torch.device("cpu")) for s in stages]
    arguments: dict[str, Any] = {"loss_fn": lambda output, _: job.loss(output), "scale_grads": False}
    inputs = [torch.cat(job.batch)] if rank == 0 else []
    target = {"target": torch.zeros(2 * number)} if rank == size - 1 else {}
    if num_chunks == 1:
        Schedule1F1B(theirs[0], number, **arguments).step(*inputs, **target)
    else:
        ScheduleInterleaved1F1B(theirs, number, **arguments).step(*inputs, **target)
    return max((a - b).abs().max().item() for a, b in zip(ours, job.gradients(stages), strict=True) if b is not None)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_same_gradients_as_torch_pipelining(ranks: Pools, num_chunks: int) -> None:
    assert max(ranks(2).run(against_torch, num_chunks)) < 1e-15


def test_groups_count_what_they_say() -> None:
    """The oracle of the counting tests."""

    class Group:
        def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
            return type("Work", (), {"wait": lambda self: None})()

    group = CountingGroup(Group())  # type: ignore[arg-type]
    works = [group.send([torch.ones(n)], 1, 0) for n in (1, 2)]
    assert (group.calls, group.unwaited, group.peak) == ([("send", 1), ("send", 2)], 2, 2)
    works[0].wait()
    assert (group.unwaited, group.peak) == (1, 2)

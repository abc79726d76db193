"""Steps that move the weights of a teacher: once a step under every layout, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Tuning
from lightning_hybrid.pipeline_parallel.frame.units import has_teacher
from tests.daily import daily
from tests.pool import Pools
from tests.training_jobs import Result, train
from tests.zoo.teacher import BYOL, MODULES, PATCHES, ForeachBYOL

WIDTH, SAMPLES, STEPS = 8, 8, 3

Pairs = Iterable[tuple[Tensor, Tensor]]


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


class Net(nn.Module):
    """A list of layers between an embedding and a head."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([layer() for _ in range(count)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for each in self.layers:
            x = x + each(x)
        out: Tensor = self.head(x)
        return out


def chained(student: nn.Module, teacher: nn.Module) -> None:
    for now, average in zip(student.parameters(), teacher.parameters(), strict=True):
        average.mul_(0.9).add_(now, alpha=0.1)


def through_data(student: nn.Module, teacher: nn.Module) -> None:
    for now, average in zip(student.parameters(), teacher.parameters(), strict=True):
        average.data.lerp_(now.data, 0.1)


def assigned(student: nn.Module, teacher: nn.Module) -> None:
    for now, average in zip(student.parameters(), teacher.parameters(), strict=True):
        average.data = average.data * 0.9 + now.data * 0.1


def foreach(student: nn.Module, teacher: nn.Module) -> None:
    averages = list(teacher.parameters())
    torch._foreach_mul_(averages, 0.9)
    torch._foreach_add_(averages, [each.detach() for each in student.parameters()], alpha=0.1)


def foreach_lerp(student: nn.Module, teacher: nn.Module) -> None:
    torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.1)


def foreach_copy(student: nn.Module, teacher: nn.Module) -> None:
    """A hard copy."""
    torch._foreach_copy_(list(teacher.parameters()), [0.5 * each for each in student.parameters()])


def of_state_dicts(student: nn.Module, teacher: nn.Module) -> None:
    for now, average in zip(student.state_dict().values(), teacher.state_dict().values(), strict=True):
        average.copy_(0.9 * average + 0.1 * now)


def by_name(student: nn.Module, teacher: nn.Module) -> None:
    states = student.state_dict()
    for name, average in teacher.state_dict().items():
        average.mul_(0.9).add_(states[name], alpha=0.1)


UPDATES = [chained, through_data, assigned, foreach, foreach_lerp, foreach_copy, of_state_dicts, by_name]


class Pair(LightningModule):
    """A student that learns to say what its teacher says, which follows it.

    Args:
        update: Moves the teacher.
        place: Where the step does that: `"top"`, `"end"`, or `"middle"`, where the teacher is used before and after.
    """

    def __init__(self, update: Callable[[nn.Module, nn.Module], None] = chained, place: str = "top") -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.student = self.make_net()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
            self.make_rest()
            with torch.no_grad():
                for each in self.teacher.parameters():
                    each.add_(0.3 * torch.randn_like(each))
        self.update, self.place = update, place
        self.double()

    def make_net(self) -> nn.Module:
        return Net()

    def make_rest(self) -> None:
        pass

    @torch.no_grad()
    def move_teacher(self) -> None:
        self.update(self.student, self.teacher)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        before = 0.0
        if self.place == "top":
            self.move_teacher()
        if self.place == "middle":
            before = self.teacher(x)
            self.move_teacher()
        loss = F.mse_loss(self.student(x), self.teacher(x.roll(1, 1)) + before)
        if self.place == "end":
            self.move_teacher()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


class ChainPair(Pair):
    """The nets are each an `nn.Sequential` that is called as a whole."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(*[layer() for _ in range(4)])


class EmbeddingPair(Pair):
    """The layers are an `nn.Sequential`; the teacher is one of what is before them."""

    def make_net(self) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def make_rest(self) -> None:
        self.body = nn.Sequential(*[layer() for _ in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        if self.place == "top":
            self.move_teacher()
        loss = F.mse_loss(self.head(self.body(self.student(x))), self.teacher(x.roll(1, 1)))
        if self.place == "end":
            self.move_teacher()
        return loss


class UntracedPair(EmbeddingPair):
    """The step reads its loss before it moves the teacher, so it cannot be traced that far."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        loss = F.mse_loss(self.head(self.body(self.student(x))), self.teacher(x.roll(1, 1)))
        if loss.item() >= 0:
            self.move_teacher()
        return loss


Job = tuple[Any, ...]


def trained(layout: dict[str, Any] | None, jobs: list[Job], shape: tuple[int, ...], shares: bool) -> list[Result | str]:
    """Train modules one after the other; return results or errors. `shares`: replicas divide the samples."""
    found: list[Result | str] = []
    for kind, *arguments in jobs:
        torch.manual_seed(0)
        module = kind(*arguments)
        numbers = torch.Generator().manual_seed(5)
        x = torch.randn(STEPS * SAMPLES, *shape, generator=numbers, dtype=torch.float64)
        replicas = (layout or {}).get("data_parallel_size", 1) if shares else 1
        data = DataLoader(TensorDataset(x), SAMPLES // replicas)
        try:
            found.append(train(module, layout, data, precision="64-true", use_distributed_sampler=shares))
        except ValueError as error:
            found.append(str(error))
    return found


def size_of(layout: dict[str, Any]) -> int:
    sizes = [value for name, value in layout.items() if name.endswith("parallel_size")]
    return int(torch.tensor(sizes or [1]).prod())


def assert_like_one_process(
    ranks: Pools, layout: dict[str, Any], jobs: list[Job], shape: tuple[int, ...] = (WIDTH,), *, shares: bool = True
) -> None:
    expected = trained(None, jobs, shape, shares)
    results = ranks(size_of(layout), lightning=True).run(trained, layout, jobs, shape, shares, timeout=200.0)
    wrong = []
    for job, one, *found in zip(jobs, expected, *results, strict=True):
        name = " ".join(getattr(each, "__name__", each) for each in job)
        errors = [each for each in found if isinstance(each, str)]
        if errors:
            wrong.append(f"{name}: {errors[0][:300]}")
            continue
        state = found[0].weights
        gap = max(float((state[key] - value).abs().max()) for key, value in one.weights.items())
        losses = torch.tensor([each.losses for each in found], dtype=torch.float64).mean(0)  # of replicas
        difference = float((losses - torch.tensor(one.losses, dtype=torch.float64)).abs().max())
        if not max(gap, difference) < 1e-10:
            wrong.append(f"{name}: states differ by {gap:.2g}, losses by {difference:.2g}")
    assert not wrong, "\n".join(wrong)


SOME: list[Job] = [
    (Pair, foreach_copy, "top"),
    (Pair, assigned, "top"),
    (Pair, of_state_dicts, "end"),
]
MIDDLE: list[Job] = [(Pair, chained, "middle")]

WITHOUT_PIPELINE = {
    "replicas": {"data_parallel_size": 2, "num_microbatches": 2},
    "zero 1": {"data_parallel_size": 2, "num_microbatches": 2, "zero_stage": 1},
    "zero 3": {"data_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3},
    "zero 3 microbatch": {
        "data_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3, "tuning": Tuning(reshard_after_forward=True),
    },
    "zero 1 whole": {"data_parallel_size": 2, "zero_stage": 1, "num_microbatches": 1},
    "zero 3 whole": {"data_parallel_size": 2, "zero_stage": 3, "num_microbatches": 1},
    "tensor": {"tensor_parallel_size": 2, "num_microbatches": 2},
    "tensor whole": {"tensor_parallel_size": 2, "num_microbatches": 1},
    "tensor x zero 3": {"tensor_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 3, "num_microbatches": 2},
}  # fmt: skip


def test_every_way_to_write_moves_a_teacher_once_a_step(ranks: Pools) -> None:
    jobs = [(Pair, update, "top") for update in UPDATES]
    assert_like_one_process(ranks, {"num_microbatches": 4}, jobs)
    assert_like_one_process(ranks, {"pipeline_parallel_size": 2, "num_microbatches": 2}, jobs)


@pytest.mark.parametrize("name", daily(WITHOUT_PIPELINE, "replicas", "zero 1", "zero 3 whole", "tensor whole"))
def test_a_teacher_moves_once_a_step_without_a_pipeline(ranks: Pools, name: str) -> None:
    assert_like_one_process(ranks, WITHOUT_PIPELINE[name], SOME + MIDDLE)


NAMED = {"pipeline_parallel_size": 2, "num_microbatches": 2, "body": ["student", "teacher"]}
CHUNKED = {"pipeline_parallel_size": 2, "num_chunks": 2, "num_microbatches": 2, "schedule": "interleaved_1f1b"}


def test_a_teacher_may_be_named_beside_its_student(ranks: Pools) -> None:
    assert_like_one_process(ranks, NAMED, [(ChainPair, chained, "top")])


def test_a_teacher_moves_once_a_step_on_several_stages_of_a_rank(ranks: Pools) -> None:
    assert_like_one_process(ranks, CHUNKED, SOME)
    assert_like_one_process(ranks, {**CHUNKED, "num_microbatches": 4}, [(UntracedPair, chained)])


PIPELINES = {
    "pp 2 x dp 2": {"pipeline_parallel_size": 2, "data_parallel_size": 2, "num_microbatches": 2},
    "pp 2 x zero 2": {
        "pipeline_parallel_size": 2, "data_parallel_size": 2, "num_microbatches": 2, "zero_stage": 2,
    },
    "pp 2 x zero 3": {
        "pipeline_parallel_size": 2, "data_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3,
    },
    "pp 2 x zero 3 microbatch": {
        "pipeline_parallel_size": 2, "data_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3,
        "tuning": Tuning(reshard_after_forward=True),
    },
}  # fmt: skip
CHAINS: list[Job] = [
    (ChainPair, through_data, "top"),
    (EmbeddingPair, chained, "end"),
    (EmbeddingPair, assigned, "top"),
]


@pytest.mark.parametrize("name", daily(PIPELINES, "pp 2 x dp 2", "pp 2 x zero 3 microbatch"))
def test_a_teacher_moves_once_a_step_under_a_pipeline(ranks: Pools, name: str) -> None:
    assert_like_one_process(ranks, PIPELINES[name], SOME)


@pytest.mark.parametrize("name", daily(PIPELINES, "pp 2 x zero 2"))
def test_a_teacher_beside_a_sequential_moves_once_a_step(ranks: Pools, name: str) -> None:
    assert_like_one_process(ranks, PIPELINES[name], CHAINS)


METHODS = {
    "pp 2": {"pipeline_parallel_size": 2},
    "pp 2 x dp 2": {"pipeline_parallel_size": 2, "data_parallel_size": 2},
    "pp 2 x zero 3": {"pipeline_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 3},
    "tensor": {"tensor_parallel_size": 2},
    "zero 1": {"data_parallel_size": 2, "zero_stage": 1},
    "zero 2": {"data_parallel_size": 2, "zero_stage": 2},
    "zero 3": {"data_parallel_size": 2, "zero_stage": 3, "tuning": Tuning(reshard_after_forward=False)},
}


@pytest.mark.parametrize("name", daily(METHODS, "pp 2", "tensor", "zero 3"))
def test_methods_with_a_momentum_encoder_equal_one_process(ranks: Pools, name: str) -> None:
    """Replicas see the same samples: losses over a batch and statistics are those of each replica."""
    assert_like_one_process(ranks, METHODS[name], [(each,) for each in MODULES], (PATCHES, WIDTH), shares=False)


def test_byol_moves_its_target_once_for_several_microbatches(ranks: Pools) -> None:
    jobs: list[Job] = [(BYOL,), (ForeachBYOL,)]
    for layout in ({"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}):
        assert_like_one_process(ranks, {**layout, "num_microbatches": 2}, jobs, (PATCHES, WIDTH))


def test_what_is_no_teacher_is_not_watched() -> None:
    """Frozen layers of a list are no copies of trained ones, and the frozen base of an adapter has no copy."""
    assert all(has_teacher(kind()) for kind in (Pair, ChainPair, EmbeddingPair, *MODULES))
    backbone = Net()
    backbone.layers[0].requires_grad_(False)
    base = nn.ModuleDict({"base": layer().requires_grad_(False), "adapter": nn.Linear(WIDTH, WIDTH)})
    assert not any(map(has_teacher, (Net(), backbone, layer(), base)))


COUNT = [0]


def counting(graph: Any, inputs: Any) -> Any:
    COUNT[0] += 1
    return graph


class CompiledPair(Pair):
    """Parts are compiled in each of the ways of torch; a step with a teacher runs them as they are."""

    def make_net(self) -> nn.Module:
        net = Net(2)
        net.layers[0].compile(backend=counting)
        net.head = torch.compile(net.head, backend=counting)  # type: ignore[assignment]
        return net


def count_graphs(layout: dict[str, Any] | None) -> int:
    torch._dynamo.reset()
    COUNT[0] = 0
    trained(layout, [(CompiledPair,)], (WIDTH,), True)
    return COUNT[0]


def test_compiled_modules_are_compiled_as_often_beside_a_teacher(ranks: Pools) -> None:
    assert count_graphs(None) > 0
    assert_like_one_process(ranks, {"num_microbatches": 2}, [(CompiledPair,)])
    (alone,) = ranks(1, lightning=True).run(count_graphs, None, timeout=200.0)
    (found,) = ranks(1, lightning=True).run(count_graphs, {"num_microbatches": 1}, timeout=200.0)
    assert found == alone

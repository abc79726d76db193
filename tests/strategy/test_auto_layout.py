"""What is left open in the arguments is found at the start: the best of `suggest`, the same on every rank."""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_hybrid
from lightning_hybrid import HybridStrategy, Tuning
from lightning_hybrid.axes import Sizes
from lightning_hybrid.cli.main import main
from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.strategy.auto_layout import choice
from lightning_hybrid.strategy.auto_layout.arguments import every_argument, in_words, nested
from lightning_hybrid.strategy.auto_layout.candidates import Layout, LoaderStep, Step
from lightning_hybrid.strategy.auto_layout.cost_model import CostModel, StageCost
from lightning_hybrid.strategy.auto_layout.machine import Machine
from lightning_hybrid.strategy.auto_layout.measure import measure_machine
from lightning_hybrid.strategy.auto_layout.module_profile import ModuleProfile
from lightning_hybrid.strategy.auto_layout.process_copy import Copies, ProcessCopy, run_in_copy
from lightning_hybrid.strategy.auto_layout.request import search_space
from lightning_hybrid.strategy.auto_layout.search import FOUND_UNSEEN, SearchSpace, layouts, search
from lightning_hybrid.trainer.precision import scale_half
from tests.context_modules import Uneven
from tests.pool import Pools
from tests.strategy.test_auto_layout_search import Blocks, make_profile, random_problem
from tests.strategy.test_auto_layout_search import Profile as MadeUp
from tests.training_jobs import Regression, assert_same, loader, make_trainer

AUTO: dict[str, Any] = {"layout": "auto"}
ALL_OPEN = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "tensor_parallel_mode",
    "tensor_parallel_depth",
    "context_parallel_size",
    "context_parallel",
    "num_microbatches",
    "schedule",
    "num_chunks",
    "tuning.extra_in_flight",
    "zero_stage",
    "recompute",
)


def open_without(*names: str) -> tuple[str, ...]:
    assert set(names) <= set(ALL_OPEN)
    return tuple(name for name in ALL_OPEN if name not in names)


_MODE = "tensor_parallel_mode", "tensor_parallel_depth"
_CONTEXT = "context_parallel_size", "context_parallel"

# -- what is open ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "searched"),
    [
        ({}, ()),
        (AUTO, ALL_OPEN),
        ({"data_parallel_size": 2, **AUTO}, ALL_OPEN),
        ({"tensor_parallel_size": 2, "zero_stage": 1, **AUTO}, open_without("tensor_parallel_size", "zero_stage")),
        ({"sequence_parallel": True, **AUTO}, open_without(*_MODE, *_CONTEXT)),
        ({"tensor_parallel_mode": "2d", **AUTO}, open_without(*_MODE, *_CONTEXT)),
        ({"context_parallel": "ring", **AUTO}, open_without("context_parallel")),
        ({"context_parallel_size": 2, **AUTO}, open_without(*_MODE, "context_parallel_size")),
        ({"tensor_parallel_size": [1, 2], **AUTO}, ALL_OPEN),
        ({"pipeline_parallel_size": "auto"}, ("pipeline_parallel_size",)),
        ({"recompute": "auto", "zero_stage": "auto"}, ("zero_stage", "recompute")),
        ({"recompute": "auto", "num_microbatches": 4, **AUTO}, open_without("num_microbatches")),
    ],
)
def test_open_is_what_is_left_at_its_default_or_auto(arguments: dict[str, Any], searched: tuple[str, ...]) -> None:
    assert HybridStrategy(**arguments).settings.searched == searched


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"layout": "best"}, "layout must be 'auto' or None, got 'best'"),
        ({"tuning": {"memory_limit": "80GiB"}}, "no search is requested. Set layout='auto' or recompute='auto'"),
        ({"tuning": {"memory_limit": "much"}, **AUTO}, "tuning.memory_limit must be a quantity such as '80GiB' or"),
        ({"tuning": {"memory_limit": -1}, **AUTO}, "tuning.memory_limit must be more than 0 bytes"),
        ({"partition": [1, 2], **AUTO}, r"partition=\[1, 2\] sets a value for each stage"),
        ({"recompute": [1, 2], "pipeline_parallel_size": "auto"}, r"recompute=\[1, 2\] sets a value for each stage"),
        ({"recompute": 0.5, **AUTO}, "The search for .* does not support recompute=0.5"),
        (
            {"num_chunks": 9, "schedule": "interleaved_1f1b", **AUTO},
            "The search for .* does not support num_chunks=9",
        ),
        ({"tensor_parallel_size": 0, **AUTO}, "tensor_parallel_size must be at least 1"),
    ],
)
def test_what_does_not_go_with_a_search_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HybridStrategy(**{name: Tuning(**value) if name == "tuning" else value for name, value in arguments.items()})


def test_a_limit_is_a_text_or_bytes() -> None:
    for value, size in (("80GiB", 80 * 2**30), ("24GB", 24e9), (1000, 1000.0), (None, None)):
        assert HybridStrategy(tuning=Tuning(memory_limit=value), **AUTO).settings.tuning.memory_bytes == size
    with pytest.raises(TypeError, match=r"tuning.memory_limit must be a number, a string or None, got \[1\]"):
        Tuning(memory_limit=[1])  # type: ignore[arg-type]


def tried(num_ranks: int, samples: int, sizes: tuple[Any, Any, Any] = ("auto", 1, 1), **arguments: Any) -> list[Layout]:
    names = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    strategy = HybridStrategy(**dict(zip(names, sizes, strict=True)), **arguments)
    return list(
        layouts(
            num_ranks,
            LoaderStep(samples),
            num_ranks,
            num_ranks,
            search_space(strategy.settings, strategy.settings.requested_sizes),
        )
    )


def test_what_is_given_stays_in_all_that_is_tried() -> None:
    found = tried(8, 16, ("auto", 2, 1), zero_stage=1, **AUTO)
    assert {layout.tensor for layout in found} == {2}
    assert {layout.zero_stage for layout in found if layout.data > 1} == {1}
    assert {layout.pipeline for layout in found} == {1, 2, 4}
    assert {layout.pipeline for layout in tried(8, 16, ("auto", 1, [4, 2]), **AUTO)} == {4, 2}
    assert {layout.data for layout in tried(8, 16, (2, 1, 1), **AUTO)} == {2}
    (only,) = tried(
        4, 16, (2, 1, 2), num_microbatches=3, zero_stage=2, schedule="gpipe", num_chunks=2, recompute="auto"
    )[:1]
    assert only == Layout(2, 1, 2, 3, "gpipe", 2, 2)
    assert "gpipe" not in {layout.schedule for layout in tried(4, 16, tuning=Tuning(extra_in_flight=1), **AUTO)}
    shared = tried(4, 16, context_parallel_size=2, **AUTO)
    assert {layout.context for layout in shared} == {2}
    assert {layout.context_kind for layout in shared} == {"ulysses", "ring", "all_gather"}
    assert {layout.context for layout in tried(4, 16, **AUTO)} == {1, 2, 4}
    modes = {(layout.tensor, layout.tensor_mode, layout.tensor_depth) for layout in tried(8, 16, **AUTO)}
    line = {(size, "1d", 1) for size in (1, 2, 4, 8)}
    assert modes == {*line, (4, "2d", 1), (8, "2.5d", 2), (8, "3d", 1)}
    assert {layout.tensor_mode for layout in tried(8, 16, **AUTO) if layout.context > 1} == {"1d"}
    square = tried(8, 16, tensor_parallel_mode="2d", **AUTO)
    assert {(layout.tensor, layout.tensor_mode) for layout in square} == {(1, "1d"), (4, "2d")}
    usual = tried(4, 64, ("auto", 1, "auto"))
    assert {(each.pipeline, each.num_microbatches) for each in usual} == {(1, 1), (2, 8), (4, 16)}


def test_batches_of_the_loader_make_up_the_samples_of_a_step() -> None:
    step = LoaderStep(4, global_batch_size=24)
    assert [replicas for replicas in range(1, 9) if step.is_possible(replicas)] == [1, 2, 3, 6]
    assert [step.accumulations(replicas) for replicas in (1, 2, 3, 6)] == [6, 3, 2, 1]
    assert step.total(Layout(3, 1, 1)) == 24
    assert LoaderStep(4, 2).total(Layout(3, 1, 1)) == 24


@pytest.mark.parametrize("seed", range(6))
def test_of_steps_of_different_size_the_time_of_a_sample_counts(seed: int) -> None:
    """The best is that of weighing each number of replicas by itself, where all steps have equally many samples."""
    problem = random_problem(seed)
    step = LoaderStep(problem.step.samples, problem.step.accumulated, problem.step.rank_order)
    found = search(CostModel(MadeUp(problem), problem.machine, step), problem.num_ranks, refuse=problem.refuse)
    alone = []
    for data in (size for size in range(1, problem.num_ranks + 1) if problem.num_ranks % size == 0):
        fixed = Step(step.samples * data, step.accumulated, step.rank_order)
        model = CostModel(MadeUp(problem), problem.machine, fixed)
        of_data = search(model, problem.num_ranks, refuse=problem.refuse, space=SearchSpace(data=(data,)))
        alone += [(cost.seconds or 0.0) / (step.samples * data * step.accumulated) for cost in of_data.best]
    assert [cost.seconds_of_sample for cost in found.best] == pytest.approx(sorted(alone)[: len(found.best)], rel=0.011)


@pytest.mark.parametrize("seed", range(5))
def test_an_option_has_to_be_worth_it(seed: int) -> None:
    problem = random_problem(seed)
    model = CostModel(MadeUp(problem), problem.machine, LoaderStep(problem.step.samples))
    first, *others = search(model, problem.num_ranks, refuse=problem.refuse, **FOUND_UNSEEN).best
    fastest = min(cost.seconds_of_sample for cost in (first, *others))
    assert first.seconds_of_sample <= 1.05 * fastest

    def options(layout: Layout) -> int:
        flags = bool(layout.recompute), bool(layout.extra_in_flight), layout.context > 1, layout.tensor_mode != "1d"
        return layout.zero_stage + layout.num_chunks + sum(flags)

    for cost in others:
        assert options(cost.layout) >= options(first.layout) or cost.seconds_of_sample > 1.0499 * fastest


# -- how few layers run again ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile() -> ModuleProfile:
    return make_profile(ranks=2)


def test_some_layers_save_and_take_what_is_between_none_and_all(profile: ModuleProfile) -> None:
    model = CostModel(profile, Machine(), Step(32))
    layout = Layout(1, 1, 2, 4)
    numbers = (0, 1, 3, 4)
    assert profile.num_layers(layout) == [4, 4]
    none, one, three, every = (model.stages(replace(layout, recompute=(number, number))) for number in numbers)
    for kind, same in ((False, none), (True, every)):
        for alike, expected in zip(same, model.stages(replace(layout, recompute=kind)), strict=True):
            assert figures_of(alike) == pytest.approx(figures_of(expected), rel=0.05)
    for low, high in ((none, one), (one, three), (three, every)):
        assert all(less.saved > more.saved for less, more in zip(low, high, strict=True))
        assert all(less.recomputed < more.recomputed for less, more in zip(low, high, strict=True))


def figures_of(cost: StageCost) -> dict[str, float]:
    return {name: value for name, value in vars(cost).items() if isinstance(value, (int, float))}


def test_as_few_layers_run_again_as_fit(profile: ModuleProfile) -> None:
    layout, step = Layout(1, 1, 2, 4), Step(32)
    unlimited = CostModel(profile, Machine(), step)
    whole, least = (unlimited.estimate(replace(layout, recompute=kind)).bytes for kind in (False, True))
    found = CostModel(profile, Machine(memory=(whole + least) / 2), step).fewest_recomputed(layout)
    assert found is not None
    assert isinstance(found.recompute, tuple)
    assert 0 < found.recompute[0] < 4, "the first stage has more microbatches in flight"
    assert found.recompute[1] < found.recompute[0]
    assert unlimited.estimate(found).bytes <= (whole + least) / 2
    fewer = replace(found, recompute=(found.recompute[0] - 1, found.recompute[1]))
    assert unlimited.estimate(fewer).bytes > (whole + least) / 2
    assert CostModel(profile, Machine(memory=least / 2), step).fewest_recomputed(layout) is None
    assert in_words(found).endswith(f"recompute layers {found.recompute[0]},{found.recompute[1]}")
    assert every_argument(found)["recompute"] == list(found.recompute)


# -- a copy of the process ---------------------------------------------------------------------------------------------


def test_a_copy_leaves_no_trace() -> None:
    kept: list[int] = []

    def change() -> float:
        kept.append(1)
        random.seed(3)
        torch.manual_seed(3)
        print("not shown")
        return torch.get_num_threads()

    before = torch.get_rng_state()
    assert run_in_copy(change, time_limit=20) == 1
    assert not kept
    assert torch.equal(before, torch.get_rng_state())


def test_a_copy_may_have_groups_of_its_own() -> None:
    def make() -> int:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        return 1

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert run_in_copy(make, time_limit=20) == 1
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def test_what_a_copy_raises_is_raised_here_and_in_time() -> None:
    def refuse() -> None:
        raise TypeError("no")

    def fail() -> None:
        raise KeyError("gone")

    with pytest.raises(TypeError, match="no"):
        run_in_copy(refuse, time_limit=20)
    with pytest.raises(RuntimeError, match="KeyError: 'gone'"):
        run_in_copy(fail, time_limit=20)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        run_in_copy(lambda: os._exit(1), time_limit=20)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="longer than"):
        run_in_copy(lambda: time.sleep(60), time_limit=0.2)
    assert time.monotonic() - start < 10


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_copies_give_what_their_functions_return_however_few_run_at_a_time() -> None:
    functions = {number: partial(pow, number, 2) for number in range(5)}
    with Copies(functions, most=2, time_limit=60) as copies:
        assert [copies.take(number) for number in (3, 0, 4, 1, 2)] == [9, 0, 16, 1, 4]
        assert copies.take(7) is None


def test_a_copy_that_fails_gives_nothing_and_the_others_run() -> None:
    def fail() -> int:
        raise KeyError("gone")

    functions: dict[str, Callable[[], int]] = {"fails": fail, "dies": lambda: os._exit(1), "works": lambda: 1}
    with Copies(functions, most=1, time_limit=60) as copies:
        assert [copies.take(name) for name in functions] == [None, None, 1]


def test_no_copy_is_left_after_an_error() -> None:
    functions = {number: partial(time.sleep, 600) for number in range(3)}
    copies: Copies[int, None] = Copies(functions, most=2, time_limit=600)
    running: list[int] = []

    def interrupted() -> None:
        with copies:
            running.extend(children_of(os.getpid()))
            raise KeyboardInterrupt

    before = set(children_of(os.getpid()))
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(set(running) - before) == 2
    assert set(children_of(os.getpid())) <= before
    assert copies.take(2) is None, "those that waited do not begin"


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end a process with its parent")
def test_copies_of_a_copy_end_with_it() -> None:
    reading, writing = os.pipe()

    def outer() -> None:
        with Copies({0: partial(time.sleep, 600), 1: partial(time.sleep, 600)}, most=2, time_limit=600):
            os.write(writing, f"{children_of(os.getpid())}".encode())
            time.sleep(600)

    copy = ProcessCopy(outer, time_limit=600)
    inner = json.loads(os.read(reading, 100))
    assert len(inner) == 2
    assert all(map(is_alive, inner))
    copy.end()
    while any(map(is_alive, inner)):  # the test's own limit ends it
        time.sleep(0.01)


# -- the choice --------------------------------------------------------------------------------------------------------

CONFIG = str(Path(__file__).parent.parent.parent / "configs" / "gpt_hybrid.yaml")
FIGURES = {"node_latency": 1e-4, "node_bandwidth": 1e9, "flops": 1e10, "memory_bandwidth": 1e10, "overlap": 0.0}


@pytest.mark.parametrize(
    ("num_ranks", "memory", "overrides"),
    [
        (2, "1GiB", ["--model.depth", "2"]),
        pytest.param(4, "30MiB", ["--model.depth", "4"], marks=pytest.mark.thorough),
        pytest.param(4, "1GiB", ["--model.depth", "6"], marks=pytest.mark.thorough),
        pytest.param(8, "20MiB", ["--model.depth", "8"], marks=pytest.mark.thorough),
    ],
)
def test_the_choice_is_what_suggest_prints_first(
    num_ranks: int, memory: str, overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning_hybrid.cli.hybrid_cli import load_config, maker
    from lightning_hybrid.cli.parser import ConfigParser

    figures = [word for name, value in FIGURES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = ["suggest", "--config", CONFIG, "--ranks", str(num_ranks), "--nodes", "1", "--memory", memory]
    left_open = ["--trainer.strategy.init_args.layout", "auto"]  # which makes no difference
    main([*command, "--keep-batch", "--json", *figures, *overrides, *left_open])
    best = json.loads(capsys.readouterr().out)["best"][0]["strategy"]
    overrides = [*overrides, "--trainer.devices", "1"]
    overrides += [f"--trainer.strategy.init_args.{axis}_parallel_size=1" for axis in ("tensor", "pipeline")]
    parser = ConfigParser("suggest", "", "")
    cli, _ = load_config(parser, [CONFIG], overrides)
    strategy = HybridStrategy(tuning=Tuning(memory_limit=memory), **AUTO)
    limit = strategy.settings.tuning.memory_bytes
    assert limit is not None
    problem = choice.Problem(
        maker([CONFIG], overrides, cli),
        strategy.settings,
        search_space(strategy.settings, strategy.settings.requested_sizes),
        Machine(memory=limit, ranks_per_node=num_ranks, **FIGURES),
        num_ranks,
        cli.trainer.strategy.precision_plugin,
        {name: getattr(cli.trainer, name) for name in choice.TRAINER},
    )
    layout = problem.solve().best[0].layout
    assert {name: value for name, value in nested(every_argument(layout)).items() if name in best} == best


class Shared(Regression):
    """Its layers can be shared, too."""

    def __init__(self) -> None:
        super().__init__(num_layers=0)
        with torch.random.fork_rng():
            torch.manual_seed(8)
            blocks = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))
            self.body = nn.Sequential(*blocks).double()


PLAN = {"body.*.0": "colwise", "body.*.1": "on_shards", "body.*.2": "rowwise"}


def found_and_trained(
    arguments: dict[str, Any], figures: dict[str, Any], batch_size: int, before: bool
) -> dict[str, Any]:
    """On a rank: what is found with a machine of these figures, and what is trained with it."""

    def machine(device: torch.device, dtype: torch.dtype, num_nodes: int, memory: float) -> Machine:
        return Machine(memory=memory, ranks_per_node=dist.get_world_size(), **figures)

    choice.measure_machine = machine  # type: ignore[assignment]
    try:
        if before:  # groups of another run are there
            make_trainer({}, max_steps=1).fit(Regression(), loader(batch_size, 32))
        module = Shared()
        trainer = make_trainer({"gather_module_on_teardown": True, "tensor_parallel_plan": PLAN, **arguments})
        trainer.fit(module, loader(batch_size, 32))
        strategy = trainer.strategy
        assert isinstance(strategy, HybridStrategy)
        sizes = strategy.sizes
        trainer.validate(module, loader(batch_size, 32), verbose=False)  # no other search
        assert strategy.sizes == sizes
        return {
            "sizes": sizes,
            "settings": strategy.settings,
            "weights": {name: value.detach().clone() for name, value in module.named_parameters()},
        }
    finally:
        choice.measure_machine = measure_machine


def one_process() -> dict[str, Tensor]:
    module = Shared()
    make_trainer(None).fit(module, loader(8, 32))
    return {name: value.detach() for name, value in module.named_parameters()}


FAST = {"node_latency": 1e-9, "node_bandwidth": 1e12, "operation_seconds": 1e-9, "flops": 1e8, "memory_bandwidth": 1e8}
SLOW = {"node_latency": 1e-3, "node_bandwidth": 1e3, "operation_seconds": 1e-9}


#: Ranks, what is given, the figures of the machine, and the sizes that are the best then.
FOUND: dict[str, tuple[int, dict[str, Any], dict[str, Any], tuple[int, int, int]]] = {
    "replicas": (2, {}, {**FAST, "node_latency": 1e-4}, (2, 1, 1)),
    "a pipeline": (2, {"data_parallel_size": 1}, {**FAST, "node_latency": 1e-4}, (1, 1, 2)),
    "shared layers": (2, {"data_parallel_size": 1, "pipeline_parallel_size": [1]}, FAST, (1, 2, 1)),
    "two of two": (4, {"tensor_parallel_size": 2}, FAST, (2, 2, 1)),
    "slow links": (4, {}, SLOW, (1, 1, 4)),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found_trains_as_one_process_on_every_rank(name: str, ranks: Pools) -> None:
    num_ranks, arguments, figures, sizes = FOUND[name]
    given = {"layout": "auto", "global_batch_size": 8, **arguments}
    pool = ranks(num_ranks, lightning=True)
    results = pool.run(found_and_trained, given, figures, 8 // num_ranks, num_ranks == 4)
    expected = one_process()
    for result in results:
        assert (result["sizes"], result["settings"]) == (Sizes(*sizes), results[0]["settings"])
        assert_same(result["weights"], expected, 1e-10)


def test_steps_are_tried_on_the_host_with_the_dtypes_of_a_device() -> None:
    half = HalfPrecision("bf16-true")
    scale_half(half, "cuda")
    for plugin in (half, HalfPrecision("16-true"), Precision()):
        assert choice._on_host(plugin) is plugin
    on_host = choice._on_host(MixedPrecision("bf16-mixed", "cuda"))
    assert isinstance(on_host, MixedPrecision)
    assert (on_host.precision, on_host.device) == ("bf16-mixed", "cpu")


def shared_sequences(figures: dict[str, Any]) -> dict[str, Any]:
    """On a rank: what is found for ranks that share sequences, and what is trained with it."""

    def machine(device: torch.device, dtype: torch.dtype, num_nodes: int, memory: float) -> Machine:
        return Machine(memory=memory, ranks_per_node=dist.get_world_size(), **figures)

    choice.measure_machine = machine  # type: ignore[assignment]
    try:
        module = Uneven().double()
        trainer = make_trainer({"layout": "auto", "context_parallel_size": 2, "tensor_parallel_size": [1]}, max_steps=2)
        trainer.fit(module)
        strategy = trainer.strategy
        assert isinstance(strategy, HybridStrategy)
        values = {name: value.detach().clone() for name, value in module.named_parameters()}
        return {"sizes": strategy.sizes, "settings": strategy.settings, "weights": values}
    finally:
        choice.measure_machine = measure_machine


def test_what_is_found_for_shared_sequences_trains_as_one_process(ranks: Pools) -> None:
    first, second = ranks(2, lightning=True).run(shared_sequences, FAST)
    module = Uneven().double()
    make_trainer(None, max_steps=2).fit(module)
    for result in (first, second):
        assert result["sizes"] == Sizes(context=2)
        assert result["settings"] == first["settings"]
        assert result["settings"].context_parallel_size == 2
        assert result["settings"].axis_order == "pp-dp-cp-tp"
        assert_same(result["weights"], {name: value.detach() for name, value in module.named_parameters()}, 1e-10)


class Quadratic(LightningModule):
    """A layer that four ranks can share in a line and in a square."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            layer = nn.TransformerEncoderLayer(8, 4, 16, 0.0, batch_first=True)
            self.body, self.head = nn.Sequential(layer), nn.Linear(8, 1)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.body(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.randn(16, 32, 8, generator=torch.Generator().manual_seed(1)).double(), 8)


def over_a_square(memory: float) -> dict[str, Any]:
    """On a rank: what is found with so much memory, where all four ranks share layers; and what is trained with it."""
    module = Quadratic()
    given = {"layout": "auto", "tensor_parallel_size": [4], "num_microbatches": 2, "recompute": True}
    trainer = make_trainer(given, max_steps=2)
    known = Machine(memory=memory, ranks_per_node=4)
    with patch.object(choice, "measure_machine", lambda *_: known):
        trainer.fit(module)
    assert isinstance(trainer.strategy, HybridStrategy)
    settings = trainer.strategy.settings
    weights = {name: full_tensor(value.detach()) for name, value in module.named_parameters()}
    return {"mode": settings.tensor_parallel_mode, "sizes": trainer.strategy.sizes, "weights": weights}


@pytest.mark.thorough
def test_blocks_are_chosen_where_nothing_else_fits_and_train_as_one_process(ranks: Pools) -> None:
    profile = make_profile(Quadratic, ranks=4)  # type: ignore[arg-type]
    model = CostModel(profile, Machine(), LoaderStep(8))
    layout = Layout(1, 4, 1, 2, recompute=True)
    line, square = (model.estimate(replace(layout, tensor_mode=mode)).bytes for mode in ("1d", "2d"))
    module = Quadratic()
    make_trainer(None, max_steps=2).fit(module)
    for memory, mode in ((line, "1d"), ((line + square) / 2, "2d")):
        for result in ranks(4, lightning=True).run(over_a_square, memory):
            assert (result["mode"], result["sizes"]) == (mode, Sizes(tensor=4))
            assert_same(result["weights"], {name: value.detach() for name, value in module.named_parameters()}, 1e-10)


def fits(limit: float | None) -> Any:
    """On a rank: what is found for `recompute` alone, and the text of a refusal."""
    module = Blocks(width=16, depth=4)
    strategy: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 4, "recompute": "auto"}
    trainer = make_trainer({**strategy, "tuning": Tuning(memory_limit=limit)}, max_steps=1)

    def known(device: torch.device, dtype: torch.dtype, num_nodes: int, memory: float) -> Machine:
        return Machine(memory=memory, ranks_per_node=2)

    with patch.object(choice, "measure_machine", known):
        try:
            trainer.fit(module)
        except ValueError as error:
            return str(error)
    assert isinstance(trainer.strategy, HybridStrategy)
    return trainer.strategy.settings.recompute


@pytest.mark.thorough
def test_recompute_takes_the_least_that_fits(ranks: Pools) -> None:
    profile = make_profile(lambda: Blocks(width=16, depth=4), ranks=2)  # type: ignore[arg-type]
    model = CostModel(profile, Machine(), LoaderStep(16))
    none, every = (model.estimate(Layout(1, 1, 2, 4, recompute=kind)).bytes for kind in (False, True))
    pool = ranks(2, lightning=True)
    assert pool.run(fits, None) == [False, False]
    assert pool.run(fits, none) == [False, False]
    some = pool.run(fits, none - 1)
    assert some[0] == some[1]
    assert some[0] == "selective" or (isinstance(some[0], list) and sum(some[0]) < 4)
    text, other = pool.run(fits, every / 2)
    assert text == other
    assert f"layouts of Blocks can be used with tuning.memory_limit={every / 2 / 2**10:,.1f} KiB" in text
    assert "does not fit, such as pipeline 2" in text


def refused(kind: str) -> str:
    """On a rank: the text of a refusal."""
    module = ByHand() if kind == "by hand" else Regression()
    data = DataLoader(Nothing(), batch_size=None) if kind == "no batch" else loader(4, 32)
    trainer = make_trainer({"layout": "auto"}, max_steps=1)
    run: Any = trainer.validate if kind == "no training" else trainer.fit
    with pytest.raises(ValueError, match=r"cannot choose .* for") as caught:
        run(module, data)
    return str(caught.value)


class ByHand(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("by hand", "ByHand uses manual optimization"),
        ("no batch", "received no training batch"),
        ("no training", "`train_dataloader` must be implemented"),
    ],
)
def test_what_cannot_be_found_is_refused_on_every_rank(kind: str, text: str, ranks: Pools) -> None:
    first, second = ranks(2, lightning=True).run(refused, kind)
    assert first == second
    assert text in first
    assert "Set the layout yourself, for example HybridStrategy(pipeline_parallel_size=2)" in first


def measured() -> dict[str, Any]:
    return vars(measure_machine(torch.device("cpu"), torch.float32, 1, math.inf))


def test_figures_are_measured_and_the_same_on_every_rank(ranks: Pools) -> None:
    first, second = ranks(2).run(measured)
    assert first == second
    assert first["ranks_per_node"] == 2
    assert 1e8 < first["flops"] < 1e13
    assert 1e8 < first["memory_bandwidth"] < 1e12
    assert 1e-7 <= first["operation_seconds"] < 1e-3
    assert 1e-7 < first["node_latency"] < 1e-1
    assert 1e6 < first["node_bandwidth"] < 1e12
    assert 0 <= first["collective_seconds"] < 1e-1


# -- YAML and commands -------------------------------------------------------------------------------------------------


def test_yaml_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"layout": "auto", "tuning": {"memory_limit": "80GiB"}, "zero_stage": "auto", "num_chunks": "auto"}
    strategy = {"class_path": "lightning_hybrid.HybridStrategy", "init_args": arguments}
    config = {"trainer": {"accelerator": "cpu", "devices": 1, "logger": False, "strategy": strategy}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    monkeypatch.setattr("sys.argv", ["program", "--config", str(file)])
    cli = LightningCLI(Regression, run=False, save_config_callback=None)
    assert isinstance(cli.trainer.strategy, HybridStrategy)
    assert cli.trainer.strategy.settings.searched == ALL_OPEN
    assert cli.trainer.strategy.settings.tuning.memory_bytes == 80 * 2**30


@pytest.mark.parametrize("command", ["plan", "memory", "check"])
def test_commands_about_one_layout_ask_for_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--config", CONFIG, "--trainer.strategy.init_args.layout", "auto"])
    assert "will be chosen when training starts" in capsys.readouterr().err


def test_check_asks_for_a_layout() -> None:
    with pytest.raises(ValueError, match="A check needs fixed values for zero_stage"):
        lightning_hybrid.check(Regression, zero_stage="auto")

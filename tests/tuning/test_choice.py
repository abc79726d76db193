"""Open arguments are chosen when a run starts: the first suggestion of `suggest`, the same on every rank."""

from __future__ import annotations

import json
from dataclasses import replace
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
from lightning_hybrid.trainer.precision import scale_half
from lightning_hybrid.tuning import choice
from lightning_hybrid.tuning.arguments import every_argument, nested
from lightning_hybrid.tuning.candidates import Layout, LoaderStep
from lightning_hybrid.tuning.cost_model import CostModel
from lightning_hybrid.tuning.dry_run.dry_run import step_arguments
from lightning_hybrid.tuning.machine import Machine
from lightning_hybrid.tuning.measure import measure_machine
from lightning_hybrid.tuning.search_space import search_space
from tests.pool import Pools
from tests.strategy.test_open_arguments import ALL_OPEN, AUTO
from tests.training_jobs import Manual, Regression, assert_same, loader, make_trainer, train
from tests.tuning.test_module_profile import Blocks, make_profile
from tests.zoo.context import Uneven

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
        step_arguments(cli.trainer),
    )
    layout = problem.solve().best[0].layout
    assert {name: value for name, value in nested(every_argument(layout)).items() if name in best} == best


class Shared(Regression):
    """Layers that also support tensor parallelism."""

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
    """Return the layout that a rank finds with the figures of a machine, and the weights after training."""

    def machine(device: torch.device, dtype: torch.dtype, num_nodes: int, memory: float) -> Machine:
        return Machine(memory=memory, ranks_per_node=dist.get_world_size(), **figures)

    choice.measure_machine = machine  # type: ignore[assignment]
    try:
        if before:  # process groups of another run exist
            make_trainer({}, max_steps=1).fit(Regression(), loader(batch_size, 32))
        module = Shared()
        trainer = make_trainer({"gather_module_on_teardown": True, "tensor_parallel_plan": PLAN, **arguments})
        trainer.fit(module, loader(batch_size, 32))
        strategy = trainer.strategy
        assert isinstance(strategy, HybridStrategy)
        sizes = strategy.sizes
        trainer.validate(module, loader(batch_size, 32), verbose=False)  # without another search
        assert strategy.sizes == sizes
        return {
            "sizes": sizes,
            "settings": strategy.settings,
            "weights": {name: value.detach().clone() for name, value in module.named_parameters()},
        }
    finally:
        choice.measure_machine = measure_machine


FAST = {"node_latency": 1e-9, "node_bandwidth": 1e12, "operation_seconds": 1e-9, "flops": 1e8, "memory_bandwidth": 1e8}
SLOW = {"node_latency": 1e-3, "node_bandwidth": 1e3, "operation_seconds": 1e-9}


#: The number of ranks, arguments, the figures of the machine, and the best sizes.
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
    expected = train(Shared(), None, loader(8, 32)).weights
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
    """Return the layout that a rank finds with context parallelism, and the weights after training."""

    def machine(device: torch.device, dtype: torch.dtype, num_nodes: int, memory: float) -> Machine:
        return Machine(memory=memory, ranks_per_node=dist.get_world_size(), **figures)

    choice.measure_machine = machine  # type: ignore[assignment]
    try:
        layout = {"layout": "auto", "context_parallel_size": 2, "tensor_parallel_size": [1]}
        result = train(Uneven().double(), layout, max_steps=2)
        strategy = result.trainer.strategy
        assert isinstance(strategy, HybridStrategy)
        return {"sizes": strategy.sizes, "settings": strategy.settings, "weights": result.weights}
    finally:
        choice.measure_machine = measure_machine


def test_what_is_found_for_shared_sequences_trains_as_one_process(ranks: Pools) -> None:
    first, second = ranks(2, lightning=True).run(shared_sequences, FAST)
    expected = train(Uneven().double(), None, max_steps=2).weights
    for result in (first, second):
        assert result["sizes"] == Sizes(context=2)
        assert result["settings"] == first["settings"]
        assert result["settings"].context_parallel_size == 2
        assert result["settings"].axis_order == "pp-dp-cp-tp"
        assert_same(result["weights"], expected, 1e-10)


class Quadratic(LightningModule):
    """A layer that supports four tensor-parallel ranks in a line and in a square."""

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
    """Return the arrangement of four tensor-parallel ranks that a rank finds, and the weights after training."""
    given = {"layout": "auto", "tensor_parallel_size": [4], "num_microbatches": 2, "recompute": True}
    known = Machine(memory=memory, ranks_per_node=4)
    with patch.object(choice, "measure_machine", lambda *_: known):
        result = train(Quadratic(), given, max_steps=2)
    strategy = result.trainer.strategy
    assert isinstance(strategy, HybridStrategy)
    return {"mode": strategy.settings.tensor_parallel_mode, "sizes": strategy.sizes, "weights": result.weights}


@pytest.mark.thorough
def test_blocks_are_chosen_where_nothing_else_fits_and_train_as_one_process(ranks: Pools) -> None:
    profile = make_profile(Quadratic, ranks=4)  # type: ignore[arg-type]
    model = CostModel(profile, Machine(), LoaderStep(8))
    layout = Layout(1, 4, 1, 2, recompute=True)
    line, square = (model.estimate(replace(layout, tensor_mode=mode)).bytes for mode in ("1d", "2d"))
    expected = train(Quadratic(), None, max_steps=2).weights
    for memory, mode in ((line, "1d"), ((line + square) / 2, "2d")):
        for result in ranks(4, lightning=True).run(over_a_square, memory):
            assert (result["mode"], result["sizes"]) == (mode, Sizes(tensor=4))
            assert_same(result["weights"], expected, 1e-10)


def fits(limit: float | None) -> Any:
    """Return the value that a rank finds if only `recompute` is open, or the text of the error."""
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
    """Return the text of the error on a rank."""
    module = Manual() if kind == "by hand" else Regression()
    data = DataLoader(Nothing(), batch_size=None) if kind == "no batch" else loader(4, 32)
    trainer = make_trainer({"layout": "auto"}, max_steps=1)
    run: Any = trainer.validate if kind == "no training" else trainer.fit
    with pytest.raises(ValueError, match=r"cannot choose .* for") as caught:
        run(module, data)
    return str(caught.value)


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("by hand", "Manual uses manual optimization"),
        ("no batch", "received no training batch"),
        ("no training", "`train_dataloader` must be implemented"),
    ],
)
def test_what_cannot_be_found_is_refused_on_every_rank(kind: str, text: str, ranks: Pools) -> None:
    first, second = ranks(2, lightning=True).run(refused, kind)
    assert first == second
    assert text in first
    assert "Set the layout yourself, for example HybridStrategy(pipeline_parallel_size=2)" in first


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

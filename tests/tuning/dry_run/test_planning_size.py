"""A plan of a run gives parameters no memory, and runs one layer of each kind, whatever the module's size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import HybridStrategy, axes
from lightning_hybrid.cli.main import main
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.pipeline_parallel.frame.alike import first_alike
from lightning_hybrid.tuning.dry_run import parameters
from lightning_hybrid.tuning.dry_run.dry_run import DryRunStrategy, dry_run
from lightning_hybrid.tuning.dry_run.parameters import made_without_memory, parameters_without_memory

WIDTH = 16
SIZES: list[int] = []  # hidden sizes of the layers that have run


class Layer(nn.Module):
    """A layer that knows its position, like the layers of transformers."""

    def __init__(self, position: int, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.layer_idx, self.hidden = position, hidden
        self.norm = nn.LayerNorm(WIDTH)
        self.rise, self.fall = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, places: list[int] | None = None) -> Tensor:
        SIZES.append(self.hidden)
        return x + self.fall(self.rise(self.norm(x)).relu() * mask)


class Deep(LightningModule):
    """Many equal layers, made in `__init__`."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.num_layers = layers
        self.make()

    def make(self) -> None:
        self.tokens = nn.Embedding(32, WIDTH)
        self.register_buffer("mask", torch.ones(2 * WIDTH))
        self.layers = nn.ModuleList(self.layer(position) for position in range(self.num_layers))
        self.head = nn.Linear(WIDTH, 32)

    def layer(self, position: int) -> nn.Module:
        return Layer(position)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.tokens(batch)
        mask = self.mask * 2.0
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class DeepLater(Deep):
    """`Deep`, made in `configure_model`."""

    def __init__(self, layers: int = 6) -> None:
        LightningModule.__init__(self)
        self.num_layers = layers
        self.head = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.head is None:
            self.make()


class ReadsRates(Deep):
    """Reads values of tensors that are not parameters, like stochastic depth."""

    def make(self) -> None:
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, self.num_layers)]
        super().make()


class ReadsWeights(Deep):
    """Reads the values of its parameters when it is made."""

    def make(self) -> None:
        super().make()
        self.scale = float(self.head.weight.detach().abs().max())


class Kinds(Deep):
    """Every third layer is wider."""

    def layer(self, position: int) -> nn.Module:
        return Layer(position, (2 + position % 3 // 2) * WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.tokens(batch)
        for layer in self.layers:
            x = layer(x, torch.ones(()))
        return self.head(x).square().mean()


class Leaking(Deep):
    """The loss uses tensors that layers keep but do not return."""

    def layer(self, position: int) -> nn.Module:
        return Keeping(position)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + sum(layer.kept.mean() for layer in self.layers)


class Keeping(Layer):
    def forward(self, x: Tensor, mask: Tensor, places: list[int] | None = None) -> Tensor:
        self.kept = x.exp()
        return super().forward(x, mask)


class Tokens(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.zeros(64, 8, dtype=torch.long), 8)


@pytest.fixture(autouse=True)
def nothing_has_run() -> None:
    SIZES.clear()


def estimate(cls: type[LightningModule], **arguments: Any) -> list[MemoryUsage]:
    settings, sizes = HybridStrategy(**arguments).settings, axes.Sizes(**axes.sizes_in(arguments))
    return list(dry_run(lambda: (cls(), Tokens()), settings, sizes, precision=Precision()).memory)


@pytest.fixture
def with_memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of parameters that have memory once a module has registered them."""
    found: list[str] = []
    register = nn.Module.register_parameter

    def watched(module: nn.Module, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        made = module._parameters[name]
        if type(made) is nn.Parameter and not made.is_meta:
            found.append(f"{type(module).__name__}.{name}")

    monkeypatch.setattr(nn.Module, "register_parameter", watched)
    return found


def write_config(directory: Path, cls: type[LightningModule], **arguments: Any) -> str:
    init_args = {"pipeline_parallel_size": 2, "num_microbatches": 2, **arguments}
    strategy = {"class_path": "lightning_hybrid.HybridStrategy", "init_args": init_args}
    trainer = {"accelerator": "cpu", "devices": 4, "max_steps": 2, "strategy": strategy, "logger": False}
    classes = {"model": cls, "data": Tokens}
    named = {name: {"class_path": f"{each.__module__}.{each.__name__}"} for name, each in classes.items()}
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump({**named, "trainer": trainer}))
    return str(path)


COMMANDS: dict[str, list[str]] = {
    "plan": [],
    "plan of nodes": ["--trainer.num_nodes", "2"],
    "memory": [],
    "suggest": ["--ranks", "2"],
}


@pytest.mark.parametrize("cls", [Deep, DeepLater], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_parameter_gets_memory(
    command: str,
    cls: type[LightningModule],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    with_memory: list[str],
) -> None:
    main([command.split()[0], "--config", write_config(tmp_path, cls), *COMMANDS[command]])
    assert with_memory == []
    assert "pipeline" in capsys.readouterr().out


def test_a_tied_parameter_stays_tied_and_keeps_its_marks() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
            weight.no_decay = True  # type: ignore[attr-defined]
            self.first, self.second = weight, weight
            self.layer = nn.Linear(3, 2)
            self.third = self.layer.weight

    with parameters_without_memory() as registered:
        module = Tied()
    assert module.first is module.second
    assert module.first.no_decay  # type: ignore[union-attr]
    assert module.third is module.layer.weight
    assert all(each.is_meta for each in module.parameters())
    assert [each.requires_grad for each in module.parameters()] == [False, True, True]
    assert registered.number == 3
    assert not nn.Linear(2, 2).weight.is_meta, "the hook is gone"


def test_numbers_that_are_no_parameters_may_be_read(with_memory: list[str]) -> None:
    assert estimate(ReadsRates) == estimate(Deep)
    assert with_memory == []


def test_a_small_module_that_reads_its_weights_is_made_with_values() -> None:
    assert estimate(ReadsWeights) == estimate(Deep)


@pytest.mark.parametrize("command", ["plan", "memory"])
def test_a_large_module_that_reads_its_weights_is_refused_in_words(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parameters, "MOST_BYTES", 2**10)
    with pytest.raises(SystemExit) as ended:
        main([command, "--config", write_config(tmp_path, ReadsWeights)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "Planning this module requires the values of its parameters" in error
    assert "Avoid reading parameter values in `__init__`, `configure_model` or `training_step`" in error


def test_an_error_that_values_do_not_mend_is_that_of_the_second_attempt() -> None:
    calls = []

    def make() -> None:
        calls.append(1)
        raise KeyError("width")

    with pytest.raises(KeyError, match="width"):
        made_without_memory(make)
    assert len(calls) == 2


# -- layers that are alike ---------------------------------------------------------------------------------------------


def test_a_layer_of_each_kind_runs_once() -> None:
    estimate(Deep)
    assert len(SIZES) == 1
    SIZES.clear()
    estimate(Kinds)
    assert sorted(SIZES) == [2 * WIDTH, 3 * WIDTH]


def test_layers_that_differ_in_an_attribute_or_a_shape_are_not_alike() -> None:
    layers = [Layer(position) for position in range(5)]
    layers[2].hidden += 1  # like a flag that its forward reads
    layers[3].rise = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    layers[4].norm.requires_grad_(False)
    named = {f"layers.{position}": layer for position, layer in enumerate(layers)}
    firsts = [layers.index(first) for first in first_alike(named).values()]  # type: ignore[arg-type]
    assert firsts == [0, 0, 2, 3, 4]


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "stages": {"pipeline_parallel_size": 3, "num_microbatches": 4},
    "recomputation": {"recompute": True},
    "selective": {"recompute": "selective"},
    "some layers": {"pipeline_parallel_size": 2, "recompute": [2, 1]},
    "tensor parallel": {"tensor_parallel_size": 2},
}


@pytest.mark.parametrize("cls", [Deep, Kinds, Leaking], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeated_layers_save_what_they_would_save_themselves(
    layout: str, cls: type[LightningModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = LAYOUTS[layout]
    repeated = estimate(cls, **arguments)
    ran = len(SIZES)
    measure = DryRunStrategy._measure

    def measure_all(self: DryRunStrategy, *args: Any, repeats: bool = False) -> Any:
        return measure(self, *args)

    monkeypatch.setattr(DryRunStrategy, "_measure", measure_all)
    SIZES.clear()
    assert estimate(cls, **arguments) == repeated
    assert (ran < len(SIZES)) is (cls is not Leaking), "a tensor that a layer keeps but does not return is not repeated"

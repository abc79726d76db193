"""The pages of `docs/migrate/`: every line that they offer runs, and the important ones do what they say."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run
import yaml
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, ProgressBar, Timer
from lightning.pytorch.loggers.logger import Logger
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from examples.lamb import Lamb
from lightning_hybrid import Faults, HybridStrategy, Launch, Tuning
from lightning_hybrid.cli.hybrid_cli import HybridCLI
from lightning_hybrid.cli.main import main
from lightning_hybrid.distributed.dtensor import full_tensor, is_tensor_parallel
from tests.pool import Pools
from tests.test_logging_features import Memory
from tests.training_jobs import Regression, assert_same, loader, make_trainer, plain, together, weights

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted((ROOT / "docs" / "migrate").glob("*.md"))
TEXT = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)

# -- reading the documents --------------------------------------------------------------------------------------------

GROUPS: dict[str, Any] = {"Faults": Faults, "Launch": Launch, "Tuning": Tuning}  # of arguments


@dataclass(frozen=True)
class Line:
    """A line of Python, or of a shell if it begins with "$"; `place` is the method that it belongs in."""

    code: str
    place: str | None = None


@dataclass(frozen=True)
class Row:
    """A row of a table: their names, what they do, and what to write here."""

    chapter: str
    names: str
    cell: str

    @property
    def has_code(self) -> bool:
        return not self.cell.startswith(("not needed", "not available"))

    @property
    def lines(self) -> list[Line]:
        found = re.findall(r"(?:in `(\w+)`: )?`([^`]+)`", self.cell) if self.has_code else []
        return [Line(code, place or None) for place, code in found]

    def __str__(self) -> str:
        return f"{self.chapter.split(':')[0].split(' ')[0]}: {self.names}"


CODE = r"(in `\w+`: )?`[^`]+`"
CELL = re.compile(rf"not needed: [^`]+|not available: [^`]+|{CODE}(<br>{CODE})*")


def read_rows() -> list[Row]:
    rows, chapter = [], ""
    lines = TEXT.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("## "):
            chapter = line[3:]
        elif line.startswith("| ") and not following.startswith("|---"):
            names, _, cell = (cell.strip() for cell in line.strip("|").split(" | "))
            rows.append(Row(chapter, names, cell))
    return rows


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


ROWS = read_rows()
RUNNING = list({row.cell: row for row in ROWS if row.has_code and not row.cell.startswith("`$ ")}.values())
COMMANDS = list(dict.fromkeys(line.code[2:] for row in ROWS for line in row.lines if row.cell.startswith("`$ ")))
CHAPTERS = list(dict.fromkeys(row.chapter for row in ROWS))


def row_of(name: str, chapter: str = "") -> Row:
    """The first row that names this."""
    return next(row for row in ROWS if name in row.names and row.chapter.startswith(chapter))


#: What each text offers, as its own pages name it.
OFFERED = {
    "Colossal-AI: pipeline": """
        parallel=dict NUM_MICRO_BATCHES NUM_CHUNKS TENSOR_SHAPE PipelineSchedule InterleavedPipelineSchedule GPipe
        build_pipeline_model get_dataloader launch_from_torch get_default_parser initialize disable_existing_loggers
        get_dist_logger CrossEntropyLoss Adam LinearWarmupLR LossHook AccuracyHook LogMetricByEpochHook
        LogMetricByStepHook LRSchedulerHook LogTimingByEpochHook LogMemoryByEpochHook ThroughputHook MultiTimer
        NUM_EPOCHS test_interval display_progress trainer.fit trainer.evaluate trainer.predict tensor_shape
        MixupAccuracy execute_schedule engine.step lr_scheduler.step tqdm torchrun launch_from_slurm config.seed
        cudnn_benchmark is_rank_for_log drop_last NonPipelineSchedule
    """,
    "Colossal-AI: ViT": """
        AMP_TYPE.TORCH AMP_TYPE.APEX AMP_TYPE.NAIVE gradient_accumulation clip_grad_norm gpu_aug mixup_alpha
        BATCH_SIZE DROP_RATE gpc.config vit_base_patch16_224 nn.Lamb SaveCheckpointHook
        TensorboardHook NUM_MICRO_BATCHES LEARNING_RATE WEIGHT_DECAY WARMUP_EPOCHS IMG_SIZE
        PATCH_SIZE HIDDEN_SIZE DEPTH NUM_HEADS MLP_RATIO NUM_CLASSES CHECKPOINT build_pipeline_vit partition_uniform
        is_using_pp get_local_rank log_to_file label_smoothing AdamW CosineAnnealingWarmupLR TENSOR_PARALLEL_SIZE
        TENSOR_PARALLEL_MODE #GPUs zero init_method='jax' load_checkpoint `save_checkpoint` is_dp_rank_0 Linear1D
        VanillaPatchEmbedding
    """,
    'Colossal-AI: "Optimize': """
        partition_uniform partition_balanced count_layer_params build_pipeline_model_from_cfg partition_method='layer'
        partition_method='parameter' build_pipeline_model ParallelMode.MODEL Initializer_Model PIPELINE_PREV
        PIPELINE_NEXT found_inf clip_grad_norm PipelineSharedModuleWrapper PipelineSharedModuleGradientHandler
        load_batch accumulation backward backward_by_grad 'sequence'
    """,
    "MindSpore": """
        data pipeline_stage MicroBatch AllGather redistribution recompute() groups slices operator-level
        semi-automatic automatic hybrid
    """,
    "LiBai": """
        data_parallel_size tensor_parallel_size pipeline_parallel_size pipeline_num_layers custom_pipeline_stage_id
        get_layer_placement layer_idx to_global 1F1B sbp get_nd_sbp Noise oneflow.distributed.launch get_config amp
        activation_checkpoint zero_optimization num_nodes device_type BERT GPT ViT Swin-Transformer T5 MoCoV3 MAE
    """,
}


def test_every_name_has_a_row() -> None:
    assert len(ROWS) == len(re.findall(r"^\| .*\n(?!\|---)", TEXT, re.MULTILINE))
    assert len(re.findall(r"^\| .* \|$", TEXT, re.MULTILINE)) == len(ROWS) + TEXT.count("\n|---|---|---|\n")
    assert TEXT.count("\n|---") == TEXT.count("\n|---|---|---|\n")
    for chapter, names in OFFERED.items():
        offered = " ".join(row.names for row in ROWS if row.chapter.startswith(chapter))
        assert [name for name in names.split() if name not in offered] == [], chapter


def test_every_row_says_what_to_write() -> None:
    assert [str(row) for row in ROWS if not CELL.fullmatch(row.cell)] == []


# -- every line runs --------------------------------------------------------------------------------------------------


#: What surrounds a row's lines in a method: its arguments, what comes before and what comes after.
METHODS: dict[str, tuple[str, str, str]] = {
    "__init__": (
        "self",
        """
        super(type(self), self).__init__()
        self.embed = nn.Linear(6, 8)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth)])
        self.head = nn.Linear(8, 3)
        """,
        "",
    ),
    "training_step": ("self, batch, batch_idx", "images, labels = batch\nlogits = self(images)", "return loss"),
    "validation_step": ("self, batch, batch_idx", "images, labels = batch\nlogits = self(images)", ""),
    "predict_step": ("self, batch, batch_idx", "images, labels = batch\nlogits = self(images)", ""),
    "configure_optimizers": ("self", "", 'return {"optimizer": optimizer, "lr_scheduler": scheduler}'),
    "on_after_batch_transfer": ("self, batch, dataloader_idx", "", "return batch"),
    "setup": ("self, stage", "", ""),
    "on_fit_start": ("self", "", ""),
    "on_train_batch_end": ("self, outputs, batch, batch_idx", "", ""),
    "on_before_optimizer_step": ("self, optimizer", "", ""),
    "on_validation_epoch_end": ("self", "", ""),
}
#: What a method computes where the row's lines do not.
USUALLY = {
    "training_step": ["loss = F.cross_entropy(logits, labels)"],
    "validation_step": ["loss = F.cross_entropy(logits, labels)"],
    "configure_optimizers": [
        "optimizer = torch.optim.SGD(self.parameters(), lr=0.1)",
        "scheduler = LinearLR(optimizer)",
    ],
}
ALWAYS = ("__init__", "training_step", "validation_step", "predict_step", "configure_optimizers")


def method(name: str, lines: list[str]) -> str:
    arguments, before, after = METHODS[name]
    lines = list(lines)
    for index, usual in enumerate(USUALLY.get(name, [])):
        target = f"{usual.split()[0]} = "
        given = next((line for line in lines if line.startswith(target)), None)
        if given is not None:
            lines.remove(given)
        lines.insert(index, given or usual)
    body = "\n".join([textwrap.dedent(before), *lines, after])
    return f"def {name}({arguments}):\n{textwrap.indent(body, '    ')}\n    return None"


def make_module(lines: list[Line], names: dict[str, Any], depth: int = 6) -> LightningModule:
    """A module for classification with a row's lines in its methods."""
    methods: dict[str, Any] = {"forward": lambda self, x: self.head(self.body(self.embed(x)))}
    names["depth"] = depth
    for name in dict.fromkeys([*ALWAYS, *(line.place for line in lines if line.place)]):
        code = [line.code.replace("num_classes=10", "num_classes=3") for line in lines if line.place == name]
        exec(method(name, code), names, methods)
    return type("Documented", (LightningModule,), methods)()


class Attending(LightningModule):
    """What ranks can share layers of, and sequences: each number of an image is a position; a class is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 16)
        self.body = nn.Sequential(*(self._layer() for _ in range(4)))
        self.head = nn.Linear(16, 4)

    def _layer(self) -> nn.Module:
        attention = nn.TransformerEncoderLayer(16, 8, 16, 0.0, batch_first=True)
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), attention)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.head(self.body(self.embed(images[..., None])).mean(1)), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def classification(num_samples: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(num_samples, 6, generator=generator)
    return TensorDataset(images, images[:, :3].argmax(1))


@contextlib.contextmanager
def inside(directory: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def logging_restored(stream: io.StringIO) -> Iterator[None]:
    """What Lightning and the strategy tell goes to a stream too; levels and handlers that lines set are taken back."""
    logger = logging.getLogger("lightning.pytorch")
    level, handlers = logger.level, list(logger.handlers)
    logger.addHandler(logging.StreamHandler(stream))
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers


#: Arguments of a strategy that say something about layers with attention.
ATTENDING = {"tensor_parallel_size", "tensor_parallel_plan", "context_parallel_size", "recompute", "layout"}


def meant(**arguments: Any) -> dict[str, Any]:
    """The arguments of a strategy; a plan says how layers are shared, and not by how many ranks."""
    return {"tensor_parallel_size": 2, **arguments} if "tensor_parallel_plan" in arguments else arguments


class Writes:
    """Gathers what Python lines of a row make, for a Trainer on the processes at hand."""

    def __init__(self) -> None:
        self.strategy: dict[str, Any] = {"pipeline_parallel_size": 2}
        self.arguments: dict[str, Any] = {}
        self.callbacks: list[Callback] = []
        dataset = classification()
        loaders = {name: DataLoader(dataset, batch_size=6) for name in ("train_loader", "val_loader")}
        self.names: dict[str, Any] = {"dataset": dataset, **loaders}
        for block in blocks("python"):
            exec(block, self.names)
        self.names.update(GROUPS, HybridStrategy=self._make_strategy, Trainer=self.arguments.update)

    def _make_strategy(self, **arguments: Any) -> None:
        self.strategy = meant(**arguments)

    def make_module(self, lines: list[Line]) -> LightningModule:
        """A module that the strategy's arguments say something about, with a row's lines in its methods."""
        if self.strategy.keys() & ATTENDING:
            assert not any(line.place for line in lines)
            return Attending()
        partition = self.strategy.get("partition", "uniform")
        return make_module(lines, self.names, depth=6 if partition in ("uniform", "parameters", [1, 2, 2, 1]) else 24)

    def evaluate(self, code: str) -> None:
        made = eval(code, self.names)
        if isinstance(made, Callback):
            self.callbacks.append(made)
        elif isinstance(made, Logger):
            self.arguments["logger"] = made
        elif isinstance(made, DataLoader):
            self.names["train_loader"] = made


def axis_sizes(strategy: Any) -> dict[str, int]:
    """The sizes of all axes, by argument."""
    return {
        **strategy.sizes.by_argument,
    }


def run_lines(
    lines: list[Line],
    processes: int = 2,
    spies: tuple[Callback, ...] = (),
    directory: str | None = None,
    short: bool = False,
) -> dict[str, Any]:
    """Train for two epochs of four batches with a row's lines, in a pipeline of two processes unless it says otherwise.

    Args:
        lines: The row's; of several strategies, one.
        processes: 1 is without our strategy.
        spies: Further callbacks.
        directory: Where to write files.
        short: Train for two batches only.
    """
    printed, told = io.StringIO(), io.StringIO()
    with inside(directory or os.curdir), logging_restored(told), contextlib.redirect_stdout(printed):
        writes = Writes()
        calls = [line.code for line in lines if line.code.startswith("trainer.")]
        for line in lines:
            if line.place is None and line.code not in calls:
                writes.evaluate(line.code)
        torch.manual_seed(0)
        module = writes.make_module(lines)
        callbacks = [*writes.callbacks, *spies]
        arguments = {"logger": Memory(), "num_sanity_val_steps": 0, "callbacks": callbacks, **writes.arguments}
        arguments.update(max_epochs=2, max_steps=-1)
        if torch.cuda.is_available():
            arguments["accelerator"] = "cpu"
        if short:
            arguments.update(max_epochs=1, limit_train_batches=2, limit_val_batches=1)
        saves = any("save" in name for name in writes.strategy)
        arguments.setdefault("enable_progress_bar", any(isinstance(callback, ProgressBar) for callback in callbacks))
        arguments.setdefault("enable_checkpointing", saves or any(isinstance(each, Checkpoint) for each in callbacks))
        trainer = make_trainer(writes.strategy if processes > 1 else None, **arguments)
        writes.names.update(trainer=trainer, model=module)
        outputs = None
        for call in calls or ["trainer.fit(model, train_loader, val_loader)"]:
            outputs = eval(call, writes.names)
    return {
        "metrics": plain(trainer.callback_metrics),
        "steps": trainer.global_step,
        "outputs": outputs,
        "weights": {name: full_tensor(value) for name, value in weights(module).items()},
        "shared": sum(map(is_tensor_parallel, module.parameters())),
        "sizes": axis_sizes(trainer.strategy) if processes > 1 else None,
        "history": getattr(trainer.logger, "history", None),
        "module": {name: value for name, value in vars(module).items() if isinstance(value, (int, float, bool))},
        "spies": [getattr(spy, "values", None) for spy in spies],
        "printed": printed.getvalue(),
        "told": told.getvalue(),
    }


#: Lines that need a library which Lightning does not bring.
NEEDS = {"DeviceStatsMonitor": ("psutil",), "TensorBoardLogger": ("tensorboard", "tensorboardX")}


def skip_without_libraries(row: Row) -> None:
    for name, libraries in NEEDS.items():
        if name in row.cell and not any(map(RequirementCache, libraries)):
            pytest.skip(f"{name} needs {' or '.join(libraries)}")


def trainings(row: Row) -> list[list[Line]]:
    """Its lines; of several strategies each by itself."""
    strategies = [line for line in row.lines if line.code.startswith("HybridStrategy(")]
    others = [line for line in row.lines if line not in strategies]
    return [[*others, strategy] for strategy in strategies] or [others]


def sizes_of(lines: list[Line]) -> dict[str, Any]:
    """The sizes of axes that a strategy among these lines names; without one, those of the usual pipeline."""
    names = {**GROUPS, "HybridStrategy": meant}
    named = [eval(line.code, names) for line in lines if line.code.startswith("HybridStrategy(")]
    arguments = named[0] if named else {"pipeline_parallel_size": 2}
    return {name: size for name, size in arguments.items() if name.endswith("_parallel_size") and size != "auto"}


def processes_of(lines: list[Line]) -> int:
    """As many as the strategy says; where it says nothing of them, two replicas."""
    return max(2, math.prod(sizes_of(lines).values()))


#: What is not trained otherwise, every day.
DAILY = ('context_parallel="ring"', 'context_parallel="ulysses"', 'tensor_parallel_mode="2d"', '.weight": "S(0)"')


def _marked(row: Row, lines: list[Line]) -> Any:
    """Every day those, and a quarter of the rows that two processes are enough for."""
    is_daily = any(name in row.cell for name in DAILY) or (RUNNING.index(row) % 4 == 0 and processes_of(lines) == 2)
    marks = () if is_daily else pytest.mark.thorough
    return pytest.param(row, lines, id=str(row), marks=marks)


def write_old_file(directory: Path) -> dict[str, Tensor]:
    """A file as a training loop of Colossal-AI writes it; the weights in it."""
    torch.manual_seed(1)
    state = make_module([], Writes().names).state_dict()
    torch.save({"epoch": 10, "model": state, "optimizer": {}}, directory / "old.pt")
    return state


@pytest.mark.parametrize(("row", "lines"), [_marked(row, lines) for row in RUNNING for lines in trainings(row)])
def test_a_line_trains(ranks: Pools, tmp_path: Path, row: Row, lines: list[Line]) -> None:
    """In the processes that its strategy needs, or else in a pipeline of two."""
    skip_without_libraries(row)
    write_old_file(tmp_path)
    if "global_batch_size" in row.cell:  # a whole number of batches makes it up
        lines = [*lines, Line("DataLoader(dataset, batch_size=8)")]
    size, sizes = processes_of(lines), sizes_of(lines)
    results = ranks(size, lightning=True).run(run_lines, lines, size, (), str(tmp_path), True)
    for result in results:
        assert result["metrics"] == results[0]["metrics"]
        assert all(math.isfinite(value) for value in result["metrics"].values())
        assert sizes.items() <= result["sizes"].items()
        assert (result["shared"] > 0) == (result["sizes"]["tensor_parallel_size"] > 1)
    only_strategy = len(lines) == 1 and lines[0].code.startswith("HybridStrategy(")
    if only_strategy and results[0]["sizes"]["data_parallel_size"] == 1:  # replicas have samples of their own
        alone = run_lines(lines, 1, (), None, True)
        assert_same(together([result["weights"] for result in results]), alone["weights"], 1e-5)


QUICK = """
    --trainer.accelerator=cpu --trainer.max_epochs=1 --trainer.limit_train_batches=2 --trainer.limit_val_batches=1
    --trainer.logger=false --trainer.enable_checkpointing=false --trainer.enable_progress_bar=false
"""


def run_program(words: list[str], directory: str) -> str:
    printed = io.StringIO()
    with inside(directory), contextlib.redirect_stdout(printed):
        sys.argv = ["lightning-hybrid"]
        main(words)
    return printed.getvalue()


def test_torchrun_starts_the_program(ranks: Pools, tmp_path: Path) -> None:
    """The ranks have what torchrun puts into the environment."""
    (command,) = [command for command in COMMANDS if command.startswith("torchrun")]
    options = torch.distributed.run.parse_args(command.replace("configs/", f"{ROOT}/configs/").split()[1:])
    assert (options.module, options.training_script) == (True, "lightning_hybrid")
    words = [*options.training_script_args, *QUICK.split()]
    first, second = ranks(int(options.nproc_per_node), lightning=True).run(run_program, words, str(tmp_path))
    assert "val_acc" in first
    assert second == ""


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.startswith("torchrun")])
def test_a_command_line_is_understood(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, *words = command.split()
    assert program == "lightning-hybrid"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [program])
    if words[0] == "timeline":
        main(words)
        assert "bubble" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--print_config"])
    assert stopped.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["trainer"]["strategy"]["init_args"]["pipeline_parallel_size"] == 2


@pytest.mark.parametrize(
    ("words", "cut"),
    [
        ([], [("0-2", "6.1%"), ("3-5", "93.9%")]),
        (["partition", "parameters"], [("0-3", "36.3%"), ("4-5", "63.7%")]),
        (["num_chunks", "2", "schedule", "interleaved_1f1b"], [("0", ""), ("1", ""), ("2-3", ""), ("4-5", "")]),
    ],
)
def test_the_network_of_the_tutorial_is_cut_into_its_stages(
    words: list[str], cut: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = (each for each in blocks("yaml") if "resnet50, channels: 3, num_classes: 10," in each)
    path = tmp_path / "resnet.yaml"
    path.write_text(block)
    options = [f"--trainer.strategy.init_args.{word}" if not index % 2 else word for index, word in enumerate(words)]
    with inside(str(ROOT)):
        main(["plan", "--config", str(path), *options])
    out = capsys.readouterr().out
    stages = re.findall(r"^ +\d+ +\d+  ([\d-]+) .* ([\d.]+%)$", out, re.MULTILINE)
    assert [layers for layers, _ in stages] == [layers for layers, _ in cut]
    assert all(share == expected for (_, share), (_, expected) in zip(stages, cut, strict=True) if expected)


@pytest.mark.parametrize("block", blocks("yaml"))
@pytest.mark.filterwarnings("ignore:You passed `Trainer")
def test_yaml_makes_a_training(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(block, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["lightning-hybrid"])
    with torch.device("meta"):
        words = ["--config", str(path), "--trainer.accelerator=cpu"]
        cli = HybridCLI(args=words, run=False, save_config_callback=None)
    assert isinstance(cli.trainer.strategy, HybridStrategy)
    arguments = yaml.safe_load(block)["trainer"]["strategy"]["init_args"]
    assert cli.trainer.strategy.settings.requested.pipeline_parallel_size == arguments["pipeline_parallel_size"]
    assert hasattr(cli.model, "body")


# -- schedules --------------------------------------------------------------------------------------------------------


def linear_rate(step: int, total_steps: int, warmup_steps: int) -> float:
    """The formula of Colossal-AI's LinearWarmupLR."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return (total_steps - step) / (total_steps - warmup_steps)


def cosine_rate(step: int, total_steps: int, warmup_steps: int, eta_min: float = 0.0) -> float:
    """The formula of Colossal-AI's CosineAnnealingWarmupLR."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    part = (step - warmup_steps) / (total_steps - warmup_steps)
    return eta_min + (1 - eta_min) * (1 + math.cos(math.pi * part)) / 2


FORMULAS = {"linear_warmup": linear_rate, "cosine_warmup": cosine_rate}


def rates_of(make: Callable[[torch.optim.Optimizer], Any], num_steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("sizes", [(60, 5), (300, 50), (300, 32), (10, 1), (10, 9), (4, 2), (4, 4), (6, 0)])
@pytest.mark.parametrize("name", FORMULAS)
def test_warm_up_follows_their_formula(name: str, sizes: tuple[int, int]) -> None:
    make = Writes().names[name]
    for extra in [{}, {"eta_min": 0.25}][: 2 if name == "cosine_warmup" else 1]:
        expected = [FORMULAS[name](step, *sizes, **extra) for step in range(sizes[0])]
        rates = rates_of(lambda optimizer, extra=extra: make(optimizer, *sizes, **extra), sizes[0])
        torch.testing.assert_close(rates, expected, rtol=1e-12, atol=1e-12)


class Rates(Callback):
    """The learning rate of every batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.values.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_every_stage_has_the_rates_of_the_schedule(ranks: Pools, interval: str) -> None:
    (scheduler,) = row_of("CosineAnnealingWarmupLR").lines
    (steps,) = row_of(f"LRSchedulerHook(by_epoch={interval == 'epoch'})").lines
    code = scheduler.code.replace("300", "8").replace("32", "3")
    lines = [
        Line("optimizer = torch.optim.SGD(self.parameters(), lr=1.0)", steps.place),
        Line(code, steps.place),
        steps,
    ]
    expected = [cosine_rate(batch // (1 if interval == "step" else 4), 8, 3) for batch in range(8)]
    for result in ranks(2, lightning=True).run(run_lines, lines, 2, (Rates(),)):
        torch.testing.assert_close(result["spies"][0], expected, rtol=1e-12, atol=1e-12)


# -- LAMB -------------------------------------------------------------------------------------------------------------


def lamb_step(
    x: Tensor, m: Tensor, v: Tensor, gradient: Tensor, step: int, arguments: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2 of https://arxiv.org/abs/1904.00962, for one layer and with phi(z) = z."""
    first, second = arguments["betas"]
    m = first * m + (1 - first) * gradient
    v = second * v + (1 - second) * gradient**2
    debiased = (m / (1 - first**step), v / (1 - second**step)) if arguments["bias_correction"] else (m, v)
    update = debiased[0] / (debiased[1].sqrt() + arguments["eps"]) + arguments["weight_decay"] * x
    ratio = x.square().sum().sqrt() / update.square().sum().sqrt()
    return x - arguments["lr"] * ratio * update, m, v


def test_lamb_takes_a_golden_step() -> None:
    parameter = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    parameter.grad = torch.tensor([1.0, -2.0], dtype=torch.float64)
    Lamb([parameter], lr=0.1, weight_decay=0.1, eps=0.0).step()
    # The first debiased update is the gradient's sign: (1, -1) + 0.1 * (3, 4) = (1.3, -0.6), of length sqrt(2.05).
    ratio = 5 / math.sqrt(2.05)
    expected = torch.tensor([3 - 0.1 * ratio * 1.3, 4 + 0.1 * ratio * 0.6], dtype=torch.float64)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-15, atol=0.0)
    torch.testing.assert_close(expected, torch.tensor([2.5460203, 4.2095291], dtype=torch.float64), rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_lamb_follows_the_paper(bias_correction: bool) -> None:
    arguments = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": bias_correction}
    layers = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in [(3, 4), (4,)]]
    expected = [(layer.detach().clone(), torch.zeros_like(layer), torch.zeros_like(layer)) for layer in layers]
    optimizer = Lamb(layers, **arguments)
    for step in range(1, 8):
        for index, layer in enumerate(layers):
            layer.grad = torch.randn_like(layer)
            expected[index] = lamb_step(*expected[index], layer.grad, step, arguments)
        optimizer.step()
    for layer, (value, _, _) in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer.detach(), value, rtol=1e-12, atol=1e-12)


def test_lamb_at_the_edges() -> None:
    layers = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizer = Lamb(layers, lr=0.5, eps=0.0)
    layers[0].grad = torch.ones(2)  # a parameter without length: the ratio is 1
    layers[1].grad = None
    loss = optimizer.step(lambda: torch.tensor(3.0, requires_grad=True) * 2)
    assert loss.requires_grad
    assert torch.equal(layers[0].detach(), torch.full((2,), -0.5))
    assert torch.equal(layers[1].detach(), torch.ones(2))
    for wrong in ({"lr": -1.0}, {"eps": -1.0}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Lamb(layers, **wrong)


class LambRegression(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = Lamb(self.parameters(), lr=1.8e-2, weight_decay=0.1)
        return [optimizer], [LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))]


def trained_by_lamb(layout: Any, path: str) -> dict[str, Tensor]:
    module = LambRegression()
    trainer = make_trainer(layout, max_epochs=3)
    trainer.fit(module, loader(), loader())
    trainer.save_checkpoint(path)
    return weights(module)


def test_lamb_trains_a_pipeline_as_one_process(ranks: Pools, tmp_path: Path) -> None:
    expected = trained_by_lamb(None, str(tmp_path / "one.ckpt"))
    assert not torch.equal(expected["embed.weight"], LambRegression().embed.weight)
    results = ranks(2, lightning=True).run(trained_by_lamb, {"pipeline_parallel_size": 2}, str(tmp_path / "two.ckpt"))
    assert_same(together(results), expected)
    two, one = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("two", "one"))
    assert_same(two["optimizer_states"], one["optimizer_states"])


# -- what the lines mean ----------------------------------------------------------------------------------------------


def compare(
    ranks: Pools, names: str | list[Line], *more: Line, spies: tuple[Callback, ...] = (), directory: Path | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Weights and metrics of a row's lines are those of one process; what came of them on both ranks, and there."""
    lines = [*(row_of(names).lines if isinstance(names, str) else names), *more]
    results = ranks(2, lightning=True).run(run_lines, lines, 2, spies, directory and str(directory))
    alone = run_lines(lines, 1, spies)
    assert_same(together([result["weights"] for result in results]), alone["weights"], 1e-5)
    for result in results:
        assert_same(result["metrics"], alone["metrics"], 1e-5)
        assert result["steps"] == alone["steps"]
    return results, alone


SMALL_BATCHES = Line("DataLoader(dataset + dataset, batch_size=2)")


def test_accumulation_steps_once_for_sixteen_batches_and_at_the_end_of_an_epoch(ranks: Pools) -> None:
    _, alone = compare(ranks, "gradient_accumulation = 16", SMALL_BATCHES)
    assert alone["steps"] == 2 * math.ceil(24 / 16)


class Norms(Callback):
    """The norm of the whole gradient that the optimizer saw."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if isinstance(trainer.strategy, HybridStrategy):
            self.values.append(trainer.strategy.grad_norm().item())


def test_the_norm_of_the_whole_gradient_is_clipped(ranks: Pools) -> None:
    steep = Line("loss = 100 * F.cross_entropy(logits, labels)", "training_step")
    results, _ = compare(ranks, "clip_grad_norm = 1.0", steep, spies=(Norms(),))
    for result in results:
        torch.testing.assert_close(result["spies"][0], [1.0] * 8, rtol=1e-5, atol=0.0)


def test_metrics_by_step_and_by_epoch(ranks: Pools) -> None:
    lines = row_of("LogMetricByEpochHook").lines + row_of("LogMetricByStepHook").lines
    results, alone = compare(ranks, lines)
    assert_same(results[0]["history"], alone["history"], 1e-5)
    logged = [name for _, metrics in alone["history"] for name in metrics]
    assert logged.count("loss_by_step") == 8
    assert logged.count("loss_by_epoch") == 2


def test_loss_and_accuracy_are_those_of_one_process(ranks: Pools) -> None:
    lines = row_of("LossHook").lines + row_of("AccuracyHook").lines
    _, alone = compare(ranks, lines)
    assert set(alone["metrics"]) == {"train_loss", "val_loss", "val_acc"}


class Durations(Callback):
    """What the profiler and the timer measured."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, *args: Any) -> None:
        self.values["batches"] = list(trainer.profiler.recorded_durations["run_training_batch"])
        (timer,) = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]
        self.values["training"] = timer.time_elapsed("train")


def test_durations_of_steps_are_measured_on_every_rank(ranks: Pools) -> None:
    lines = row_of("LogTimingByEpochHook").lines + row_of("get_timer").lines
    for result in ranks(2, lightning=True).run(run_lines, lines, 2, (Durations(),)):
        (durations,) = result["spies"]
        assert len(durations["batches"]) == 8
        assert 0 < sum(durations["batches"]) < durations["training"]


@pytest.mark.parametrize(("name", "replicas"), [("parallel=dict(pipeline=2)", 1), ("data parallel mode", 2)])
def test_throughput_counts_replicas(ranks: Pools, name: str, replicas: int) -> None:
    lines = row_of("ThroughputHook").lines + row_of("LogMetricByStepHook").lines + row_of(name).lines
    first, _ = ranks(2, lightning=True).run(run_lines, [*lines, SMALL_BATCHES])
    rows = [metrics for _, metrics in first["history"] if "train/device/samples_per_sec" in metrics]
    assert len(rows) >= 10
    for row in rows:
        of_one = row["train/device/samples_per_sec"]
        assert of_one == pytest.approx(2 * row["train/device/batches_per_sec"])
        assert row.get("train/samples_per_sec", of_one) == pytest.approx(replicas * of_one)


def test_every_rank_prints_its_peak_memory(ranks: Pools) -> None:
    results = ranks(2, lightning=True).run(run_lines, row_of("report_memory_usage").lines)
    for rank, result in enumerate(results):
        assert re.fullmatch(rf"(rank {rank}: [\d,]+ bytes\n){{2}}", result["printed"])


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("SaveCheckpointHook(interval=1)", [4, 8, 8]),
        ("save_by_iter", [2, 4, 6, 8, 8]),
        ("max_to_keep", [4, 6, 8, 8]),
        ("`save_checkpoint`", [8]),
    ],
)
def test_checkpoints_are_written_at_their_interval(ranks: Pools, tmp_path: Path, name: str, steps: list[int]) -> None:
    lines = row_of(name).lines
    results = ranks(2, lightning=True).run(run_lines, lines, 2, (), str(tmp_path))
    checkpoints = [torch.load(path, weights_only=False) for path in tmp_path.rglob("*.ckpt")]
    assert sorted(checkpoint["global_step"] for checkpoint in checkpoints) == steps
    last = max(checkpoints, key=lambda checkpoint: checkpoint["global_step"])
    assert_same(last["state_dict"], together([result["weights"] for result in results]), 0.0)
    make_module(lines, Writes().names).load_state_dict(last["state_dict"])


@pytest.mark.parametrize("name", ["SaveCheckpointHook(interval=1)", "save_by_iter", "max_to_keep"])
def test_the_last_checkpoint_is_resumed(ranks: Pools, tmp_path: Path, name: str) -> None:
    lines = [*row_of(name).lines, *row_of("`load_checkpoint`").lines, *row_of("LogMetricByStepHook").lines]
    first, again = (ranks(2, lightning=True).run(run_lines, lines, 2, (), str(tmp_path)) for _ in range(2))
    before, after = (together([result["weights"] for result in results]) for results in (first, again))
    assert_same(after, before, 0.0)
    assert {result["steps"] for result in (*first, *again)} == {8}
    assert first[0]["history"]
    assert not again[0]["history"]  # all epochs were done


def test_weights_of_an_old_file_are_loaded(ranks: Pools, tmp_path: Path) -> None:
    expected = write_old_file(tmp_path)
    lines = [
        *row_of("old file").lines,
        Line("optimizer = torch.optim.SGD(self.parameters(), lr=0.0)", "configure_optimizers"),
    ]
    results = ranks(2, lightning=True).run(run_lines, lines, 2, (), str(tmp_path), True)
    assert_same(together([result["weights"] for result in results]), expected, 0.0)


def test_steps_return_what_the_schedule_did(ranks: Pools) -> None:
    keep = Line("self.right = logits.shape == (6, 3) and bool((labels == batch[1]).all())", "on_train_batch_end")
    for result in ranks(2, lightning=True).run(run_lines, [*row_of("output, label, loss").lines, keep]):
        assert result["module"]["right"]


@pytest.mark.parametrize(("name", "files"), [("TensorboardHook", "events.out.*"), ("Trainer(engine", "metrics.csv")])
def test_one_rank_writes_one_file(ranks: Pools, tmp_path: Path, name: str, files: str) -> None:
    skip_without_libraries(row_of(name))
    lines = row_of(name).lines + row_of("LogMetricByStepHook").lines
    ranks(2, lightning=True).run(run_lines, lines, 2, (), str(tmp_path))
    (file,) = tmp_path.rglob(files)
    assert file.stat().st_size > 0


def test_parameters_of_each_stage_are_printed(ranks: Pools) -> None:
    row = row_of("number of parameters")
    results = ranks(2, lightning=True).run(run_lines, row.lines)
    layers, outside = 3 * (8 * 8 + 8), (6 * 8 + 8) + (8 * 3 + 3)
    for stage, result in enumerate(results):
        assert result["printed"] == f"number of parameters: {layers + outside} on pipeline stage {stage}\n"
    line = "    1        1  3-5               3 x Sequential        216             27         243  47.2%\n"
    assert line in results[0]["told"]
    assert "parameters" not in results[1]["told"]


STAGES = {
    "parallel=dict(pipeline=2)": [{0, 1, 2}, {3, 4, 5}],
    "NUM_CHUNKS=2": [{0, 2, 3}, {1, 4, 5}],
    "build_pipeline_model_from_cfg(partition_method='parameter')": [{0, 1, 2}, {3, 4, 5}],
    "self.head.pipeline_stage = 0": [{0, 1, 2}, {3, 4, 5}],
}


@pytest.mark.parametrize("name", STAGES)
def test_layers_are_where_they_should_be(ranks: Pools, name: str) -> None:
    results, _ = compare(ranks, name)
    held = [{int(name.split(".")[1]) for name in result["weights"] if name.startswith("body")} for result in results]
    assert held == STAGES[name]


def test_chunks_of_an_explicit_partition(ranks: Pools) -> None:
    results, _ = compare(ranks, row_of("build_pipeline_model", 'Colossal-AI: "Optimize').lines)
    results, _ = compare(ranks, [line for row in ROWS for line in row.lines if "[1, 2, 2, 1]" in line.code])
    held = [{int(name.split(".")[1]) for name in result["weights"] if name.startswith("body")} for result in results]
    assert held == [{0, 3, 4}, {1, 2, 5}]


def test_a_parameter_of_two_stages_stays_one(ranks: Pools) -> None:
    results, alone = compare(ranks, "PipelineSharedModuleWrapper")
    assert "body.5.0.weight" not in alone["weights"]
    for result in results:
        assert torch.equal(result["weights"]["body.0.0.weight"], results[0]["weights"]["body.0.0.weight"])


def test_mixup_has_the_same_share_on_every_rank(ranks: Pools) -> None:
    keep = Line("self.share = float(labels[2])", "training_step")
    first, second = ranks(2, lightning=True).run(run_lines, [*row_of("mixup_alpha").lines, keep])
    assert first["module"]["share"] == second["module"]["share"]
    assert 0 < first["module"]["share"] < 1


def test_predictions_are_those_of_one_process(ranks: Pools) -> None:
    results, alone = compare(ranks, "trainer.predict")
    for result in results:
        assert_same(result["outputs"], alone["outputs"], 1e-5)


def test_the_effective_batch_is_told(ranks: Pools) -> None:
    first, _ = ranks(2, lightning=True).run(run_lines, row_of("BATCH_SIZE").lines)
    assert "Effective batch: 256 samples x 1 replica x 1 accumulated batch = 256 per optimizer step" in first["told"]

"""The estimate of memory is what a run holds."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.gpt import GPT
from lightning_hybrid import Faults, HybridStrategy, Tuning
from lightning_hybrid.cli.main import main
from lightning_hybrid.distributed.sizes import resolve_sizes
from lightning_hybrid.memory.account import (
    LocalParameter,
    MemoryUsage,
    SavedTensorMeter,
    most_in_flight,
    optimizer_state_bytes,
    peak_activation_bytes,
    peak_parameter_bytes,
    storage_bytes,
)
from lightning_hybrid.pipeline_parallel.schedules import build
from lightning_hybrid.tuning.dry_run.dry_run import dry_run
from tests.daily import daily
from tests.memory.meter import MemoryMeter, printed_usages
from tests.pool import Pools
from tests.test_examples import CONFIGS, ROOT
from tests.zoo.experts import Experts

FIELDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "total")
KIB = 2**10


class Words(GPT):
    """The example's GPT with a loader of its own."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(dim=64, depth=4, heads=4, length=32, **arguments)

    def train_dataloader(self) -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(torch.randint(0, 256, (64, 33), generator=generator), 8)


class MadeLater(LightningModule):
    """Made in `configure_model`; has buffers, something frozen, and a layer that draws."""

    def __init__(self, layers: int = 6, width: int = 128) -> None:
        super().__init__()
        self.layers, self.width, self.body = layers, width, None

    def configure_model(self) -> None:
        if self.body is None:
            self.body = nn.Sequential(*(self.layer() for _ in range(self.layers)))
            self.head = nn.Linear(self.width, 1)
            self.body[0].requires_grad_(False)

    def layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, self.width), nn.BatchNorm1d(self.width), nn.Dropout(0.5))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.body(batch)).square().mean()

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(64, self.width), 16)

    def configure_optimizers(self) -> Any:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trainable, lr=0.1, momentum=0.9)


class Routed(nn.Module):
    """A layer whose tokens choose experts in turn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.experts = Experts(4, width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(len(x)).unsqueeze(1) % 4
        return self.experts(self.linear(x), index, torch.ones_like(index, dtype=x.dtype))


class Mixture(MadeLater):
    """Most parameters are in experts."""

    def layer(self) -> nn.Module:
        return Routed(self.width)


def run(cls: type[LightningModule], devices: int, arguments: dict[str, Any], precision: str) -> tuple[Any, str]:
    """What is measured in the first step of a run, and what the run says of its memory when it begins."""
    messages: list[str] = []
    meter = MemoryMeter()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("lightning.pytorch"), Handler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        trainer = Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=HybridStrategy(**arguments, faults=Faults(compare_microbatches=False)),
            callbacks=[meter],
            precision=precision,  # type: ignore[arg-type]
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(cls())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.ERROR)
    return meter.usages, next((text for text in messages if text.startswith("Estimated memory per rank")), "")


def table_bytes(table: str) -> list[dict[str, float]]:
    """The numbers of a table in bytes, by pipeline rank and column."""
    lines = table.splitlines()
    (names,) = [line.split()[1:] for line in lines if line.startswith("GiB")]
    rows = [line.split()[3:] for line in lines if line.startswith("pipeline rank")]
    return [{name: float(text.replace(",", "")) * 2**30 for name, text in zip(names, row, strict=True)} for row in rows]


def estimate(
    cls: type[LightningModule], arguments: dict[str, Any], size: int, precision: Precision
) -> list[MemoryUsage]:
    strategy = HybridStrategy(**arguments)
    sizes = resolve_sizes(size, strategy.settings.requested_sizes | {"data": "auto"})
    return list(dry_run(lambda: (cls(), None), strategy.settings, sizes, precision=precision).memory)


SQUARE: dict[str, Any] = {"tensor_parallel_size": 4, "tensor_parallel_mode": "2d"}
CASES: dict[str, tuple[type[LightningModule], int, dict[str, Any]]] = {
    "dp2": (Words, 2, {}),
    "dp2 zero 1": (Words, 2, {"zero_stage": 1}),
    "dp2 zero 2": (Words, 2, {"zero_stage": 2}),
    "dp2 zero 3": (Words, 2, {"zero_stage": 3}),
    "dp4 zero 2 in pairs": (Words, 4, {"zero_stage": 2, "zero_size": 2}),
    "dp2 zero 3 per step": (Words, 2, {"zero_stage": 3, "num_microbatches": 2}),
    "pp2": (Words, 2, {"pipeline_parallel_size": 2, "num_microbatches": 4}),
    "pp2 gpipe": (Words, 2, {"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": "gpipe"}),
    "pp2 recomputing": (Words, 2, {"pipeline_parallel_size": 2, "recompute": True}),
    "pp2 selective": (Words, 2, {"pipeline_parallel_size": 2, "recompute": "selective"}),
    "chunks": (Words, 2, {"pipeline_parallel_size": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"}),
    "tp2": (Words, 2, {"tensor_parallel_size": 2}),
    "tp2 sequences": (Words, 2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "tp2 pp2": (Words, 4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "cp2 ulysses": (Words, 2, {"context_parallel_size": 2}),
    "cp2 ring": (Words, 2, {"context_parallel_size": 2, "context_parallel": "ring"}),
    "cp2 all_gather": (Words, 2, {"context_parallel_size": 2, "context_parallel": "all_gather"}),
    "cp2 pp2": (Words, 4, {"context_parallel_size": 2, "pipeline_parallel_size": 2, "recompute": True}),
    "cp2 dp2 zero 2": (Words, 4, {"context_parallel_size": 2, "zero_stage": 2}),
    "tp4 2d": (Words, 4, SQUARE),
    "tp4 2d pp2": (Words, 8, {**SQUARE, "pipeline_parallel_size": 2}),
    "dp2 experts": (Mixture, 2, {"expert_parallel_size": 2}),
    # In a single backward, the gradients of experts would be reduced before the last gradient exists.
    "dp4 experts zero 1": (Mixture, 4, {"expert_parallel_size": 2, "zero_stage": 1, "num_microbatches": 2}),
    "dp2 experts zero 3": (Mixture, 2, {"expert_parallel_size": 2, "zero_stage": 3}),
    "dp4 experts zero 3": (Mixture, 4, {"expert_parallel_size": 2, "zero_stage": 3}),
    "tp2 experts": (Mixture, 2, {"tensor_parallel_size": 2, "expert_parallel": "tensor"}),
    "made later": (MadeLater, 2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
}


#: Of which others know as much.
SOME = "cp2 ulysses", "cp2 ring", "cp2 pp2", "cp2 dp2 zero 2", "tp4 2d pp2"
EACH_CASE = daily(CASES, *(case for case in CASES if case not in SOME))


@pytest.mark.distributed
@pytest.mark.parametrize("case", EACH_CASE)
def test_a_run_holds_what_is_estimated(ranks: Pools, case: str) -> None:
    cls, size, arguments = CASES[case]
    measured, table = ranks(size, lightning=True).run(run, cls, size, arguments, "32-true")[0]
    logged = table_bytes(table)
    estimates = estimate(cls, arguments, size, Precision())
    assert len(measured) == len(logged) == len(estimates)
    for (usage, activations), of_run, expected in zip(measured, logged, estimates, strict=True):
        of_run["activations"] = activations
        of_run["total"] = sum(of_run.values())
        assert set(of_run) == set(FIELDS)
        for name in FIELDS:
            value = getattr(expected, name)
            tolerance = 0.1 if name == "total" else 0.15  # gradients of tied parameters come later than others
            assert getattr(usage, name) == pytest.approx(value, rel=tolerance, abs=12 * KIB), name
            assert of_run[name] == pytest.approx(value, rel=0.02, abs=12 * KIB), name


@pytest.mark.distributed
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_gradients_in_float32_are_estimated(ranks: Pools, zero_stage: int) -> None:
    arguments = {"num_microbatches": 2, "zero_stage": zero_stage, "tuning": Tuning(float32_gradients=True)}
    ((usage, _),), _ = ranks(2, lightning=True).run(run, Words, 2, arguments, "bf16-true")[0]
    (expected,) = estimate(Words, arguments, 2, HalfPrecision("bf16-true"))
    for name in FIELDS:
        assert getattr(usage, name) == pytest.approx(getattr(expected, name), rel=0.15, abs=12 * KIB), name


@pytest.mark.distributed
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_master_weights_are_estimated(ranks: Pools, zero_stage: int) -> None:
    arguments = {"zero_stage": zero_stage, "master_weights": True}
    ((usage, _),), _ = ranks(2, lightning=True).run(run, Words, 2, arguments, "bf16-true")[0]
    (expected,) = estimate(Words, arguments, 2, HalfPrecision("bf16-true"))
    (without,) = estimate(Words, {"zero_stage": zero_stage}, 2, HalfPrecision("bf16-true"))
    held = sum(each.numel() for each in Words().parameters()) / (2 if zero_stage else 1)
    assert expected.parameters == pytest.approx(without.parameters + 4 * held, rel=0.02)
    assert usage.optimizer == pytest.approx(expected.optimizer, rel=0.15, abs=12 * KIB)
    assert expected.optimizer == pytest.approx(8 * held, rel=0.02)
    assert expected.gradients == pytest.approx(4 * held, rel=0.02)  # at the optimizer's step


@pytest.mark.distributed
def test_half_precision_is_estimated(ranks: Pools) -> None:
    arguments = {"pipeline_parallel_size": 2, "num_microbatches": 4}
    measured, _ = ranks(2, lightning=True).run(run, Words, 2, arguments, "bf16-mixed")[0]
    estimates = estimate(Words, arguments, 2, MixedPrecision("bf16-mixed", "cpu"))
    for (usage, _), expected in zip(measured, estimates, strict=True):
        assert usage.activations == pytest.approx(expected.activations, rel=0.1)


@pytest.mark.distributed
def test_weights_in_half_precision_count_once_for_all_microbatches(ranks: Pools) -> None:
    arguments = {"pipeline_parallel_size": 2, "num_microbatches": 8, "schedule": "gpipe"}
    measured, _ = ranks(2, lightning=True).run(run, MadeLater, 2, arguments, "bf16-mixed")[0]
    first, last = estimate(MadeLater, arguments, 2, MixedPrecision("bf16-mixed", "cpu"))
    assert measured[1][0].activations == pytest.approx(last.activations, rel=0.1)
    # The weight of the first trained layer is cast too, but autograd does not save it: nothing before it is trained.
    assert measured[0][0].activations < first.activations < 2 * measured[0][0].activations


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_examples_hold_what_is_estimated(config: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # A step of the largest example, with 256 images, would compute for minutes.
    small = ["--data.init_args.batch_size", "32"] if config.stem == "vit_b16" else []
    main(["memory", "--json", "--config", str(config), *small])
    estimates = json.loads(capfd.readouterr().out)["bytes_of_pipeline_ranks"]
    meter = {"class_path": "tests.memory.meter.MemoryMeter", "init_args": {"prints": True}}
    options = [*small, "--trainer.max_steps", "1", "--trainer.default_root_dir", str(tmp_path)]
    options += ["--trainer.callbacks+", json.dumps(meter)]
    command = [sys.executable, "-m", "lightning_hybrid", "fit", "--config", str(config), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    measured = printed_usages(output)
    for usage, expected in zip(measured, estimates, strict=True):
        values = [getattr(usage, name) for name in FIELDS]
        assert values == pytest.approx([expected[name] for name in FIELDS], rel=0.1, abs=12 * KIB)


def test_zero_holds_what_its_table_says() -> None:
    parameters = [LocalParameter(torch.Size([10, 3]), 4, 4, layer) for layer in (0, 1)]
    parameters += [LocalParameter(torch.Size([7]), 4, 4), LocalParameter(torch.Size([]), 4, 4)]
    parameters.append(LocalParameter(torch.Size([4]), 4, 0, 1))

    def peak(num_replicas: int, zero_stage: int, **options: bool) -> tuple[int, int]:
        sharded = [replace(each, num_shards=num_replicas) for each in parameters]
        return peak_parameter_bytes(sharded, zero_stage=zero_stage, **options)

    layers, outside, single, frozen = (30, 30), 7, 1, 4
    whole = sum(layers) + outside + frozen + single
    assert peak(1, 3) == (4 * whole, 4 * (whole - frozen))
    assert peak(2, 0) == (4 * whole, 4 * (whole - frozen))
    padded = whole + 1  # 7 rows are held as 8
    assert peak(2, 1) == (4 * (padded + 34), 4 * (whole - frozen))
    shards = 15 + 15 + 4 + single  # of 10, 10 and 7 rows
    assert peak(2, 2) == (4 * (padded + 34), 4 * (shards + outside + 30))
    assert peak(2, 2, single_backward=True) == (4 * (padded + 34), 4 * (15 + single + outside + 30))
    at_rest = shards + 2
    gradients = 4 * (shards + outside + 30)
    assert peak(2, 3) == (4 * (at_rest + padded - single), gradients)
    parameters.append(LocalParameter(torch.Size([10, 3]), 4, 4, 2))
    assert peak(2, 3, frees_early=True)[0] == 4 * (at_rest + 15 + 8 + 34 + 30)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 48),
        (lambda p: torch.optim.AdamW(p, lr=0.1), 2 * 48 + 4),
        (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), 3 * 48 + 4),
        (lambda p: torch.optim.Adafactor(p, lr=0.1), 4 * (3 + 4) + 4),
        (lambda p: torch.optim.LBFGS(p, lr=0.1), None),
    ],
)
def test_state_bytes_leave_the_optimizer_alone(optimizer: Any, expected: int | None) -> None:
    parameter = nn.Parameter(torch.ones(3, 4))
    made = optimizer([parameter])
    steps: list[Any] = []
    made.register_step_post_hook(lambda *args: steps.append(args))
    torch.optim.lr_scheduler.StepLR(made, 1)
    assert optimizer_state_bytes(made, made.param_groups[0], parameter) == expected
    assert not made.state
    assert not steps
    assert made.param_groups[0]["params"] == [parameter]
    assert torch.equal(parameter, torch.ones(3, 4))


@pytest.mark.parametrize(("ranks_", "microbatches"), [(1, 1), (4, 8), (4, 2)])
def test_a_rank_holds_as_many_micro_batches_as_the_papers_say(ranks_: int, microbatches: int) -> None:
    schedule = build("1f1b", ranks_, microbatches)
    for rank in range(ranks_):
        assert peak_activation_bytes(schedule, rank, {rank: 5}) == 5 * min(microbatches, ranks_ - rank)


def saved_bytes(meter: SavedTensorMeter, labels: list[Any]) -> int:
    return sum({key: size for label in labels for key, size in meter.storages(label).items()}.values())


def test_what_autograd_saves_is_counted_by_label() -> None:
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(8, 4)
    meter = SavedTensorMeter([weight])
    with meter():
        meter.label = "first"
        y = (x @ weight).sigmoid()  # saves x, and its result
        meter.label = "second"
        z = y.exp()  # saves its result, of which a view is saved once more
        loss = (z[:4] * y[4:]).sum()
    size = 8 * 4 * 4
    assert saved_bytes(meter, ["first"]) == 2 * size
    assert saved_bytes(meter, ["second"]) == 2 * size
    assert saved_bytes(meter, ["first", "second"]) == 3 * size
    expected = torch.autograd.grad(loss, weight, retain_graph=True)
    loss.backward()
    assert torch.equal(weight.grad, expected[0])


def test_what_is_dropped_is_counted_no_more_and_let_go_of() -> None:
    x = torch.randn(8, 4, requires_grad=True)
    meter = SavedTensorMeter([])
    with meter():
        y = x.exp()  # saves its result
        dropped = x.sigmoid()
        storage = weakref.ref(dropped.untyped_storage())
        assert saved_bytes(meter, [None]) == 2 * 8 * 4 * 4
        del dropped
    assert saved_bytes(meter, [None]) == 8 * 4 * 4
    assert storage() is None
    y.sum().backward()


def test_second_derivatives_pass() -> None:
    weight = torch.randn(3, requires_grad=True)
    with SavedTensorMeter([])():
        (first,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), weight)
    assert torch.equal(second, 6 * weight)


def test_a_shared_storage_counts_once() -> None:
    tensor = torch.zeros(4, 4)
    assert storage_bytes([tensor, tensor[1:], torch.zeros(2), torch.zeros(9, device="meta")]) == 64 + 8


class ReadsNumbers(Words):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        assert float(loss) > 0
        return loss


class ReadsNumbersLater(MadeLater):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert float(loss) >= 0
        return loss


class OnMeta(ReadsNumbersLater):
    def configure_model(self) -> None:
        with torch.device("meta"):
            super().configure_model()


class RatesInNumbers(MadeLater):
    def configure_model(self) -> None:
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 6)]
        super().configure_model()


class PlainTensor(MadeLater):
    def configure_model(self) -> None:
        super().configure_model()
        self.scale = torch.ones(())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch * self.scale, batch_idx)


class AsksForTheMesh(MadeLater):
    def configure_model(self) -> None:
        super().configure_model()
        assert self.device_mesh is not None
        assert self.device_mesh["data_parallel"].size() == 2


class TalksToTheLogger(MadeLater):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.logger.experiment.add_scalar("x", 1.0)  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


class ByHand(Words):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_a_step_that_reads_numbers_is_run_with_numbers() -> None:
    assert estimate(ReadsNumbers, {}, 1, Precision()) == estimate(Words, {}, 1, Precision())


@pytest.mark.parametrize(
    "cls",
    [ReadsNumbersLater, RatesInNumbers, PlainTensor, AsksForTheMesh, TalksToTheLogger],
    ids=lambda cls: cls.__name__,
)
def test_modules_that_do_what_they_like_in_a_run(cls: type[LightningModule]) -> None:
    assert estimate(cls, {}, 2, Precision()) == estimate(MadeLater, {}, 2, Precision())


def test_buffers_without_values_are_recomputed() -> None:
    (every,) = estimate(MadeLater, {}, 1, Precision())
    (recomputed,) = estimate(MadeLater, {"recompute": True}, 1, Precision())
    assert recomputed.activations is not None
    assert every.activations is not None
    assert recomputed.activations < every.activations / 2


def test_a_step_that_reads_numbers_which_are_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot run without parameter values"):
        estimate(OnMeta, {}, 1, Precision())


def test_what_cannot_be_estimated_is_left_open() -> None:
    (usage,) = estimate(ByHand, {}, 1, Precision())
    assert usage.activations is None
    assert usage.total is None
    assert usage.parameters > 0


def test_any_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    config = next(path for path in CONFIGS if path.stem == "gpt_hybrid")
    main(["memory", "--config", str(config), "--ranks", "256", "--trainer.strategy.init_args.zero_stage", "1"])
    output = capsys.readouterr().out
    assert "data 64 x tensor 2 x pipeline 2 = 256 processes" in output
    assert len(table_bytes(output)) == 2


@pytest.mark.parametrize(("ranks_", "text"), [("3", "cannot be divided into groups"), ("0", "devices")])
def test_wrong_numbers_of_ranks(ranks_: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = next(path for path in CONFIGS if path.stem == "gpt_hybrid")
    with pytest.raises(SystemExit):
        main(["memory", "--config", str(config), "--ranks", ranks_])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_the_most_bytes_are_those_of_the_times_at_which_most_is_in_flight(name: str) -> None:
    """Whatever a microbatch takes in each stage, going through the whole schedule finds nothing larger."""
    ranks, chunks = 4, 3 if name == "interleaved_1f1b" else 1
    schedule = build(name, ranks, 8, chunks)
    draw = random.Random(0)
    for _ in range(20):
        saved = {stage: draw.choice((0, 1, draw.randrange(1000))) for stage in range(ranks * chunks)}
        for rank in range(ranks):
            times = most_in_flight(schedule, rank)
            most = max(sum(count * saved[stage] for stage, count in counts.items()) for counts in times)
            assert most == peak_activation_bytes(schedule, rank, saved)
            assert len(times) < 8 * chunks, "times at which less is held are left out"

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_hybrid
from lightning_hybrid import Faults
from lightning_hybrid.axes import Sizes
from lightning_hybrid.cli.check import CheckResult, check
from lightning_hybrid.cli.check_training import TrainingRecord
from lightning_hybrid.cli.comparison import compare, interleaved
from lightning_hybrid.cli.local_ranks import RankError, run_ranks
from lightning_hybrid.cli.main import main
from lightning_hybrid.distributed.mesh import Mesh
from tests.daily import daily
from tests.zoo import basic, frame, tensor

ROOT = Path(__file__).parent.parent.parent
PP2: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 4}
#: Microbatches are averaged as they are.
PLAIN_MEANS: dict[str, Any] = {"num_microbatches": 2, "faults": Faults(compare_microbatches=False)}


class Contrastive(basic.Around):
    """Each sample against all others of its batch."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x) @ y.T, torch.arange(len(x)))


class UnweightedTokens(basic.TokenWeighted):
    """A mean over the tokens of a batch, and nobody says so."""

    microbatch_weight = None  # type: ignore[assignment]


class Sum(basic.Around):
    """A sum over samples."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y, reduction="sum")


class DependsOnStages(basic.Around):
    """Something that no layout can hide: the step asks for the world."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.trainer.world_size


class Dropouts(basic.Around):
    """Dropout of every kind: layers, functions and attention."""

    def build(self) -> None:
        super().build()
        self.body = nn.Sequential(*(nn.Sequential(basic.block(8), nn.Dropout(0.2)) for _ in range(4)))
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.drop_probability = 0.5

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        tokens = h.view(-1, 2, 4).repeat(1, 1, 2)
        h = h + self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1)
        return self.head(self.body(F.dropout(h, self.drop_probability, self.training)))


class InFloat32(basic.Around):
    """A loss that is computed in float32, as those of causal language models are."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x).float(), y.float())


class Manual(basic.Around):
    """Optimizes by itself."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False


class Crashes(basic.Around):
    """The last stage's loss has a mistake."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + torch.zeros(2)[2 if self.trainer.world_size > 1 else 1]


class Fails(basic.Around):
    """In one process, too."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + {}["weight"]


class Hangs(basic.Around):
    """Never comes to an end on one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        while self.global_rank == 1:
            time.sleep(0.1)
        return super().training_step(batch, batch_idx)


class Dies(basic.Around):
    """Killed, as by the system when there is no memory left."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


# -- the numbers of one process ----------------------------------------------------------------------------------------


def _by_hand(replicas: int, clip: float | None) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Two steps of `Around` in plain torch: losses, norms and weights; the mean over replicas, each with its batch."""
    torch.manual_seed(0)
    module = basic.Around().double()
    optimizer = module.configure_optimizers()
    batches = [[part.double() for part in batch] for batch in module.train_dataloader()]
    losses, norms = [], []
    for step in range(2):
        optimizer.zero_grad()
        of_step = [module.loss(batch) for batch in batches[step * replicas : (step + 1) * replicas]]
        mean = sum(of_step) / replicas
        mean.backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip or float("inf"))))
        optimizer.step()
        losses.append(float(mean.detach()))
    return losses, norms, dict(module.named_parameters())


@pytest.mark.distributed
@pytest.mark.parametrize(("replicas", "clip"), [(1, None), (2, 0.05)])
def test_what_is_compared_is_one_process(replicas: int, clip: float | None) -> None:
    losses, norms, weights = _by_hand(replicas, clip)
    result = check(basic.Around, trainer={"gradient_clip_val": clip}, data_parallel_size=replicas, zero_stage=1)
    assert result.equal, result
    found = {(each.step, each.name): each for each in result.comparisons}
    for step in (1, 2):
        assert found[step, "loss"].expected == pytest.approx(losses[step - 1], rel=1e-10)
        assert found[step, "gradient norm"].expected == pytest.approx(norms[step - 1], rel=1e-10)
    assert {name for _, name in found if name.startswith("weight ")} == {f"weight {name}" for name in weights}
    for name, weight in weights.items():
        assert found[None, f"weight {name}"].expected == pytest.approx(float(weight.detach().norm()), rel=1e-10)


EQUAL: dict[str, tuple[type[basic.Example], dict[str, Any], dict[str, Any]]] = {
    "sequential": (basic.Plain, {}, PP2),
    "frame": (frame.Loop, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}, PP2),
    "tensor": (tensor.GPT, {}, {"tensor_parallel_size": 2}),
    "zero": (basic.Tied, {"accumulate_grad_batches": 2}, {"data_parallel_size": 2, "zero_stage": 3}),
    "replicas of a pipeline, metrics": (basic.Classifier, {}, {**PP2, "data_parallel_size": 2}),
    "weights of microbatches": (basic.TokenWeighted, {}, {"data_parallel_size": 2, "num_microbatches": 2}),
    "statistics": (basic.Normalised, {}, {**PP2, "num_microbatches": 1}),
    "couples samples": (Contrastive, {}, {**PP2, "num_microbatches": 1}),
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", daily(EQUAL, *[*EQUAL][::2]))
def test_equal(name: str) -> None:
    module, trainer, layout = EQUAL[name]
    result = check(module, trainer=trainer, **layout)
    assert result.equal, str(result)
    assert result.largest.difference < 1e-12
    assert not result.notes
    assert "Equal within 1e-12" in str(result) or "Equal to the last bit" in str(result)


@pytest.mark.distributed
def test_dropout_is_off_and_said() -> None:
    result = check(Dropouts, **PP2)
    assert result.equal, str(result)
    assert "Dropout probabilities set to 0: 6." in str(result)


@pytest.mark.distributed
def test_what_float32_allows() -> None:
    result = check(InFloat32, **PP2)
    assert result.equal, str(result)
    assert 1e-12 < result.largest.difference < 1e-6
    assert re.search(r"computes in float32 at .*tests/cli/test_check.py:\d+", str(result))


@pytest.mark.distributed
def test_random_numbers_are_those_of_the_same_microbatches() -> None:
    result = check(basic.Noisy, **PP2)
    assert result.equal, str(result)
    assert result.largest.difference < 1e-12
    assert "one process ran the same microbatches" in str(result)


# -- differences, and why ----------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("module", "layout", "reason", "remedy"),
    [
        (
            basic.Normalised,
            {**PP2, "num_microbatches": 3},
            "the BatchNorm layers (8) use the statistics of each microbatch",
            "GroupNorm",
        ),
        (Contrastive, {"num_microbatches": 2}, "couples the samples", "num_microbatches=1"),
        (
            UnweightedTokens,
            {**PP2, **PLAIN_MEANS},
            "a mean over units other than samples",
            "`microbatch_weight(",
        ),
        (Sum, PLAIN_MEANS, "the loss is a sum over samples", 'loss_reduction="sum"'),
        (
            basic.LogsProduct,
            {"num_microbatches": 2},
            "logged values are not means over the samples: square",
            "`reduce_fx`",
        ),
        (DependsOnStages, PP2, "with pipeline_parallel_size=1, the results are equal", "lightning-hybrid plan"),
        (frame.FrameDrops, PP2, "the step draws random numbers", "Turn off"),
        (basic.Noisy, {"data_parallel_size": 2}, "the step draws random numbers", "Turn off"),
        (basic.Noisy, {"data_parallel_size": 2}, "the step draws random numbers", "draw them in the Dataset"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_why(module: type[LightningModule], layout: dict[str, Any], reason: str, remedy: str) -> None:
    result = check(module, **layout)
    assert not result.equal
    assert reason in result.reason, str(result)
    assert remedy in result.remedy
    first = result.differences[0]
    assert first.step == 1
    assert f"Different. First difference: {first.name} of step 1" in str(result)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("module", "layout"),
    [
        (UnweightedTokens, {**PP2, "num_microbatches": 2}),  # weighted by their tokens
        (Sum, {"num_microbatches": 2}),  # summed
        (Contrastive, {"pipeline_parallel_size": 2}),  # one microbatch is chosen
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_losses_that_a_run_recognizes_are_equal(module: type[LightningModule], layout: dict[str, Any]) -> None:
    result = check(module, **layout)
    assert result.equal, str(result)


def with_noise(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    x = torch.stack(samples)
    return x, torch.randn_like(x)


class Denoises(basic.Example):
    """Noise that comes with the batch."""

    def loss(self, batch: Any) -> Tensor:
        x, noise = batch
        return nn.functional.mse_loss(self(x + noise), noise)

    def train_dataloader(self) -> Any:
        x = torch.randn(32, basic.WIDTH, dtype=torch.float64)
        return DataLoader(list(x), batch_size=8, collate_fn=with_noise)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", [{"data_parallel_size": 2}, PP2, {**PP2, "num_microbatches": 1}])
def test_noise_that_comes_with_the_batch_is_the_same(layout: dict[str, Any]) -> None:
    assert check(Denoises, **layout).equal


@pytest.mark.distributed
def test_weights_of_microbatches_are_found() -> None:
    """The shares of tokens, which the loss is divided by."""
    result = check(UnweightedTokens, **PLAIN_MEANS)
    torch.manual_seed(0)
    _, targets = next(iter(basic.TokenWeighted().train_dataloader()))
    tokens = [int((part >= 0).sum()) for part in targets.chunk(2)]
    weights = f"{tokens[0] / sum(tokens):.4g}, {tokens[1] / sum(tokens):.4g}"
    assert f"the correct weights of the microbatches are {weights}, but the weights 0.5, 0.5 were used" in result.reason


# -- what does not train -----------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Manual, r"Training under data 1 x tensor 1 x pipeline 2 = 2 processes, 4 microbatches: .*manual"),
        (Crashes, r"(?s)Rank 1 of 2 raised IndexError: index 2 is out of bounds.*in loss"),
        (
            Crashes,
            r"(?s)test_check.py\", line \d+, in loss.*The step works in one process, so the layout causes the error\. "
            "To find the argument",
        ),
        (
            Fails,
            r"(?s)in one process: Rank 0 of 1 raised KeyError.*in loss.*also fails in one process\. "
            "Train with `Trainer",
        ),
        (Hangs, r"(?s)took longer than the time limit.*in training_step"),
        (Dies, r"Rank 1 of 2 died \(exit code -9\)"),
    ],
)
def test_failures_are_told(module: type[LightningModule], text: str) -> None:
    with pytest.raises(RankError, match=text) as failed:
        check(module, time_limit=8.0 if module is Hangs else 60.0, **PP2)
    assert "site-packages" not in str(failed.value) or not failed.value.is_raised


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"time_limit": 0}, "time_limit must be a positive number of seconds"),
        ({"trainer": {"devices": 2}}, "trainer accepts only accumulate_grad_batches, .*, but got devices"),
        ({"schedule": "1f2b"}, "schedule must be one of"),
    ],
)
def test_wrong_use(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check(basic.Plain, **arguments)


@pytest.mark.distributed
def test_a_loader_without_batches() -> None:
    with pytest.raises(RankError, match="returned no batches"):
        check(basic.Plain, lambda: DataLoader(basic.Samples([])), num_microbatches=2)


class NotANumber(basic.Around):
    """Has no loss."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * float("nan")


@pytest.mark.distributed
def test_what_is_not_finite_is_not_equal() -> None:
    with pytest.raises(ValueError, match=r"In one process, the losses are \[nan, nan\]"):
        check(NotANumber, num_microbatches=2)


# -- comparing ---------------------------------------------------------------------------------------------------------


def _record(**values: Any) -> TrainingRecord:
    return TrainingRecord(
        **{
            "losses": [1.0, 2.0, 3.0, 4.0],
            "logged": [{"x": 1.0}, {"x": 2.0}, {"x": 3.0}, {"x": 4.0}],
            "grad_norms": [5.0, 6.0],
            "weights": {"w": torch.ones(4), "mean": torch.zeros(2)},
            "parameter_names": frozenset({"w"}),
            **values,
        }
    )


def _change(path: Callable[[TrainingRecord], Any], key: Any, value: Any) -> TrainingRecord:
    record = deepcopy(_record())
    path(record)[key] = value
    return record


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (_change(lambda r: r.losses, 3, 4.04), [(2, "loss", 0.01)]),
        (_change(lambda r: r.logged[0], "x", 2.0), [(1, "log x", 1.0)]),
        (_change(lambda r: r.logged[0], "y", 2.0), [(1, "log y", float("inf"))]),
        (_change(lambda r: r.grad_norms, 1, float("nan")), [(2, "gradient norm", float("inf"))]),
        (_change(lambda r: r.weights, "w", torch.tensor([1.0, 1, 1, 1.2])), [(None, "weight w", 0.1)]),
        (_change(lambda r: r.weights, "w", torch.ones(3)), [(None, "weight w", float("inf"))]),
        (_change(lambda r: r.weights, "mean", torch.full((2,), 1e-4)), [(None, "buffer mean", 0.1)]),
        (_change(lambda r: r.epoch_logged, "z", 1.0), [(None, "log z", float("inf"))]),
    ],
)
def test_each_difference_is_found(changed: TrainingRecord, expected: list[tuple[Any, str, float]]) -> None:
    assert not [each for each in compare(_record(), [_record()], steps=2, replicas=1) if each.difference]
    compared = compare(_record(), [changed], steps=2, replicas=1)
    found = [(each.step, each.name, each.difference) for each in compared if each.difference]
    assert [pair[:2] for pair in found] == [pair[:2] for pair in expected]
    assert [pair[2] for pair in found] == pytest.approx([pair[2] for pair in expected])


def test_replicas_log_their_own_values_or_common_ones() -> None:
    """Two steps of two replicas: what each logs itself, or `sync_dist=True` makes of them."""

    def replicas(*logged: tuple[float, float]) -> list[TrainingRecord]:
        return [
            _record(data_rank=rank, losses=[1.0 + rank, 3.0 + rank], logged=[{"x": each[rank]} for each in logged])
            for rank in (0, 1)
        ]

    def differences(ranks: list[TrainingRecord]) -> list[str]:
        return [each.name for each in compare(_record(), ranks, steps=2, replicas=2) if each.difference]

    own = replicas((1, 2), (3, 4))
    assert not differences(own)
    assert interleaved(own).losses == _record().losses
    assert interleaved(own).logged == _record().logged
    assert not differences(replicas((1.5, 1.5), (3.5, 3.5)))  # the mean
    assert not differences(replicas((3, 3), (7, 7)))  # the sum
    assert not differences(replicas((2, 2), (4, 4)))  # the maximum
    assert differences(replicas((2, 1), (3, 4))) == ["log x"]
    assert differences([*own[:1], _record(data_rank=1, losses=[2.0, 5.0], logged=own[1].logged)]) == ["loss"]


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_ranks_run_closures_as_one_job(capfd: pytest.CaptureFixture[str]) -> None:
    offset = 10

    def add() -> tuple[int, float]:
        print("nobody sees this")
        value = torch.tensor(float(offset + int(os.environ["RANK"])))
        torch.distributed.all_reduce(value)
        return int(os.environ["LOCAL_RANK"]), float(value)

    assert run_ranks(add, 2, time_limit=30) == [(0, 21.0), (1, 21.0)]
    assert "RANK" not in os.environ
    assert capfd.readouterr().out == ""


# -- the command -------------------------------------------------------------------------------------------------------


def _command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lightning-hybrid"])
    with pytest.raises(SystemExit) as exit_:
        main(["check", *words])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def _config(tmp_path: Path, model: str, *, devices: int = 2, microbatches: int = 2) -> str:
    file = tmp_path / "config.yaml"
    file.write_text(f"""
seed_everything: 0
model: {{class_path: {model}}}
trainer:
  accelerator: auto
  precision: bf16-mixed
  devices: {devices}
  accumulate_grad_batches: 2
  strategy:
    class_path: lightning_hybrid.HybridStrategy
    init_args: {{pipeline_parallel_size: 2, num_microbatches: {microbatches}, initial_weights: nowhere.pt}}
""")
    return str(file)


@pytest.mark.distributed
def test_command_says_equal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--config", _config(tmp_path, "tests.zoo.basic.Around"), "--steps", "3", "--model.batch_size", "4"]
    assert _command(monkeypatch, *words) == 0
    out = capsys.readouterr().out
    assert "One process compared with data 1 x tensor 1 x pipeline 2 = 2 processes, 2 microbatches" in out
    assert len(re.findall(r"^ +3  (loss|gradient norm|log loss) ", out, re.MULTILINE)) == 3
    assert "  16 weights and buffers " in out


@pytest.mark.distributed
def test_the_example_of_the_help_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert _command(monkeypatch, "--help") == 0
    example = capsys.readouterr().out.split("Example:")[1].split("FILE")[1].split()
    config = _config(tmp_path, "tests.zoo.basic.Around", devices=4)
    assert _command(monkeypatch, "--config", config, *example, "--json") == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["equal"]
    assert "data 1 x tensor 1 x pipeline 2 = 2 processes" in found["layout"]
    (loss,) = (each for each in found["comparisons"] if (each["step"], each["name"]) == (3, "loss"))
    assert loss["actual"] == pytest.approx(loss["expected"], rel=found["tolerance"])


@pytest.mark.distributed
def test_command_on_a_model_of_hugging_face(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    words = ["--model.depth", "2", "--model.dim", "16", "--model.length", "16", "--data.length", "16"]
    assert _command(monkeypatch, "--config", str(ROOT / "configs" / "hf_gpt2.yaml"), *words, "--steps", "1") == 0
    out = capsys.readouterr().out
    assert "One process compared with data 2 x tensor 1 x pipeline 2 = 4 processes, 4 microbatches" in out
    assert "The step computes in float32 at transformers/loss/loss_utils.py:" in out


@pytest.mark.distributed
def test_command_says_different(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert _command(monkeypatch, "--config", _config(tmp_path, "tests.cli.test_check.UnweightedTokens")) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "Different. First difference: loss of step 1" in out
    assert "num_microbatches=1: equal" in out
    assert "`microbatch_weight(self, microbatch)`" in out


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("model", "words", "complaint"),
    [
        ("tests.zoo.basic.Around", ["--steps", "0"], "steps must be an integer of at least 1"),
        ("tests.zoo.basic.Around", ["--trainer.devices", "3"], "3 processes cannot be divided"),
        ("tests.zoo.basic.Around", ["--trainer.strategy", "ddp"], "is a DDPStrategy, not a HybridStrategy"),
        ("tests.cli.test_check.Manual", [], "manual"),
    ],
)
def test_command_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: str,
    words: list[str],
    complaint: str,
) -> None:
    assert _command(monkeypatch, "--config", _config(tmp_path, model), *words) == 2
    assert complaint in capsys.readouterr().err


def test_it_is_public() -> None:
    assert lightning_hybrid.check is check
    assert CheckResult("x", compare(_record(), [_record()], steps=2, replicas=1), 1e-8).equal


def make_mesh() -> int:
    return Mesh(Sizes(dist.get_world_size(), 1, 1)).num_replicas


def test_ranks_may_be_copied_from_a_process_that_has_had_groups() -> None:
    """They freed these, and waited for threads that had not been copied."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert make_mesh() == 1
    finally:
        dist.destroy_process_group()
    assert run_ranks(make_mesh, 2, time_limit=60) == [2, 2]

"""What a process prints that an error ends: the cause once, with the user's lines; the other ranks say one line."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from lightning_hybrid.error_codes import printing
from lightning_hybrid.error_codes.printing import VARIABLE
from lightning_hybrid.trainer.exceptions import print_shortly
from tests.daily import daily
from tests.pool import Pools
from tests.training_jobs import PP2, Regression, loader, make_trainer


class Fails(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.strategy.mesh.pipeline_rank == 1 and batch_idx == 1:
            raise KeyError("no such column")  # a line of the user's
        return loss


class CalledTwice(Regression):
    def forward(self, x: Any) -> Any:
        return self.head(self.body(self.body(self.embed(x))))  # a wrong line of the user's


class Decides(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(self.body)

    def forward(self, x: Any) -> Any:
        x = self.embed(x)
        for layer in self.body:
            x = layer(x)
            if x.mean() > 9:
                break
        return self.head(x)


def printed(module: type[Regression]) -> str:
    """What the end of the process would print."""
    sys.excepthook = sys.__excepthook__
    written = io.StringIO()
    try:
        make_trainer(PP2 | {"body": "body"}).fit(module(), loader())
    except Exception as error:
        with contextlib.redirect_stderr(written), mock.patch.multiple(printing, PATIENCE=0.0, signal=mock.Mock()):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.excepthook = sys.__excepthook__
    return written.getvalue()


def test_a_cause_is_told_once_with_the_lines_of_the_user(ranks: Pools) -> None:
    other, failed = ranks(2, lightning=True).run(printed, Fails)
    note = (
        "The error was raised in microbatch 1 of 4, which contains 2 of 8 samples. If the code needs the full batch,"
        " set num_microbatches=1. To split batches in a different way, define a method"
        " `split_batch(batch, num_microbatches)` in the module."
    )
    assert other.splitlines() == [
        "[rank0]: RuntimeError: Rank 1 (pipeline rank 1, data rank 0), stage 1, action 1F0, failed: KeyError:"
        f" 'no such column' ({note})"
    ]
    assert "a line of the user's" in failed
    assert "lightning/pytorch" not in failed
    assert "lightning_hybrid/trainer" not in failed
    assert f"[rank1]: KeyError: 'no such column'\n[rank1]: {note}\n[rank1]: (" in failed
    assert failed.count("Traceback (most recent call last)") == 1
    assert len(failed.splitlines()) < 15


def test_what_is_wrong_on_every_rank_is_told_where_it_was_seen(ranks: Pools) -> None:
    other, seen = ranks(2, lightning=True).run(printed, CalledTwice)
    assert seen.startswith("[rank1]: Traceback (most recent call last)")
    assert "a wrong line of the user's" in seen
    assert "[rank1]: ValueError: `training_step` called the body" in seen
    assert seen.count("' 2 times.") == 1
    assert other.startswith("[rank0]: ValueError: `training_step` called the body")
    assert len(other.splitlines()) == 1


def test_a_refusal_without_a_line_of_the_user_is_its_text(ranks: Pools) -> None:
    """There were nine lines of this package above it."""
    for text in ranks(2, lightning=True).run(printed, Decides):
        assert re.fullmatch(
            r"\[rank\d\]: ValueError: `__bool__` at test_exceptions\.py:\d+ reads the value of a tensor that another"
            r" pipeline stage computes, and the layer 'body\.\d' is called afterward\. .*\n",
            text,
        )


def test_other_errors_and_other_hooks_stay_what_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raised() -> Exception:
        try:
            nn.Linear(2, 2)(None)
        except TypeError as error:
            return error
        raise AssertionError

    error = raised()
    monkeypatch.setattr(sys, "excepthook", print)
    print_shortly(error, 0, told_elsewhere=False)
    assert sys.excepthook is print
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv(VARIABLE, "full")
    print_shortly(error, 0, told_elsewhere=False)
    assert sys.excepthook is sys.__excepthook__
    monkeypatch.delenv(VARIABLE)
    print_shortly(error, 0, told_elsewhere=False)
    sys.excepthook(type(error), error, error.__traceback__)
    short = capsys.readouterr().err
    assert "nn/modules/module.py" not in short
    assert "nn/modules/linear.py" in short  # no line of the user's code was running: the line that raised the error
    assert f"are hidden. Set {VARIABLE}=full to show them" in short
    another = raised()
    sys.excepthook(type(another), another, another.__traceback__)
    assert "nn/modules/linear.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "arguments", "is_printed"),
    [
        ("Killed or crashed without an error message: rank 1", {"is_first": True}, True),
        ("Killed or crashed without an error message: rank 1", {"is_terminated": lambda: True}, False),
        ("Rank 1 failed: ArithmeticError: broken", {"is_terminated": lambda: True}, True),
    ],
)
def test_the_rank_that_found_the_cause_prints_it_and_nobody_waits_for_a_launcher_that_has_spoken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, arguments: Any, is_printed: bool
) -> None:
    """torchrun waited 30 s for such a rank, killed it, and the cause was not printed."""
    error = RuntimeError(text)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    print_shortly(error, 0, told_elsewhere=True, **arguments)
    sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == (f"[rank0]: RuntimeError: {text}\n" if is_printed else "")


def test_lines_of_libraries_below_the_code_of_the_user_are_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fails(nn.Module):
        def forward(self, x: object) -> object:
            return nn.functional.relu(x)  # type: ignore[arg-type]

    with pytest.raises(TypeError) as caught:
        nn.Sequential(Fails())(None)
    error = caught.value
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    print_shortly(error, 0, told_elsewhere=False)
    sys.excepthook(type(error), error, error.__traceback__)
    short = capsys.readouterr().err
    assert "nn.functional.relu(x)" in short
    assert "torch/nn" not in short


JOB = """
import sys
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from lightning_hybrid import HybridStrategy


class Model(LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.automatic_optimization = kind, kind != "module"
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def training_step(self, batch, batch_idx):
        loss = self.body(batch).mean()
        return loss.detach() if self.kind == "step" else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


kind = sys.argv[1]
strategy = HybridStrategy(pipeline_parallel_size=2, schedule="1f2b" if kind == "argument" else "1f1b")
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=1, **quiet)
trainer.fit(Model(kind), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))
"""


ERRORS = {
    "argument": "ValueError: schedule must be one of",
    "module": "ValueError: Model uses manual optimization",
    "step": "ValueError: The loss of `training_step` has no autograd graph",
}


@pytest.mark.parametrize(
    ("launcher", "kind"),
    daily(
        [(launcher, kind) for launcher in ("torchrun", "trainer") for kind in ERRORS],
        ("torchrun", "step"),
        ("trainer", "argument"),
    ),
)
def test_an_error_of_all_ranks_is_printed_once(tmp_path: Path, launcher: str, kind: str) -> None:
    text = ERRORS[kind]
    job = tmp_path / "job.py"
    job.write_text(JOB)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    line = [sys.executable, *(torchrun if launcher == "torchrun" else []), str(job), kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode != 0
    assert done.stderr.count(text) == 1, done.stderr

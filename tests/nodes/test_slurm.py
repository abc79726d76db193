"""Jobs that a real SLURM stops go on, and end as undisturbed ones."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.documents import DOCS, blocks
from tests.nodes import requeues
from tests.nodes.machines import ROOT, Machines
from tests.nodes.slurm import Slurm, why_not

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    """SLURM over two machines."""
    if why_not():
        pytest.skip(why_not())
    with Machines(2, tmp_path) as machines, Slurm(machines, tmp_path / "slurm") as made:
        yield made


def test_a_requeued_job_ends_as_the_undisturbed_one(slurm: Slurm, tmp_path: Path) -> None:
    """Bit by bit, with dropout and a shuffled order."""
    expected, _ = requeues.run(slurm, tmp_path / "undisturbed")
    found, _ = requeues.run(slurm, tmp_path / "disturbed", [[2.0]])
    assert len(requeues.starts(tmp_path / "disturbed")) == 2
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stopped", ["its time is up", "another job is more urgent"])
def test_the_job_file_goes_on(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: str) -> None:
    """SLURM looks every 30 s for jobs whose time is up; and it tells those that others need the machines by SIGTERM."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    limit, epochs = (["--time=2", "--signal=USR1@60"], 4) if stopped == "its time is up" else ([], 2)
    slow = ["--trainer.callbacks+=tests.nodes.preempted.Slow", f"--trainer.callbacks.folder={tmp_path}"]
    words = [str(ROOT / "configs" / "vit_elastic.yaml"), f"--trainer.max_epochs={epochs}", *slow]
    options = [*limit, f"--chdir={tmp_path}", "--output=job.log"]
    job = slurm.submit(ROOT / "examples" / "slurm" / "train.sh", *words, options=options)
    if not limit:
        requeues.wait_until(lambda: re.search(r" [1-9]", requeues.now(tmp_path)) is not None, slurm, job, tmp_path)
        (tmp_path / "urgent.sh").write_text("#!/bin/bash\n")
        urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
        slurm.submit(tmp_path / "urgent.sh", options=urgent)
    state, text = slurm.wait(job), (tmp_path / "job.log").read_text()
    assert state == "COMPLETED", text
    assert f"`Trainer.fit` stopped: `max_epochs={epochs}` reached" in text
    first, second, *_ = requeues.starts(tmp_path)
    assert first == 0 < second


_SCRIPT = """import argparse, os
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_hybrid import HybridStrategy
from tests.nodes.preempted import Slow
from tests.training_jobs import Regression, loader
seed_everything(7)
model, data = Regression(), loader(num_samples=64, shuffle=True)
"""


def test_the_job_file_of_the_page_goes_on_with_the_lines_for_a_script(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only sizes are others, there is no GPU, and steps take a while."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    page = blocks(DOCS / "guides" / "slurm.md")
    job = next(block.text for block in page if "#SBATCH" in block.text)
    (tmp_path / "job.sh").write_text(re.sub(r"^(#SBATCH --gpus|source ).*\n", "", job, flags=re.MULTILINE))
    script = next(block.text for block in page if "SLURM_NNODES" in block.text and block.language == "python")
    script = script.replace("callbacks=[", f"max_epochs=3, callbacks=[Slow({str(tmp_path)!r}), ")
    (tmp_path / "train.py").write_text(_SCRIPT + script)
    options = ["--ntasks-per-node=2", "--cpus-per-task=2", f"--chdir={tmp_path}", "--output=job.log"]
    number = slurm.submit(tmp_path / "job.sh", options=options)
    requeues.wait_until(lambda: re.search(r" [3-9]", requeues.now(tmp_path)) is not None, slurm, number, tmp_path)
    slurm.run("scancel", "--signal=USR1", number)
    state, text = slurm.wait(number), (tmp_path / "job.log").read_text()
    assert state == "COMPLETED", text
    assert "`Trainer.fit` stopped: `max_epochs=3` reached" in text
    first, second = requeues.starts(tmp_path)
    assert first == 0 < second

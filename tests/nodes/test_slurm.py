"""Jobs under a real SLURM end as one process does."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.nodes import preempted, train
from tests.nodes.machines import SECONDS, Machines
from tests.nodes.slurm import Slurm, why_not
from tests.training_jobs import Regression, assert_same, loader, make_trainer, weights

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(300)]

JOB = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --output={folder}/job.log
#SBATCH --chdir={folder}
#SBATCH --open-mode=append
#SBATCH --signal=USR1@90
#SBATCH --requeue
export LOCAL_WORLD_SIZE=2 GROUP_WORLD_SIZE=2
srun {python} -W ignore {words}
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    """SLURM over two machines."""
    if why_not():
        pytest.skip(why_not())
    with Machines(2, tmp_path) as machines, Slurm(machines, tmp_path / "slurm") as made:
        yield made


def submit(slurm: Slurm, folder: Path, words: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "job.sh").write_text(JOB.format(folder=folder, python=sys.executable, words=words))
    return slurm.submit(folder / "job.sh")


def test_srun_on_two_machines_is_as_one_process(slurm: Slurm, tmp_path: Path) -> None:
    layout = json.dumps({"pipeline_parallel_size": 2, "num_microbatches": 4})
    state = slurm.wait(submit(slurm, tmp_path, f"{train.__file__} '{layout}' {tmp_path}"))
    text = (tmp_path / "job.log").read_text()
    assert state == "COMPLETED", text
    assert "rank 0 of 4: from step 0" in text
    module = Regression()
    make_trainer(None, max_epochs=2).fit(module, loader(16))
    assert_same(torch.load(tmp_path / "weights.ckpt")["state_dict"], weights(module))


def ended(slurm: Slurm, folder: Path, *, disturbs: bool) -> str:
    """What a job has printed that is to be requeued, once it has ended.

    Args:
        slurm: Where it runs.
        folder: Of its files.
        disturbs: Whether SLURM takes its machines away in the middle.
    """
    job = submit(slurm, folder, f"{preempted.__file__} {folder}")
    end = time.monotonic() + SECONDS
    while disturbs and not (folder / "from-0").exists():
        assert time.monotonic() < end, (folder / "job.log").read_text()
        assert slurm.runs(job), (folder / "job.log").read_text()
        time.sleep(0.1)
    if disturbs:
        time.sleep(2)  # some steps
        slurm.run("scancel", "--signal=USR1", job)
    state, text = slurm.wait(job), (folder / "job.log").read_text()
    assert state == "COMPLETED", text
    return text


def test_a_requeued_job_ends_as_the_undisturbed_one(slurm: Slurm, tmp_path: Path) -> None:
    """Bit by bit, with dropout and a shuffled order."""
    folders = {disturbs: tmp_path / f"disturbed-{disturbs}" for disturbs in (True, False)}
    texts = {disturbs: ended(slurm, folder, disturbs=disturbs) for disturbs, folder in folders.items()}
    starts = [len(list(folder.glob("from-*"))) for folder in folders.values()]
    assert starts == [2, 1], texts[True]
    found, expected = (torch.load(folder / "weights.ckpt")["state_dict"] for folder in folders.values())
    assert all(torch.equal(found[name], expected[name]) for name in expected)

"""Jobs under a real SLURM end as one process does."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.nodes import train
from tests.nodes.machines import Machines
from tests.nodes.slurm import Slurm, why_not
from tests.training_jobs import Regression, assert_same, loader, make_trainer, weights

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(300)]

JOB = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --output={folder}/job.log
export LOCAL_WORLD_SIZE=2 GROUP_WORLD_SIZE=2
srun {python} -W ignore {script} '{layout}' {folder}
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    """SLURM over two machines."""
    if why_not():
        pytest.skip(why_not())
    with Machines(2, tmp_path) as machines, Slurm(machines, tmp_path / "slurm") as made:
        yield made


def test_srun_on_two_machines_is_as_one_process(slurm: Slurm, tmp_path: Path) -> None:
    job = tmp_path / "job.sh"
    layout = json.dumps({"pipeline_parallel_size": 2, "num_microbatches": 4})
    job.write_text(JOB.format(folder=tmp_path, python=sys.executable, script=train.__file__, layout=layout))
    state = slurm.wait(slurm.submit(job))
    text = (tmp_path / "job.log").read_text()
    assert state == "COMPLETED", text
    assert "rank 0 of 4: from step 0" in text
    module = Regression()
    make_trainer(None, max_epochs=2).fit(module, loader(16))
    assert_same(torch.load(tmp_path / "weights.ckpt")["state_dict"], weights(module))

"""Jobs that a real SLURM stops go on, and end as undisturbed ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.nodes import requeues
from tests.nodes.machines import Machines
from tests.nodes.slurm import Slurm, why_not

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(300)]


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

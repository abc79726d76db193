"""What goes from one machine to another in a step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.nodes import pictures
from tests.nodes.machines import Machines, outputs, why_not

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(300)]


def num_bytes(folder: Path, kind: str, steps: int) -> int:
    with Machines(2, folder) as machines:
        ended = outputs(machines.torchrun([pictures.__file__, kind, str(steps)], processes=1))
        assert [code for code, _ in ended] == [0, 0], ended
        return machines.num_bytes()


@pytest.mark.parametrize("kind", pictures.KINDS)
def test_pictures_stay_on_the_machine_that_reads_them(tmp_path: Path, kind: str) -> None:
    """A longer run less a shorter one: without what goes by at the start."""
    if why_not():
        pytest.skip(why_not())
    of_a_batch = 4 * math.prod(pictures.SHAPE) * pictures.BATCH
    short, long = 5, 45
    of_a_step = (num_bytes(tmp_path / "long", kind, long) - num_bytes(tmp_path / "short", kind, short)) / (long - short)
    assert of_a_step < 0.05 * of_a_batch, f"{of_a_step:.0f} of {of_a_batch} bytes"

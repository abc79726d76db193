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


def num_bytes_of_a_step(folder: Path, kind: str) -> float:
    """Return the bytes of a step: those of a longer run less those of a shorter one, without what the start sends."""
    short, long = 5, 45
    return (num_bytes(folder / "long", kind, long) - num_bytes(folder / "short", kind, short)) / (long - short)


def test_a_step_sends_as_few_bytes_as_a_loop_by_hand(tmp_path: Path) -> None:
    """At most 5 % more than a loop that sends activations, gradients and labels alone, headers of packets included."""
    if why_not():
        pytest.skip(why_not())
    ours = num_bytes_of_a_step(tmp_path / "ours", "direct")
    by_hand = num_bytes_of_a_step(tmp_path / "by_hand", pictures.BY_HAND)
    assert ours <= 1.05 * by_hand, f"{ours:.0f} and {by_hand:.0f} bytes"


@pytest.mark.parametrize("kind", pictures.KINDS)
def test_pictures_stay_on_the_machine_that_reads_them(tmp_path: Path, kind: str) -> None:
    if why_not():
        pytest.skip(why_not())
    of_a_batch = 4 * math.prod(pictures.SHAPE) * pictures.BATCH
    of_a_step = num_bytes_of_a_step(tmp_path, kind)
    assert of_a_step < 0.05 * of_a_batch, f"{of_a_step:.0f} of {of_a_batch} bytes"

"""What goes from one machine to another in a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nodes import pictures, replicas
from tests.nodes.machines import Machines, outputs, why_not

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(300)]


def num_bytes(folder: Path, words: list[str], processes: int) -> int:
    with Machines(2, folder) as machines:
        ended = outputs(machines.torchrun(words, processes=processes))
        assert [code for code, _ in ended] == [0, 0], ended
        return machines.num_bytes()


def of_a_step(folder: Path, words: Callable[[int], list[str]], processes: int = 1) -> float:
    """Return the bytes of a step: those of a longer run less those of a shorter one, without what the start sends.

    Args:
        folder: A folder for files.
        words: Returns the script and its arguments, for a number of steps.
        processes: The number of processes on each machine.
    """
    short, long = 5, 45
    longer, shorter = (num_bytes(folder / str(steps), words(steps), processes) for steps in (long, short))
    return (longer - shorter) / (long - short)


def num_bytes_of_a_step(folder: Path, kind: str) -> float:
    return of_a_step(folder, lambda steps: [pictures.__file__, kind, str(steps)])


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


def test_hybrid_sharding_sends_only_the_sums_of_shards_to_the_other_machine(tmp_path: Path) -> None:
    """Each of four ranks sends its half of the gradients once, and receives the sum: twice the bytes of gradients."""
    if why_not():
        pytest.skip(why_not())

    def sent(name: str, *arguments: str) -> float:
        words = [replicas.__file__, "zero_stage=3", *arguments]
        return of_a_step(tmp_path / name, lambda steps: [words[0], str(steps), *words[1:]], processes=2)

    hybrid, whole = sent("hybrid", "zero_size=2"), sent("whole")
    expected = 2 * replicas.gradient_bytes()
    assert expected <= hybrid <= 1.1 * expected, f"{hybrid:.0f} and {expected} bytes"
    assert hybrid < 0.6 * whole, f"{hybrid:.0f} and {whole:.0f} bytes"

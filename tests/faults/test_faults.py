"""A few faults of the long list, each day; ``make faults N=200`` runs more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.fault import ALONE, DEADLY, OTHER, STILL, draw

ROOT = Path(__file__).parents[2]
#: One of each sort, most on two ranks. In 31 the callbacks save when a replica has come to its end; in 40 a rank leaves
#: its epoch, and each of four ranks waits for another one in another way.
DAILY = [2, 3, 7, 15, 19, 25, 31, 36, 40, 57, 85, 86, 96, 107, 174, 231, 289, 759]


def run(*arguments: str, program: str = "tests.faults", timeout: float = 300) -> str:
    """Run the list in a process of its own: ranks are forked from it."""
    command = [sys.executable, "-m", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_fault_ends_all_ranks_with_its_name() -> None:
    output = run("--jobs", "3", "--numbers", *map(str, DAILY))
    assert f"{len(DAILY)} faults, 0 of them never happened" in output


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_faults_under_launchers(launcher: str) -> None:
    run("6", "--launcher", launcher, "--kinds", "raise", "kill", "exit", "sleep+sigterm")


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_nothing_grows_in_a_long_run_with_changing_shapes() -> None:
    assert "nothing grew by more than 1%" in run(program="tests.faults.soak", timeout=1700)


def test_a_fault_is_what_its_number_says() -> None:
    faults = [draw(number) for number in range(200)]
    assert faults == [draw(number) for number in range(200)]
    assert {fault.kind for fault in faults} == {*DEADLY, *ALONE, *STILL, *OTHER}
    assert all(fault.rank < fault.size for fault in faults)

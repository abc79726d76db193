"""Requeues at random moments by a real SLURM: python -m tests.nodes.requeues [JOBS [SEED [PROCESSES]]].

Three in each job, each by one signal or two. What it says of a job: what it did when signals came, from which steps it
has begun, and whether its weights are those of a job that nobody has disturbed, bit by bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from tests.nodes import preempted
from tests.nodes.machines import SECONDS, Machines
from tests.nodes.slurm import Slurm


def run(
    slurm: Slurm, folder: Path, moments: Sequence[Sequence[float]] = (), *, takes: str = "", processes: int = 2
) -> tuple[dict[str, Tensor], list[str]]:
    """Run a job, and have SLURM disturb it.

    Args:
        slurm: Where.
        folder: Of its files.
        moments: For each of its starts the seconds after which signals come, the later ones after the first.
        takes: From which checkpoint it goes on.
        processes: On each of two machines.

    Returns:
        The weights, and what the run did when signals came.
    """
    job = slurm.start([preempted.__file__, str(folder), takes], folder, processes=processes)
    met = []
    for number, seconds in enumerate(moments):
        wait_until(lambda number=number: len(starts(folder)) > number and bool(now(folder)), slurm, job, folder)
        for each in seconds:
            time.sleep(each)
            met.append(now(folder))
            slurm.run("scancel", "--signal=USR1", job)
    state = slurm.wait(job)
    assert state == "COMPLETED", _read(folder / "job.log")
    weights: dict[str, Tensor] = torch.load(folder / "weights.ckpt")["state_dict"]
    return weights, met


def starts(folder: Path) -> list[int]:
    """The steps from which a job has begun."""
    return [int(line) for line in _read(folder / "starts").split()]


def now(folder: Path) -> str:
    """What a job does, or has done last: ``step``, ``validation`` or ``save``, and the number of the step."""
    return _read(folder / "now")


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_until(is_reached: Callable[[], bool], slurm: Slurm, job: str, folder: Path) -> None:
    """Wait for something that a job does."""
    end = time.monotonic() + SECONDS
    while not is_reached():
        assert slurm.runs(job), _read(folder / "job.log")
        assert time.monotonic() < end, _read(folder / "job.log")
        time.sleep(0.1)


def main(jobs: str = "7", seed: str = "0", processes: str = "2") -> None:
    """Run jobs, and print a line for each."""
    random = Random(int(seed))
    with TemporaryDirectory() as top, Machines(2, Path(top)) as machines, Slurm(machines, Path(top, "slurm")) as slurm:
        expected, _ = run(slurm, Path(top, "undisturbed"), processes=int(processes))
        for number in range(int(jobs)):
            moments = [[random.uniform(0, 4), *random.choice([[], [random.uniform(0, 1)]])] for _ in range(3)]
            begin, folder = time.monotonic(), Path(top, f"job{number}")
            takes = "newest" if number % 2 else ""
            found, met = run(slurm, folder, moments, takes=takes, processes=int(processes))
            is_same = all(torch.equal(found[name], expected[name]) for name in expected)
            seconds = f"{time.monotonic() - begin:.0f} s"
            told = f"job {number}, {seconds}: signals in {', '.join(met)}; began from {starts(folder)}"
            print(f"{told}: {'bit by bit the same' if is_same else 'OTHER WEIGHTS'}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

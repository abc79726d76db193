"""Ranks that are killed at random moments, and torchrun's restarts: python -m tests.nodes.restarts [RUNS [SEED]].

On two machines, three kills in each run. What it says of a run: which rank was killed when, from which steps it has
begun, and whether its weights are those of a run that nobody has disturbed, bit by bit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from tests.nodes import elastic
from tests.nodes.machines import SECONDS, Machines, outputs

KILLS = 3
LAYOUT = {"pipeline_parallel_size": 2, "num_microbatches": 2}


def run(machines: Machines, folder: Path, random: Random | None = None) -> tuple[dict[str, Tensor], list[str]]:
    """Train, and kill ranks.

    Args:
        machines: Where, a rank on each.
        folder: Of its files.
        random: Chooses ranks and moments; without it nobody is killed.

    Returns:
        The weights, and who was killed when.
    """
    folder.mkdir()
    started = machines.torchrun(
        [elastic.__file__, str(folder), json.dumps(LAYOUT), "12", "0.1"], processes=1, restarts=KILLS
    )
    killed = []
    for number in range(KILLS if random else 0):
        assert random is not None
        _wait_for(folder / "notes" / f"rank0-{number}")
        seconds, machine = random.uniform(0, 3), random.choice(machines.numbers)
        time.sleep(seconds)
        os.kill(_rank_on(machines, machine), signal.SIGKILL)
        killed.append(f"rank {machine - 1} after {seconds:.1f} s")
    ended = outputs(started)
    assert [code for code, _ in ended] == [0, 0], ended
    weights: dict[str, Tensor] = torch.load(folder / "weights.ckpt")["state_dict"]
    return weights, killed


def _wait_for(notes: Path) -> None:
    end = time.monotonic() + SECONDS
    while not notes.exists() or not notes.read_text():
        assert time.monotonic() < end, notes
        time.sleep(0.1)


def _rank_on(machines: Machines, number: int) -> int:
    commands = {process: Path(f"/proc/{process}/cmdline").read_text() for process in machines.processes(number)}
    (rank,) = [each for each, text in commands.items() if elastic.__file__ in text and "distributed.run" not in text]
    return rank


def main(runs: str = "7", seed: str = "0") -> None:
    """Run, and print a line for each."""
    random = Random(int(seed))
    with TemporaryDirectory() as top, Machines(2, Path(top)) as machines:
        expected, _ = run(machines, Path(top, "undisturbed"))
        for number in range(int(runs)):
            begin, folder = time.monotonic(), Path(top, f"run{number}")
            found, killed = run(machines, folder, random)
            is_same = all(torch.equal(found[name], expected[name]) for name in expected)
            starts = [json.loads(path.read_text().split("\n")[0])[3] for path in sorted(folder.glob("notes/rank0-*"))]
            told = f"run {number}, {time.monotonic() - begin:.0f} s: {', '.join(killed)}; began from {starts}"
            print(f"{told}: {'bit by bit the same' if is_same else 'OTHER WEIGHTS'}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What do the guards take of a step? The same Trainer with them, and with them taken out, in turns.

They are what looks whether ranks do the same, whether layers are still those that were divided, whether tensors are
split by mistake, and the thread beside the run: ``python -m benchmarks.step.guards [--rounds 40]``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.ratios import interval
from benchmarks.step.__main__ import SIZES, WARM_UP, Model, dist_rank, loader_of
from benchmarks.timed_trainer import Stopwatch, trainer_round
from lightning_hybrid import HybridStrategy
from lightning_hybrid.pipeline_parallel.body import BodyWatch
from lightning_hybrid.pipeline_parallel.splitting.split_watch import LengthWatch
from lightning_hybrid.strategy.watch.run_watch import RunWatch
from lightning_hybrid.trainer.debug.desync import StepDesync

#: What is taken out: the class, its method, and what that gives.
GUARDS: list[tuple[type, str, Any]] = [
    (RunWatch, "_look", None),
    (StepDesync, "note_batch", None),
    (StepDesync, "note_logs", None),
    (StepDesync, "_note_reduction", None),
    (StepDesync, "_note_epoch_end", None),
    (BodyWatch, "check", None),
    (LengthWatch, "__call__", []),
]

#: A round has as many times the batches of one of the other benchmarks: the thread beside the run looks twice a second,
#: and at its beginning, so that it looks as often in a round as in a run.
LONGER = 5


def without_guards() -> ExitStack:
    """Inside, there are none."""
    stack = ExitStack()
    for owner, name, value in GUARDS:
        stack.enter_context(mock.patch.object(owner, name, lambda *_, value=value, **__: value))
    return stack


def compare(kind: str, rounds: int) -> dict[str, Any]:
    """Alternate; a ratio is the time with guards over that without."""
    size = SIZES[kind]._replace(batches=LONGER * SIZES[kind].batches)
    strategy = HybridStrategy(pipeline_parallel_size=2, num_microbatches=size.microbatches)
    run = trainer_round(
        Model(size), loader_of(size, 0), size.batches, watch=Stopwatch(WARM_UP), strategy=strategy, devices=2
    )
    run()  # makes the process groups
    times: dict[bool, list[float]] = {True: [], False: []}
    for index in range(rounds):
        for guarded in (True, False) if index % 2 else (False, True):
            dist.barrier()
            with ExitStack() if guarded else without_guards():
                times[guarded].append(run())
    ratios = sorted(a / b for a, b in zip(times[True], times[False], strict=True))
    low, high = interval(ratios)
    return {"stages": kind, "ratio": median(ratios), "interval_95": [low, high], "ms": 1e3 * median(times[True])}


def main() -> None:
    """Tiny stages, and normal ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step.guards", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--worker", choices=SIZES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        result = compare(arguments.worker, arguments.rounds)
        if dist_rank() == 0:
            print(f"RESULT {json.dumps(result)}")
        return
    results = []
    for kind in SIZES:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command += ["-m", "benchmarks.step.guards", "--worker", kind, "--rounds", str(arguments.rounds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise SystemExit(done.stdout + done.stderr)
        results.append(json.loads(lines[0].removeprefix("RESULT ")))
        low, high = results[-1]["interval_95"]
        print(f"{kind:<7} with guards / without {results[-1]['ratio']:.3f} [{low:.3f}, {high:.3f}]", flush=True)
    (arguments.output / "guards_cpu.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

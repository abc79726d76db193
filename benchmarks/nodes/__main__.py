"""How long does a step take between machines that are far apart? Ours against a loop by hand on torch's pipeline."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.step.__main__ import Size, measure
from lightning_hybrid import Tuning
from lightning_hybrid.pipeline_parallel.engine import Engine
from tests.nodes.machines import Machines, outputs, why_not

#: By the numbers of microbatches, and of those more in flight: the most of the loop's time at a delay of 5 ms.
BARS = {(2, 0): 1.3, (8, 0): 0.85, (16, 0): 0.75, (32, 0): 0.65, (8, 6): 0.7, (16, 8): 0.6, (32, 8): 0.5}
DELAYS = 0.0, 0.005


class ScheduleTime:
    """The time that this rank's engine has run."""

    def __init__(self) -> None:
        self.seconds, self.steps = 0.0, 0
        run = Engine.run

        def timed(*arguments: Any, **others: Any) -> Any:
            start = time.perf_counter()
            result = run(*arguments, **others)
            self.seconds += time.perf_counter() - start
            self.steps += 1
            return result

        Engine.run = timed  # type: ignore[method-assign]


def compare(microbatches: int, extra: int, rounds: int) -> dict[str, Any]:
    """Two stages on two machines, eight blocks of width 32."""
    spent = ScheduleTime()
    found = measure(Size(32, 8, 4, 4, microbatches), 1, None, rounds, tuning=Tuning(extra_in_flight=extra))
    outside: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outside, found["ms_ours"] - 1e3 * spent.seconds / spent.steps)
    return {"microbatches": microbatches, "extra_in_flight": extra, **found, "ms_outside_schedule": outside}


def main() -> None:
    """Run the comparisons between machines made of namespaces."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nodes", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(BARS)), help="numbers of cases, from 0")
    parser.add_argument("--delays", type=float, nargs="*", default=DELAYS, help="one way, in seconds")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        result = compare(*list(BARS)[arguments.cases[0]], arguments.rounds)
        if dist.get_rank() == 0:
            print(f"RESULT {json.dumps(result)}")
        return
    if why_not():
        raise SystemExit(why_not())
    results = []
    for delay in arguments.delays:
        for case in arguments.cases:
            results.append({"delay_ms": 1e3 * delay, **_run(delay, case, arguments.rounds)})
            print(_line(results[-1]), flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "nodes_cpu.json").write_text(json.dumps(results, indent=2) + "\n")


def _run(delay: float, case: int, rounds: int) -> dict[str, Any]:
    words = ["-m", "benchmarks.nodes", "--worker", "--rounds", str(rounds), "--cases", str(case)]
    with tempfile.TemporaryDirectory() as folder, Machines(2, Path(folder), delay) as machines:
        ended = outputs(machines.torchrun(words, processes=1))
    lines = [line for _, text in ended for line in text.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit("\n".join(text for _, text in ended))
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def _line(result: dict[str, Any]) -> str:
    low, high = result["interval_95"]
    outside = " and ".join(f"{each:.1f}" for each in result["ms_outside_schedule"])
    name = f"{result['delay_ms']:.0f} ms, {result['microbatches']:>2} microbatches, {result['extra_in_flight']} extra"
    times = f"{result['ms_ours']:.1f} and {result['ms_by_hand']:.1f} ms a step; {outside} outside of the schedule"
    return f"{name}   time ours / by hand {result['time_ratio']:.3f}  [{low:.3f}, {high:.3f}]  ({times})"


if __name__ == "__main__":
    main()

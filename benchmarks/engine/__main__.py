"""The pipeline engine against `torch.distributed.pipelining`: overhead, throughput and memory.

python -m benchmarks.engine tiny --ranks 2
python -m benchmarks.engine normal --ranks 4
python -m benchmarks.engine memory --ranks 4
python -m benchmarks.engine all
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.contenders import CONTENDERS, MODELS
from benchmarks.engine.measurements import SCHEDULES, on_ranks, peak_growth, time_rounds
from benchmarks.ratios import interval

BARS = {"tiny": {2: 0.85, 4: 0.75}, "normal": {2: 1.0, 4: 1.0}, "memory": {4: 0.4}}
"""The ratio, ours to torch's, that is to be reached, by number of ranks."""


def report_times(options: argparse.Namespace) -> dict[str, Any]:
    """Both schedules, wall and CPU time; printed line by line."""
    report: dict[str, Any] = {}
    bar = BARS[options.setting][options.ranks]
    print(f"{'':26} us per microbatch            ratio of ours to torch's (median, 95 % interval)")
    for name in SCHEDULES:
        arguments = (options.setting, name, options.microbatches, options.rounds, options.steps)
        rounds = on_ranks(options.ranks, time_rounds, *arguments)
        for column, what in enumerate(("wall", "CPU")):
            seconds = {contender: [times[column] for times in rounds[contender]] for contender in CONTENDERS}
            ratios = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds["torch"], strict=True)]
            ratio, (low, high) = statistics.median(ratios), interval(ratios)
            micros = {c: round(1e6 * statistics.median(s) / options.microbatches) for c, s in seconds.items()}
            report[f"{name} {what}"] = {
                "microseconds_per_microbatch": micros,
                "ratio": round(ratio, 3),
                "interval": [round(low, 3), round(high, 3)],
                "bar": bar,
                "reached": low <= bar,
                "seconds_per_step": {c: [round(value, 6) for value in s] for c, s in seconds.items()},
            }
            verdict = f"bar {bar}: {'reached' if low <= bar else 'missed'}"
            print(
                f"{options.ranks} ranks {name:16} {what:4} ours {micros['ours']:6}   torch {micros['torch']:6}"
                f"     {ratio:.3f} [{low:.3f}, {high:.3f}]   {verdict}",
                flush=True,
            )
    return report


def report_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Two numbers of microbatches; printed line by line."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back to the system, so the peak is what is used
    report: dict[str, Any] = {}
    for number in (8, 32):
        for contender in CONTENDERS:
            growth = on_ranks(options.ranks, peak_growth, contender, number)
            report[f"{contender} {number}"] = growth
            print(f"{number:2} microbatches  {contender:5}  MiB by rank {growth}, largest {max(growth)}", flush=True)
    flatness = max(report["ours 32"]) / max(report["ours 8"])
    ratio, bar = max(report["ours 32"]) / max(report["torch 32"]), BARS["memory"][options.ranks]
    print(f"ours, 32 microbatches to 8: {flatness:.3f}")
    print(f"ours to torch's, 32 microbatches: {ratio:.3f}   bar {bar}: {'reached' if ratio <= bar else 'missed'}")
    return report | {"ours_32_to_8": round(flatness, 3), "ours_to_torch_32": round(ratio, 3), "bar": bar}


def measure(options: argparse.Namespace) -> None:
    """One setting: print, and write JSON."""
    started = os.getloadavg()[0]
    report = report_memory(options) if options.setting == "memory" else report_times(options)
    environment = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": [started, os.getloadavg()[0]],
        "rounds": options.rounds,
        "steps_per_round": options.steps,
        "microbatches": options.microbatches,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{options.setting}_{options.ranks}_ranks.json"
    path.write_text(json.dumps({"environment": environment, "result": report}) + "\n")
    print(f"written to {path}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=[*MODELS, "all"])
    parser.add_argument("--ranks", type=int, choices=[2, 4], default=2)
    parser.add_argument("--microbatches", type=int, default=16, help="per step (memory: always 8 and 32)")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, help="steps per round (default: 3 of tiny, 1 of normal)")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    everything = [(setting, ranks) for setting, bars in BARS.items() for ranks in bars]
    for setting, ranks in everything if arguments.setting == "all" else [(arguments.setting, arguments.ranks)]:
        print(f"-- {setting}, {ranks} ranks")
        steps = arguments.steps or (3 if setting == "tiny" else 1)
        measure(argparse.Namespace(**{**vars(arguments), "setting": setting, "ranks": ranks, "steps": steps}))


if __name__ == "__main__":
    main()

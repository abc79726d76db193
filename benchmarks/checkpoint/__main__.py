"""Time and memory of saving and loading: against `torch.distributed.checkpoint` itself, and Lightning's strategies."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import gc
import json
import logging
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint.contenders import KINDS, RANKS, Contender, forget_peak, make, memory, remove
from benchmarks.ratios import interval


def timed(contender: Contender, what: str, path: Path) -> float:
    """Seconds until all ranks are done."""
    dist.barrier()
    start = time.perf_counter()
    getattr(contender, what)(path)
    dist.barrier()
    return time.perf_counter() - start


def compare(kind: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Take turns; in each round another one begins, for writing is slower after some files than after others."""
    contenders = make(kind, arguments.width, arguments.depth)
    names = list(contenders)
    times: dict[str, dict[str, list[float]]] = {what: {name: [] for name in contenders} for what in ("save", "load")}
    for index in range(arguments.rounds + 2):
        begin = index % len(names)
        for name in names[begin:] + names[:begin]:
            path = folder / f"{name}-{index}"
            for what, found in times.items():
                seconds = timed(contenders[name], what, path)
                if index >= 2:  # the first ones are slower: files, groups and caches are made
                    found[name].append(seconds)
            remove(path)
    result: dict[str, Any] = {"kind": kind, "rounds": arguments.rounds}
    for what, found in times.items():
        result[what] = {"ms": {name: 1e3 * median(seconds) for name, seconds in found.items()}}
        for other in names[1:]:
            ratios = [ours / theirs for ours, theirs in zip(found["ours"], found[other], strict=True)]
            result[what][f"ours / {other}"] = [median(ratios), *interval(ratios)]
    return result


def measure_memory(kind: str, name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The most bytes of one contender over what its process has without a model, alone in its processes."""
    before = memory()[0]
    contender = make(kind, arguments.width, arguments.depth, only=name)[name]
    path, peaks = folder / "memory", {}
    for what in ("save", "load"):
        if what == "load":
            contender.forget()
        gc.collect()
        forget_peak()
        timed(contender, what, path)
        peaks[what] = memory()[1] - before
    all_peaks: list[Any] = [None] * RANKS
    dist.all_gather_object(all_peaks, peaks)
    return {what: max(each[what] for each in all_peaks) for what in peaks}


def work(arguments: argparse.Namespace) -> None:
    """One of the ranks."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    folder = Path(arguments.folder)
    if arguments.alone:
        result = measure_memory(arguments.kind, arguments.alone, arguments, folder)
    else:
        result = compare(arguments.kind, arguments, folder)
    if int(os.environ["RANK"]) == 0:
        print(f"RESULT {json.dumps(result)}", flush=True)
    dist.destroy_process_group()


def run(arguments: argparse.Namespace, kind: str, alone: str = "") -> dict[str, Any]:
    """Start the ranks, and return what the first one found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    command += ["-m", "benchmarks.checkpoint", "--worker", "--kind", kind, "--alone", alone]
    options = {"--rounds": arguments.rounds, "--width": arguments.width, "--depth": arguments.depth}
    if alone:
        options["--width"] = 4 * arguments.width  # large, so that what else a process does is small beside it
    command += [str(word) for option in options.items() for word in option]
    # Large tensors go back to the system when they are freed, so that a peak is that of what is there.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"} if alone else None
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        command += ["--folder", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(done.stdout + done.stderr)
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def main() -> None:
    """All comparisons, each in processes of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file"
    )
    parser.add_argument("--directory", default=None, help="where checkpoints are written; default: a temporary one")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--kind", choices=KINDS, default=None, help="one comparison only")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    results = []
    for kind in KINDS if arguments.kind is None else [arguments.kind]:
        result = run(arguments, kind)
        names = list(result["save"]["ms"])
        result["peak_bytes"] = {name: run(arguments, kind, name) for name in names}
        results.append(result)
        for what in ("save", "load"):
            times = "  ".join(f"{name} {ms:.1f} ms" for name, ms in result[what]["ms"].items())
            print(f"{kind:<22} {what}  {times}")
            for other in names[1:]:
                ratio, low, high = result[what][f"ours / {other}"]
                peak = result["peak_bytes"]["ours"][what] / result["peak_bytes"][other][what]
                print(f"{'':<22} {what}  ours / {other}: time {ratio:.3f} [{low:.3f}, {high:.3f}]  memory {peak:.3f}")
    environment = {
        "device": f"cpu, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "width": arguments.width,
        "depth": arguments.depth,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment, "results": results}
    (arguments.output / "checkpoint_cpu.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

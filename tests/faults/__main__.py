"""``python -m tests.faults 100``: a hundred faults, and a table of how they ended."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice

from tests.faults import program  # noqa: F401 - once, before processes are forked
from tests.faults.fault import Fault, draw
from tests.faults.harness import Ending, run, shared_memory


def endings(faults: list[Fault], jobs: int, seconds: float) -> Iterator[Ending]:
    """Run faults, some at a time; they spend most of their time waiting."""
    deadline = time.monotonic() + seconds
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        waiting = iter(faults)
        running = {pool.submit(run, fault) for fault in islice(waiting, jobs)}
        while running:
            done = next(as_completed(running))
            running.remove(done)
            yield done.result()
            fault = next(waiting, None) if time.monotonic() < deadline else None
            if fault is not None:
                running.add(pool.submit(run, fault))


def describe(ending: Ending) -> str:
    """A line about one run."""
    seconds = "never happened" if ending.seconds is None else f"{ending.seconds:.1f} s"
    said = "; ".join(ending.problems) or ending.checkpoint
    return f"{ending.fault}: {seconds}, codes {ending.codes} {said}"


def main() -> int:
    """Run them; the exit code is the number of runs that did not end as they should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first fault")
    parser.add_argument("--numbers", type=int, nargs="*", help="of the faults, instead of the first one and the count")
    parser.add_argument("--kinds", nargs="*", help="what to choose from")
    parser.add_argument("--launcher", default="fork", choices=("fork", "lightning", "torchrun"))
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other after so long")
    parser.add_argument("--texts", action="store_true", help="what the ranks said")
    arguments = parser.parse_args()
    before, found = shared_memory(), []
    numbers = arguments.numbers or range(arguments.first, arguments.first + arguments.count)
    faults = [draw(number, arguments.kinds, arguments.launcher) for number in numbers]
    for ending in endings(faults, arguments.jobs, arguments.seconds):
        found.append(ending)
        print(describe(ending), flush=True)
        if arguments.texts or ending.problems:
            for rank, text in ending.texts.items():
                print(f"    rank {rank}: {text[:600]}", flush=True)
    times = sorted(each.seconds for each in found if each.seconds is not None and not each.hangs)
    print(f"{len(found)} faults, {sum(each.seconds is None for each in found)} of them never happened")
    if times:
        print(f"seconds to the end of all processes: median {statistics.median(times):.1f}, maximum {times[-1]:.1f}")
    for problem in sorted({problem for each in found for problem in each.problems}):
        those = [each.fault.number for each in found if problem in each.problems]
        print(f"{problem}: {len(those)} {those}")
    print(f"new in shared memory, of whatever process: {sorted(shared_memory() - before) or 'nothing'}")
    return min(100, sum(bool(each.problems) for each in found))


if __name__ == "__main__":
    sys.exit(main())

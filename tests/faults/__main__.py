"""``python -m tests.faults 100``: a hundred faults, one after the other, and a table of how they ended."""

from __future__ import annotations

import argparse
import statistics
import time

from tests.faults.fault import draw
from tests.faults.harness import run


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first fault")
    parser.add_argument("--kinds", nargs="*", help="what to choose from")
    parser.add_argument("--launcher", default="fork", choices=("fork", "lightning", "torchrun"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other after so long")
    parser.add_argument("--texts", action="store_true", help="what the ranks said")
    arguments = parser.parse_args()
    began, endings = time.monotonic(), []
    for number in range(arguments.first, arguments.first + arguments.count):
        if time.monotonic() - began > arguments.seconds:
            break
        ending = run(draw(number, arguments.kinds, arguments.launcher))
        endings.append(ending)
        seconds = "never happened" if ending.seconds is None else f"{ending.seconds:.1f} s"
        print(f"{ending.fault}: {seconds}, codes {ending.codes} {'; '.join(ending.problems)}", flush=True)
        if arguments.texts or ending.problems:
            for rank, text in ending.texts.items():
                print(f"    rank {rank}: {text[:600]}", flush=True)
    times = sorted(ending.seconds for ending in endings if ending.seconds is not None and not ending.hangs)
    print(f"{len(endings)} faults, {sum(each.seconds is None for each in endings)} of them never happened")
    if times:
        print(f"seconds to the end of all processes: median {statistics.median(times):.1f}, maximum {times[-1]:.1f}")
    for problem in sorted({problem for ending in endings for problem in ending.problems}):
        numbers = [ending.fault.number for ending in endings if problem in ending.problems]
        print(f"{problem}: {len(numbers)} {numbers}")


if __name__ == "__main__":
    main()

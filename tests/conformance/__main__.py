"""``python -m tests.conformance``: every Lightning test that passes with ``strategy="auto"`` passes with ours too."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.conformance.judgement import Exceptions, Judgement, Results, judge
from tests.conformance.runs import Run, run_all
from tests.conformance.selection import files_of

VARIABLE = "LIGHTNING_TESTS"


def main(words: list[str] | None = None) -> int:
    """Run Lightning's tests twice, compare, and tell.

    Returns:
        The exit status: 0 if there is no difference without a reason, or if Lightning's tests are not there.
    """
    arguments = _parse(words)
    checkout = os.environ.get(VARIABLE)
    if not checkout:
        print(f"SKIPPED: {VARIABLE}, a checkout of Lightning's repository, is not set; see docs/project/conformance.md")
        return 0
    files = arguments.files or files_of(Path(checkout), stages=arguments.stages)
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
        results = _both(arguments, Path(checkout), files, Path(arguments.keep or scratch))
    exceptions = Exceptions.read(stages=arguments.stages)
    judgement = judge(*results, exceptions)
    _tell(judgement, details=arguments.verbose)
    return 0 if judgement.good else 1


def _parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("files", nargs="*", help="below tests/tests_pytorch, instead of all that selection.py names")
    parser.add_argument("--stages", type=int, choices=(1, 2), default=1, help="2: pipeline parallel, on two ranks")
    parser.add_argument("-k", dest="keyword", default="", help="as for pytest")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes, or pairs of ranks, run at a time")
    parser.add_argument("--keep", metavar="FOLDER", help="leave pytest's output and the outcomes here")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the text of every difference")
    return parser.parse_args(words)


def _both(arguments: argparse.Namespace, checkout: Path, files: list[str], folder: Path) -> tuple[Results, Results]:
    """Outcomes with Lightning's strategy and with ours.

    On a busy machine a test with a time limit fails now and then, so what differs is run once more on both sides.
    """
    sides = [
        Run(checkout, folder / strategy, strategy, stages=arguments.stages, keyword=arguments.keyword)
        for strategy in ("auto", "hybrid")
    ]
    first, second = run_all(sides, files, arguments.jobs)
    doubtful = judge(first, second, Exceptions()).differences
    if doubtful:
        print(f"{len(doubtful)} tests differ; running them again", flush=True)
        for outcomes, again in zip((first, second), run_all(sides, sorted(doubtful), arguments.jobs), strict=True):
            outcomes.update(again)
    return first, second


def _tell(judgement: Judgement, *, details: bool) -> None:
    for name, text in sorted(judgement.differences.items()):
        print(f"DIFFERS {name}\n{text if details else _last_line(text)}")
    for name in sorted(judgement.unneeded):
        print(f"NO LONGER NEEDED {name}: passes, although it has a reason not to")
    for reason, count in Counter(judgement.excused.values()).most_common():
        print(f"{count:5} excused: {reason}")
    print(
        f"{judgement.selected} tests make a Trainer that chooses its strategy; {judgement.passed_auto} pass with"
        f" 'auto', {judgement.passed_hybrid} of these with 'hybrid', {len(judgement.excused)} have a reason,"
        f" {len(judgement.differences)} differ"
    )


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((f"    {line[1:].strip()}" for line in lines if line.startswith("E ")), lines[-1] if lines else "")


if __name__ == "__main__":
    sys.exit(main())

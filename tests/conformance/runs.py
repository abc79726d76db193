"""Runs of Lightning's tests: each in copies of the tests, in processes that may die and are started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tests.conformance.judgement import Outcome, Results, read_results
from tests.conformance.selection import ROOT

__all__ = ["Run", "run_all"]

_REPOSITORY = Path(__file__).parent.parent.parent
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",  # a slow resolver of host names costs seconds for each process group
    # A real SLURM job has them; those that tests make up do not.
    **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"), "0"),
}
_CHOOSE = "not ddp"  # tests that are named after a strategy start it, in processes that take most of the time
_PER_TEST = 120  # seconds: pytest-timeout ends the test
_SILENCE = 240  # seconds without a line of outcome: the processes are ended, and go on with the next test
_COLLECTING = 400


@dataclass(frozen=True)
class Run:
    """Lightning's tests with one strategy.

    Attributes:
        checkout: Lightning's repository.
        folder: For copies of the tests, outcomes and what pytest says.
        strategy: What a Trainer takes that was left the choice: ``"auto"`` or ``"hybrid"``.
        stages: 2 for models with a body of two layers, and ``"hybrid"`` on two ranks.
        keyword: pytest's ``-k``.
    """

    checkout: Path
    folder: Path
    strategy: str
    stages: int = 1
    keyword: str = ""

    @property
    def num_ranks(self) -> int:
        """How many processes run each test together."""
        return self.stages if self.strategy != "auto" else 1

    def run(self, part: int, tests: Sequence[str]) -> Results:
        """Run some tests.

        Args:
            part: Tells this from other calls.
            tests: Files, or names of tests, below `ROOT`.

        Returns:
            The outcomes; of several ranks the worst.
        """
        folder = self.folder / f"part-{part}"
        shutil.rmtree(folder, ignore_errors=True)
        ranks = [folder / f"rank-{rank}" for rank in range(self.num_ranks)]
        for rank in ranks:
            # A copy for each process: Lightning's tests look for files that appear beside them.
            shutil.copytree(self.checkout / ROOT, rank / ROOT, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(self.checkout / "pyproject.toml", rank)
        for attempt in range(len(tests) * 100):  # each of them ends at least one test
            before = _finished(ranks)
            finished = self._attempt(ranks, attempt, tests)
            if finished or _finished(ranks) == before:
                break
        return _worst([read_results(rank / "outcomes.jsonl") for rank in ranks])

    def _attempt(self, ranks: Sequence[Path], attempt: int, tests: Sequence[str]) -> bool:
        """Start a process for each rank and wait; whether they came to the end by themselves."""
        only, done = ranks[0].parent / "only.txt", ranks[0].parent / "done.txt"
        only.write_text("\n".join(test for test in tests if "::" in test))
        done.write_text("\n".join(_finished(ranks)))
        meeting = ranks[0].parent / f"meeting-{attempt}"
        meeting.mkdir()
        with contextlib.ExitStack() as stack:
            processes = []
            for number, rank in enumerate(ranks):
                output = stack.enter_context((rank / f"output-{attempt}.txt").open("w"))
                words = [*self._words(rank, tests), f"--conformance-done={done}", f"--conformance-meeting={meeting}"]
                words += [f"--conformance-only={only}"] if "::" in tests[0] else []
                words += [f"--conformance-rank={number}"]
                processes.append(
                    subprocess.Popen(
                        words,
                        cwd=rank / ROOT,
                        env={
                            **os.environ,
                            **_ENVIRONMENT,
                            "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), str(rank / "tests")]),
                        },
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
            try:
                return _wait(processes, [rank / "outcomes.jsonl" for rank in ranks])
            finally:
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # with what a test has left running
                    process.wait()

    def _words(self, rank: Path, tests: Sequence[str]) -> list[str]:
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        words = [
            sys.executable,
            "-m",
            "pytest",
            *files,
            "-q",
            "-p",
            "tests.conformance.plugin",
            "-p",
            "no:cacheprovider",
        ]
        words += ["-c", str(rank / "pyproject.toml"), "--rootdir=.", f"--basetemp={rank / 'tmp'}", "--color=no"]
        words += [f"--timeout={_PER_TEST}", "--tb=short", f"--conformance-report={rank / 'outcomes.jsonl'}"]
        words += [f"--conformance-strategy={self.strategy}", f"--conformance-stages={self.stages}"]
        return [*words, "-k", f"{_CHOOSE} and ({self.keyword})" if self.keyword else _CHOOSE]


def run_all(sides: Sequence[Run], files: Sequence[str], jobs: int) -> list[Results]:
    """Several runs, one after the other; each but the first only of tests that the first has found to be concerned.

    Args:
        sides: The runs.
        files: Files, or names of tests.
        jobs: How many processes, or pairs of them, at a time.
    """
    results: list[Results] = []
    for side in sides:
        tests = [name for name, outcome in results[0].items() if outcome.replaced] if results else files
        shares = [share for start in range(jobs) if (share := _share(tests, start, jobs))]
        with ThreadPoolExecutor(jobs) as pool:
            parts = pool.map(side.run, range(len(shares)), shares)
            results.append({name: outcome for part in parts for name, outcome in part.items()})
        print(f"{side.strategy}: {len(results[-1])} tests run", flush=True)
    return results


def _share(tests: Iterable[str], start: int, jobs: int) -> list[str]:
    """Every `jobs`-th file, with the tests in it."""
    tests = list(tests)
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))
    mine = set(files[start::jobs])
    return [test for test in tests if test.split("::")[0] in mine]


def _wait(processes: Sequence[subprocess.Popen[bytes]], written: Sequence[Path]) -> bool:
    sizes, patience = [0] * len(written), time.monotonic() + _COLLECTING
    while any(process.poll() is None for process in processes):
        time.sleep(0.2)
        now = [path.stat().st_size if path.exists() else 0 for path in written]
        if now != sizes:
            sizes, patience = now, time.monotonic() + _SILENCE
        if time.monotonic() > patience or any(process.poll() not in (None, 0, 1, 5) for process in processes):
            return False
    return all(process.returncode in (0, 1, 5) for process in processes)  # passed, failed, nothing to do


def _finished(ranks: Sequence[Path]) -> list[str]:
    return sorted({name for rank in ranks for name in read_results(rank / "outcomes.jsonl")})


def _worst(by_rank: Sequence[Results]) -> Results:
    order = ("started", "failed", "skipped", "passed")
    missing = Outcome("started", text="another rank's process ended")
    worst = {}
    for name in sorted({name for results in by_rank for name in results}):
        of_ranks = [replace(results.get(name, missing), rank=rank) for rank, results in enumerate(by_rank)]
        worst[name] = min(of_ranks, key=lambda found: order.index(found.outcome))
        if of_ranks[0].outcome == "failed":  # other ranks may have been waiting for it
            worst[name] = of_ranks[0]
    return worst

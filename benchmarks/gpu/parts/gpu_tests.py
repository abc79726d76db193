"""Tests of `tests/gpu`: those that have passed before are not run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.gpu.place import Place
from benchmarks.gpu.table import Report


class _Outcomes:
    """A plugin of pytest that reports each test as soon as it has ended."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.found: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome, what the test recorded, and the end of its error."""
        if report.when != "call" and report.outcome == "passed":
            return
        found = {"outcome": report.outcome, "seconds": round(report.duration, 2), **dict(report.user_properties)}
        if report.failed:
            found["error"] = report.longreprtext[-4000:]
        self.found[report.nodeid] = found
        self._report(tests=self.found)


def measure(place: Place, report: Report, tests: Sequence[str]) -> None:
    """Run the tests of these ids.

    Raises:
        SystemExit: If one of them fails, or does not exist.
    """
    earlier = [values.get("tests", {}) for values in report.earlier.values()]
    passed = {name for found in earlier for name, test in found.items() if test["outcome"] == "passed"}
    outcomes = _Outcomes(report)
    # Ids contain brackets and commas, which `--deselect` takes as they are.
    deselected = [f"--deselect={name}" for name in sorted(passed)]
    code = pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", *deselected, *tests], plugins=[outcomes])
    by_outcome = [test["outcome"] for test in outcomes.found.values()]
    counts = [f"{by_outcome.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped")]
    text = ", ".join(count for count in counts if not count.startswith("0 "))
    before = f"{len(passed)} passed before" if passed else ""
    report(summary=", ".join(filter(None, (text, before))) or "no test was left")
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(1)

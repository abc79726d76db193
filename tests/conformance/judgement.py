"""Outcomes of Lightning's tests with two strategies, compared."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

__all__ = ["Exceptions", "Judgement", "Outcome", "Results", "judge", "read_results"]

_EXCEPTIONS = Path(__file__).parent / "exceptions.yaml"


@dataclass(frozen=True)
class Outcome:
    """What became of a test.

    Attributes:
        outcome: ``"passed"``, ``"failed"``, ``"skipped"``, or ``"started"`` if its process died or was ended.
        replaced: How many of its Trainers had the choice of a strategy.
        text: Why it did not pass.
        rank: On which rank; the first one of those where it did not pass.
    """

    outcome: str
    replaced: int = 0
    text: str = ""
    rank: int = 0


Results = dict[str, Outcome]


def read_results(path: Path) -> Results:
    """The last outcome of each test that the plugin wrote to a file."""
    results: Results = {}
    if path.exists():
        for line in path.read_text().splitlines():
            written: dict[str, Any] = json.loads(line)
            name = written.pop("test")
            results[name] = Outcome(**written)
    return results


@dataclass(frozen=True)
class Exceptions:
    """Tests that need not pass, each with its reason.

    Attributes:
        tests: Reasons by pattern of the test's name (as of a shell, ``[`` being itself).
        texts: Reasons by a part of what the test fails with: things that are refused.
        texts_elsewhere: The same, for tests that pass on rank 0.
    """

    tests: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    texts_elsewhere: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, *, stages: int, path: Path = _EXCEPTIONS) -> Exceptions:
        """The list of a number of stages: of ``one_process``, or of ``two_stages``."""
        groups = yaml.safe_load(path.read_text())["one_process" if stages == 1 else "two_stages"]
        keys = ("tests", "texts", "texts_elsewhere")
        by_key = ({part: group["reason"] for group in groups for part in group.get(key, ())} for key in keys)
        return cls(*by_key)

    def of_test(self, name: str) -> str | None:
        """Why this test need not pass; ``None`` if it must."""
        found = (
            reason for pattern, reason in self.tests.items() if fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))
        )
        return next(found, None)

    def of_failure(self, failed: Outcome) -> str | None:
        """Why a test may fail with this text on this rank; ``None`` if it may not."""
        texts = {**self.texts, **self.texts_elsewhere} if failed.rank > 0 else self.texts
        return next((reason for part, reason in texts.items() if part in failed.text), None)


@dataclass(frozen=True)
class Judgement:
    """A comparison.

    Attributes:
        selected: Tests with a Trainer that had the choice.
        passed_auto: Those that pass with Lightning's strategy.
        passed_hybrid: Those of them that pass with ours.
        differences: Those that should pass with ours and do not, with their texts.
        excused: Those that do not pass and have a reason, with it.
        unneeded: Those that pass although they have a reason not to.
    """

    selected: int
    passed_auto: int
    passed_hybrid: int
    differences: dict[str, str]
    excused: dict[str, str]
    unneeded: list[str]

    @property
    def good(self) -> bool:
        """Whether every difference has a reason, and every reason a difference."""
        return not self.differences and not self.unneeded


def judge(auto: Results, hybrid: Results, exceptions: Exceptions) -> Judgement:
    """Compare the outcomes of two runs.

    Args:
        auto: With Lightning's strategy.
        hybrid: With ours.
        exceptions: What need not pass.
    """
    selected = {name for name, outcome in auto.items() if outcome.replaced}
    passed = {name for name in selected if auto[name].outcome == "passed"}
    missing = Outcome("missing", text="did not run")
    ours = {name: hybrid.get(name, missing) for name in sorted(passed)}
    excused, differences = {}, {}
    for name, outcome in ours.items():
        reason = exceptions.of_test(name)
        if reason is None and outcome.outcome == "failed":
            reason = exceptions.of_failure(outcome)
        if outcome.outcome != "passed" and reason is not None:
            excused[name] = reason
        elif outcome.outcome != "passed":
            differences[name] = f"{outcome.outcome}: {outcome.text}"
    good = [name for name, outcome in ours.items() if outcome.outcome == "passed"]
    return Judgement(
        selected=len(selected),
        passed_auto=len(passed),
        passed_hybrid=len(good),
        differences=differences,
        excused=excused,
        unneeded=[name for name in good if exceptions.of_test(name) is not None],
    )

"""Lightning's own tests, where there is a checkout of them; and the parts of the programme that runs them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.conformance.__main__ import VARIABLE, main
from tests.conformance.judgement import Exceptions, Outcome, judge, read_results
from tests.conformance.runs import _share, _worst
from tests.conformance.selection import FILES, files_of

needs_checkout = pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"{VARIABLE}, a checkout of Lightning's repository, is not set"
)


@needs_checkout
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("stages", [1, 2])
def test_lightnings_tests_pass(stages: int) -> None:
    assert main([f"--stages={stages}"]) == 0


def test_without_a_checkout_the_run_is_skipped_visibly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert main([]) == 0
    assert "SKIPPED: LIGHTNING_TESTS" in capsys.readouterr().out


# -- judgement --------------------------------------------------------------------------------------------------------

PASSED, FAILED, SKIPPED = Outcome("passed", 1), Outcome("failed", 1, "E   wrong"), Outcome("skipped", 1)


def test_what_passes_with_lightnings_choice_must_pass_with_ours() -> None:
    auto = {"a": PASSED, "b": PASSED, "c": PASSED, "d": FAILED, "e": SKIPPED, "f": Outcome("passed", 0), "g": PASSED}
    hybrid = {"a": PASSED, "b": FAILED, "c": SKIPPED, "d": FAILED, "e": SKIPPED, "f": FAILED}
    judgement = judge(auto, hybrid, Exceptions())
    assert (judgement.selected, judgement.passed_auto, judgement.passed_hybrid) == (6, 4, 1)
    assert set(judgement.differences) == {"b", "c", "g"}
    assert judgement.differences["b"] == "failed: E   wrong"
    assert not judgement.good


def test_a_reason_excuses_and_must_be_needed() -> None:
    auto = {"x.py::t[1]": PASSED, "x.py::t[2]": PASSED, "x.py::u": PASSED}
    hybrid = {"x.py::t[1]": FAILED, "x.py::t[2]": PASSED, "x.py::u": PASSED}
    judgement = judge(auto, hybrid, Exceptions({"x.py::t[1]": "counts calls"}))
    assert judgement.excused == {"x.py::t[1]": "counts calls"}
    assert judgement.good
    judgement = judge(auto, hybrid, Exceptions({"x.py::t[*]": "counts calls"}))
    assert judgement.unneeded == ["x.py::t[2]"]
    assert not judgement.good


def test_what_is_refused_is_known_by_its_text() -> None:
    auto = {"a": PASSED, "b": PASSED, "c": PASSED}
    hybrid = {"a": Outcome("failed", 1, "ValueError: uses manual optimization, ..."), "b": FAILED, "c": PASSED}
    judgement = judge(auto, hybrid, Exceptions(texts={"uses manual optimization": "refused"}))
    assert judgement.excused == {"a": "refused"}
    assert list(judgement.differences) == ["b"]
    assert not judgement.unneeded


def test_what_only_rank_0_says_may_be_missed_elsewhere() -> None:
    exceptions = Exceptions(texts_elsewhere={"DID NOT WARN": "rank 0 warns"})
    for rank, good in ((0, False), (1, True)):
        judgement = judge({"a": PASSED}, {"a": Outcome("failed", 1, "DID NOT WARN", rank)}, exceptions)
        assert judgement.good == good


def test_the_worst_of_all_ranks_counts_and_the_first() -> None:
    results = _worst([{"a": PASSED, "b": FAILED, "c": PASSED}, {"a": FAILED, "b": Outcome("started"), "c": PASSED}])
    assert {name: (found.outcome, found.rank) for name, found in results.items()} == {
        "a": ("failed", 1),
        "b": ("failed", 0),
        "c": ("passed", 0),
    }
    assert _worst([{"a": PASSED}, {}])["a"].outcome == "started"


@pytest.mark.parametrize("stages", [1, 2])
def test_every_exception_has_a_reason_and_a_selected_file(stages: int) -> None:
    exceptions = Exceptions.read(stages=stages)
    assert all(len(reason) > 30 for reason in [*exceptions.tests.values(), *exceptions.texts.values()])
    assert all(any(pattern.startswith(name) for name in FILES) for pattern in exceptions.tests)


def test_the_last_outcome_counts(tmp_path: Path) -> None:
    lines = [{"test": "a", "outcome": "started"}, {"test": "a", "outcome": "passed", "replaced": 2, "text": ""}]
    lines.append({"test": "b", "outcome": "started"})
    (tmp_path / "outcomes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_results(tmp_path / "outcomes.jsonl") == {"a": Outcome("passed", 2), "b": Outcome("started")}


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_file_stays_in_one_share() -> None:
    tests = ["a.py::x", "b.py::x", "a.py::y", "c.py"]
    assert [_share(tests, start, 2) for start in range(2)] == [["a.py::x", "a.py::y", "c.py"], ["b.py::x"]]


def test_files_are_found_below_the_tests(tmp_path: Path) -> None:
    for name in (
        "loops/test_a.py",
        "loops/optimization/test_b.py",
        "loops/helper.py",
        "models/test_amp.py",
        "test_x.py",
    ):
        path = tmp_path / "tests" / "tests_pytorch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = [name for name in files_of(tmp_path) if name.startswith("loops")]
    assert found == ["loops/optimization/test_b.py", "loops/test_a.py"]

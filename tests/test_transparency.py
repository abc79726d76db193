"""The main proof: a module under any layout and schedule has the numbers of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.results import Results, listed
from tests.transparency import (
    LAYOUTS,
    SCHEDULES,
    SUBJECTS,
    Case,
    allowed,
    compare,
    cover,
    pairs,
)

#: The first test of a batch waits for all of it.
pytestmark = pytest.mark.timeout(900)

CASES = [Case(*triple) for triple in cover(SUBJECTS, LAYOUTS, SCHEDULES)]
CASES.sort(key=lambda case: case.size)
SINGLE_SUBJECTS = ["momentum", "residual", "tied", "token_weighted"]
SINGLE_LAYOUTS = ["dp2", "pp2", "pp3_chunks2", "pp2_dp2"]
SINGLE = [Case(*triple, double=False) for triple in cover(SINGLE_SUBJECTS, SINGLE_LAYOUTS, SCHEDULES)]


def _marked(case: Case) -> Any:
    """Every day a small part of the list: a layout for each module, or none."""
    number = list(SUBJECTS).index(case.subject) + list(LAYOUTS).index(case.layout)
    return pytest.param(case, id=str(case), marks=() if number % 45 == 0 else pytest.mark.thorough)


@pytest.mark.rows(6, 59, 60, 61, 64)
@pytest.mark.distributed
@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_double_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)


@pytest.mark.distributed
@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_single_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["outputs", "validation", "steps", "metrics", "norms", "rates", "parameters"])
def test_a_small_difference_on_one_rank_is_found(results: Results, name: str) -> None:
    """The comparison is not blind in any of what it compares."""
    case = next(case for case in CASES if case.subject == "outputs" and case.layout == "pp2")
    records, oracle = copy.deepcopy(results[case])
    assert not compare(case, records, oracle)
    _disturb(getattr(records[1], name))
    assert compare(case, records, oracle)


def _disturb(values: Any) -> bool:
    """Change the last number in a tree by a billionth."""
    for key in reversed(list(values if isinstance(values, dict) else range(len(values)))):
        if isinstance(values[key], (torch.Tensor, float)):
            values[key] = values[key] * (1 + 1e-9)
            return True
        if isinstance(values[key], (dict, list)) and _disturb(values[key]):
            return True
    return False


def test_every_pair_occurs(capsys: pytest.CaptureFixture[str]) -> None:
    """Counted by itself, from what is possible."""
    wanted = {
        pair
        for subject in SUBJECTS
        for layout in LAYOUTS
        for schedule in SCHEDULES
        if allowed(subject, layout, schedule)
        for pair in pairs((subject, layout, schedule))
    }
    covered = set().union(*(pairs((case.subject, case.layout, case.schedule)) for case in CASES))
    assert covered == wanted
    with capsys.disabled():
        print(
            f"\ntransparency: {len(SUBJECTS)} modules, {len(LAYOUTS)} layouts, {len(SCHEDULES)} schedules,"
            f" {len(CASES)} cases in float64, all {len(wanted)} pairs covered; {len(SINGLE)} cases in float32"
        )

"""The main proof: a module under any layout and schedule has the numbers of one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.pool import Pools, RankError
from tests.transparency import (
    LAYOUTS,
    SCHEDULES,
    SUBJECTS,
    Case,
    OracleKey,
    Record,
    allowed,
    compare,
    cover,
    oracle_of,
    pairs,
    train,
)

#: The first test of a batch waits for all of it.
pytestmark = pytest.mark.timeout(900)

#: Trainings in one call of the ranks: starting costs more than a training, and a hang should not cost too many.
BATCH = 12

CASES = [Case(*triple) for triple in cover(SUBJECTS, LAYOUTS, SCHEDULES)]
CASES.sort(key=lambda case: case.size)
SINGLE_SUBJECTS = ["momentum", "residual", "tied", "token_weighted"]
SINGLE_LAYOUTS = ["dp2", "pp2", "pp3_chunks2", "pp2_dp2"]
SINGLE = [Case(*triple, double=False) for triple in cover(SINGLE_SUBJECTS, SINGLE_LAYOUTS, SCHEDULES)]


class Results:
    """Runs trainings when they are first asked for, several in one call of the ranks."""

    def __init__(self, ranks: Pools, cases: list[Case]) -> None:
        self._ranks = ranks
        self._cases = cases
        self._done: dict[Case | OracleKey, list[Record] | RankError] = {}

    def __getitem__(self, case: Case) -> tuple[list[Record], list[Record]]:
        """What the ranks of a case and the processes of its oracle saw."""
        if case not in self._done:
            waiting = [other for other in self._cases if other.size == case.size and other not in self._done]
            batch = [case, *(other for other in waiting if other != case)][:BATCH]
            oracles = {oracle_of(member) for member in batch} - self._done.keys()
            for size in (1, 2):
                self._run(size, [key for key in oracles if key.size == size])
            self._run(case.size, batch)
        outcomes = self._done[case], self._done[oracle_of(case)]
        for outcome in outcomes:
            if isinstance(outcome, RankError):
                raise outcome
        return outcomes

    def _run(self, size: int, jobs: list[Any]) -> None:
        if not jobs:
            return
        try:
            by_rank = self._ranks(size, lightning=True).run(train, jobs, timeout=60 + 10 * len(jobs))
            self._done.update({job: [records[i] for records in by_rank] for i, job in enumerate(jobs)})
        except RankError as error:
            if len(jobs) == 1:
                self._done[jobs[0]] = error
            else:  # one by one, to see which it is
                for job in jobs:
                    self._run(size, [job])


@pytest.fixture(scope="module")
def results(pools: Pools, request: pytest.FixtureRequest) -> Iterator[Results]:
    selected = [
        item.callspec.params["case"]
        for item in request.session.items
        if hasattr(item, "callspec") and isinstance(item.callspec.params.get("case"), Case)
    ]
    return Results(pools, selected)


@pytest.mark.rows(6, 59, 60, 61, 64)
@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES, ids=str)
def test_double_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, _text(differences)


@pytest.mark.distributed
@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_single_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, _text(differences)


def _text(differences: list[str], limit: int = 12) -> str:
    return "\n".join([f"{len(differences)} differences:", *differences[:limit]])


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

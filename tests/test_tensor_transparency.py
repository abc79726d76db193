"""The main proof, for layers that are shared by several ranks: the numbers of one process.

Every subject under every layout takes ten minutes: ``pytest -m "" tests/test_tensor_transparency.py``. An ordinary run
takes the part that is not marked `thorough`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.results import Results, listed
from tests.transparency import TENSOR_LAYOUTS, TENSOR_SUBJECTS, Case, Layout, compare

pytestmark = [pytest.mark.timeout(900), pytest.mark.distributed]


def _schedule(layout: Layout) -> str:
    return "interleaved_1f1b" if layout.chunks > 1 else "1f1b"


CASES = [
    Case(subject, layout.name, _schedule(layout))
    for subject, layout in itertools.product(TENSOR_SUBJECTS, TENSOR_LAYOUTS.values())
]
CASES.sort(key=lambda case: case.size)

#: Of every run: every second subject under one layout, one with chunks.
DAILY = {(subject, "tp2_pp2_sequence") for subject in list(TENSOR_SUBJECTS)[::2]}


def _marked(case: Case) -> Any:
    chunks = case.layout == "tp2_pp2_chunks2" and case.subject == "gpt"
    daily = chunks or (case.subject, case.layout) in DAILY
    return pytest.param(case, id=str(case), marks=() if daily else pytest.mark.thorough)


SINGLE = [
    Case(case.subject, case.layout, case.schedule, double=False) for case in CASES if case.layout == "tp2_pp2_sequence"
]


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_double_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)


def test_a_rank_that_shares_nothing_is_found(results: Results) -> None:
    """Replicas would have the right numbers too."""
    case = next(case for case in CASES if (case.subject, case.layout) in DAILY)
    records, oracle = results[case]
    assert compare(case, [replace(records[0], shared=0), *records[1:]], oracle) == [
        "ranks without shared parameters: 1, expected 0"
    ]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if case.subject == "tied_words" else pytest.mark.thorough)
        for case in SINGLE
    ],
)
def test_single_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)

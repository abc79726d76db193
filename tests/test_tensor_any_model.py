"""A model that is no chain, with layers shared by several ranks, has the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.results import Results, listed
from tests.transparency import SCHEDULES, TENSOR_FRAME_LAYOUTS, TENSOR_FRAME_SUBJECTS, Case, compare, cover

#: The first test of a batch waits for all of it.
pytestmark = pytest.mark.timeout(900)

CASES = [Case(*triple) for triple in cover(TENSOR_FRAME_SUBJECTS, TENSOR_FRAME_LAYOUTS, SCHEDULES)]
CASES.sort(key=lambda case: case.size)


def _marked(case: Case) -> Any:
    number = list(TENSOR_FRAME_SUBJECTS).index(case.subject) + list(TENSOR_FRAME_LAYOUTS).index(case.layout)
    return pytest.param(case, id=str(case), marks=() if number % 6 == 0 else pytest.mark.thorough)


@pytest.mark.distributed
@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_double_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)

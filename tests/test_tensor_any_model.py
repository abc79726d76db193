"""A model that is no chain, with layers shared by several ranks, has the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pool import Pools
from tests.results import Results, assert_equal_under, listed
from tests.transparency import (
    SCHEDULES,
    TENSOR_FRAME_LAYOUTS,
    TENSOR_FRAME_SUBJECTS,
    Case,
    allowed,
    compare,
    cover,
)

#: The first test of a batch waits for all of it.
pytestmark = pytest.mark.timeout(900)


def _possible(subject: str, layout: str, schedule: str) -> bool:
    """What a step writes into parameters is lost where replicas shard them."""
    return allowed(subject, layout, schedule) and (subject, layout) != ("clamped", "frame_tp2_pp2_zero3")


CASES = [Case(*triple) for triple in cover(TENSOR_FRAME_SUBJECTS, TENSOR_FRAME_LAYOUTS, SCHEDULES, _possible)]
CASES.sort(key=lambda case: case.size)


def _marked(case: Case) -> Any:
    number = list(TENSOR_FRAME_SUBJECTS).index(case.subject) + list(TENSOR_FRAME_LAYOUTS).index(case.layout)
    is_daily = number % 18 == 0 and case.size == 4
    return pytest.param(case, id=str(case), marks=() if is_daily else pytest.mark.thorough)


@pytest.mark.distributed
@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_double_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("subject", "layouts"),
    [
        ("gathered_drops", ("frame_pp2", "frame_tp2_pp2", "frame_tp2_pp2_chunks2")),
        ("shared_drops", ("frame_tp2_pp2", "frame_tp2_pp2_chunks2")),  # on shards, each rank draws its own
    ],
)
def test_random_numbers_do_not_depend_on_the_layout(ranks: Pools, subject: str, layouts: tuple[str, ...]) -> None:
    """Dropout around the layers and in them: shared or not, every stage draws what every other one does."""
    assert_equal_under(ranks, subject, layouts)

"""The main proof, for layers that are shared by ranks in two and three dimensions: the numbers of one process.

All of it takes half an hour: ``pytest -m "" tests/test_grid_transparency.py``. What is marked `thorough` is
left out of an ordinary run.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.results import Results, listed
from tests.transparency import GRID_LAYOUTS, Case, compare

pytestmark = [pytest.mark.timeout(900), pytest.mark.distributed]

SUBJECTS = ["mlps", "own_attention", "encoders", "sequence_first", "decoders", "gpt", "tied_words", "vit"]
CASES = [Case(subject, layout, "1f1b") for layout in GRID_LAYOUTS for subject in SUBJECTS]
CASES.sort(key=lambda case: case.size)

#: Of every run: with a clipped norm and tied weights, with a plan of regions.
DAILY = {("tied_words", "grid2.5d_depth1")}


def _marked(case: Case) -> Any:
    is_daily = (case.subject, case.layout) in DAILY
    return pytest.param(case, id=str(case), marks=() if is_daily else pytest.mark.thorough)


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_double_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)


def test_every_subject_meets_every_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """Counted by itself."""
    assert {(case.subject, case.layout) for case in CASES} == set(itertools.product(SUBJECTS, GRID_LAYOUTS))
    modes = {layout.mode for layout in GRID_LAYOUTS.values()}
    with capsys.disabled():
        print(
            f"\ngrid transparency: {len(SUBJECTS)} modules, {len(GRID_LAYOUTS)} layouts of {len(modes)} modes,"
            f" {len(CASES)} cases in float64; {len(DAILY)} daily"
        )

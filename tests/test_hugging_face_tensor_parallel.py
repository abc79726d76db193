"""Models of transformers, their classes unchanged, whose layers several ranks share: the numbers of one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.results import Results, listed
from tests.transparency import FOUND_SUBJECTS, Case, compare

pytest.importorskip("transformers")

#: The first test of a batch waits for all of it.
pytestmark = pytest.mark.timeout(900)

CASES = [Case(*pair, "1f1b") for pair in itertools.product(FOUND_SUBJECTS, ["tp2", "tp2_dp2", "tp4"])]
CASES.sort(key=lambda case: case.size)
DAILY = {"found_gpt2": "tp2", "found_t5": "tp2", "found_bert": "tp2", "found_timm": "tp2", "found_nano": "tp2"}
DAILY |= {"found_llama": "tp2_dp2", "found_qwen3": "tp2", "found_opt": "tp2_dp2", "found_vit": "tp2"}


def _marked(case: Case) -> Any:
    is_daily = DAILY.get(case.subject) == case.layout
    return pytest.param(case, id=str(case), marks=() if is_daily else pytest.mark.thorough)


@pytest.mark.distributed
@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_double_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)

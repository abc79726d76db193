"""Models of transformers, their classes unchanged, under any layout and schedule: the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.results import Results, listed
from tests.transparency import FRAME_LAYOUTS, HF_SHARED, HF_SUBJECTS, SCHEDULES, Case, compare, cover

pytest.importorskip("transformers")

#: The first test of a batch waits for all of it.
pytestmark = pytest.mark.timeout(900)

CASES = [Case(*triple) for triple in cover(HF_SUBJECTS, FRAME_LAYOUTS, SCHEDULES)]
CASES += [Case(subject, "frame_tp2_pp2", "1f1b") for subject in (*HF_SUBJECTS, *HF_SHARED)]
CASES.sort(key=lambda case: case.size)
DAILY = {"hf_llama": "frame_pp2", "hf_gpt2": "frame_pp2_dp2", "hf_bert": "frame_pp2_chunks2", "hf_t5": "frame_pp3"}
DAILY |= {"hf_deberta2": "frame_pp2", "hf_vit_mae": "frame_pp2_chunks2"}


def _marked(case: Case) -> Any:
    is_daily = DAILY.get(case.subject) == case.layout or str(case) == "hf_llama_shared-frame_tp2_pp2-1f1b"
    return pytest.param(case, id=str(case), marks=() if is_daily else pytest.mark.thorough)


@pytest.mark.distributed
@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_double_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)

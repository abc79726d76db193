"""The main proof, where replicas divide optimizer states, gradients and parameters: the numbers of one process.

All of it takes 30 minutes: ``pytest -m "" tests/test_zero_transparency.py``. What is marked `thorough` is
left out of an ordinary run.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.results import Results, listed
from tests.transparency import ZERO_LAYOUTS, Case, compare

pytestmark = [pytest.mark.timeout(900), pytest.mark.distributed]

#: What may go wrong where gradients travel in parts: several batches a step, a norm over parts, tensors of several
#: stages, layers and parameters that only some replicas, or nobody, use, and ones that are frozen or thaw.
SUBJECTS = ["residual", "momentum", "accumulated", "clipped_by_norm", "tied", "shared_parameter", "shared_layer"]
SUBJECTS += ["branching", "branching_accumulated", "unused", "frozen_middle", "thawing", "token_weighted", "normalised"]
TENSOR_SUBJECTS = ["mlps", "tied_words", "own_attention", "encoders", "vit"]


def _cases() -> list[Case]:
    cases = []
    for layout in ZERO_LAYOUTS.values():
        schedule = "interleaved_1f1b" if layout.chunks > 1 else "1f1b"
        subjects = TENSOR_SUBJECTS if layout.tensor > 1 else SUBJECTS
        cases += [Case(subject, layout.name, schedule) for subject in subjects]
    return sorted(cases, key=lambda case: case.size)


CASES = _cases()


#: What is run every day beside the part of the smaller ones.
CHOSEN = {("normalised", "dp4_zero2"), ("tied_words", "tp2_pp2_dp2_zero2"), ("vit", "tp2_dp2_zero1")}
CHOSEN |= {("encoders", "tp2_dp2_sequence_zero3_early"), ("clipped_by_norm", "dp4_of2_zero3")}


def _marked(case: Case) -> Any:
    """In every run each small layout with one of its modules, or none, and a few of the others."""
    layout = ZERO_LAYOUTS[case.layout]
    subjects = TENSOR_SUBJECTS if layout.tensor > 1 else SUBJECTS
    number = subjects.index(case.subject) + list(ZERO_LAYOUTS).index(case.layout)
    small = layout.size < 8 and layout.data < 4
    daily = (small and number % 42 == 0) or (case.subject, case.layout) in CHOSEN
    return pytest.param(case, id=str(case), marks=() if daily else pytest.mark.thorough)


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_double_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)

"""The main proof, for sequences that ranks share: the numbers of one process.

All of it takes an hour: ``pytest -m "" tests/test_context_transparency.py``. An ordinary run takes
the part that is not marked `thorough`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from lightning_hybrid.tensor_parallel.context_parallel.attention import KINDS
from tests.results import Results, listed
from tests.transparency import (
    CONTEXT_LAYOUTS,
    CONTEXT_SUBJECTS,
    WIDE_CONTEXT_LAYOUTS,
    WIDE_CONTEXT_SUBJECTS,
    Case,
    Layout,
    compare,
)

pytestmark = [pytest.mark.timeout(900), pytest.mark.distributed]

#: Those of transformers with a loss of the test's, in float64, and with their own, which casts logits to float32.
HUGGING_FACE = ["found_gpt2", "found_llama", "found_mistral", "hf_gpt2", "hf_llama"]
SUBJECTS = ["gpt", "tied_words", "found_nano", *HUGGING_FACE, *CONTEXT_SUBJECTS]
#: Tensor parallelism divides heads once more: of models whose layers it knows.
WITHOUT_TENSOR = {"context_used_twice", "context_penalised"}
#: No stage has the values of all parameters.
WITHOUT_STAGES = {"context_penalised"}
#: The loss is a DTensor then, which is not broadcast in a model group.
WITHOUT_ZERO3 = {"context_penalised"}
#: A cache of keys does not go with layers that run again.
CACHED = set(HUGGING_FACE)
UNCACHED = {f"context_{name}" for name in ("gpt2", "llama", "mistral")}
#: Shared by four ranks beside another axis: two models, and with recompute alone one of transformers too.
WIDE_SUBJECTS = [*WIDE_CONTEXT_SUBJECTS, "context_llama"]
DAILY = {
    ("context_example", "cp2_ulysses"),
    ("hf_llama", "cp2_all_gather"),
    ("context_used_twice", "cp2_pp2_ring"),
}


def _schedule(layout: Layout) -> str:
    return "interleaved_1f1b" if layout.chunks > 1 else "1f1b"


def _means_something(subject: str, layout: Layout) -> bool:
    without = WITHOUT_TENSOR if layout.tensor > 1 else WITHOUT_STAGES if layout.pipeline > 1 else set()
    if layout.zero == 3:
        without = without | WITHOUT_ZERO3
    return subject not in without and subject not in (CACHED if layout.recompute else UNCACHED)


CASES = [
    Case(subject, layout.name, _schedule(layout))
    for subjects, layouts in ((SUBJECTS, CONTEXT_LAYOUTS), (WIDE_SUBJECTS, WIDE_CONTEXT_LAYOUTS))
    for subject, layout in itertools.product(subjects, layouts.values())
    if _means_something(subject, layout)
]
CASES.sort(key=lambda case: case.size)


def _marked(case: Case) -> Any:
    return pytest.param(case, id=str(case), marks=() if (case.subject, case.layout) in DAILY else pytest.mark.thorough)


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_double_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)


def test_every_subject_meets_every_kind_and_every_layout_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Counted by itself, from what is possible."""
    layouts = CONTEXT_LAYOUTS | WIDE_CONTEXT_LAYOUTS
    subjects = {*SUBJECTS, *WIDE_SUBJECTS}
    met = {(case.subject, layouts[case.layout].context_kind) for case in CASES}
    assert met == set(itertools.product(subjects, KINDS))
    assert {case.layout for case in CASES} == set(layouts)
    assert len(set(CASES)) == len(CASES)
    wide = [case for case in CASES if case.layout in WIDE_CONTEXT_LAYOUTS]
    assert len(wide) == len(WIDE_CONTEXT_SUBJECTS) * len(WIDE_CONTEXT_LAYOUTS) + len(KINDS)
    with capsys.disabled():
        print(
            f"\ncontext transparency: {len(subjects)} modules, {len(layouts)} layouts, {len(KINDS)} kinds,"
            f" {len(CASES)} cases in float64, {len(wide)} of them with shares of four ranks beside another axis;"
            f" {len(DAILY)} daily"
        )

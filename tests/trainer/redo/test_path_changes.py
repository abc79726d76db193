from __future__ import annotations

import warnings

from lightning_hybrid.pipeline_parallel.frame.path_change import FOLLOW, Choice
from lightning_hybrid.trainer.redo.path_changes import PathChanges


def noted(steps: list[tuple[int, int]]) -> tuple[PathChanges, list[str]]:
    """Note plans that were chosen at steps, and return the warnings too."""
    changes = PathChanges()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, plan in steps:
            changes.note(Choice(0, plan, follows_rest=False), step)
    return changes, [str(each.message) for each in caught]


def test_new_paths_again_and_again_are_followed_first() -> None:
    changes, texts = noted([(step, FOLLOW) for step in (5, 6, 6, 8, 9, 10, 11)])
    assert changes.follows_first
    assert len(texts) == 1
    assert "4 new paths in 5 batches" in texts[0]
    assert "HybridStrategy(dynamic_shapes=True)" in texts[0]


def test_new_paths_now_and_then_and_remembered_ones_are_not() -> None:
    for steps in ([(step, FOLLOW) for step in range(0, 100, 10)], [(step, 7) for step in range(20)]):
        changes, texts = noted(steps)
        assert (changes.have_been, changes.follows_first, texts) == (True, False, [])


def test_microbatches_before_the_first_that_fails_are_not_chosen_again() -> None:
    assert [Choice(1, 4, follows_rest=False).plan_of(number) for number in (1, 2)] == [4, None]
    assert [Choice(1, FOLLOW, follows_rest=True).plan_of(number) for number in (1, 2)] == [FOLLOW, FOLLOW]

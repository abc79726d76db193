"""The layouts that a search compares have the values that the user set."""

from __future__ import annotations

from typing import Any

from lightning_hybrid import HybridStrategy, Tuning
from lightning_hybrid.tuning.candidates import Layout, LoaderStep
from lightning_hybrid.tuning.search_space import layouts, search_space
from tests.strategy.test_open_arguments import AUTO


def tried(num_ranks: int, samples: int, sizes: tuple[Any, Any, Any] = ("auto", 1, 1), **arguments: Any) -> list[Layout]:
    names = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    strategy = HybridStrategy(**dict(zip(names, sizes, strict=True)), **arguments)
    return list(
        layouts(
            num_ranks,
            LoaderStep(samples),
            num_ranks,
            num_ranks,
            search_space(strategy.settings, strategy.settings.requested_sizes),
        )
    )


def test_what_is_given_stays_in_all_that_is_tried() -> None:
    found = tried(8, 16, ("auto", 2, 1), zero_stage=1, **AUTO)
    assert {layout.tensor for layout in found} == {2}
    assert {layout.zero_stage for layout in found if layout.data > 1} == {1}
    assert {layout.pipeline for layout in found} == {1, 2, 4}
    assert {layout.pipeline for layout in tried(8, 16, ("auto", 1, [4, 2]), **AUTO)} == {4, 2}
    assert {layout.data for layout in tried(8, 16, (2, 1, 1), **AUTO)} == {2}
    (only,) = tried(
        4, 16, (2, 1, 2), num_microbatches=3, zero_stage=2, schedule="gpipe", num_chunks=2, recompute="auto"
    )[:1]
    assert only == Layout(2, 1, 2, 3, "gpipe", 2, 2)
    assert "gpipe" not in {layout.schedule for layout in tried(4, 16, tuning=Tuning(extra_in_flight=1), **AUTO)}
    shared = tried(4, 16, context_parallel_size=2, **AUTO)
    assert {layout.context for layout in shared} == {2}
    assert {layout.context_kind for layout in shared} == {"ulysses", "ring", "all_gather"}
    assert {layout.context for layout in tried(4, 16, **AUTO)} == {1, 2, 4}
    modes = {(layout.tensor, layout.tensor_mode, layout.tensor_depth) for layout in tried(8, 16, **AUTO)}
    line = {(size, "1d", 1) for size in (1, 2, 4, 8)}
    assert modes == {*line, (4, "2d", 1), (8, "2.5d", 2), (8, "3d", 1)}
    assert {layout.tensor_mode for layout in tried(8, 16, **AUTO) if layout.context > 1} == {"1d"}
    square = tried(8, 16, tensor_parallel_mode="2d", **AUTO)
    assert {(layout.tensor, layout.tensor_mode) for layout in square} == {(1, "1d"), (4, "2d")}
    usual = tried(4, 64, ("auto", 1, "auto"))
    assert {(each.pipeline, each.num_microbatches) for each in usual} == {(1, 1), (2, 8), (4, 16)}


def test_zero_shards_over_all_replicas_or_over_those_of_a_node() -> None:
    space = search_space(HybridStrategy(**AUTO).settings, HybridStrategy(**AUTO).settings.requested_sizes)
    found = {
        (layout.data, layout.tensor, layout.pipeline, layout.zero_size)
        for layout in layouts(16, LoaderStep(16), 8, 8, space)
        if layout.zero_stage and layout.context == 1
    }
    hybrid = {each for each in found if each[-1] is not None}
    assert hybrid == {(16, 1, 1, 8), (8, 2, 1, 4), (4, 4, 1, 2)}
    assert found - hybrid >= {(*sizes, None) for *sizes, _ in hybrid}


def test_a_zero_size_that_the_user_sets_stays() -> None:
    found = tried(8, 16, zero_size=4, **AUTO)
    assert {(layout.data, layout.zero_size) for layout in found} == {(8, 4), (4, 4)}
    assert {layout.zero_stage for layout in found} == {1, 2, 3}


def test_batches_of_the_loader_make_up_the_samples_of_a_step() -> None:
    step = LoaderStep(4, global_batch_size=24)
    assert [replicas for replicas in range(1, 9) if step.is_possible(replicas)] == [1, 2, 3, 6]
    assert [step.accumulations(replicas) for replicas in (1, 2, 3, 6)] == [6, 3, 2, 1]
    assert step.total(Layout(3, 1, 1)) == 24
    assert LoaderStep(4, 2).total(Layout(3, 1, 1)) == 24

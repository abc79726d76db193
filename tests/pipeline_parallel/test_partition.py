"""Partitions against golden vectors and against trying out all of them."""

from __future__ import annotations

import random
import re
from itertools import accumulate, combinations, pairwise

import pytest

from lightning_hybrid.pipeline_parallel.partition import partition


def layers_per_stage(stages: list[range]) -> list[int]:
    assert stages[0].start == 0
    assert all(first.stop == second.start for first, second in pairwise(stages))
    return [len(stage) for stage in stages]


def heaviest(weights: list[int], stages: list[range]) -> int:
    return max(sum(weights[layer] for layer in stage) for stage in stages)


# Colossal-AI 0.1.9, partition_uniform.
@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [
        (12, 2, [6, 6]),
        (10, 4, [2, 2, 3, 3]),
        (12, 5, [2, 2, 2, 3, 3]),
        (13, 4, [3, 3, 3, 4]),
        (7, 3, [2, 2, 3]),
        (6, 2, [3, 3]),
        (7, 4, [1, 2, 2, 2]),  # 2 ranks, 2 chunks: Colossal-AI refuses it
        (5, 1, [5]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_uniform(num_layers: int, num_stages: int, expected: list[int]) -> None:
    assert layers_per_stage(partition("uniform", [1] * num_layers, num_stages)) == expected


# Colossal-AI 0.1.9, uniform with chunks: number of layers, ranks, chunks; the layers of the first ranks.
@pytest.mark.parametrize(
    ("num_layers", "num_ranks", "num_chunks", "expected"),
    [
        (12, 2, 2, [[(0, 3), (6, 9)], [(3, 6), (9, 12)]]),
        (16, 4, 2, [[(0, 2), (8, 10)], [(2, 4), (10, 12)], [(4, 6), (12, 14)], [(6, 8), (14, 16)]]),
        (24, 4, 2, [[(0, 3), (12, 15)]]),
    ],
)
def test_chunks_of_a_rank(
    num_layers: int, num_ranks: int, num_chunks: int, expected: list[list[tuple[int, int]]]
) -> None:
    stages = partition("uniform", [1] * num_layers, num_ranks * num_chunks)
    of_ranks = [[(stage.start, stage.stop) for stage in stages[rank::num_ranks]] for rank in range(num_ranks)]
    assert of_ranks[: len(expected)] == expected


# LiBai's rule gives the last stage less: layers, stages, layers of its heaviest stage.
@pytest.mark.parametrize(
    ("num_layers", "num_stages", "theirs"),
    [
        (8, 2, 4),
        (12, 4, 4),
        (12, 5, 3),
        (24, 4, 7),
        (8, 4, 3),
        (24, 8, 4),
        (32, 8, 5),
        (10, 4, 3),
        (13, 4, 4),
        (48, 8, 7),
    ],
)
def test_uniform_is_not_heavier_than_libai(num_layers: int, num_stages: int, theirs: int) -> None:
    assert max(layers_per_stage(partition("uniform", [1] * num_layers, num_stages))) <= theirs


# Colossal-AI 0.1.9, partition_balanced: weights and where its stages begin and end.
GOLDEN_BALANCED = [
    ([1, 1, 1, 1, 8], [0, 4, 5]),
    ([9, 1, 1, 1, 1, 1, 1, 9], [0, 1, 4, 7, 8]),
    ([10, 1, 1, 1, 1, 1, 1, 10], [0, 4, 8]),
    ([3, 1, 4, 1, 5, 9, 2, 6], [0, 4, 5, 6, 8]),
    ([9536, 215808, 1219584, 7098368, 14964736, 20490], [0, 4, 6]),  # children of ResNet-50
    ([0, 5, 5, 0, 5, 5], [0, 2, 4, 6]),
    ([100, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 100], [0, 1, 7, 13, 14]),
]


@pytest.mark.parametrize(("weights", "bounds"), GOLDEN_BALANCED)
def test_balanced_is_not_heavier_than_golden(weights: list[int], bounds: list[int]) -> None:
    golden = [range(first, end) for first, end in pairwise(bounds)]
    ours = partition("parameters", weights, len(golden))
    assert heaviest(weights, ours) <= heaviest(weights, golden)
    if weights != [3, 1, 4, 1, 5, 9, 2, 6]:  # there [0, 3, 5, 6, 8] is as heavy and more even
        assert ours == golden


def test_balanced_finds_the_lightest_and_most_even_of_all_partitions() -> None:
    rng = random.Random(0)
    for _ in range(500):
        num_layers = rng.randint(1, 9)
        num_stages = rng.randint(1, num_layers)
        weights = [rng.choice([0, 1, rng.randint(0, 9), rng.randint(0, 10**9)]) for _ in range(num_layers)]

        def rank_of(counts: list[int], weights: list[int] = weights) -> tuple[int, int, int, list[int]]:
            ends = [0, *accumulate(counts)]
            loads = [sum(weights[first:end]) for first, end in pairwise(ends)]
            return max(loads), sum(load**2 for load in loads), sum(count**2 for count in counts), counts

        cuts = combinations(range(1, num_layers), num_stages - 1)
        best = min(rank_of([end - first for first, end in pairwise([0, *cut, num_layers])]) for cut in cuts)
        assert rank_of(layers_per_stage(partition("parameters", weights, num_stages))) == best


def test_balanced_is_not_heavier_than_uniform_for_many_layers() -> None:
    rng = random.Random(1)
    for _ in range(50):
        num_layers = rng.randint(20, 120)
        num_stages = rng.randint(2, 16)
        weights = [rng.randint(0, 10**6) for _ in range(num_layers)]
        ours = heaviest(weights, partition("parameters", weights, num_stages))
        assert ours <= heaviest(weights, partition("uniform", weights, num_stages))
        assert ours >= max(max(weights), -(-sum(weights) // num_stages))


def test_layers_without_parameters_are_spread_as_in_uniform() -> None:
    assert partition("parameters", [0] * 7, 4) == partition("uniform", [0] * 7, 4)


def test_given_layers() -> None:
    assert partition([1, 3, 2], [1] * 6, 3) == [range(1), range(1, 4), range(4, 6)]


@pytest.mark.parametrize(
    ("stages", "num_stages", "expected"),
    [
        ([0] * 6 + [1] * 7 + [2] * 7 + [3] * 4, 4, [6, 7, 7, 4]),  # LiBai's example
        ([0, 1], 2, [1, 1]),
        ([0, 0, 0], 1, [3]),
        ((0, 1, 2, 2), 3, [1, 1, 2]),
    ],
)
def test_given_stages(stages: list[int], num_stages: int, expected: list[int]) -> None:
    found = partition(stages, [1] * len(stages), num_stages)
    assert layers_per_stage(found) == expected
    assert found == partition(expected, [1] * len(stages), num_stages)


@pytest.mark.parametrize(
    ("method", "num_layers", "num_stages", "message"),
    [
        ("even", 4, 2, "partition='even' must be 'uniform', 'parameters', or a list that contains"),
        (None, 4, 2, "partition=None must be 'uniform', 'parameters', or a list that contains"),
        ("uniform", 3, 4, "3 layers cannot be split into 4 stages"),
        ("parameters", 3, 4, "so that their product is at most 3"),
        ([1, 1, 1], 2, 3, "2 layers cannot be split into 3 stages"),
        ("uniform", 3, 0, "The number of stages must be at least 1, got 0"),
        ([2, 2], 4, 3, "[2, 2] is for 2 stages, but pipeline_parallel_size * num_chunks is 3"),
        ([2, 2], 5, 2, "[2, 2] is for 4 layers, but the body has 5; change the numbers so that they sum to 5"),
        ([4, 0], 4, 2, "must be at least 1, got 0 (in [4, 0])"),
        ([1, 1, 2, 2], 4, 2, "or the stage of each layer, starting at 0"),
        ([0, 4], 4, 2, "[0, 4] are for 2 layers, but there are 4 layers; list one stage for each layer, or one number"),
        ([0, 1, 0, 1], 4, 2, "[0, 1, 0, 1] decrease from 1 to 0 at layer 2"),
        ([0, 0, 2, 2], 4, 3, "[0, 0, 2, 2] do not contain stage 1;"),
        ([0, 0, 0, 1], 4, 3, "[0, 0, 0, 1] do not contain stage 2;"),
        ([0, 1, 2, 3], 4, 2, "[0, 1, 2, 3] contain stage 3, but pipeline_parallel_size * num_chunks is 2"),
        ([0, -1, 1, 1], 4, 2, "a stage must be at least 0, got -1"),
    ],
)
def test_wrong_values(method: str | list[int], num_layers: int, num_stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        partition(method, [1] * num_layers, num_stages)


def test_negative_weight() -> None:
    with pytest.raises(ValueError, match=re.escape("at least 0, got -1 (in [1, -1])")):
        partition("parameters", [1, -1], 2)


@pytest.mark.parametrize("layers", [[1.0, 3], [True, 3], ["1", 3], [False, 0, 1, 1], [0.0, 0, 1, 1]])
def test_wrong_types(layers: list[int]) -> None:
    with pytest.raises(TypeError, match=f"must be an integer, but {layers[0]!r} is a {type(layers[0]).__name__}"):
        partition(layers, [1] * 4, 2)

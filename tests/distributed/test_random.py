from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from lightning_hybrid.distributed.random import (
    RandomStreams,
    derive_seed,
    generator_marks,
    generator_states,
    seed_generators,
    set_generator_states,
)

Numbers = tuple[float, float, float]
CPU = torch.device("cpu")

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(()).item(),
    "torch normal": lambda: torch.randn(3)[0].item(),
    "numpy": lambda: float(np.random.rand()),
    "random": random.random,
    "random gauss": lambda: random.gauss(0, 1),
}
# NumPy keeps the second of two normal numbers for later, outside of the generator that the layers' stream replaces.
ALL_DRAWS = {**DRAWS, "numpy normal": lambda: float(np.random.randn())}


def draw() -> tuple[float, ...]:
    return tuple(one() for one in DRAWS.values())


def all_differ(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    return all(a != b for a, b in zip(first, second, strict=True))


def make(seed: int = 7, data_rank: int = 0) -> RandomStreams:
    return RandomStreams(seed, data_rank, torch.device("cpu"))


# -- seeds -------------------------------------------------------------------------------------------------------------


def splitmix64(state: int) -> int:
    """The reference implementation (https://prng.di.unimi.it/splitmix64.c): one number after ``state``."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_a_seed_of_one_coordinate_is_splitmix64() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the first number of the published generator for seed 0
    for coordinate in (0, 1, 42, 2**63, 2**64 - 1):
        assert derive_seed(coordinate) == splitmix64(coordinate)


def test_neighbouring_coordinates_give_different_seeds() -> None:
    seeds = {derive_seed(*place) for place in itertools.product(range(-2, 4), repeat=4)}
    assert len(seeds) == 6**4
    assert len({derive_seed(*[0] * length) for length in range(1, 9)}) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_the_bits_of_neighbouring_seeds_are_unrelated() -> None:
    differing = [(derive_seed(1, i) ^ derive_seed(1, i + 1)).bit_count() for i in range(1000)]
    assert 31 < sum(differing) / len(differing) < 33
    assert min(differing) > 10


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**64 - 1])
def test_every_generator_is_seeded(seed: int) -> None:
    seed_generators(seed)
    first = draw()
    draw()
    seed_generators(seed, torch.device("cpu"))
    assert draw() == first
    seed_generators((seed + 1) % 2**64)
    assert all_differ(draw(), first)


def test_torch_is_seeded_as_by_manual_seed() -> None:
    seed_generators(123)
    ours = torch.rand(3)
    torch.manual_seed(123)
    assert torch.equal(torch.rand(3), ours)


# -- the world outside -------------------------------------------------------------------------------------------------


def draw_around(inside: Callable[[], None], kind: str, before: int) -> list[float]:
    seed_generators(5)
    numbers = [ALL_DRAWS[kind]() for _ in range(before)]
    inside()
    return numbers + [ALL_DRAWS[kind]() for _ in range(3)]


@pytest.mark.parametrize("kind", ALL_DRAWS)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_nothing_inside_is_noticed_outside(kind: str, before: int) -> None:
    streams = make()

    def step() -> None:
        with streams.isolated():
            streams.seed_user(1, 2)
            draw()
            with streams.layers(0, 1, 2):
                draw()
                torch.manual_seed(3)
                np.random.seed(3)
                random.seed(3)
            draw()

    assert draw_around(step, kind, before) == draw_around(lambda: None, kind, before)


def test_everything_is_restored_after_an_error() -> None:
    streams = make()
    seed_generators(5)
    expected = draw()
    seed_generators(5)

    def broken() -> None:
        with streams.isolated(), streams.layers(0, 1):
            draw()
            raise RuntimeError("in a layer")

    with pytest.raises(RuntimeError, match="in a layer"):
        broken()
    assert draw() == expected


def test_generators_that_the_user_made_are_left_alone() -> None:
    mine, torchs = np.random.default_rng(1), torch.Generator().manual_seed(1)
    with make().isolated():
        make().seed_user(1)
    assert mine.random() == np.random.default_rng(1).random()
    assert torch.rand((), generator=torchs) == torch.rand((), generator=torch.Generator().manual_seed(1))


# -- the streams -------------------------------------------------------------------------------------------------------


def user(streams: RandomStreams, *coordinates: int) -> tuple[float, ...]:
    with streams.isolated():
        streams.seed_user(*coordinates)
        return draw()


def layers(streams: RandomStreams, stage: int, *coordinates: int) -> tuple[float, ...]:
    with streams.isolated():
        streams.seed_user(*coordinates)
        with streams.layers(stage, *coordinates):
            return draw()


def test_the_users_code_draws_the_same_on_every_rank_of_a_model_group() -> None:
    first, last = make(), make()
    with first.isolated():
        first.seed_user(0, 3, 1)
        expected = draw(), draw()
        with first.layers(0, 0, 3, 1):
            draw()
    np.random.rand(5)  # ranks differ in what they did before
    with last.isolated():
        last.seed_user(0, 3, 1)
        before = draw()
        with last.layers(3, 0, 3, 1):
            for _ in range(4):
                draw()
        after = draw()
    assert (before, after) == expected


@pytest.mark.parametrize("other", [(0, 3, 2), (0, 4, 1), (1, 3, 1), (0, 3)])
def test_the_users_code_draws_other_numbers_elsewhere(other: tuple[int, ...]) -> None:
    assert all_differ(user(make(), 0, 3, 1), user(make(), *other))


def test_replicas_and_seeds_draw_other_numbers() -> None:
    numbers = [make(), make(data_rank=1), make(seed=8)]
    for a, b in itertools.combinations(numbers, 2):
        assert all_differ(user(a, 0, 3, 1), user(b, 0, 3, 1))
        assert all_differ(layers(a, 0, 0, 3, 1), layers(b, 0, 0, 3, 1))


def test_each_stage_has_its_own_stream() -> None:
    numbers = [layers(make(), stage, 0, 3, 1) for stage in range(4)] + [user(make(), 0, 3, 1)]
    for a, b in itertools.combinations(numbers, 2):
        assert all_differ(a, b)


def test_layers_draw_other_numbers_in_each_microbatch_and_the_same_again_after_a_restart() -> None:
    assert all_differ(layers(make(), 1, 0, 3, 1), layers(make(), 1, 0, 3, 2))
    streams = make()
    for microbatch in range(3):
        layers(streams, 1, 0, 2, microbatch)
    assert layers(streams, 1, 0, 3, 1) == layers(make(), 1, 0, 3, 1)


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_the_users_stream_goes_on_after_the_layers(kind: str, before: int) -> None:
    def numbers(through_layers: bool) -> list[float]:
        streams = make()
        with streams.isolated():
            streams.seed_user(4)
            found = [DRAWS[kind]() for _ in range(before)]
            if through_layers:
                with streams.layers(0, 4):
                    draw()
            return found + [DRAWS[kind]() for _ in range(3)]

    assert numbers(True) == numbers(False)


def test_normal_numbers_of_numpy_are_the_same_on_every_rank() -> None:
    # None of them has one in store after the layers.
    def numbers(stage: int, drawn_outside: int) -> list[float]:
        streams = make()
        np.random.randn(drawn_outside)
        with streams.isolated():
            streams.seed_user(4)
            found = [float(np.random.randn())]
            with streams.layers(stage, 4):
                np.random.randn(stage)
            return [*found, float(np.random.randn()), float(np.random.randn())]

    assert numbers(0, 1) == numbers(1, 2) == numbers(3, 0)


def test_seeding_costs_microseconds() -> None:
    """Not timed: `torch.manual_seed` would visit every backend, and is not called."""
    called = []
    original, torch.manual_seed = torch.manual_seed, lambda seed: called.append(seed)  # type: ignore[assignment]
    try:
        with make().isolated():
            make().seed_user(1)
    finally:
        torch.manual_seed = original
    assert called == []


# -- states ------------------------------------------------------------------------------------------------------------


def draws() -> list[float]:
    return [torch.rand(()).item(), np.random.rand(), np.random.randn(), random.random(), random.gauss(0, 1)]


@pytest.mark.parametrize("numpy", [np.random.MT19937, np.random.PCG64])
def test_generators_go_back_to_a_state_that_went_through_a_file(tmp_path: Path, numpy: Any) -> None:
    before = get_bit_generator()
    set_bit_generator(numpy(5))
    try:
        draws()
        states = generator_states(CPU)
        expected = draws(), draws()
        torch.save(states, tmp_path / "states")
        set_generator_states(torch.load(tmp_path / "states", weights_only=True), CPU)
        assert (draws(), draws()) == expected
    finally:
        set_bit_generator(before)


@pytest.mark.parametrize("numpy", [np.random.MT19937, np.random.PCG64])
@pytest.mark.parametrize("draw", [lambda: torch.rand(1), np.random.rand, random.random])
def test_a_draw_leaves_a_mark(draw: Callable[[], Any], numpy: Any) -> None:
    before = get_bit_generator()
    set_bit_generator(numpy(5))
    try:
        marks = generator_marks(CPU)
        assert generator_marks(CPU) == marks
        draw()
        assert generator_marks(CPU) != marks
    finally:
        set_bit_generator(before)


def test_streams_go_on_counting() -> None:
    first, second = RandomStreams(1, 0, CPU), RandomStreams(2, 0, CPU)
    assert [first.next_number("a"), first.next_number("a"), first.next_number("b")] == [0, 1, 0]
    second.load_state_dict(first.state_dict())
    assert [second.next_number("a"), second.next_number("b"), second.next_number("c")] == [2, 1, 0]
    first.seed_user(3)
    expected = draws()
    second.seed_user(3)
    assert draws() == expected


def test_the_outside_can_be_seen_from_inside() -> None:
    streams = RandomStreams(1, 0, CPU)
    with streams.outside():
        outside = generator_marks(CPU)
    with streams.isolated():
        streams.seed_user(1)
        with streams.isolated():
            inside = generator_marks(CPU)
            with streams.outside():
                assert generator_marks(CPU) == outside
            assert generator_marks(CPU) == inside != outside
    assert generator_marks(CPU) == outside

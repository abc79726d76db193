"""How many microbatches more are chosen: against closed forms, and against every number tried one by one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from lightning_hybrid.pipeline_parallel.links.in_flight import NOT_WORTH, choose_extra
from lightning_hybrid.pipeline_parallel.links.link import Link, StepTimes, equal_times
from lightning_hybrid.pipeline_parallel.schedules import Placement, build
from lightning_hybrid.pipeline_parallel.timeline import simulate

# -- two ranks: closed forms -------------------------------------------------------------------------------------------


def two(delay: float, occupied: float = 0.0, first: float = 1.0, last: float = 1.0) -> StepTimes:
    """Two stages whose backward takes twice the forward."""
    return StepTimes([first, last], [2 * first, 2 * last], [delay], [occupied])


@pytest.mark.parametrize("occupied", [0.0, 1.0])
@pytest.mark.parametrize("delay", [0.0, 0.5, 1.4, 4.0, 7.9, 19.5])
def test_two_equal_stages_need_what_their_way_takes(delay: float, occupied: float) -> None:
    """Way there and back over the time of a microbatch, less the two that 1F1B has in flight by itself."""
    needed = math.ceil((6 + 2 * (delay + occupied)) / 3) - 2
    assert choose_extra("1f1b", two(delay, occupied), 2, 64) == (needed,)


def test_a_slow_stage_hides_delay_by_itself() -> None:
    """The way is 3 + 12 + 8, and a microbatch takes 12: 1F1B's own two in flight are enough."""
    assert choose_extra("1f1b", two(4.0, last=4.0), 2, 64) == (0,)
    assert choose_extra("1f1b", two(4.0), 2, 64) == (3,)


def test_who_has_no_time_to_look_takes_what_is_surely_enough() -> None:
    """Way there and back over the time of a microbatch, though two are in flight anyhow."""
    assert choose_extra("1f1b", two(4.0), 2, 64, patience=0.0) == (math.ceil(8 / 3) + 0,)
    assert choose_extra("1f1b", two(40.0), 2, 64, [5, 5], patience=0.0) == (5,)


def test_nothing_is_asked_for_without_delay_or_by_gpipe() -> None:
    assert choose_extra("1f1b", two(0.0), 2, 64) == (0,)
    assert choose_extra("gpipe", two(50.0), 2, 64) == (0,)
    assert choose_extra("1f1b", StepTimes([1.0], [2.0], [], []), 1, 8) == ()
    assert choose_extra("1f1b", StepTimes([0.0] * 2, [0.0] * 2, [1.0], [0.0]), 2, 8) == (0,)


def test_a_delay_that_is_next_to_nothing_is_not_worth_a_microbatch() -> None:
    assert choose_extra("1f1b", two(0.01), 2, 64) == (0,)


def test_a_step_of_few_microbatches_has_no_more_in_flight_than_these() -> None:
    (extra,) = choose_extra("1f1b", two(100.0), 2, 5)
    assert extra == 3  # and the two of 1F1B


def test_a_slow_link_is_not_helped_by_more_than_it_passes_on() -> None:
    """A message keeps the link for 6, twice as long as computing: only as many as keep it busy, there and back."""
    times = two(0.0, occupied=6.0)
    (extra,) = choose_extra("1f1b", times, 2, 64)
    assert extra == math.ceil((6 + 2 * 6) / 6) - 2


# -- any number of ranks -----------------------------------------------------------------------------------------------


def seconds(name: str, times: StepTimes, num_ranks: int, number: int, extra: tuple[int, ...]) -> float:
    schedule = build(name, num_ranks, number, len(times.forwards) // num_ranks, extra)
    return simulate(schedule, send=times.send, duration=times.duration, occupied=times.occupied).makespan


def of_microbatch(name: str, times: StepTimes, num_ranks: int, extra: tuple[int, ...]) -> float:
    """What one more takes in a long step, however long the beginning and the end of it."""
    few, many = (seconds(name, times, num_ranks, number, extra) for number in (30, 42))
    return (many - few) / 12


def random_times(seed: int) -> tuple[str, int, StepTimes]:
    draw = random.Random(seed)
    num_ranks, num_chunks = draw.choice([(2, 1), (2, 2), (3, 1)])
    number = num_ranks * num_chunks

    def each(low: float, high: float, count: int) -> list[float]:
        return [draw.uniform(low, high) / num_chunks for _ in range(count)]

    sends = [draw.choice([0.0, draw.uniform(0, 5)]) for _ in range(number - 1)]
    times = StepTimes(each(0.5, 1.5, number), each(1, 3, number), sends, [0.0] * (number - 1))
    return "1f1b" if num_chunks == 1 else "interleaved_1f1b", num_ranks, times


def check_choice(seed: int) -> None:
    name, num_ranks, times = random_times(seed)
    chosen = choose_extra(name, times, num_ranks, 48)
    every: Sequence[tuple[int, ...]] = list(itertools.product((0, 1, 2, 3, 5, 8), repeat=num_ranks - 1))

    def taken(extra: tuple[int, ...]) -> float:
        if name == "1f1b":
            return of_microbatch(name, times, num_ranks, extra)
        return seconds(name, times, num_ranks, 48, extra)  # interleaved, microbatches go in groups

    assert taken(chosen) <= (1 + 3 * NOT_WORTH) * min(map(taken, every))
    for link in (link for link in range(num_ranks - 1) if chosen[link]):
        fewer = (*chosen[:link], chosen[link] - 1, *chosen[link + 1 :])
        assert seconds(name, times, num_ranks, 48, fewer) > seconds(name, times, num_ranks, 48, chosen)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_could_be_tried_is_faster_by_much(seed: int) -> None:
    check_choice(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4, 80))
def test_nothing_that_could_be_tried_is_faster_by_much_on_many_problems(seed: int) -> None:
    check_choice(seed)


def test_only_links_between_nodes_get_more() -> None:
    times = equal_times(Placement.in_turns(4), [0, 0, 1, 1], Link(), Link(latency=4.0))
    assert choose_extra("1f1b", times, 4, 64) == (0, 3, 0)


@pytest.mark.parametrize(
    ("most", "expected"),
    [([9, 9, 9, 9], (0, 3, 0)), ([9, 2, 9, 9], (0, 2, 0)), ([1, 9, 9, 9], (0, 1, 0)), ([0, 0, 0, 0], (0, 0, 0))],
)
def test_no_more_than_ranks_have_memory_for(most: Sequence[float], expected: tuple[int, ...]) -> None:
    times = equal_times(Placement.in_turns(4), [0, 0, 1, 1], Link(), Link(latency=4.0))
    assert choose_extra("1f1b", times, 4, 64, most) == expected

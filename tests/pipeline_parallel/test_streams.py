"""On a device, a receive that is posted early is a kernel that waits: no host that waits for its device may hang."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lightning_hybrid.pipeline_parallel.schedules import (
    SCHEDULES,
    Action,
    Placement,
    Schedule,
    add_communication,
    build,
    build_forward,
    compute_schedule,
    post_receives_early,
)
from tests.pipeline_parallel.streams import hangs_if_launches_block, places_that_hang


def layouts(name: str, ranks: range, microbatches: range) -> Iterator[tuple[str, int, int, int]]:
    chunks = [1, 2, 3] if name not in SCHEDULES or SCHEDULES[name].takes_chunks else [1]
    return ((name, *sizes) for sizes in itertools.product(ranks, microbatches, chunks))


def built(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1, **others: bool) -> Schedule:
    if name == "forward":
        return build_forward.__wrapped__(Placement.in_turns(num_ranks, num_chunks), num_microbatches, **others)
    return build.__wrapped__(name, num_ranks, num_microbatches, num_chunks, **others)


def check(name: str, ranks: range, microbatches: range) -> None:
    for layout in layouts(name, ranks, microbatches):
        assert places_that_hang(built(*layout)) == [], layout


NAMES = [*SCHEDULES, "forward"]


@pytest.mark.parametrize("name", NAMES)
def test_one_wait_for_the_device_hangs_nowhere(name: str) -> None:
    check(name, range(2, 6), range(1, 7))


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_one_wait_for_the_device_hangs_nowhere_with_more_in_flight(name: str, chunks: int) -> None:
    for ranks, microbatches in itertools.product(range(2, 5), range(1, 9)):
        for links in itertools.product((0, 2), repeat=ranks - 1):
            assert places_that_hang(build.__wrapped__(name, ranks, microbatches, chunks, links)) == []


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("name", NAMES)
def test_one_wait_for_the_device_hangs_nowhere_in_any_schedule(name: str, ranks: int) -> None:
    check(name, range(ranks, ranks + 1), range(1, 17))


def place(action: Action, actions: tuple[Action, ...], computations: int) -> tuple[Action, ...]:
    """The list with an action in front of the computation of that number, behind what is sent there."""
    others = [other for other in actions if other != action]
    positions = [i for i, other in enumerate(others) if other.kind.is_compute]
    return (*others[: positions[computations]], action, *others[positions[computations] :])


@pytest.mark.parametrize(("name", "sizes"), [("gpipe", (3, 4)), ("1f1b", (4, 2)), ("interleaved_1f1b", (2, 4, 2))])
def test_a_receive_moves_as_far_as_that_holds(name: str, sizes: tuple[int, ...]) -> None:
    """Everything was moved in front of the message before it: these hang if the memory of a device runs low."""
    schedule = add_communication(compute_schedule(name, *sizes))
    moved = post_receives_early(schedule)
    held = 0
    for rank, actions in enumerate(moved.actions):
        users = [action for action in actions if action.kind.is_compute]
        for receive in (action for action in actions if action.kind.is_receive):
            channel = [a for a in actions if a.kind.is_receive and moved.channel(a) == moved.channel(receive)]
            number = channel.index(receive)
            user_of = {moved.receive_for(user): position for position, user in enumerate(users)}
            wanted = user_of[channel[number - 1]] if number else max(0, user_of[receive] - 1)
            found = sum(action.kind.is_compute for action in actions[: actions.index(receive)])
            original = schedule.actions[rank]
            if found > min(wanted, sum(a.kind.is_compute for a in original[: original.index(receive)])):
                held += 1
                lists = list(moved.actions)
                lists[rank] = place(receive, actions, found - 1)
                assert places_that_hang(replace(moved, actions=tuple(lists))), f"{receive} may be posted earlier"
    assert held


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_1f1b_gives_nothing_up(ranks: int) -> None:
    """Each receive is posted before the computation of the message before it, as without a device."""
    for microbatches in range(ranks, 17):
        for actions in build("1f1b", ranks, microbatches).actions:
            schedule = build("1f1b", ranks, microbatches)
            users = {
                schedule.receive_for(action): i for i, action in enumerate(a for a in actions if a.kind.is_compute)
            }
            before: dict[object, int] = {}
            for i, action in enumerate(actions):
                if action.kind.is_receive:
                    computed = sum(a.kind.is_compute for a in actions[:i])
                    channel = schedule.channel(action)
                    assert computed <= before.get(channel, max(0, users[action] - 1))
                    before[channel] = users[action]


@pytest.mark.parametrize("name", NAMES)
def test_no_number_of_waits_hangs_what_posts_nothing_early(name: str) -> None:
    """In a first step all hosts wait for their devices, which load kernels."""
    for layout in layouts(name, range(2, 6), range(1, 9)):
        assert not hangs_if_launches_block(built(*layout, posts_early=False)), layout


@pytest.mark.parametrize("name", NAMES)
def test_launches_that_block_hang_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thing that is set to find a fault on a GPU: from the second step on, it hung every schedule."""
    if name == "1f1b":
        assert hangs_if_launches_block(built(name, 2, 4))
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    for layout in layouts(name, range(2, 6), range(1, 9)):
        assert not hangs_if_launches_block(built(*layout)), layout

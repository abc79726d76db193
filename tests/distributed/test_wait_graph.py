"""Ranks that wait for each other for ever are found; ranks that only wait for long are not."""

from __future__ import annotations

import random

import pytest

from lightning_hybrid.distributed.watch.record import Waiting
from lightning_hybrid.distributed.watch.verdict.wait_graph import find_deadlock

EVERYONE = [0, 1]


def at(group: str, number: int, kind: str = "broadcast", ranks: list[int] | None = None, **started: int) -> Waiting:
    """Waits in a collective; has started so many of each group."""
    kinds = {name: (1, ["broadcast"] * count) for name, count in started.items()}
    first, before = kinds.get(group, (1, []))
    kinds[group] = first, [*before, kind]
    return Waiting(collectives=[(group, ranks or EVERYONE, number, kind)], started=kinds, place=f"in {group}")


def test_two_ranks_in_different_groups_wait_for_ever() -> None:
    found = find_deadlock({0: at("model", 5, model=4, world=2), 1: at("world", 3, world=2, model=4)})
    assert found is not None
    assert found[0] == {0, 1}
    assert "rank 0 waits for rank 1 in `broadcast` of ranks 0, 1, at in model" in found[1]
    assert "rank 1 waits for rank 0 in `broadcast`" in found[1]


def test_a_rank_that_computes_is_waited_for() -> None:
    assert find_deadlock({0: at("model", 5, model=4)}) is None


def test_what_all_have_started_is_on_its_way() -> None:
    """A slow network is no fault: rank 0 waits for what rank 1 has sent, and rank 1 for what rank 0 does next."""
    started = Waiting(message=("a", 1, 3), sent={"b": 2}, place="")
    assert find_deadlock({0: started, 1: Waiting(message=("b", 0, 3), sent={"a": 3})}) is None
    assert find_deadlock({0: started, 1: Waiting(message=("b", 0, 3), sent={"a": 2})}) is not None
    assert find_deadlock({0: at("model", 5, model=4), 1: at("model", 5, model=4)}) is None


def test_another_collective_at_the_same_number_ends_nowhere() -> None:
    found = find_deadlock({0: at("world", 3, "barrier", world=2), 1: at("world", 3, "broadcast", world=2)})
    assert found is not None
    assert "in `barrier` of ranks 0, 1, where that rank called `broadcast`" in found[1]


def test_who_went_past_it_has_done_another_one() -> None:
    """The source of a broadcast does not wait for anybody."""
    source = at("model", 1, world=3)  # waits in `model`, after a broadcast over `world`
    found = find_deadlock({0: at("world", 3, "barrier", world=2), 1: source})
    assert found is not None
    assert found[0] == {0, 1}


def test_a_circle_among_some_is_found_while_others_compute() -> None:
    waiting = {
        0: at("a", 1, ranks=[0, 1]),
        1: at("b", 1, ranks=[0, 1]),
        2: at("c", 1, ranks=[2, 3]),  # rank 3 computes
        4: at("a", 1, ranks=[0, 1, 4]),  # waits for one in the circle
    }
    found = find_deadlock(waiting)
    assert found is not None
    assert found[0] == {0, 1, 4}


def test_a_rank_whose_run_is_over_never_comes() -> None:
    over = Waiting(finished=True, started={"world": (1, ["broadcast"] * 2)}, state="fit")
    found = find_deadlock({0: at("world", 3, world=2), 1: over})
    assert found is not None
    assert "rank 1 reached the end of the run" in found[1]
    assert find_deadlock({1: over}) is None
    assert find_deadlock({0: at("world", 2, world=1), 1: over}) is None, "it did that before"


def test_old_collectives_are_forgotten_and_nothing_is_concluded_from_them() -> None:
    late = Waiting(collectives=[("b", EVERYONE, 1, "barrier")], started={"a": (500, ["broadcast"]), "b": (1, ["x"])})
    found = find_deadlock({0: at("a", 3, "barrier", a=2), 1: late})
    assert found is None or found[0] == {1}


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_run_one_program_are_never_accused(seed: int) -> None:
    """Each rank is anywhere in the same list of collectives over random groups, as far as the others let it."""
    chance = random.Random(seed)
    size = 4
    program = [(name, chance.sample(range(size), chance.choice([2, 3, 4]))) for name in "abcdefgh" * 4]
    ranks_of = {name: sorted(ranks) for name, ranks in program[:8]}
    done = [0] * size  # how many entries each has passed

    def started(rank: int) -> dict[str, tuple[int, list[str]]]:
        names = [name for name, _ in program[: done[rank] + 1] if rank in ranks_of[name]]
        return {name: (1, ["broadcast"] * names.count(name)) for name in set(names)}

    for _ in range(200):
        rank = chance.randrange(size)
        if done[rank] == len(program) - 1:
            continue
        name, position = program[done[rank]][0], done[rank]
        if rank not in ranks_of[name] or all(done[other] >= position for other in ranks_of[name]):
            done[rank] += 1
        waiting = {}
        for each in range(size):
            own = program[done[each]][0]
            if each in ranks_of[own]:
                number = len(started(each)[own][1])
                waiting[each] = Waiting(collectives=[(own, ranks_of[own], number, "broadcast")], started=started(each))
        slowest = min(range(size), key=done.__getitem__)
        waiting.pop(slowest, None)  # it computes
        assert find_deadlock(waiting) is None

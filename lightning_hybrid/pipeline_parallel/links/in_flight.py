"""How many microbatches more are to be on their way over each link, so that no rank waits for its delay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache

from lightning_hybrid.pipeline_parallel.links.link import StepTimes
from lightning_hybrid.pipeline_parallel.schedules import Placement, Schedule, build_unproven, placement_of
from lightning_hybrid.pipeline_parallel.timeline import simulate

#: A share of a step that is not worth the memory of another microbatch.
NOT_WORTH = 0.02

_MOST_PLAYED = 64  # microbatches of a step after which it surely goes on as before, if there are not more ranks


def choose_extra(
    name: str,
    times: StepTimes,
    num_ranks: int,
    num_microbatches: int,
    most: Sequence[float] | None = None,
    *,
    patience: float = math.inf,
    build: Callable[[str, int, int, int, tuple[int, ...]], Schedule] = build_unproven,
) -> tuple[int, ...]:
    """The smallest numbers with which a step takes as long as with any, by the simulator.

    With ``n`` microbatches in flight over links behind a rank, one of them takes at least
    ``(way there and back, with all computations on it) / n`` (eager 1F1B, https://arxiv.org/abs/2211.05322). So
    ``time on the link, there and back / time of a microbatch on the slowest rank``, rounded up, is enough for each
    link. Often fewer are: where stages before or behind it wait anyhow, or a step has few microbatches. The simulator
    plays what a run would do with these, and what it would do with fewer, link by link.

    Args:
        name: The schedule. ``"gpipe"`` has all in flight already.
        times: What computing and messages take.
        num_ranks: Pipeline ranks.
        num_microbatches: Of a step.
        most: For each rank, how many more it has memory for; ``None`` for any number.
        patience: Seconds after which links that have not been looked at keep what is surely enough.
        build: Makes a schedule, as :func:`~..schedules.build_unproven`.

    Returns:
        A number for each link between neighbouring ranks; zeros where more would gain less than :data:`NOT_WORTH`.
    """
    deadline, nothing = time.monotonic() + patience, (0,) * (num_ranks - 1)
    num_chunks = len(times.forwards) // max(1, num_ranks)
    enough = _bounded(_enough(times, placement_of(name, num_ranks, num_chunks), num_microbatches), most)
    if name == "gpipe" or not any(enough):
        return nothing
    number = min(num_microbatches, max(_MOST_PLAYED, 4 * num_ranks + sum(enough)))

    @cache
    def seconds(extra: tuple[int, ...]) -> float:
        schedule = build(name, num_ranks, number, num_chunks, extra)
        timeline = simulate(schedule, send=times.send, duration=times.duration, occupied=times.occupied)
        return timeline.makespan

    # What no number in flight changes: the step without any messages.
    schedule = build(name, num_ranks, number, num_chunks, nothing)
    undelayed = simulate(schedule, duration=times.duration).makespan
    if seconds(nothing) <= (1 + NOT_WORTH) * undelayed:
        return nothing
    goal = (1 + NOT_WORTH) * seconds(enough)
    chosen = nothing if seconds(nothing) <= goal else enough
    for link in range(num_ranks - 1):
        low, high = 0, chosen[link]
        while low < high and time.monotonic() < deadline:
            middle = (low + high) // 2
            if seconds(_with(chosen, link, middle)) <= goal:
                high = middle
            else:
                low = middle + 1
        chosen = _with(chosen, link, high)
    return chosen


def _enough(times: StepTimes, placement: Placement, num_microbatches: int) -> list[int]:
    """Return for each link the microbatches on their way there and back while the slowest rank computes one."""
    num_ranks = placement.num_ranks
    own = map(placement.stages_of, range(num_ranks))
    slowest = max(sum(times.forwards[stage] + times.backwards[stage] for stage in stages) for stages in own)
    on_link = [0.0] * num_ranks
    for rank, send, occupied in zip(placement.ranks[:-1], times.sends, times.occupations, strict=True):
        on_link[rank] += 2 * (send + occupied)
    if num_ranks == 1 or not slowest:
        return [0] * (num_ranks - 1)
    back = on_link.pop()  # from the last rank to the first, which has no number of its own
    on_link[-1] += back
    # Between chunks a forward waits for its turn beside backwards: there a message is late by more than its own time.
    late = placement.num_chunks
    return [min(num_microbatches, math.ceil(late * time / slowest)) for time in on_link]


def _bounded(extra: list[int], most: Sequence[float] | None) -> tuple[int, ...]:
    """As many as ranks have memory for: a rank keeps what is on its way over all links behind it."""
    limits = [math.inf] * len(extra) if most is None else most
    for rank in reversed(range(len(extra))):
        while sum(extra[rank:]) > max(0.0, limits[rank]):
            at = max(range(rank, len(extra)), key=lambda link: extra[link])
            extra[at] -= 1
    return tuple(extra)


def _with(extra: tuple[int, ...], link: int, number: int) -> tuple[int, ...]:
    return (*extra[:link], number, *extra[link + 1 :])

"""Choice of extra microbatches in flight, to hide the latency of links.

:class:`~.step_schedules.StepSchedules` calls :func:`choose_extra` with measured times. The layout search and the
command `timeline` call it with estimated times.

In plain 1F1B, rank ``r`` of ``p`` runs ``p - r`` forwards and then waits for the gradient of the first of them, which
arrives late if messages take a long time. An *extra* microbatch in flight over a link is one more forward on the ranks
before the link, which they run during this wait. It needs memory for its activations, so the number is not simply set
to a large value.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache

from lightning_hybrid.pipeline_parallel.links.link import StepTimes
from lightning_hybrid.pipeline_parallel.schedules import Placement, Schedule, build_unproven, placement_of
from lightning_hybrid.pipeline_parallel.timeline import simulate

#: A saving below this fraction of the step is not worth the memory of another microbatch.
NOT_WORTH = 0.02

_MOST_PLAYED = 64  # simulated microbatches of a long step, which then repeats the same pattern; more with many ranks


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
    """Return small numbers of extra microbatches with which the simulated step takes about the shortest time.

    With ``n`` microbatches in flight over the links after a rank, each of them takes at least
    ``(time there and back, with all computations in between) / n`` (eager 1F1B, https://arxiv.org/abs/2211.05322). So
    ``time on the link, there and back / time of a microbatch on the slowest rank``, rounded up, is enough for each
    link. Often a smaller number is enough, because stages before or after the link wait anyway, or because a step has
    few microbatches. The function simulates a step with these numbers. Then, link by link, it searches for the smallest
    number with which the step is slower by at most the fraction :data:`NOT_WORTH`.

    Args:
        name: The name of the schedule. ``"gpipe"`` needs no extra microbatches.
        times: The times of computations and messages.
        num_ranks: The number of pipeline ranks.
        num_microbatches: The number of microbatches in a step.
        most: For each rank, the number of extra microbatches that its memory has room for; ``None`` for no limit.
        patience: The time limit of the search, in seconds. Links that the search has not reached keep the number that
            is certainly enough.
        build: A function that builds a schedule, like :func:`~..schedules.build_unproven`.

    Returns:
        A number for each link between neighboring ranks; zeros for ``"gpipe"``, and if extra microbatches would save
        less than the fraction :data:`NOT_WORTH` of the step.
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

    # A lower limit for any number in flight: the step if messages took no time.
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
    """Return a sufficient number of extra microbatches for each link.

    It is the round-trip time of a message on the link divided by the time of a microbatch on the slowest rank, times
    the number of chunks, rounded up, and at most the number of microbatches.
    """
    num_ranks = placement.num_ranks
    own = map(placement.stages_of, range(num_ranks))
    slowest = max(sum(times.forwards[stage] + times.backwards[stage] for stage in stages) for stages in own)
    on_link = [0.0] * num_ranks
    for rank, send, occupied in zip(placement.ranks[:-1], times.sends, times.occupations, strict=True):
        on_link[rank] += 2 * (send + occupied)
    if num_ranks == 1 or not slowest:
        return [0] * (num_ranks - 1)
    back = on_link.pop()  # the link from the last rank to the first has no number of its own
    on_link[-1] += back
    # With several chunks, a late forward also waits for backwards, so a message delays it by more than its own time.
    late = placement.num_chunks
    return [min(num_microbatches, math.ceil(late * time / slowest)) for time in on_link]


def _bounded(extra: list[int], most: Sequence[float] | None) -> tuple[int, ...]:
    """Reduce numbers of extra microbatches so that every rank has enough memory.

    A rank stores the activations of all microbatches in flight over the links after it.

    Args:
        extra: A number for each link; changed in place.
        most: For each rank, the number of extra microbatches that its memory has room for; ``None`` for no limit.
    """
    limits = [math.inf] * len(extra) if most is None else most
    for rank in reversed(range(len(extra))):
        while sum(extra[rank:]) > max(0.0, limits[rank]):
            at = max(range(rank, len(extra)), key=lambda link: extra[link])
            extra[at] -= 1
    return tuple(extra)


def _with(extra: tuple[int, ...], link: int, number: int) -> tuple[int, ...]:
    """Return the numbers of all links with another number for one link."""
    return (*extra[:link], number, *extra[link + 1 :])

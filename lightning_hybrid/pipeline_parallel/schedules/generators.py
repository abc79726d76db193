"""Generators of schedules: the order in which each rank computes, without sends and receives.

:func:`~..schedules.compute_schedule` calls :func:`compute_order` for a step with backward, and
:func:`~..schedules.build_forward` calls :func:`forward_order` for a step without backward. The keys of
:data:`SCHEDULES` are the values of the user's argument `schedule`, except ``"auto"``. Sends and receives follow from
the order (:mod:`~.passes`), so a generator cannot make them inconsistent.

In the diagrams, time runs to the right, and a forward takes as long as a backward. In formulas, ``p`` is the number of
ranks, ``m`` the number of microbatches, and ``v`` the number of chunks, which are the stages of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from lightning_hybrid.pipeline_parallel.schedules.actions import Action
from lightning_hybrid.pipeline_parallel.schedules.kinds import Kind
from lightning_hybrid.pipeline_parallel.schedules.placement import Placement

_T = TypeVar("_T")

Order = tuple[tuple[Action, ...], ...]
"""The computations of every rank: ``order[rank]`` contains the actions of one rank, in order."""


def placement_of(name: str, num_ranks: int, num_chunks: int = 1) -> Placement:
    """Return the rank of each stage in a schedule.

    Args:
        name: A key of :data:`SCHEDULES`.
        num_ranks: The number of pipeline ranks.
        num_chunks: The number of stages per rank.

    Raises:
        KeyError: If the schedule does not exist.
    """
    return SCHEDULES[name].place(num_ranks, num_chunks)


def compute_order(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1, extra_in_flight: Sequence[int] = ()
) -> Order:
    """Return the computations of each rank, without sends and receives.

    Every schedule runs the backwards of one stage in the order of the microbatches. So the gradients of a stage are
    added in the same order, with bitwise identical results, in every schedule.

    Args:
        name: A key of :data:`SCHEDULES`.
        num_ranks: The number of pipeline ranks.
        num_microbatches: The number of microbatches in a step. It may be smaller than the number of stages.
        num_chunks: The number of stages per rank.
        extra_in_flight: The number of extra microbatches in flight over each link between neighboring ranks: forwards
            that the ranks before the link run earlier than in the plain schedule. Empty for none.

    Raises:
        ValueError: If the schedule does not exist, a number is below 1, or the schedule does not support several chunks
            or extra microbatches in flight.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r} must be one of {', '.join(map(repr, SCHEDULES))} [LH102]")
    _check_sizes(num_ranks, num_microbatches, num_chunks)
    links = extra_in_flight or [0] * (num_ranks - 1)
    if len(links) != num_ranks - 1 or min(links, default=0) < 0:
        raise ValueError(
            f"extra_in_flight={list(links)} must contain one non-negative number for each link between consecutive"
            f" ranks, but {num_ranks} ranks have {num_ranks - 1} links [LH115]"
        )
    if num_chunks > 1 and not SCHEDULES[name].takes_chunks:
        raise ValueError(
            f"schedule={name!r} supports only one chunk per rank, but num_chunks is {num_chunks}."
            " Use schedule='interleaved_1f1b' or num_chunks=1. [LH114]"
        )
    # A rank has run the forwards of all extra microbatches in flight over the links after it.
    extra = [sum(links[rank:]) for rank in range(num_ranks)]
    return SCHEDULES[name].order(placement_of(name, num_ranks, num_chunks), num_microbatches, extra)


def gpipe(placement: Placement, num_microbatches: int, extra: Sequence[int]) -> Order:
    """Order all forwards before all backwards (GPipe, https://arxiv.org/abs/1811.06965).

    ::

        rank 0   F0 F1 F2 F3                   B0 B1 B2 B3
        rank 1      F0 F1 F2 F3             B0 B1 B2 B3
        rank 2         F0 F1 F2 F3       B0 B1 B2 B3
        rank 3            F0 F1 F2 F3 B0 B1 B2 B3

    Every rank stores the activations of all microbatches. With several chunks, a rank runs all microbatches through one
    chunk before the next chunk (breadth first, https://arxiv.org/abs/2211.05953).

    Raises:
        ValueError: If extra microbatches in flight are requested.
    """
    if any(extra):
        raise ValueError(
            f"schedule='gpipe' already has all microbatches in flight, but extra_in_flight adds {extra[0]} on rank 0."
            " Remove extra_in_flight, or use schedule='1f1b'. [LH116]"
        )

    def of_rank(rank: int) -> tuple[Action, ...]:
        stages = placement.stages_of(rank)
        forwards = [Action(stage, Kind.F, i) for stage in stages for i in range(num_microbatches)]
        backwards = [Action(stage, Kind.B, i) for stage in reversed(stages) for i in range(num_microbatches)]
        return (*forwards, *backwards)

    return tuple(of_rank(rank) for rank in range(placement.num_ranks))


def one_f_one_b(placement: Placement, num_microbatches: int, extra: Sequence[int]) -> Order:
    """Alternate forwards and backwards after a warm-up (1F1B, PipeDream-Flush, https://arxiv.org/abs/2006.09503).

    ::

        rank 0   F0 F1 F2 F3          B0    B1    B2    B3
        rank 1      F0 F1 F2       B0 F3 B1    B2    B3
        rank 2         F0 F1    B0 F2 B1 F3 B2    B3
        rank 3            F0 B0 F1 B1 F2 B2 F3 B3

    It takes as long as GPipe, but rank ``r`` stores the activations of only ``min(m, p - r)`` microbatches.

    If messages take a long time, ranks wait for microbatches that return from the last rank, unless extra microbatches
    are in flight (eager 1F1B, https://arxiv.org/abs/2211.05322). With two extra microbatches on rank 0, and time for
    messages::

        rank 0   F0 F1 F2 F3 B0 F4 B1 F5 B2    B3 ...
        rank 1         F0 B0 F1 B1 F2 B2 F3 B3 ...
    """
    num_ranks = placement.num_ranks

    def of_rank(rank: int) -> list[Action]:
        forwards = [Action(rank, Kind.F, i) for i in range(num_microbatches)]
        backwards = [Action(rank, Kind.B, i) for i in range(num_microbatches)]
        return _in_turns(forwards, backwards, warm_up=num_ranks - 1 - rank + extra[rank])

    return tuple(tuple(of_rank(rank)) for rank in range(num_ranks))


def interleaved_1f1b(placement: Placement, num_microbatches: int, extra: Sequence[int]) -> Order:
    """Run 1F1B over ``v`` chunks per rank, to divide the bubble by ``v`` (Megatron, https://arxiv.org/abs/2104.04473).

    ::

        rank 0   0a 1a 0b 1b 2a 0B 3a 1B 2b 0A 3b 1A    2B    3B 2A 3A
        rank 1      0a 1a 0b 0B 1b 1B 2a 0A 3a 1A 2b 2B 3b 3B 2A 3A

        0a, 0b: forwards of microbatch 0 through the rank's first and second chunk; 0A, 0B: their backwards

    Microbatches go through the chunks in groups: the whole group through one chunk, then through the next chunk. If a
    group has at least ``p`` microbatches, its first microbatch is back at rank 0 when the last microbatch has left it,
    so no rank waits. The original schedule has groups of ``p`` microbatches, so it needs a multiple of ``p``
    microbatches. Here, groups are larger instead, and some groups lack one microbatch. For ``p = 4`` and ``m = 9``, the
    order is the order of two groups of 5 without one microbatch::

        0 1 2 3 - | 4 5 6 7 8

    If microbatches are removed from a schedule without deadlock, the result has no deadlock either. The bubble is
    ``(p - 1) / (v m)`` of the ideal time for every ``m >= p``. The cost is memory: a rank stores at most as many extra
    microbatches as a group has in excess of ``p``. If ``m < p``, all microbatches are in one group. With one chunk per
    rank, the schedule is 1F1B. Groups grow by the number of extra microbatches in flight.
    """
    num_ranks, num_chunks = placement.num_ranks, placement.num_chunks
    if num_chunks == 1:
        return one_f_one_b(placement, num_microbatches, extra)
    groups = _groups(num_ranks + extra[0], num_microbatches)

    def of_rank(rank: int) -> tuple[Action, ...]:
        stages = placement.stages_of(rank)
        forwards, backwards = _in_groups(Kind.F, stages, groups), _in_groups(Kind.B, stages[::-1], groups)
        # Before its first backward, the last rank runs the first group through all chunks except one. Each rank before
        # it starts one step earlier and gets its gradients one step later, so it runs two more forwards.
        warm_up = (num_chunks - 1) * len(groups[0]) + 2 * (num_ranks - 1 - rank) + extra[rank]
        return tuple(filter(None, _in_turns(forwards, backwards, warm_up)))

    return tuple(of_rank(rank) for rank in range(num_ranks))


def forward_order(placement: Placement, num_microbatches: int) -> Order:
    """Return only forwards, for evaluation, in groups of microbatches as in :func:`interleaved_1f1b`.

    Raises:
        ValueError: If the number of microbatches is below 1.
    """
    _check_sizes(placement.num_ranks, num_microbatches, placement.num_chunks)
    groups = _groups(placement.num_ranks, num_microbatches)
    stages_of_ranks = map(placement.stages_of, range(placement.num_ranks))
    return tuple(tuple(filter(None, _in_groups(Kind.F, stages, groups))) for stages in stages_of_ranks)


class Generator(NamedTuple):
    """Schedule for any number of ranks, chunks and microbatches.

    Attributes:
        order: Returns the computations. Takes the placement, the number of microbatches, and for each rank the number
            of extra forwards that it runs before its first backward.
        place: Returns the placement. Takes the number of ranks and the number of chunks.
        takes_chunks: True if a rank can have several chunks.
    """

    order: Callable[[Placement, int, Sequence[int]], Order]
    place: Callable[[int, int], Placement] = Placement.in_turns
    takes_chunks: bool = True


#: The schedules by name.
SCHEDULES = {
    "gpipe": Generator(gpipe),
    "1f1b": Generator(one_f_one_b, takes_chunks=False),
    "interleaved_1f1b": Generator(interleaved_1f1b),
}


def _in_turns(forwards: Sequence[_T], backwards: Sequence[_T], warm_up: int) -> list[_T]:
    """Return ``warm_up`` forwards, then one forward and one backward in turns, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    turns = [action for pair in zip(forwards[warm_up:], backwards[:steady], strict=True) for action in pair]
    return [*forwards[:warm_up], *turns, *backwards[steady:]]


def _groups(least: int, num_microbatches: int) -> list[list[int | None]]:
    """Split microbatches into groups of equal length, in which ``None`` is a hole.

    Each group has at least ``least`` microbatches if there are enough. Groups with a hole come first, so that fewer
    activations are stored while the pipeline fills.
    """
    num_groups = max(1, num_microbatches // least)
    size = -(-num_microbatches // num_groups)
    num_holes = num_groups * size - num_microbatches
    numbers = iter(range(num_microbatches))
    return [
        [None if group < num_holes and slot == size - 1 else next(numbers) for slot in range(size)]
        for group in range(num_groups)
    ]


def _in_groups(kind: Kind, stages: Sequence[int], groups: list[list[int | None]]) -> list[Action | None]:
    """Return the actions of a rank, group by group through its stages. Holes remain ``None``."""
    return [None if i is None else Action(stage, kind, i) for group in groups for stage in stages for i in group]


def _check_sizes(num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    """Raise an error if a number is below 1."""
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}, but must be at least 1 [LH103]")

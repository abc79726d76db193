"""Pipeline schedules as plain data: lists of actions, how they are generated, and the passes that complete them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

from lightning_hybrid.pipeline_parallel.schedules.actions import Action, ChannelKey, Schedule
from lightning_hybrid.pipeline_parallel.schedules.generators import (
    SCHEDULES,
    compute_order,
    forward_order,
    placement_of,
)
from lightning_hybrid.pipeline_parallel.schedules.kinds import COMPUTATIONS, Kind
from lightning_hybrid.pipeline_parallel.schedules.passes import (
    add_communication,
    post_receives_early,
    prove_sends_received,
)
from lightning_hybrid.pipeline_parallel.schedules.placement import Placement
from lightning_hybrid.pipeline_parallel.schedules.validation import validate

__all__ = [
    "COMPUTATIONS",
    "SCHEDULES",
    "Action",
    "ChannelKey",
    "Kind",
    "Placement",
    "Schedule",
    "add_communication",
    "build",
    "build_forward",
    "build_unproven",
    "complete",
    "compute_order",
    "compute_schedule",
    "placement_of",
    "post_receives_early",
    "prove_sends_received",
    "validate",
]


@lru_cache
def build(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    extra_in_flight: tuple[int, ...] = (),
    *,
    posts_early: bool = True,
) -> Schedule:
    """The complete, validated schedule of a training step.

    Args:
        name: ``"gpipe"``, ``"1f1b"`` or ``"interleaved_1f1b"``.
        num_ranks: Number of pipeline ranks.
        num_microbatches: Microbatches in one step; any number, also fewer than stages.
        num_chunks: Stages per rank.
        extra_in_flight: For each link between neighbouring ranks, how many microbatches more are on their way over it;
            nothing for none.
        posts_early: Whether receives are posted before their messages are sent, in unit time. If not, every host may
            wait for its device at any time: what each has enqueued comes to its end.

    Raises:
        ValueError: If there is no such schedule, a number is not at least 1, or the schedule has one chunk only, or
            cannot have more in flight.

    Example:
        >>> print(*build("1f1b", num_ranks=2, num_microbatches=2).actions[1])
        1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    schedule = compute_schedule(name, num_ranks, num_microbatches, num_chunks, extra_in_flight)
    return complete(schedule, extra_in_flight, posts_early=posts_early)


def compute_schedule(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1, extra_in_flight: Sequence[int] = ()
) -> Schedule:
    """Return the schedule of :func:`build` without sends and receives. Its arguments are those of :func:`build`."""
    order = compute_order(name, num_ranks, num_microbatches, num_chunks, extra_in_flight)
    return Schedule(name, placement_of(name, num_ranks, num_chunks), num_microbatches, order)


def complete(schedule: Schedule, extra_in_flight: Sequence[int] = (), *, posts_early: bool = True) -> Schedule:
    """Return a schedule of computations with sends and receives, validated, and with the proofs that an engine reads.

    Args:
        schedule: The computations.
        extra_in_flight: As for :func:`build`.
        posts_early: As for :func:`build`.

    Raises:
        ValueError: If a computation is missing, or computations wait for each other.
    """
    schedule = _with_communication(schedule, extra_in_flight, posts_early)
    validate(schedule)
    return prove_sends_received(schedule)


def build_unproven(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1, extra_in_flight: tuple[int, ...] = ()
) -> Schedule:
    """Return the schedule of :func:`build` without validation and proofs, in a fifth of the time: for simulations.

    Args:
        name: As for :func:`build`.
        num_ranks: As for :func:`build`.
        num_microbatches: As for :func:`build`.
        num_chunks: As for :func:`build`.
        extra_in_flight: As for :func:`build`.
    """
    schedule = compute_schedule(name, num_ranks, num_microbatches, num_chunks, extra_in_flight)
    return _with_communication(schedule, extra_in_flight, True)


@lru_cache
def build_forward(placement: Placement, num_microbatches: int, *, posts_early: bool = True) -> Schedule:
    """Return the complete, validated schedule of an evaluation step: forwards only.

    Args:
        placement: The rank of each stage, as in training.
        num_microbatches: As for :func:`build`.
        posts_early: As for :func:`build`.

    Raises:
        ValueError: If the number of microbatches is less than 1.
    """
    schedule = Schedule("forward", placement, num_microbatches, forward_order(placement, num_microbatches))
    return complete(schedule, posts_early=posts_early)


def _with_communication(schedule: Schedule, extra_in_flight: Sequence[int], posts_early: bool) -> Schedule:
    schedule = add_communication(schedule)
    if posts_early and not _waits_for_each_kernel():
        schedule = post_receives_early(schedule, extra_in_flight)
    return schedule


def _waits_for_each_kernel() -> bool:
    """Whether the host waits for each kernel that it launches, so also for the message of each receive that it posts.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars: it is set before the process starts.
    """
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"

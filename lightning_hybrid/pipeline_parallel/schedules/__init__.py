"""Pipeline schedules as plain data: lists of actions, how they are generated, and the passes that complete them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

from lightning_hybrid.pipeline_parallel.schedules.actions import Action, ChannelKey, Kind, Schedule
from lightning_hybrid.pipeline_parallel.schedules.generators import SCHEDULES, compute_order, forward_order
from lightning_hybrid.pipeline_parallel.schedules.passes import (
    add_communication,
    post_receives_early,
    prove_sends_received,
)
from lightning_hybrid.pipeline_parallel.schedules.validation import validate

__all__ = [
    "SCHEDULES",
    "Action",
    "ChannelKey",
    "Kind",
    "Schedule",
    "add_communication",
    "build",
    "build_forward",
    "build_unproven",
    "compute_order",
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
    order = compute_order(name, num_ranks, num_microbatches, num_chunks, extra_in_flight)
    schedule = Schedule(name, num_ranks, num_chunks, num_microbatches, order)
    return _proven(_with_communication(schedule, extra_in_flight, posts_early))


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
    order = compute_order(name, num_ranks, num_microbatches, num_chunks, extra_in_flight)
    return _with_communication(Schedule(name, num_ranks, num_chunks, num_microbatches, order), extra_in_flight, True)


@lru_cache
def build_forward(num_ranks: int, num_microbatches: int, num_chunks: int = 1, *, posts_early: bool = True) -> Schedule:
    """The complete, validated schedule of an evaluation step: forwards only. Arguments are those of :func:`build`.

    Raises:
        ValueError: If a number is not at least 1.
    """
    order = forward_order(num_ranks, num_microbatches, num_chunks)
    schedule = Schedule("forward", num_ranks, num_chunks, num_microbatches, order)
    return _proven(_with_communication(schedule, (), posts_early))


def _with_communication(schedule: Schedule, extra_in_flight: Sequence[int], posts_early: bool) -> Schedule:
    schedule = add_communication(schedule)
    if posts_early and not _waits_for_each_kernel():
        schedule = post_receives_early(schedule, extra_in_flight)
    return schedule


def _proven(schedule: Schedule) -> Schedule:
    validate(schedule)
    return prove_sends_received(schedule)


def _waits_for_each_kernel() -> bool:
    """Whether the host waits for each kernel that it launches, so also for the message of each receive that it posts.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars: it is set before the process starts.
    """
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"

"""Pipeline schedules as plain data: lists of actions, their generators, and the passes that complete them.

A schedule lists, for each pipeline rank, the forwards, backwards, sends and receives of one step, in order. A rank has
one or several stages, its *chunks*. :func:`build` makes the schedule of a training step, and :func:`build_forward` the
schedule of a step without backward. Training and evaluation steps call them when they first need the schedule, and
:class:`~..engine.Engine` runs this rank's list. The cost model, the memory account and the command `timeline` read
schedules without running them.

Schedules are data and not code in the engine, so that the same lists can be validated before any rank waits for another
rank, simulated without a device, and drawn. Every rank builds the lists of all ranks from the same numbers, without
communication.
"""

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
    """Build the complete, validated schedule of a training step.

    The result is cached: equal arguments return the same object. The engine recognizes a known schedule by its
    identity.

    Args:
        name: ``"gpipe"``, ``"1f1b"`` or ``"interleaved_1f1b"``.
        num_ranks: The number of pipeline ranks.
        num_microbatches: The number of microbatches in a step. It may be smaller than the number of stages.
        num_chunks: The number of stages per rank.
        extra_in_flight: The number of extra microbatches in flight over each link between neighboring ranks: forwards
            that the ranks before the link run earlier than in the plain schedule. Empty for none.
        posts_early: If True, receives are posted before their messages are sent, in unit time, unless
            ``CUDA_LAUNCH_BLOCKING`` is set. If False, every host may wait for its device at any time, because all
            operations that a host has enqueued can finish.

    Raises:
        ValueError: If the schedule does not exist, a number is below 1, or the schedule does not support several chunks
            or extra microbatches in flight.

    Example:
        >>> print(*build("1f1b", num_ranks=2, num_microbatches=2).actions[1])
        1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    schedule = compute_schedule(name, num_ranks, num_microbatches, num_chunks, extra_in_flight)
    return complete(schedule, extra_in_flight, posts_early=posts_early)


def compute_schedule(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1, extra_in_flight: Sequence[int] = ()
) -> Schedule:
    """Build the schedule of :func:`build` without sends and receives, for example for an estimate of memory.

    The arguments are the same, without `posts_early`.

    Raises:
        ValueError: See :func:`compute_order`.
    """
    order = compute_order(name, num_ranks, num_microbatches, num_chunks, extra_in_flight)
    return Schedule(name, placement_of(name, num_ranks, num_chunks), num_microbatches, order)


def complete(schedule: Schedule, extra_in_flight: Sequence[int] = (), *, posts_early: bool = True) -> Schedule:
    """Add sends, receives and proofs to a schedule of computations, and validate it.

    The engine needs the proofs of :func:`prove_sends_received`.

    Args:
        schedule: The computations.
        extra_in_flight: See :func:`build`.
        posts_early: See :func:`build`.

    Raises:
        ValueError: If a computation is missing, or computations wait for each other.
    """
    schedule = _with_communication(schedule, extra_in_flight, posts_early)
    validate(schedule)
    return prove_sends_received(schedule)


def build_unproven(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1, extra_in_flight: tuple[int, ...] = ()
) -> Schedule:
    """Build the schedule of :func:`build` without validation and proofs, for simulations, in a fifth of the time.

    Args:
        name: See :func:`build`.
        num_ranks: See :func:`build`.
        num_microbatches: See :func:`build`.
        num_chunks: See :func:`build`.
        extra_in_flight: See :func:`build`.

    Raises:
        ValueError: See :func:`compute_order`. Also if computations wait for each other.
    """
    schedule = compute_schedule(name, num_ranks, num_microbatches, num_chunks, extra_in_flight)
    return _with_communication(schedule, extra_in_flight, True)


@lru_cache
def build_forward(placement: Placement, num_microbatches: int, *, posts_early: bool = True) -> Schedule:
    """Build the complete, validated schedule of a step that has only forwards.

    This is an evaluation step, or a run of training batches without backward, such as a comparison of microbatches. The
    result is cached, as in :func:`build`.

    Args:
        placement: The rank of each stage, as in training.
        num_microbatches: See :func:`build`.
        posts_early: See :func:`build`.

    Raises:
        ValueError: If the number of microbatches is below 1.
    """
    schedule = Schedule("forward", placement, num_microbatches, forward_order(placement, num_microbatches))
    return complete(schedule, posts_early=posts_early)


def _with_communication(schedule: Schedule, extra_in_flight: Sequence[int], posts_early: bool) -> Schedule:
    """Add sends and receives to a schedule of computations."""
    schedule = add_communication(schedule)
    if posts_early and not _waits_for_each_kernel():
        schedule = post_receives_early(schedule, extra_in_flight)
    return schedule


def _waits_for_each_kernel() -> bool:
    """Return whether the host waits for each kernel that it launches.

    It would then also wait for the message of each receive that it posts. The user sets this variable before the
    process starts: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars
    """
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"

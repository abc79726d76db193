"""Schedules and their microbatches in flight, cached for all layouts that share them."""

from __future__ import annotations

from functools import cache

from lightning_hybrid.memory.account import most_in_flight
from lightning_hybrid.pipeline_parallel.schedules import Schedule, build_unproven, compute_schedule


@cache
def schedule_of(name: str, num_ranks: int, num_microbatches: int, num_chunks: int, extra: tuple[int, ...]) -> Schedule:
    """Return the schedule of a step for a simulation."""
    return build_unproven(name, num_ranks, num_microbatches, num_chunks, extra)


@cache
def most_saved(schedule_key: tuple[str, int, int, int, tuple[int, ...]], saved: tuple[int, ...]) -> tuple[int, ...]:
    """Return the most bytes of activations that each rank holds at a time; all ZeRO stages share them.

    Args:
        schedule_key: The arguments of :func:`schedule_of`.
        saved: The bytes that each stage keeps of a microbatch.
    """
    return tuple(
        max(sum(count * saved[stage] for stage, count in counts.items()) for counts in peaks)
        for peaks in in_flight_of(*schedule_key)
    )


@cache
def in_flight_of(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int, extra: tuple[int, ...]
) -> list[list[dict[int, int]]]:
    """Return the microbatches that each rank holds at its peaks; cached for all layouts with this schedule."""
    schedule = order_of(name, num_ranks, num_microbatches, num_chunks, extra)
    return [most_in_flight(schedule, rank) for rank in range(num_ranks)]


@cache
def order_of(name: str, num_ranks: int, num_microbatches: int, num_chunks: int, extra: tuple[int, ...]) -> Schedule:
    """Return a schedule of computations alone; they suffice for memory, and take much less time to make."""
    return compute_schedule(name, num_ranks, num_microbatches, num_chunks, extra)

"""Schedules and their microbatches in flight, cached for all layouts that have the same ones.

The cost model calls these functions for each layout: a search compares thousands of layouts, which have few different
schedules. The caches are global, and are kept until the process ends. A schedule is determined by the name, the number
of pipeline ranks, of microbatches and of chunks on each rank, and the extra microbatches in flight on each link between
ranks (empty for none), as in `Layout.schedule_key`.
"""

from __future__ import annotations

from functools import cache

from lightning_hybrid.memory.account import most_in_flight
from lightning_hybrid.pipeline_parallel.schedules import Schedule, build_unproven, compute_schedule


@cache
def schedule_of(name: str, num_ranks: int, num_microbatches: int, num_chunks: int, extra: tuple[int, ...]) -> Schedule:
    """Return the schedule of a step for a simulation. It has sends and receives, but no proofs for the engine."""
    return build_unproven(name, num_ranks, num_microbatches, num_chunks, extra)


@cache
def most_saved(schedule_key: tuple[str, int, int, int, tuple[int, ...]], saved: tuple[int, ...]) -> tuple[int, ...]:
    """Return the largest number of bytes of activations that each pipeline rank holds at a time.

    Args:
        schedule_key: The arguments of :func:`schedule_of`.
        saved: The bytes that each stage saves for a microbatch, in the order of the stages.
    """
    return tuple(
        max(sum(count * saved[stage] for stage, count in counts.items()) for counts in peaks)
        for peaks in in_flight_of(*schedule_key)
    )


@cache
def in_flight_of(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int, extra: tuple[int, ...]
) -> list[list[dict[int, int]]]:
    """Return the numbers of microbatches that each pipeline rank holds at its peaks.

    Returns:
        For each rank, a list of peaks; each maps the rank's stages to their numbers of microbatches. The bytes of the
        stages determine which of the peaks needs the most memory.
    """
    schedule = order_of(name, num_ranks, num_microbatches, num_chunks, extra)
    return [most_in_flight(schedule, rank) for rank in range(num_ranks)]


@cache
def order_of(name: str, num_ranks: int, num_microbatches: int, num_chunks: int, extra: tuple[int, ...]) -> Schedule:
    """Return a schedule without communication. It is enough for memory, and takes much less time to build."""
    return compute_schedule(name, num_ranks, num_microbatches, num_chunks, extra)

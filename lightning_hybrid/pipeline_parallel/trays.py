"""Trays: where messages wait between the actions of one rank."""

from __future__ import annotations

from typing import Any

from lightning_hybrid.pipeline_parallel.schedules import Kind, Schedule

__all__ = ["Tray", "lay_out"]

Tray = dict[int, Any]
"""Messages that wait to be taken, by microbatch."""


def lay_out(schedule: Schedule, rank: int) -> dict[tuple[int, Kind], tuple[Tray | None, Tray | None]]:
    """Say where each kind of action of each stage takes messages from, and where it puts them.

    ::

        RECV_F --> inputs -----------> F --> outputs -----------> SEND_F
        SEND_B <-- input gradients <-- B <-- output gradients <-- RECV_B

    Neighbouring stages on one rank share the trays between them: the outputs of one are the inputs of the next.

    Args:
        schedule: The schedule.
        rank: Pipeline rank.

    Returns:
        (tray to take from, tray to put into) by (stage, kind); ``None`` where nothing goes in or comes out.
    """
    trays: dict[tuple[int, Kind], tuple[Tray | None, Tray | None]] = {}
    outputs: Tray | None = None
    output_gradients: Tray | None = None
    for stage in range(rank, schedule.num_stages, schedule.num_ranks):
        is_first, is_last = stage == 0, stage == schedule.num_stages - 1
        is_joined = schedule.num_ranks == 1 and not is_first  # to the stage before, on the same rank
        inputs: Tray | None = None if is_first else outputs if is_joined else {}
        input_gradients: Tray | None = None if is_first else output_gradients if is_joined else {}
        outputs = None if is_last else {}
        output_gradients = None if is_last else {}
        trays |= {
            (stage, Kind.RECV_F): (None, inputs),
            (stage, Kind.F): (inputs, outputs),
            (stage, Kind.SEND_F): (outputs, None),
            (stage, Kind.RECV_B): (None, output_gradients),
            (stage, Kind.B): (output_gradients, input_gradients),
            (stage, Kind.SEND_B): (input_gradients, None),
        }
    return trays

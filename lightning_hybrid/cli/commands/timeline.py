"""``lightning-hybrid timeline``: one step of a schedule, drawn. It needs no torch."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_hybrid.cli.parser import Parser, print_json
from lightning_hybrid.pipeline_parallel.schedules import SCHEDULES, build
from lightning_hybrid.pipeline_parallel.timeline import Timeline, simulate


def run(args: Sequence[str]) -> None:
    """Draw one step of a schedule."""
    parser = Parser(
        "timeline",
        description="Draw one training step of a pipeline schedule, its bubble and what each rank holds in memory.",
    )
    parser.add_choice("--schedule", list(SCHEDULES), default="1f1b", help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="pipeline ranks (default: %(default)s)")
    parser.add_argument(
        "--microbatches", type=int, metavar="N", help="microbatches of a step (default: 4 for each rank)"
    )
    parser.add_argument("--chunks", type=int, metavar="N", help="model chunks per rank (default: 1, interleaved 2)")
    parser.add_argument(
        "--extra-in-flight", type=int, default=0, metavar="N", help="microbatches more on their way over each link"
    )
    parser.add_argument(
        "--send", type=float, default=0.0, metavar="T", help="time of a message; a forward takes 1 (default: 0)"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture to this file too")
    parser.add_json()
    options = parser.parse_args(args)
    default_chunks = 2 if options.schedule == "interleaved_1f1b" else 1
    chunks = default_chunks if options.chunks is None else options.chunks
    microbatches = 4 * options.ranks if options.microbatches is None else options.microbatches
    links = (options.extra_in_flight,) * (options.ranks - 1)
    with parser.refusing(ValueError):
        timeline = simulate(build(options.schedule, options.ranks, microbatches, chunks, links), send=options.send)
    if options.json:
        print_json(_data(timeline))
    else:
        print(_text(timeline))
    if options.svg is not None:
        with parser.refusing(OSError, doing=f"cannot write --svg {options.svg}: "):
            options.svg.write_text(timeline.to_svg(), encoding="utf-8")


def _text(timeline: Timeline) -> str:
    peaks = "  ".join(f"rank {rank}: {peak:g}" for rank, peak in enumerate(timeline.peak_in_flight))
    return "\n".join(
        [
            timeline.to_text(width=max(80, shutil.get_terminal_size((120, 24)).columns)),
            f"bubble          {timeline.bubble:.1%} of the step, {timeline.bubble_over_ideal:.1%} over the ideal",
            f"peak in flight  {peaks} (microbatches whose activations are kept)",
        ]
    )


def _data(timeline: Timeline) -> dict[str, Any]:
    """The figures, and when each rank computes what: ``2F0`` is the forward of microbatch 0 through stage 2."""
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "chunks": schedule.num_chunks,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "peak_in_flight": timeline.peak_in_flight,
        "computing": [
            [{"action": str(span.action), "start": span.start, "end": span.end} for span in spans]
            for spans in timeline.computing
        ],
    }

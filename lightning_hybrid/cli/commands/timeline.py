"""``lightning-hybrid timeline``: a drawing of one step of a schedule. It does not import torch.

`cli.main` calls :func:`run`. The schedule is simulated with equal times for all stages, so it shows the bubble of a
schedule without a model; ``suggest`` simulates with the times of a module.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_hybrid.cli.parser import COLUMNS, Parser, positive, print_json, wrapped
from lightning_hybrid.pipeline_parallel.links.in_flight import choose_extra
from lightning_hybrid.pipeline_parallel.links.link import Link, StepTimes, equal_times
from lightning_hybrid.pipeline_parallel.schedules import SCHEDULES, build, placement_of
from lightning_hybrid.pipeline_parallel.timeline import Timeline, simulate


def run(args: Sequence[str]) -> None:
    """Draw one step of a schedule, as text, as JSON, or also as SVG.

    Args:
        args: The words of the command line after ``timeline``.

    Raises:
        SystemExit: With 2 if the options are wrong, or the SVG file cannot be written.
    """
    parser = Parser(
        "timeline",
        description="Draw one training step of a pipeline schedule, and print the size of the bubble. For each rank,"
        " also print the highest number of microbatches whose activations are in memory at the same time.",
    )
    _add_arguments(parser)
    options = parser.parse_args(args)
    default_chunks = 2 if options.schedule == "interleaved_1f1b" else 1
    chunks = default_chunks if options.chunks is None else options.chunks
    microbatches = 4 * options.ranks if options.microbatches is None else options.microbatches
    with parser.refusing(ValueError):
        times = _times(options, max(1, options.ranks), max(1, chunks))
        links = options.extra_in_flight
        if links == "auto":
            links = choose_extra(options.schedule, times, options.ranks, microbatches)
        links = (links,) * (options.ranks - 1) if isinstance(links, int) else links
        schedule = build(options.schedule, options.ranks, microbatches, chunks, links)
        timeline = simulate(schedule, send=times.send, occupied=times.occupied)
    if options.json:
        print_json(_data(timeline, links))
    else:
        print(_text(timeline))
        if options.extra_in_flight == "auto":
            print(f"extra in flight {list(links)} (extra microbatches in flight on each link between ranks)")
    if options.svg is not None:
        with parser.refusing(OSError, doing=f"cannot write --svg {options.svg}: "):
            options.svg.write_text(timeline.to_svg(), encoding="utf-8")


def _add_arguments(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_choice("--schedule", list(SCHEDULES), default="1f1b", help="pipeline schedule (default: %(default)s)")
    parser.add_argument(
        "--ranks", type=int, default=4, metavar="N", help="number of pipeline ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="N",
        help="number of microbatches per step (default: 4 times the number of ranks)",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        metavar="N",
        help="number of stages (chunks) on each rank (default: 2 for interleaved_1f1b, otherwise 1)",
    )
    parser.add_argument(
        "--extra-in-flight",
        type=_extra,
        default=0,
        metavar="N",
        help="number of extra microbatches in flight on each link between ranks, a list such as 0,2,0, or auto",
    )
    messages, output = parser.group("messages"), parser.group("output")
    messages.add_argument(
        "--send",
        type=float,
        default=0.0,
        metavar="T",
        help="time to send a message, as a multiple of the time of a forward pass (default: 0)",
    )
    messages.add_argument(
        "--nodes",
        type=positive,
        default=1,
        metavar="K",
        help="number of nodes, all with the same number of ranks (default: 1)",
    )
    for name, where in {"node": "within a node", "network": "between nodes"}.items():
        messages.add_argument(
            f"--{name}-latency",
            type=float,
            metavar="T",
            help=f"time to send a message {where} (default: the value of --send)",
        )
        messages.add_argument(
            f"--{name}-bandwidth",
            type=_bandwidth,
            default=math.inf,
            metavar="X",
            help=f"number of messages that a link {where} can send during a forward pass (default: unlimited)",
        )
    output.add_argument("--svg", type=Path, metavar="FILE", help="also save the picture in this SVG file")
    parser.add_json()


def _times(options: argparse.Namespace, ranks: int, chunks: int) -> StepTimes:
    """Return the times of actions and messages, relative to the time of a rank's forward pass."""
    if ranks % options.nodes:
        raise ValueError(f"--ranks {ranks} cannot be split evenly over --nodes {options.nodes}. [LH1008]")
    nodes = [rank * options.nodes // ranks for rank in range(ranks)]
    inside, between = (
        Link(options.send if latency is None else latency, bandwidth)
        for latency, bandwidth in (
            (options.node_latency, options.node_bandwidth),
            (options.network_latency, options.network_bandwidth),
        )
    )
    return equal_times(placement_of(options.schedule, ranks, chunks), nodes, inside, between)


def _extra(text: str) -> int | str | tuple[int, ...]:
    """Return a number, one number for each link, or ``auto``."""
    if text == "auto":
        return text
    try:
        numbers = tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, a list such as 0,2,0, or auto") from None
    return numbers if "," in text else numbers[0]


def _bandwidth(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _text(timeline: Timeline) -> str:
    peaks = ", ".join(f"{peak:g}" for peak in timeline.peak_in_flight)
    width = min(COLUMNS, max(80, shutil.get_terminal_size((COLUMNS, 24)).columns))
    figures = (
        f"over the ideal  {timeline.bubble_over_ideal:.1%}: the step takes this much longer than the computation on the"
        " busiest rank",
        f"peak in flight  {peaks}: highest number of microbatches with stored activations, on each rank",
    )
    lines = [timeline.to_text(width), *(line for text in figures for line in wrapped(text, 16 * " "))]
    return "\n".join(lines)


def _data(timeline: Timeline, links: Sequence[int]) -> dict[str, Any]:
    """Return the timeline as data. The action ``2F0`` is the forward pass of microbatch 0 on stage 2."""
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "chunks": schedule.num_chunks,
        "extra_in_flight": links,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "peak_in_flight": timeline.peak_in_flight,
        "computing": [
            [{"action": str(span.action), "start": span.start, "end": span.end} for span in spans]
            for spans in timeline.computing
        ],
    }

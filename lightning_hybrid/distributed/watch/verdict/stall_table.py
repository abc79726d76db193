"""The answers of ranks to a call for positions: they show which rank the others wait for, as a text and as a table.

The judge calls these functions for a stall. They need only the answers of all ranks, and not the store or a thread, so
they are separate from `stall`. The *culprits* are the ranks that the others wait for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lightning_hybrid.distributed.watch.record import IDLES, SILENT, WAITS, WORKS, Answer
from lightning_hybrid.distributed.watch.verdict.wait_graph import MOST


def find_culprits(answers: Sequence[Answer]) -> list[int]:
    """Return the ranks that the others wait for.

    Args:
        answers: The answers of all ranks, in the order of the ranks.

    Returns:
        The ranks that are silent or idle. If there are none, the ranks that work. If all ranks wait, the ranks for
        which most ranks wait. The list is empty if all ranks are waited for equally.
    """
    for states in ((SILENT, IDLES), (WORKS,)):
        found = [answer.rank for answer in answers if answer.state in states]
        if found:
            return found
    votes: Counter[int] = Counter()
    for answer in answers:
        others = answer.waits_for or [other.rank for other in answers if other.rank != answer.rank]
        # A rank in the same call is not missing from this call.
        votes.update(rank for rank in others if not answer.call or answers[rank].call != answer.call)
    most = [rank for rank, count in votes.items() if count == max(votes.values())]
    return sorted(most) if len(most) < len(answers) else []


def stall_text(answers: Sequence[Answer], culprits: Sequence[int]) -> str:
    """Return the text of a stall, with the ranks that the others wait for, and their states.

    Args:
        answers: The answers of all ranks, in the order of the ranks.
        culprits: The result of :func:`find_culprits`; empty if all ranks wait at the same point.
    """
    longest = max((answer.seconds for answer in answers if answer.state == WAITS), default=0.0)
    if not culprits:
        return (
            f"Stalled: no rank has made progress for {longest:.0f} s. All ranks are waiting at the same point in the"
            " code, so the cause may be the network: check the connections between the nodes. [LH224]"
        )
    parts = []
    for rank in culprits[:MOST]:
        answer = answers[rank]
        does = {
            SILENT: "does not respond: its process is stopped, or its host is down",
            IDLES: f"has been idle for {answer.seconds:.0f} s at {answer.place}",
            WORKS: f"is busy at {answer.place}",
            WAITS: f"is waiting at a different point: {answer.place}",
        }[answer.state]
        parts.append(f"rank {rank} (on {answer.host}), which {does}")
    more = f", and {len(culprits) - MOST} more" if len(culprits) > MOST else ""
    may_idle = any(answers[rank].state == IDLES for rank in culprits)
    advice = " If the code there can take this long, increase `faults.stall_timeout` and `timeout`." if may_idle else ""
    return (
        f"Stalled: no rank has made progress for {longest:.0f} s. The other ranks are waiting for"
        f" {'; for '.join(parts)}{more}.{advice} [LH224]"
    )


def table(answers: Sequence[Answer], culprits: Sequence[int]) -> str:
    """Return a table of all ranks, the culprits first. Ranks at the same place are in the same row.

    Args:
        answers: The answers of all ranks, in the order of the ranks.
        culprits: The result of :func:`find_culprits`.
    """
    rows: dict[tuple[Any, ...], list[Answer]] = {}
    for answer in sorted(answers, key=lambda answer: (answer.rank not in culprits, answer.rank)):
        rows.setdefault(_row(answer), []).append(answer)
    cells = [["rank", "state", "seconds", "batch", "action", "last actions", "pending messages", "at"]]
    for alike in rows.values():
        first = alike[0]
        ranks = ", ".join(str(answer.rank) for answer in alike[:MOST])
        more = f", ... ({len(alike)})" if len(alike) > MOST else ""
        state = first.state
        if state == WAITS and first.waits_for:
            state += f" for {', '.join(map(str, first.waits_for[:MOST]))}"
        longest = max(answer.seconds for answer in alike)
        seconds = "" if first.state == SILENT else f"{longest:.0f}"
        pending = ", ".join(first.pending[:MOST])
        cells.append(
            [f"{ranks}{more}", state, seconds, first.batch, first.action, " ".join(first.last), pending, first.place]
        )
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def _row(answer: Answer) -> tuple[Any, ...]:
    lists = tuple(answer.last), tuple(answer.pending), tuple(answer.waits_for)
    return answer.state, answer.batch, answer.action, answer.place, *lists

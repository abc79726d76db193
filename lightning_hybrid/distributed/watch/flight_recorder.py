"""The collectives of this rank, from torch's flight recorder, which notes each of them when it is started."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from lightning_hybrid.torch_internals import dump_flight_recorder, group_of_name

_MOST = 64  # collectives of one group, the latest ones


@dataclass
class Collectives:
    """The collectives of one process.

    Attributes:
        started: By the name of the group: the number of the first one that is listed, and their kinds in order.
        pending: The collectives of one thread that have not ended: (name of the group, number, kind).
        last: Changes with every collective.
    """

    started: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    pending: list[tuple[str, int, str]] = field(default_factory=list)
    last: int = -1


def read_collectives(since: int = -1, thread: int | None = None) -> Collectives:
    """Return the collectives that have been started.

    The recorder keeps the last 2,000 or so. Only collectives of gloo are returned, since the host waits for their ends;
    with NCCL the device waits. Sends and receives are left out. Reading takes a few milliseconds; torch keeps the
    record anyway. It is private to torch (2.13): if it is missing, or off (``TORCH_FR_BUFFER_SIZE=0``), the result is
    empty.

    Args:
        since: An earlier :attr:`Collectives.last`: groups before it may have had the same names.
        thread: The `threading.get_ident` of the thread whose pending collectives are returned.
    """
    found = Collectives(last=since)
    for entry in _entries():
        backend, _, kind = entry["profiling_name"].partition(":")
        if entry["record_id"] <= since or backend != "gloo":
            continue
        group, number = entry["process_group"][0], entry["collective_seq_id"]
        first, kinds = found.started.setdefault(group, (number, []))
        if number != first + len(kinds):  # what was between is no longer listed
            first, kinds = number, []
        kinds.append(kind)
        drop = max(0, len(kinds) - _MOST)
        found.started[group] = first + drop, kinds[drop:]
        found.last = max(found.last, entry["record_id"])
        if not entry["retired"] and str(thread) == entry["thread_id"]:
            found.pending.append((group, number, kind))
    return found


def read_bytes(since: int = -1) -> tuple[dict[str, float], int]:
    """Return the bytes of collectives that have been started, by the name of the group.

    The bytes of the whole tensor count twice for a sum, and once otherwise, as often as it goes around a ring of the
    group. Each rank sends ``(n - 1) / n`` of them. Collectives that are no longer listed count as the average of the
    others.

    Args:
        since: The second value of an earlier call.

    Returns:
        The bytes, and a number that grows with each collective.
    """
    entries = [entry for entry in _entries() if entry["record_id"] > since and entry.keys() >= _SIZES]
    found: dict[str, float] = {}
    last = max((entry["record_id"] for entry in entries), default=since)
    started_by_one = (last - since) / max(1, len(entries)) if since >= 0 else 1.0
    for entry in entries:
        group, kind = entry["process_group"][0], entry["profiling_name"].partition(":")[2]
        sizes = [_num_bytes(entry[f"{side}_sizes"], entry[f"{side}_dtypes"]) for side in ("input", "output")]
        passes = 2 if "reduce" in kind and "scatter" not in kind else 1
        found[group] = found.get(group, 0.0) + started_by_one * passes * max(sizes)
    return found, last


def _num_bytes(shapes: Sequence[Any], dtypes: Sequence[str]) -> int:
    """Return the bytes of the tensors of one side of a collective; shapes may be those of a list of tensors."""
    return sum(_ITEMSIZES.get(dtype, 4) * math.prod(shape) for shape, dtype in zip(shapes, dtypes, strict=False))


def read_progress() -> str | None:
    """Return a text that changes with every collective; ``None`` if it is not known. It takes microseconds."""
    if dump_flight_recorder is None:
        return None
    try:
        status = str(json.loads(dump_flight_recorder(includeCollectives=False))["pg_status"])
    except Exception:  # another version of torch may have another form
        return None
    return status or None


def ranks_of(group: str) -> Sequence[int] | None:
    """Return the global ranks of a group by its name; ``None`` if it is not known."""
    try:
        return None if group_of_name is None else dist.get_process_group_ranks(group_of_name(group))
    except Exception:  # the groups may be gone
        return None


def _entries() -> list[dict[str, Any]]:
    if dump_flight_recorder is None:
        return []
    try:
        entries = json.loads(dump_flight_recorder())["entries"]
    except Exception:  # another version of torch may have another form
        return []
    return [entry for entry in entries if entry.keys() >= _FIELDS]


_SIZES = {f"{side}_{what}" for side in ("input", "output") for what in ("sizes", "dtypes")}
_ITEMSIZES = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool"), 1),
}  # bytes of an element, by torch's names; others have 4

_FIELDS = {
    *("record_id", "process_group", "collective_seq_id", "profiling_name"),
    *("retired", "thread_id"),
}

"""The collectives of this rank, from torch's flight recorder, which records each collective when it starts.

The watcher reads the collectives for which a rank waits, and `pipeline_parallel.links.traffic` reads the bytes of
collectives. Wrapping torch's functions would miss collectives that C++ code starts, such as the ones of DTensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from lightning_hybrid.torch_internals import dump_flight_recorder, group_of_name

_MOST = 64  # the number of collectives listed for one group


@dataclass
class Collectives:
    """The collectives of one process.

    Attributes:
        started: For each group name, the number of the first listed collective, and the kinds of the listed ones in
            order.
        pending: (name of the group, number, kind) of each collective of one thread that has not ended.
        last: A number that changes with every collective.
    """

    started: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    pending: list[tuple[str, int, str]] = field(default_factory=list)
    last: int = -1


def read_collectives(since: int = -1, thread: int | None = None) -> Collectives:
    """Return the collectives that have been started.

    The recorder keeps about 2,000 collectives. Only collectives of gloo are returned, because the host waits for their
    ends; with NCCL, the device waits. Sends and receives are omitted. Reading takes a few milliseconds; torch records
    in any case. The recorder is private to torch (2.13). If it is missing or disabled (``TORCH_FR_BUFFER_SIZE=0``), the
    result is empty.

    Args:
        since: An earlier :attr:`Collectives.last`; collectives up to it are omitted, because groups before it may have
            had the same names. -1 omits none.
        thread: The `threading.get_ident` of the thread whose pending collectives are returned; ``None`` for none.
    """
    found = Collectives(last=since)
    for entry in _entries():
        backend, _, kind = entry["profiling_name"].partition(":")
        if entry["record_id"] <= since or backend != "gloo":
            continue
        group, number = entry["process_group"][0], entry["collective_seq_id"]
        first, kinds = found.started.setdefault(group, (number, []))
        if number != first + len(kinds):  # the collectives in between are no longer listed
            first, kinds = number, []
        kinds.append(kind)
        drop = max(0, len(kinds) - _MOST)
        found.started[group] = first + drop, kinds[drop:]
        found.last = max(found.last, entry["record_id"])
        if not entry["retired"] and str(thread) == entry["thread_id"]:
            found.pending.append((group, number, kind))
    return found


def read_bytes(since: int = -1) -> tuple[dict[str, float], int]:
    """Return the bytes of the collectives that have been started, by the name of the group.

    For each collective, the bytes of the full tensor are counted as often as the tensor goes around a ring of the
    group: twice for a sum, and once otherwise. Each rank sends ``(n - 1) / n`` of these bytes. Collectives that are no
    longer listed count as the average of the others.

    Args:
        since: The second value of an earlier call; -1 for all collectives that are still listed.

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
    """Return the bytes of the tensors on one side of a collective. A shape may be a list of shapes of tensors."""
    return sum(_ITEMSIZES.get(dtype, 4) * math.prod(shape) for shape, dtype in zip(shapes, dtypes, strict=False))


def read_progress() -> str | None:
    """Return a text that changes with every collective; ``None`` if it is not known. This takes microseconds."""
    if dump_flight_recorder is None:
        return None
    try:
        status = str(json.loads(dump_flight_recorder(includeCollectives=False))["pg_status"])
    except Exception:  # another version of torch may use another format
        return None
    return status or None


def ranks_of(group: str) -> Sequence[int] | None:
    """Return the global ranks of a group by its name; ``None`` if they are not known."""
    try:
        return None if group_of_name is None else dist.get_process_group_ranks(group_of_name(group))
    except Exception:  # the groups may be destroyed
        return None


def _entries() -> list[dict[str, Any]]:
    if dump_flight_recorder is None:
        return []
    try:
        entries = json.loads(dump_flight_recorder())["entries"]
    except Exception:  # another version of torch may use another format
        return []
    return [entry for entry in entries if entry.keys() >= _FIELDS]


_SIZES = {f"{side}_{what}" for side in ("input", "output") for what in ("sizes", "dtypes")}
_ITEMSIZES = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool"), 1),
}  # bytes per element, by torch's names of dtypes; 4 for other names

_FIELDS = {
    *("record_id", "process_group", "collective_seq_id", "profiling_name"),
    *("retired", "thread_id"),
}

"""What this rank's collectives were, out of torch's flight recorder, which notes each of them where it is started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

_MOST = 64  # collectives of one group, the latest ones


@dataclass
class Collectives:
    """The collectives of one process.

    Attributes:
        started: By the name of the group: the number of the first one that is listed, and their kinds in order.
        pending: Those of one thread that have not ended: (name of the group, number, kind).
        last: Changes with every collective.
    """

    started: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    pending: list[tuple[str, int, str]] = field(default_factory=list)
    last: int = -1


def read_collectives(since: int = -1, thread: int | None = None) -> Collectives:
    """The collectives that have been started.

    The recorder keeps the last 2,000 or so. Those of gloo are listed, whose ends the host waits for; with NCCL it is
    the device that waits. Sends and receives are none of them. To read it takes a few milliseconds; torch keeps it
    anyway. It is private to torch (2.13): where it is missing, or off (``TORCH_FR_BUFFER_SIZE=0``), there are none.

    Args:
        since: :attr:`Collectives.last` of before, when groups of the same names may have been others.
        thread: Whose pending collectives are listed, as `threading.get_ident` names it.
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


def read_progress() -> str | None:
    """A text that changes with every collective that is started; ``None`` if it is not known. It takes microseconds."""
    dump = getattr(_c10d(), "_dump_fr_trace_json", None)
    try:
        status: str = json.dumps(json.loads(dump(includeCollectives=False))["pg_status"]) if dump is not None else ""
    except Exception:  # of a torch whose recorder has another form
        return None
    return status or None


def ranks_of(group: str) -> Sequence[int] | None:
    """The global ranks of a group by its name; ``None`` if it is not known."""
    resolve = getattr(_c10d(), "_resolve_process_group", None)
    try:
        return None if resolve is None else dist.get_process_group_ranks(resolve(group))
    except Exception:  # of a world that is gone
        return None


def _entries() -> list[dict[str, Any]]:
    dump = getattr(_c10d(), "_dump_fr_trace_json", None)
    if dump is None:
        return []
    try:
        entries = json.loads(dump())["entries"]
    except Exception:  # of a torch whose recorder has another form
        return []
    return [entry for entry in entries if entry.keys() >= _FIELDS]


_FIELDS = {
    *("record_id", "process_group", "collective_seq_id", "profiling_name"),
    *("retired", "thread_id"),
}


def _c10d() -> Any:
    return getattr(__import__("torch")._C, "_distributed_c10d", None)

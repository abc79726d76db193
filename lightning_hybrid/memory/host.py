"""The available memory of this node, which its processes share.

`strategy.gather` calls :func:`available_memory` on each rank at the end of a run, to decide if the full module fits.
The free memory of the machine alone is too large in a container, so the limits of cgroups are also read.
"""

from __future__ import annotations

import os
from pathlib import Path

_SYSTEM = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Return the bytes that processes of this node or container can still allocate.

    On systems without ``/proc/meminfo``, this is the total memory of the machine.
    """
    try:
        lines = _SYSTEM.read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # on other systems, only the total memory is known
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (_left_of("memory.max", "memory.current", "memory.stat"), _left_of_version_1())
    return min([available, *(limit for limit in limits if limit is not None)])


def _left_of_version_1() -> int | None:
    return _left_of("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")


def _left_of(limit: str, used: str, statistics: str) -> int | None:
    """Return the bytes that a container can still allocate; ``None`` without a limit. Cached files count as free.

    Args:
        limit: The file with the limit in bytes, below the folder of cgroups.
        used: The file with the used bytes.
        statistics: The file with the bytes of cached files.
    """
    try:
        most, now = ((_GROUPS / name).read_text() for name in (limit, used))
        stat = dict(line.split(maxsplit=1) for line in (_GROUPS / statistics).read_text().splitlines())
        return int(most) - int(now) + int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None

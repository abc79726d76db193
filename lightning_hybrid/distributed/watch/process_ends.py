"""The ends of other ranks' processes on this node, which the kernel reports.

`RankWatch` adds the ranks on its node when they begin a run, and takes ended ranks at each look. Other files use the
description of a process, by which two ranks find out if they are on one node. Heartbeats alone would find an ended
process too, but only after their timeout.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path


def describe_process() -> str:
    """Return the name of this host, an identifier of this node and the number of this process."""
    return f"{socket.gethostname()} {_machine()} {os.getpid()}"


def host_of(description: str | None) -> str:
    """Return the name of the host from a text of :func:`describe_process`."""
    return "an unknown host" if description is None else description.split()[0]


def machine_of(description: str) -> str:
    """Return the identifier of the node from a text of :func:`describe_process`."""
    return description.split()[1]


@lru_cache(maxsize=1)
def _machine() -> str:
    """Return an identifier of this node and container, within which processes can see each other's numbers."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    return "?"


class ProcessEnds:
    """A search for ranks whose processes have ended.

    A rank that is killed sends no message. A rank that waits for a blocked rank does not notice, because none of its
    connections breaks. But the kernel makes the descriptor of a process readable when the process ends (Linux,
    ``pidfd_open``). On other systems, and for processes on other nodes, nothing is found.
    """

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}  # the rank of each descriptor
        self._ended: list[int] = []

    def add(self, rank: int, description: str) -> None:
        """Watch a rank, if it is on this node.

        Args:
            rank: The rank.
            description: The result of :func:`describe_process` on that rank.
        """
        _, machine, pid = description.split()
        open_process = getattr(os, "pidfd_open", None)
        if open_process is not None and machine != "?" and machine == _machine():
            try:
                self._descriptors[open_process(int(pid))] = rank
            except ProcessLookupError:
                self._ended.append(rank)
            except OSError:  # not permitted
                return

    def descriptors(self) -> Collection[int]:
        """Return the descriptors that become readable when a process ends."""
        return tuple(self._descriptors)

    def take(self) -> list[int]:
        """Return the ranks whose processes have ended since the last call."""
        poll = select.poll()
        for descriptor in self._descriptors:
            poll.register(descriptor, select.POLLIN)
        ended, self._ended = self._ended, []
        for descriptor, _ in poll.poll(0) if self._descriptors else ():
            ended.append(self._descriptors.pop(descriptor))
            os.close(descriptor)
        return ended

    def resume(self) -> None:
        """Resume the processes of the watched ranks, if they are stopped (SIGCONT)."""
        for descriptor in self._descriptors:
            with suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)

    def close(self) -> None:
        """Stop watching all ranks. Others can be added afterwards."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._ended.clear()

"""The processes of the other ranks on this machine: the kernel says when one of them ends."""

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
    """Where this process is: the name of its host, and what another process on the same machine finds it by."""
    return f"{socket.gethostname()} {_machine()} {os.getpid()}"


def host_of(description: str | None) -> str:
    """The name of the host in what :func:`describe_process` has made."""
    return "an unknown host" if description is None else description.split()[0]


def machine_of(description: str) -> str:
    """What is the same in descriptions of processes on one machine."""
    return description.split()[1]


@lru_cache(maxsize=1)
def _machine() -> str:
    """The same text for processes that know each other's numbers: on one machine, in one container."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    return "?"


class ProcessEnds:
    """Which of the processes that were given have ended.

    A rank that is killed says nothing, and who waits for one that waits for it has no connection that breaks. The
    kernel makes a descriptor of a process readable when it ends, whoever started it (Linux, ``pidfd_open``). Elsewhere,
    and on other machines, nobody is found here.
    """

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}  # descriptor: rank
        self._ended: list[int] = []

    def add(self, rank: int, description: str) -> None:
        """Watch a rank, if it is on this machine.

        Args:
            rank: The rank.
            description: As its own :func:`describe_process` has made it.
        """
        _, machine, pid = description.split()
        open_process = getattr(os, "pidfd_open", None)
        if open_process is not None and machine != "?" and machine == _machine():
            try:
                self._descriptors[open_process(int(pid))] = rank
            except ProcessLookupError:
                self._ended.append(rank)
            except OSError:  # not allowed
                return

    def descriptors(self) -> Collection[int]:
        """What can be read when a process ends."""
        return tuple(self._descriptors)

    def take(self) -> list[int]:
        """The ranks whose processes have ended since this was asked before."""
        poll = select.poll()
        for descriptor in self._descriptors:
            poll.register(descriptor, select.POLLIN)
        ended, self._ended = self._ended, []
        for descriptor, _ in poll.poll(0) if self._descriptors else ():
            ended.append(self._descriptors.pop(descriptor))
            os.close(descriptor)
        return ended

    def resume(self) -> None:
        """Have those that are stopped go on."""
        for descriptor in self._descriptors:
            with suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)

    def close(self) -> None:
        """Watch nobody any more."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._ended.clear()

"""The connections of process groups. Shutting them down wakes a rank that waits for another one.

`HybridStrategy` makes a :class:`Connections` before the groups. Code that makes groups enters
:meth:`Connections.opened`. `RankWatch` reads :meth:`Connections.num_lost` to notice that another rank has gone, and
calls :meth:`Connections.shut_down`, through `StartWatch`, when this rank must end.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

_DESCRIPTORS = Path("/proc/self/fd")


class Connections:
    """The sockets of process groups.

    A rank that waits in gloo waits in C++ code, and gloo has no `abort` (torch 2.13). If its sockets are shut down, the
    wait ends with the error "Connection closed by peer", in the call of the user's code. The run then ends as after any
    other exception. Otherwise only the end of the process could end the wait.

    A socket is identified by its descriptor and its inode, because descriptors are reused. The sockets of the store and
    sockets that Python opened are ignored. On systems without ``/proc``, no sockets are found.
    """

    def __init__(self) -> None:
        self._sockets: set[tuple[int, int]] = set()
        self._lasting: set[tuple[int, int]] = set()

    def watch_opened(self, store_port: int | None = None) -> None:
        """Count the group sockets that are open now in :meth:`num_lost`.

        Usually these sockets are closed only when a process ends.

        Args:
            store_port: The port of the store, which is not watched.
        """
        self._lasting = set(self._connected(store_port))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Register the sockets that C++ code opens while entered as sockets of process groups, which are made there."""
        # torch cannot list the sockets of a gloo group, so the open sockets are listed before and after. A logger's
        # thread may connect to its server at the same time, but sockets that Python opens are known.
        before = _sockets()
        with _python_sockets() as of_python:
            try:
                yield
            finally:
                numbers = {each.fileno() for each in of_python}
                self._sockets |= {each for each in _sockets() - before if each[0] not in numbers}

    def num_lost(self) -> int:
        """Return how many sockets of :meth:`watch_opened` have been closed, here or by the peer; 0 if it is not known.

        One of these sockets may belong to C++ code other than gloo, so a closed socket alone does not prove a failure.
        """
        number, hung_up = 0, getattr(select, "POLLRDHUP", 0)
        lasting = self._lasting if hung_up else set()
        for descriptor, inode in lasting:
            poll = select.poll()
            poll.register(descriptor, hung_up)
            with suppress(OSError):
                number += os.fstat(descriptor).st_ino == inode and not poll.poll(0)
        return len(lasting) - number

    def shut_down(self, store_port: int | None = None) -> None:
        """Shut the sockets down, which wakes the ranks that wait at either end. The groups cannot be used afterwards.

        Args:
            store_port: The port of the store, which other ranks still read.
        """
        # A closed descriptor could be reused while gloo's thread still polls it. `shutdown` on a copy of the descriptor
        # leaves gloo's own descriptor open, and has the same effect for gloo as the exit of a peer.
        for number, _ in self._connected(store_port):
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()
        self._lasting = set()

    def _connected(self, store_port: int | None) -> Iterator[tuple[int, int]]:
        """Yield the sockets that connect this process with another process, without sockets of the store."""
        for number, inode in self._sockets & _sockets():
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens or connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue  # gloo ends the process if a listening socket is shut down
                if store_port not in (connection.getsockname()[1], connection.getpeername()[1]):
                    yield number, inode


def _sockets() -> set[tuple[int, int]]:
    """Return the descriptor and inode of each open socket of this process."""
    found: set[tuple[int, int]] = set()
    with suppress(OSError):
        for path in _DESCRIPTORS.iterdir():
            with suppress(OSError):
                status = os.fstat(int(path.name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(path.name), status.st_ino))
    return found


@contextmanager
def _python_sockets() -> Iterator[WeakSet[socket.socket]]:
    """Collect the sockets that Python opens while entered, in any thread."""
    opened = WeakSet[socket.socket]()
    initialize = socket.socket.__init__

    def note(self: socket.socket, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        opened.add(self)

    socket.socket.__init__ = note  # type: ignore[method-assign]
    try:
        yield opened
    finally:
        socket.socket.__init__ = initialize  # type: ignore[method-assign]

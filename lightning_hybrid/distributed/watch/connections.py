"""The connections of process groups: shut down, they wake whoever waits for another rank."""

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
    """The sockets that were opened while process groups were made.

    A rank that waits in gloo waits in C++, and gloo has no `abort` (torch 2.13). Where its sockets are shut down, the
    wait ends with "Connection closed by peer", in the line of the user's code that led there: the run ends as after
    any other exception, instead of with its process.

    A socket is known by its number and by its inode, which no other socket of this machine has: one that was closed in
    the meantime, and whose number belongs to something else, is left alone. So are the store, and what Python opened:
    a logger's thread may have connected to its server at the time. Where the system does not list what a process has
    open (it does on Linux), there are none.
    """

    def __init__(self) -> None:
        self._sockets: set[tuple[int, int]] = set()
        self._lasting: set[tuple[int, int]] = set()

    def watch_opened(self, store_port: int | None = None) -> None:
        """Only a process that ends is likely to close what has been opened so far: :meth:`num_lost` counts it.

        Args:
            store_port: Of the store, which is not watched.
        """
        self._lasting = set(self._connected(store_port))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, process groups are made, and no other C++ opens sockets."""
        before = _sockets()
        with _python_sockets() as of_python:
            try:
                yield
            finally:
                numbers = {each.fileno() for each in of_python}
                self._sockets |= {each for each in _sockets() - before if each[0] not in numbers}

    def num_lost(self) -> int:
        """How many of those that last have been closed all the same; where the system does not tell, none.

        Those of other groups may be closed on purpose, while a rank is busy and cannot say that it is there. Other C++
        than gloo's may have opened one at the same time: that it is closed says little by itself.
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
        """Wake whoever waits, here and on the other side; the groups are of no use afterwards.

        Args:
            store_port: Of the store, which the others still read.
        """
        for number, _ in self._connected(store_port):
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()
        self._lasting = set()

    def _connected(self, store_port: int | None) -> Iterator[tuple[int, int]]:
        """Yield the sockets that connect this process with another one, without the store's."""
        for number, inode in self._sockets & _sockets():
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens or connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue  # gloo ends the process if a socket that listens is shut down
                if store_port not in (connection.getsockname()[1], connection.getpeername()[1]):
                    yield number, inode


def _sockets() -> set[tuple[int, int]]:
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
    """Note the sockets that Python opens inside, in any thread."""
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

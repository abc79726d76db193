"""Messages of the host between ranks of a group: within a machine small ones go through a socket, without a thread."""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.distributed.tensor_bytes import bytes_tensor

#: Bytes of the largest message that goes through a socket, which has room for some 6 of these (Linux gives it 416 KiB).
LARGEST_EAGER = 65536
#: Ranks of a machine up to which each is connected with each: that is a socket to each.
MOST_CONNECTED = 256

_CONNECT = 0  # the tag by which sockets are agreed on
_TAG = struct.Struct("I")
_SECRET = 16  # bytes
_LONGEST_POLL = 1e6  # seconds: the kernel counts milliseconds in 31 bits
_LOOK = 1e-3  # seconds between two looks whether a socket has had room
_ALL: WeakSet[HostMessages] = WeakSet()


class Work(Protocol):
    """What a process group returns of a message that is under way."""

    def wait(self) -> Any:
        """Return when it has been received, or when its tensor is no longer needed."""


class HostMessages:
    """Sends and receives tensors of the host, as a process group does: each sender's k-th of a tag meets the k-th here.

    gloo hands every message to a thread of its own, which turns in a circle while the other one has the lock of the
    connection: on few cores that is up to the kernel's next tick, milliseconds. Between two ranks of one machine a
    message of up to :data:`LARGEST_EAGER` bytes goes the way that MPI calls eager: the kernel keeps it until the
    receiver looks. Both sides know the length, and so the way::

        sender      send a ---.     send b ---.            (compute)
                              v               v
        socket      . . . . . [a] . . . . . . [a b] . . .  [ ] . .
                                                            ^
        receiver                         post a             `- wait a: takes a, and b, which nobody has posted yet

    Whoever waits takes in what has come from any rank, also for receives that are posted later. What finds no room in
    a socket is given out by a thread, which ends with it: the sender may go on to a collective, and wait there for the
    one that waits for this.

    Args:
        group: The ranks, over gloo: takes what is large, or for another machine.
        sockets: By rank inside of the group, what :func:`connect` has connected.
        timeout: After so long a wait fails.

    Attributes:
        timeout: That, in seconds.
        rank: This rank, inside of the group.
        ranks: The global ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup, sockets: Mapping[int, socket.socket], timeout: timedelta) -> None:
        self._group = GroupRef(group)
        self.timeout = timeout.total_seconds()
        self.rank, self.ranks = group.rank(), dist.get_process_group_ranks(group)
        self._peers = {peer: _Peer(self, connected, self.ranks[peer]) for peer, connected in sockets.items()}
        self._by_descriptor = {connected.fileno(): self._peers[peer] for peer, connected in sockets.items()}
        self._poll = select.poll()
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)
        _ALL.add(self)

    @property
    def connected(self) -> frozenset[int]:
        """The ranks inside of the group to which there is a socket."""
        return frozenset(self._peers)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work | None:
        """Send a tensor; never blocks.

        Args:
            tensors: One, contiguous. Until it has been waited for it must not change.
            peer: The receiver's rank inside of the group.
            tag: Of the message.

        Returns:
            What is to be waited for; ``None`` if the kernel has it all.
        """
        [tensor] = tensors
        connected = self._peers.get(peer)
        if connected is None or tensor.nbytes > LARGEST_EAGER:
            group: Any = self._group.weak()  # at every message: no call of Python
            return group.send(tensors, peer, tag)  # type: ignore[no-any-return]
        return None if connected.send(tensor, tag) else connected

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        """Post the receive of a tensor; never blocks. Arguments as for :meth:`send`, of the sender."""
        [tensor] = tensors
        connected = self._peers.get(peer)
        if connected is None or tensor.nbytes > LARGEST_EAGER:
            group: Any = self._group.weak()
            return group.recv(tensors, peer, tag)  # type: ignore[no-any-return]
        return connected.post(tensor, tag)

    def progress(self, seconds: float) -> None:
        """Wait until something comes, and take it in.

        Args:
            seconds: So long at most; not negative.
        """
        for descriptor, _ in self._poll.poll(seconds * 1000):
            self._by_descriptor[descriptor].take_in()

    def forget(self, connected: socket.socket) -> None:
        """Nothing comes from there any more."""
        self._poll.unregister(connected.fileno())

    def shut_down(self) -> None:
        """Wake whoever waits, here in another thread, and on the other sides."""
        for peer in self._peers.values():
            with suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """After a failure: close the sockets, so that others notice."""
        self.shut_down()
        self.close()

    def close(self) -> None:
        """Close the sockets of this process."""
        for peer in self._peers.values():
            peer.close()


class _Peer:
    """A rank to which there is a socket. As a :class:`Work` it is all that has been sent to it.

    Attributes:
        socket: Keeps the bounds of messages.
    """

    __slots__ = ("_arrived", "_is_open", "_lock", "_messages", "_posted", "_rank", "_unsent", "socket")

    def __init__(self, messages: HostMessages, connected: socket.socket, rank: int) -> None:
        self._messages, self.socket, self._rank = messages, connected, rank
        self._is_open = True
        # What had no room, for a thread that runs as long as there is something.
        self._unsent: deque[bytes] = deque()
        self._lock = threading.Lock()
        # By tag; of each at most one has something.
        self._posted: defaultdict[int, deque[_Receive]] = defaultdict(deque)
        self._arrived: defaultdict[int, deque[bytes]] = defaultdict(deque)

    def send(self, tensor: Tensor, tag: int) -> bool:
        """Give a message to the kernel, and say whether there was room; if there was not, a thread does it."""
        data = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        with self._lock:
            has_thread = bool(self._unsent)
            if not has_thread:
                try:
                    self.socket.sendmsg((data, _TAG.pack(tag)), (), socket.MSG_DONTWAIT)
                    return True
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise self._gone() from error
            self._unsent.append(bytes(data) + _TAG.pack(tag))
        if not has_thread:
            threading.Thread(target=self._give_out, name="lightning_hybrid-send", daemon=True).start()
        return False

    def _give_out(self) -> None:
        """On a thread: what had no room."""
        while True:
            try:
                self.socket.send(self._unsent[0])
            except OSError:  # whoever waits for this rank is told
                with self._lock:
                    self._unsent.clear()
                return
            with self._lock:
                self._unsent.popleft()
                if not self._unsent:
                    return

    def post(self, tensor: Tensor, tag: int) -> _Receive:
        """Receive the next message of a tag."""
        receive = _Receive(self, tensor)
        arrived = self._arrived[tag]
        if arrived:
            receive.fill(arrived.popleft())
        else:
            self._posted[tag].append(receive)
        return receive

    def take_in(self) -> None:
        """Take one message from the kernel, for whoever has posted its receive."""
        try:
            message = self.socket.recv(LARGEST_EAGER + _TAG.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self.close()
            return
        (tag,) = _TAG.unpack_from(message, len(message) - _TAG.size)
        posted = self._posted[tag]
        if posted:
            posted.popleft().fill(message)
        else:
            self._arrived[tag].append(message)

    def wait(self) -> None:
        """Return when the kernel has all that has been sent."""
        self.wait_while(lambda: bool(self._unsent), longest_poll=_LOOK)

    def wait_while(self, is_pending: Callable[[], bool], longest_poll: float = _LONGEST_POLL) -> None:
        """Take in messages of all ranks until this one has done something.

        Args:
            is_pending: Whether it has not.
            longest_poll: So many seconds pass at most until that is asked again, if nothing comes.

        Raises:
            DistNetworkError: If it has left, or does not do it in time.
        """
        deadline = time.monotonic() + self._messages.timeout
        while is_pending():
            if not self._is_open:
                raise self._gone()
            seconds = deadline - time.monotonic()
            if seconds < 0:
                raise dist.DistNetworkError(
                    f"Timed out waiting {self._messages.timeout:.0f} s for a message of rank {self._rank}"
                )
            self._messages.progress(min(seconds, longest_poll))

    def _gone(self) -> dist.DistNetworkError:
        return dist.DistNetworkError(f"Connection closed by rank {self._rank}")

    def close(self) -> None:
        """Close the socket; nothing comes from there any more."""
        if self._is_open:
            self._is_open = False
            self._messages.forget(self.socket)
        self.socket.close()


class _Receive:
    """A posted receive, as a :class:`Work`."""

    __slots__ = ("_peer", "_tensor")

    def __init__(self, peer: _Peer, tensor: Tensor) -> None:
        self._peer = peer
        self._tensor: Tensor | None = tensor

    def fill(self, message: bytes) -> None:
        """Its message is here; at its end there is the tag."""
        tensor = self._tensor
        assert tensor is not None
        assert len(message) == tensor.nbytes + _TAG.size, (len(message), tensor.shape, tensor.dtype)
        ctypes.memmove(tensor.data_ptr(), message, tensor.nbytes)
        self._tensor = None

    def wait(self) -> None:
        """Return when the tensor has its values."""
        if self._tensor is not None:
            self._peer.wait_while(lambda: self._tensor is not None)


def connect(group: dist.ProcessGroup, local: Iterable[int], timeout: timedelta) -> HostMessages:
    """Connect the ranks of a group that are on one machine; all of them call this.

    ::

        lower rank     listens, invites ------>                                    accepts if so
        higher rank                             connects, tells whether it could ------>

    An invitation has the socket's name, which is seen on the whole machine, and a secret, which is not. Ranks that are
    on one machine but cannot connect, as those of two containers, talk over the group.

    Args:
        group: Over gloo.
        local: The ranks inside of the group that are on the machine of this one.
        timeout: Of each message, and of connecting.
    """
    own = group.rank()
    others = sorted(set(local) - {own})
    if sys.platform != "linux" or len(others) >= MOST_CONNECTED:  # others have no names without a file
        others = []
    if not others:
        return HostMessages(group, {}, timeout)
    lower, higher = [peer for peer in others if peer < own], [peer for peer in others if peer > own]
    name, secret = b"\0" + secrets.token_bytes(_SECRET), secrets.token_bytes(_SECRET)
    with _socket(timeout) as listener:
        listener.bind(name)
        listener.listen(len(others))
        invitation = bytes_tensor(name + secret)
        sends = [group.send([invitation], peer, _CONNECT) for peer in higher]
        sockets = {peer: connected for peer in lower if (connected := _accept_invitation(group, peer, timeout))}
        could = {peer: bytes_tensor(bytes([peer in sockets])) for peer in lower}
        sends += [group.send([told], peer, _CONNECT) for peer, told in could.items()]
        told = {peer: torch.zeros(1, dtype=torch.uint8) for peer in higher}
        for work in [group.recv([flag], peer, _CONNECT) for peer, flag in told.items()]:
            work.wait()
        expected = {peer for peer, flag in told.items() if flag}
        while expected:
            connected, _ = listener.accept()
            peer = _peer_of(connected, secret, timeout)
            if peer in expected:
                expected.remove(peer)
                sockets[peer] = connected
            else:
                connected.close()
    for work in sends:
        work.wait()
    return HostMessages(group, sockets, timeout)


def _socket(timeout: timedelta) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(timeout.total_seconds())
    return made


def _accept_invitation(group: dist.ProcessGroup, peer: int, timeout: timedelta) -> socket.socket | None:
    """On the higher rank."""
    invitation = torch.zeros(1 + 2 * _SECRET, dtype=torch.uint8)
    group.recv([invitation], peer, _CONNECT).wait()
    name, secret = bytes(invitation[: 1 + _SECRET].numpy()), bytes(invitation[1 + _SECRET :].numpy())
    connected = _socket(timeout)
    try:
        connected.connect(name)
        connected.send(secret + _TAG.pack(group.rank()))
    except OSError:
        connected.close()
        return None
    _complete(connected)
    return connected


def _peer_of(connected: socket.socket, secret: bytes, timeout: timedelta) -> int | None:
    """On the lower rank: who has connected; ``None`` if it does not know the secret."""
    connected.settimeout(timeout.total_seconds())
    try:
        message = connected.recv(_SECRET + _TAG.size)
    except OSError:
        return None
    if len(message) != _SECRET + _TAG.size or not secrets.compare_digest(message[:_SECRET], secret):
        return None
    _complete(connected)
    return int(_TAG.unpack_from(message, _SECRET)[0])


def _complete(connected: socket.socket) -> None:
    """As much room as the kernel gives without privileges; and Python does not wait by itself."""
    connected.setblocking(True)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)


def shut_down_sockets() -> None:
    """Wake whoever waits for a message of the host, here and on the other sides; for a thread beside the run."""
    for messages in list(_ALL):
        messages.shut_down()


def _close_copies() -> None:
    """In a process that was forked: as long as it had the sockets too, nobody would notice that this rank ends."""
    for messages in list(_ALL):
        messages.close()


os.register_at_fork(after_in_child=_close_copies)

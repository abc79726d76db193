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
import weakref
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

#: Bytes of the largest message that goes through a socket.
LARGEST_EAGER = 65536
#: Ranks of a machine up to which each is connected with each: that is a socket to each.
MOST_CONNECTED = 256

_ROOM = 1 << 20  # bytes that a socket is to have room for; the kernel gives at most what `net.core.wmem_max` says
_MOST_UNSENT = 1024  # messages for one rank that have found no room; then the sender waits
_CONNECT = 0  # the tag by which sockets are agreed on
_TAG = struct.Struct("I")
_SECRET = 16  # bytes
_LONGEST_POLL = 1e6  # seconds: the kernel counts milliseconds in 31 bits
_LOOK = 1e-3  # seconds between two looks whether a socket has had room
_PLAIN = torch.Tensor, torch.nn.Parameter  # whose memory is their own
_ALL: WeakSet[HostMessages] = WeakSet()


class Work(Protocol):
    """What a process group returns of a message that is under way."""

    def wait(self) -> Any:
        """Return when it has been received, or when its tensor is no longer needed."""


class HostMessages:
    """Sends and receives tensors of the host, as a process group does: each sender's k-th of a tag meets the k-th here.

    gloo hands every message to a thread of its own, which turns in a circle while the other one has the lock of the
    connection: on few cores that is up to the kernel's next tick, milliseconds. Between two ranks of one machine a
    message of up to :data:`LARGEST_EAGER` bytes goes the way that MPI calls eager: the kernel keeps a copy until the
    receiver looks. Both sides know the length, and so the way::

        sender      send a ---.     send b ---.            (compute)
                              v               v
        socket      . . . . . [a] . . . . . . [a b] . . .  [ ] . .
                                                            ^
        receiver                         post a             `- wait a: takes a, and b, which nobody has posted yet

    Whoever waits takes what has come from any rank, also for receives that are posted later. Nobody waits for a send:
    what finds no room in a socket is copied, and sent by a thread that runs until all of that is sent. So a rank may go
    on to a collective, and wait there for one that waits for its message, as with gloo.

    When the group is destroyed, the sockets are shut down: its ranks notice, as those of a gloo group do.

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
        weakref.finalize(group, _shut_down, list(self._peers.values())).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> HostMessages:
        """Itself, as a group: callbacks copy modules, and what refers to this."""
        return self

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work | None:
        """Send a tensor.

        Args:
            tensors: One, contiguous. It must not change until what is returned has been waited for.
            peer: The receiver's rank inside of the group.
            tag: Of the message.

        Returns:
            What is to be waited for; ``None`` if there is a copy.

        Raises:
            DistNetworkError: If the receiver has left.
        """
        [tensor] = tensors
        connected = self._peers.get(peer)
        if connected is None or tensor.nbytes > LARGEST_EAGER:
            group: Any = self._group.weak()  # at every message: no call of Python
            return group.send(tensors, peer, tag)  # type: ignore[no-any-return]
        if type(tensor) not in _PLAIN:  # as the results of functional collectives, which have no memory of their own
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        connected.send(tensor, tag)
        return None

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        """Post the receive of a tensor; arguments as for :meth:`send`, of the sender."""
        [tensor] = tensors
        connected = self._peers.get(peer)
        if connected is None or tensor.nbytes > LARGEST_EAGER:
            group: Any = self._group.weak()
            return group.recv(tensors, peer, tag)  # type: ignore[no-any-return]
        return connected.post(tensor, tag)

    def flush(self) -> None:
        """Wait until the kernel has all that has been sent."""
        for peer in self._peers.values():
            peer.flush()

    def wait_any(self, seconds: float) -> None:
        """Wait until something comes, and take it.

        Args:
            seconds: So long at most; not negative.
        """
        for descriptor, _ in self._poll.poll(seconds * 1000):
            self._by_descriptor[descriptor].take()

    def forget(self, connected: socket.socket) -> None:
        """Nothing comes from there any more."""
        self._poll.unregister(connected.fileno())

    def shut_down(self) -> None:
        """Wake whoever waits, here in another thread, and on the other sides."""
        _shut_down(self._peers.values())

    def abandon(self) -> None:
        """After a failure: close the sockets, so that others notice."""
        self.shut_down()
        self.close()

    def close(self) -> None:
        """Close the sockets of this process."""
        for peer in self._peers.values():
            peer.close()


class _Peer:
    """A rank to which there is a socket.

    Attributes:
        socket: Keeps the bounds of messages.
        rank: The global rank.
    """

    __slots__ = (
        "_arrived",
        "_error",
        "_is_open",
        "_lock",
        "_messages",
        "_posted",
        "_thread",
        "_unsent",
        "rank",
        "socket",
    )

    def __init__(self, messages: HostMessages, connected: socket.socket, rank: int) -> None:
        self._messages, self.socket, self.rank = messages, connected, rank
        self._is_open = True
        self._unsent: deque[bytes] = deque()  # what found no room
        self._thread: threading.Thread | None = None  # that sends it
        self._lock = threading.Lock()  # of these two
        self._error: OSError | None = None  # with which it has ended
        # By tag; for none of them both have something.
        self._posted: defaultdict[int, deque[_Receive]] = defaultdict(deque)
        self._arrived: defaultdict[int, deque[bytes]] = defaultdict(deque)

    def send(self, tensor: Tensor, tag: int) -> None:
        """Give the kernel a message, or keep a copy for when it has room."""
        data = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        with self._lock:
            if not self._is_open or self._error is not None:
                raise self._gone() from self._error
            if self._thread is None:
                try:
                    self.socket.sendmsg((data, _TAG.pack(tag)), (), socket.MSG_DONTWAIT)
                    return
                except BlockingIOError:
                    pass
                except ConnectionError as error:
                    raise self._gone() from error
                thread = threading.Thread(target=self._send_rest, name="lightning_hybrid-send", daemon=True)
                thread.start()  # it waits for the lock
                self._thread = thread
            self._unsent.append(bytes(data) + _TAG.pack(tag))
        self.flush(_MOST_UNSENT)

    def _send_rest(self) -> None:
        """On a thread: send what found no room, in its order."""
        while True:
            with self._lock:
                if not self._unsent:
                    self._thread = None
                    return
                message = self._unsent[0]
            try:
                self.socket.send(message)
            except OSError as error:
                self._error = error
                return
            with self._lock:
                self._unsent.popleft()

    def post(self, tensor: Tensor, tag: int) -> _Receive:
        """Receive the next message of a tag."""
        receive = _Receive(self, tensor)
        arrived = self._arrived[tag]
        if arrived:
            receive.fill(arrived.popleft())
        else:
            self._posted[tag].append(receive)
        return receive

    def take(self) -> None:
        """Take one message from the kernel, for whoever has posted its receive."""
        try:
            message = self.socket.recv(LARGEST_EAGER + _TAG.size, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):  # it left something unread: what it sent before comes now
            return
        if not message:
            self.close()
            return
        (tag,) = _TAG.unpack_from(message, len(message) - _TAG.size)
        posted = self._posted[tag]
        if posted:
            posted.popleft().fill(message)
        else:
            self._arrived[tag].append(message)

    def flush(self, most: int = 0) -> None:
        """Wait until at most so many messages have found no room yet."""
        if len(self._unsent) > most:
            self.wait_while(lambda: self._is_sending(most), longest_poll=_LOOK)

    def _is_sending(self, most: int) -> bool:
        if self._error is not None:
            raise self._gone() from self._error
        return len(self._unsent) > most

    def wait_while(self, is_pending: Callable[[], bool], longest_poll: float = _LONGEST_POLL) -> None:
        """Take messages of all ranks until this one has done something.

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
                waited = f"{self._messages.timeout:.0f} s"
                raise dist.DistNetworkError(f"Timed out waiting {waited} for a message from rank {self.rank}")
            self._messages.wait_any(min(seconds, longest_poll))

    def __del__(self) -> None:
        """Python warns of sockets that nobody has closed."""
        self.socket.close()

    def _gone(self) -> dist.DistNetworkError:
        return dist.DistNetworkError(f"Connection closed by rank {self.rank}")

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
        if len(message) != tensor.nbytes + _TAG.size:
            found, rank = len(message) - _TAG.size, self._peer.rank
            raise RuntimeError(f"Rank {rank} sent {found} bytes, but {tensor.nbytes} were expected")
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
        higher rank                             connects, says whether it could ------>

    An invitation has the socket's name, which is seen on the whole machine, and a secret, which is not. Ranks that are
    on one machine but cannot connect, as those of two containers, talk over the group.

    Args:
        group: Over gloo.
        local: The ranks inside of the group that are on the machine of this one.
        timeout: Of each message, and of connecting.
    """
    own = group.rank()
    others = sorted(set(local) - {own})
    if sys.platform != "linux" or len(others) >= MOST_CONNECTED:  # elsewhere sockets have no names without a file
        others = []
    lower, higher = [peer for peer in others if peer < own], [peer for peer in others if peer > own]
    name, secret = secrets.token_bytes(_SECRET), secrets.token_bytes(_SECRET)
    listener = _listen(name, len(higher)) if higher else None
    invitation = bytes_tensor(name + secret if listener is not None else bytes(2 * _SECRET))
    sends = [group.send([invitation], peer, _CONNECT) for peer in higher]
    sockets = {peer: connected for peer in lower if (connected := _accept_invitation(group, peer))}
    could = {peer: bytes_tensor(bytes([peer in sockets])) for peer in lower}
    sends += [group.send([could[peer]], peer, _CONNECT) for peer in lower]
    answers = {peer: torch.zeros(1, dtype=torch.uint8) for peer in higher}
    for work in [group.recv([answer], peer, _CONNECT) for peer, answer in answers.items()]:
        work.wait()
    if listener is not None:
        with listener:
            listener.settimeout(timeout.total_seconds())
            expected = {peer for peer, answer in answers.items() if answer}
            while expected - sockets.keys():
                connected, _ = listener.accept()
                peer = _peer_of(connected, secret)
                if peer in expected:
                    sockets[peer] = connected
                else:
                    connected.close()
    for work in sends:
        work.wait()
    for connected in sockets.values():
        connected.setblocking(True)  # or Python waits by itself
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
    return HostMessages(group, sockets, timeout)


def _listen(name: bytes, most: int) -> socket.socket | None:
    """On the lower rank; ``None`` where the system does not allow it."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        return None
    try:
        listener.bind(b"\0" + name)
        listener.listen(most)
    except OSError:
        listener.close()
        return None
    return listener


def _accept_invitation(group: dist.ProcessGroup, peer: int) -> socket.socket | None:
    """On the higher rank; ``None`` if it cannot connect."""
    invitation = torch.zeros(2 * _SECRET, dtype=torch.uint8)
    group.recv([invitation], peer, _CONNECT).wait()
    name, secret = bytes(invitation[:_SECRET].numpy()), bytes(invitation[_SECRET:].numpy())
    try:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        return None
    try:
        connected.setblocking(False)
        connected.connect(b"\0" + name)
        connected.send(secret + _TAG.pack(group.rank()))
    except OSError:
        connected.close()
        return None
    return connected


def _peer_of(connected: socket.socket, secret: bytes) -> int | None:
    """On the lower rank: who has connected; ``None`` if it has not said the secret, which ranks have by now."""
    try:
        message = connected.recv(_SECRET + _TAG.size, socket.MSG_DONTWAIT)
    except OSError:
        return None
    if len(message) != _SECRET + _TAG.size or not secrets.compare_digest(message[:_SECRET], secret):
        return None
    return int(_TAG.unpack_from(message, _SECRET)[0])


def _shut_down(peers: Iterable[_Peer]) -> None:
    """Wake whoever waits, here in another thread, and on the other sides."""
    for peer in peers:
        with suppress(OSError):
            peer.socket.shutdown(socket.SHUT_RDWR)


def shut_down_sockets() -> None:
    """Wake whoever waits for a message of the host, here and on the other sides; for a thread beside the run."""
    for messages in list(_ALL):
        messages.shut_down()


def _close_copies() -> None:
    """In a process that was forked: as long as it had the sockets too, nobody would notice that this rank ends."""
    for messages in list(_ALL):
        messages.close()


os.register_at_fork(after_in_child=_close_copies)

"""Messages of the host between ranks of a group. On one node, small messages use sockets, without a thread.

The mesh connects the ranks of its control group by :func:`connect`. :class:`~.posted_broadcast.PostedBroadcast` sends
batches, results, signals and layers through the result, and `pipeline_parallel.p2p` sends messages between stages that
are on the host.

A message is *eager* if the sender does not wait for its receive. A receive is *posted* when the receiver has passed a
tensor for it, and *taken* when its bytes have been read from the socket.
"""

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

#: The largest message, in bytes, that is sent through a socket.
LARGEST_EAGER = 65536
#: The largest number of ranks on a node whose pairs are connected: each rank needs a socket per peer.
MOST_CONNECTED = 256

_ROOM = 1 << 20  # bytes of the buffer requested for a socket; the kernel limits it to `net.core.wmem_max`
_MOST_UNSENT = 1024  # messages to one rank for which its socket has no room; with more, the sender waits
_CONNECT = 0  # the tag of the messages that set up sockets
_TAG = struct.Struct("I")
_SECRET = 16  # bytes
_LONGEST_POLL = 1e6  # seconds; the kernel stores milliseconds in 31 bits
_LOOK = 1e-3  # seconds between two checks for room in a socket
_PLAIN = torch.Tensor, torch.nn.Parameter  # types of tensors that have memory
_ALL: WeakSet[HostMessages] = WeakSet()


class Work(Protocol):
    """A pending message, as a process group returns it."""

    def wait(self) -> Any:
        """Wait until the message has been received, or until the tensor of a sent message may be modified."""


class HostMessages:
    """Messages of the host between ranks, with the interface of a process group.

    The k-th send with a tag to a rank matches the k-th receive with this tag on that rank.

    gloo passes each message to a thread, which busy-waits while another thread has the lock of the connection. With few
    cores, this lasts until the kernel's next tick, several milliseconds. Therefore, a message of up to
    :data:`LARGEST_EAGER` bytes between two ranks of one node is sent eagerly, as MPI calls it: the kernel keeps a copy
    until the receiver takes it. Both ranks know the length of a message, and so its path::

        sender      send a ---.     send b ---.            (compute)
                              v               v
        socket      . . . . . [a] . . . . . . [a b] . . .  [ ] . .
                                                            ^
        receiver                         post a             `- wait a: takes a, and b, which is not posted yet

    A waiting rank takes messages from all ranks, even messages whose receives are posted later. A send does not wait:
    if a socket has no room, the message is copied, and a thread sends it later. So a rank may continue to a collective,
    and wait there for a rank that waits for its message, as with gloo.

    When the group is destroyed, the sockets are shut down, so that peers notice, as they do with gloo.

    Args:
        group: The ranks, over gloo. It sends large messages and messages to other nodes.
        sockets: The sockets that :func:`connect` has connected, by rank in the group.
        timeout: The time after which a wait for a message through a socket fails. The group has its own timeout.

    Attributes:
        timeout: The timeout in seconds.
        rank: This rank in the group.
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
        """Return the same object, as for a group: callbacks copy modules, which may refer to this object."""
        return self

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work | None:
        """Send a tensor.

        Args:
            tensors: A list of one contiguous tensor. It must not be modified before the returned work has ended.
            peer: The receiver's rank in the group.
            tag: The tag of the message.

        Returns:
            The pending message; ``None`` if the message has been copied.

        Raises:
            DistNetworkError: If the receiver has left, or too many messages to it have waited for room until the
                timeout.
        """
        [tensor] = tensors
        connected = self._peers.get(peer)
        if connected is None or tensor.nbytes > LARGEST_EAGER:
            group: Any = self._group.weak()  # hot path: `self._group()` would be a call of Python code
            return group.send(tensors, peer, tag)  # type: ignore[no-any-return]
        if type(tensor) not in _PLAIN:  # for example results of functional collectives, which have no memory
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        connected.send(tensor, tag)
        return None

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        """Post the receive of a tensor.

        Args:
            tensors: A list of one contiguous tensor, which gets the values.
            peer: The sender's rank in the group.
            tag: The tag of the message.

        Returns:
            The pending message.
        """
        [tensor] = tensors
        connected = self._peers.get(peer)
        if connected is None or tensor.nbytes > LARGEST_EAGER:
            group: Any = self._group.weak()
            return group.recv(tensors, peer, tag)  # type: ignore[no-any-return]
        return connected.post(tensor, tag)

    def flush(self) -> None:
        """Wait until the kernel has copied all messages that were sent through sockets.

        Raises:
            DistNetworkError: If a receiver has left, or the timeout has passed.
        """
        for peer in self._peers.values():
            peer.flush()

    def wait_any(self, seconds: float) -> None:
        """Wait until a message arrives, and take it.

        Args:
            seconds: The longest time to wait; not negative.
        """
        for descriptor, _ in self._poll.poll(seconds * 1000):
            self._by_descriptor[descriptor].take()

    def forget(self, connected: socket.socket) -> None:
        """Stop polling a socket, from which no more messages arrive."""
        self._poll.unregister(connected.fileno())

    def shut_down(self) -> None:
        """Shut the sockets down. This wakes waiting threads in this process and on the peers."""
        _shut_down(self._peers.values())

    def abandon(self) -> None:
        """Close the sockets after a failure, so that peers notice."""
        self.shut_down()
        self.close()

    def close(self) -> None:
        """Close the sockets in this process."""
        for peer in self._peers.values():
            peer.close()


class _Peer:
    """A rank to which this rank has a socket.

    Attributes:
        socket: The socket, which preserves the boundaries of messages.
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
        self._unsent: deque[bytes] = deque()  # messages for which the socket had no room
        self._thread: threading.Thread | None = None  # sends these messages
        self._lock = threading.Lock()  # protects the two attributes above
        self._error: OSError | None = None  # ended the thread
        # By tag. At most one of the two has entries for a tag.
        self._posted: defaultdict[int, deque[_Receive]] = defaultdict(deque)
        self._arrived: defaultdict[int, deque[bytes]] = defaultdict(deque)

    def send(self, tensor: Tensor, tag: int) -> None:
        """Pass a message to the kernel, or copy it until the kernel has room."""
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
                thread.start()  # the thread waits for the lock
                self._thread = thread
            self._unsent.append(bytes(data) + _TAG.pack(tag))
        self.flush(_MOST_UNSENT)

    def _send_rest(self) -> None:
        """Send copied messages in their order, on a thread."""
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
        """Post a receive of the next message with a tag."""
        receive = _Receive(self, tensor)
        arrived = self._arrived[tag]
        if arrived:
            receive.fill(arrived.popleft())
        else:
            self._posted[tag].append(receive)
        return receive

    def take(self) -> None:
        """Take one message from the kernel, for a posted receive or for a later one."""
        try:
            message = self.socket.recv(LARGEST_EAGER + _TAG.size, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):  # after a reset, earlier messages can still be read
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
        """Wait until the socket has had room for all but some messages.

        Args:
            most: The number of messages that may remain.
        """
        if len(self._unsent) > most:
            self.wait_while(lambda: self._is_sending(most), longest_poll=_LOOK)

    def _is_sending(self, most: int) -> bool:
        if self._error is not None:
            raise self._gone() from self._error
        return len(self._unsent) > most

    def wait_while(self, is_pending: Callable[[], bool], longest_poll: float = _LONGEST_POLL) -> None:
        """Take messages from all ranks while a condition is true.

        Args:
            is_pending: Returns True until this peer has done what is waited for.
            longest_poll: The seconds after which the condition is checked again if no message arrives.

        Raises:
            DistNetworkError: If this peer has left, or the timeout has passed.
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
        """Close the socket, because Python warns about open sockets."""
        self.socket.close()

    def _gone(self) -> dist.DistNetworkError:
        return dist.DistNetworkError(f"Connection closed by rank {self.rank}")

    def close(self) -> None:
        """Close the socket, and stop polling it."""
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
        """Copy a message, which ends with its tag, into the tensor."""
        tensor = self._tensor
        assert tensor is not None
        if len(message) != tensor.nbytes + _TAG.size:
            found, rank = len(message) - _TAG.size, self._peer.rank
            raise RuntimeError(f"Rank {rank} sent {found} bytes, but {tensor.nbytes} were expected")
        ctypes.memmove(tensor.data_ptr(), message, tensor.nbytes)
        self._tensor = None

    def wait(self) -> None:
        """Wait until the tensor has its values."""
        if self._tensor is not None:
            self._peer.wait_while(lambda: self._tensor is not None)


def connect(group: dist.ProcessGroup, local: Iterable[int], timeout: timedelta) -> HostMessages:
    """Connect the ranks of a group that are on one node; all of these ranks call this.

    ::

        lower rank     listens, invites ------>                                         accepts if connected
        higher rank                             connects, reports whether it did ------>

    An invitation consists of the name of a socket, which all processes of the node can see, and a secret, which only
    ranks know. Ranks that are on one node but cannot connect, such as ranks in two containers, use the group.

    Args:
        group: The group, over gloo.
        local: The ranks in the group that are on this node, with this rank or without it.
        timeout: The timeout of each message and of this function.
    """
    own = group.rank()
    others = sorted(set(local) - {own})
    if sys.platform != "linux" or len(others) >= MOST_CONNECTED:  # only Linux has names of sockets without files
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
        connected.setblocking(True)  # with a timeout, Python would poll before each call
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
    return HostMessages(group, sockets, timeout)


def _listen(name: bytes, most: int) -> socket.socket | None:
    """Return a listening socket on the lower rank; ``None`` if the system does not allow it."""
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
    """Return a socket to the lower rank, on the higher rank; ``None`` if it cannot connect."""
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
    """Return the rank that has connected to the lower rank; ``None`` if it has not sent the secret.

    Ranks send the secret before they report the connection, so this does not wait.
    """
    try:
        message = connected.recv(_SECRET + _TAG.size, socket.MSG_DONTWAIT)
    except OSError:
        return None
    if len(message) != _SECRET + _TAG.size or not secrets.compare_digest(message[:_SECRET], secret):
        return None
    return int(_TAG.unpack_from(message, _SECRET)[0])


def _shut_down(peers: Iterable[_Peer]) -> None:
    """Shut sockets down. This wakes waiting threads in this process and on the peers."""
    for peer in peers:
        with suppress(OSError):
            peer.socket.shutdown(socket.SHUT_RDWR)


def shut_down_sockets() -> None:
    """Wake all waits for messages of the host, in this process and on the peers. A background thread may call this."""
    for messages in list(_ALL):
        messages.shut_down()


def _close_copies() -> None:
    """Close the sockets in a forked process. If it kept them open, peers would not notice when this rank exits."""
    for messages in list(_ALL):
        messages.close()


os.register_at_fork(after_in_child=_close_copies)

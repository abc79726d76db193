"""Trees of values from one rank to its group: the meta is sent when it is new, the numbers every time."""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work, broadcast  # torch's own, also while the user's collectives are looked at

from lightning_hybrid.distributed.failure import PeerFailedError, WrongUseError
from lightning_hybrid.distributed.process_group import GroupRef, torch_profiles
from lightning_hybrid.distributed.pytree import TreeMeta, TreeSpec, flatten, unflatten
from lightning_hybrid.distributed.tensor_bytes import as_bytes, tell_autograd

_NEW, _FAILED, _END = -1, -2, 0  # what comes, if it is no tree whose meta is known; the numbers of metas begin at 1
_HEADER = struct.Struct("qqqq")  # of a packet: what comes, the bytes of its pickle, and of all, and what it is about
_LEAST = 1 << 10  # bytes of a packet
_SMALL = 1 << 20  # bytes of a tensor, up to which it is worth a second copy to save a message
_MOST_METAS = 4096  # that are remembered
_MOST_PENDING = 8  # messages to one rank that are not known to be received


def broadcast_object(value: Any, source: int, group: dist.ProcessGroup) -> Any:
    """Broadcast anything that can be pickled.

    Args:
        value: The value; only the source's counts.
        source: The rank inside the group that has it.
        group: A group over a backend that takes tensors of the host.
    """
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, source), group=group)
    return values[0]


def reduce_over(tensor: Tensor, group: dist.ProcessGroup, operation: Any) -> Tensor:
    """Reduce a tensor over a group, also to the mean on backends that have no mean.

    Args:
        tensor: May be changed in place.
        group: The ranks.
        operation: ``"mean"``, ``"sum"``, ``"min"``, ``"max"`` ... or a `ReduceOp`.

    Returns:
        The result.
    """
    if group.size() == 1:
        return tensor
    name = operation.lower() if isinstance(operation, str) else operation
    mean = name in ("mean", "avg", dist.ReduceOp.AVG)
    if mean and not tensor.is_floating_point():
        tensor = tensor.clone()  # the mean of integers need not be one
    named = getattr(dist.ReduceOp, name.upper()) if isinstance(name, str) and not mean else name
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM if mean else named, group=group)
    tell_autograd(tensor)
    if not mean:
        return tensor
    return tensor.div_(group.size()) if tensor.is_floating_point() else tensor / group.size()


def send_tree(tree: Any, target: int, group: dist.ProcessGroup, prepare: Callable[[Any], Any]) -> None:
    """Send a tree to one rank, tensor by tensor.

    Args:
        tree: Tensors and values that can be pickled.
        target: The global rank, which calls :func:`receive_tree`.
        group: A group over a backend that takes tensors of the host.
        prepare: Makes of each leaf, when its turn comes, what is sent: a tensor on the host, of equal shape and dtype.
    """
    leaves, spec = flatten(tree)
    dist.send_object_list([_split(leaves, spec)], dst=target, group=group)
    for leaf in leaves:
        ready = prepare(leaf)
        if isinstance(ready, Tensor) and ready.numel() > 0:
            dist.send(as_bytes(ready), dst=target, group=group)


def receive_tree(source: int, group: dist.ProcessGroup) -> Any:
    """Receive the tree that a rank sends with :func:`send_tree`; tensors are on the host."""
    received: list[Any] = [None]
    dist.recv_object_list(received, src=source, group=group)
    meta, leaves = received[0]
    for tensor in _allocate(meta, leaves, torch.device("cpu")):
        if tensor.numel() > 0:
            dist.recv(as_bytes(tensor), src=source, group=group)
    return unflatten(leaves, meta.spec)


def _split(leaves: list[Any], spec: TreeSpec) -> tuple[TreeMeta, list[Any]]:
    """What can be the same for many trees, and the values that are not tensors, by position."""
    tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
    return TreeMeta.of(tensors, spec), [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _allocate(meta: TreeMeta, leaves: list[Any], device: torch.device, *, pin_memory: bool = False) -> list[Tensor]:
    """Put empty tensors at their positions among the leaves, and return them: on the host those that were there."""
    tensors = []
    for index, tensor in meta.tensors():
        on_host = tensor.on_host or device.type == "cpu"
        where = torch.device("cpu") if on_host else device
        leaves[index] = torch.empty(tensor.shape, dtype=tensor.dtype, device=where, pin_memory=pin_memory and on_host)
        tensors.append(leaves[index])
    return tensors


class PostedBroadcast:
    """Bytes from one rank to all of a group, again and again, by messages whose receives are posted ahead.

    In a broadcast of gloo every rank waits, the source too: for the others to ask for it, which is one delay of the
    link between them, and for the bytes, which is another one. Here only who reads waits, and for one delay::

        source    send 1                send 2               the next step: nobody has waited
                       `-------.             `-------.
        others    post 1    receive 1, post 2     receive 2, post 3

    The messages go along a binomial tree. A rank hands on what it reads, so the source of a large group does not send
    to everyone, and neighbours, which are on one machine, mostly hear from neighbours::

        ranks relative to the source    0 --> 4, 2, 1    4 --> 6, 5    2 --> 3    6 --> 7

    A receive stays posted when a run is over, so one of these lives as long as its group.

    Args:
        group: The ranks, over gloo.
        source: The rank inside the group that sends.
        tag: Of these messages, and of no others between ranks of this group.
        name: What is sent, for messages about ranks that wait.

    Attributes:
        source: The rank inside the group that sends.
        is_source: Whether that is this rank.
        awaited: What this rank waits for: the channel, the global rank that has to do something, and the number of the
            message; ``None`` if it does not wait. Another thread may ask.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, tag: int, name: str) -> None:
        self._group, self._tag = GroupRef(group), tag
        rank, size, ranks = dist.get_rank(group), group.size(), dist.get_process_group_ranks(group)
        self.source, self.is_source = source, rank == source
        position = (rank - source) % size
        span = position & -position or 1 << (size - 1).bit_length()
        steps = (span >> bits for bits in range(1, span.bit_length()))
        self._parent = None if self.is_source else (position - span + source) % size
        self._children = [(position + step + source) % size for step in steps if position + step < size]
        # (channel, global rank at its other end)
        self._from = (
            None if self._parent is None else (_channel(name, ranks[self._parent], ranks[rank]), ranks[self._parent])
        )
        self._to = {child: (_channel(name, ranks[rank], ranks[child]), ranks[child]) for child in self._children}
        self._pending: deque[tuple[Work, Tensor, int, int]] = deque()
        self._posted: deque[tuple[Work, Tensor]] = deque()
        self._num_sent = self._num_posted = 0
        self.awaited: tuple[str, int, int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PostedBroadcast:
        """Itself, as a group: callbacks copy modules, and what refers to this."""
        return self

    def send(self, data: Tensor) -> None:
        """On the source: send a message; it waits only where many are under way.

        Args:
            data: Contiguous. It must not be changed any more.
        """
        group: Any = self._group()
        self._num_sent += 1
        for child in self._children:
            self._pending.append((group.send([data], child, self._tag), data, child, self._num_sent))
        self.retire(0 if torch_profiles() else _MOST_PENDING * len(self._children))

    def post(self, data: Tensor) -> None:
        """On the others: receive one more message into a tensor, which is contiguous and as long as what is sent."""
        group: Any = self._group()
        self._num_posted += 1
        self._posted.append((group.recv([data], self._parent, self._tag), data))

    def post_ahead(self, num_bytes: int) -> None:
        """On the others: post the receive of the next message, for :meth:`receive`.

        Not while torch's profiler runs: see :data:`torch_profiles`.
        """
        if not torch_profiles():
            self.post(torch.empty(num_bytes, dtype=torch.uint8))

    def receive(self, num_bytes: int) -> Tensor:
        """On the others: wait for the next message, of this length; its receive is posted now unless it has been."""
        if not self._posted:
            self.post(torch.empty(num_bytes, dtype=torch.uint8))
        return self.wait()

    def wait(self) -> Tensor:
        """On the others: wait for the message of the first receive that was posted."""
        work, data = self._posted.popleft()
        assert self._from is not None
        self.awaited = *self._from, self._num_posted - len(self._posted)
        work.wait()
        self.awaited = None
        if self._children:
            self.send(data.clone())  # what was received is the caller's
        return data

    def retire(self, most: int = 0) -> None:
        """Wait until the latest ``most`` messages are all that may not have been received."""
        while len(self._pending) > most:
            work, _, child, number = self._pending[0]
            channel, rank = self._to[child]
            self.awaited = _receipt(channel), rank, number
            work.wait()
            self._pending.popleft()
        self.awaited = None

    def progress(self) -> dict[str, int]:
        """How many messages this rank has sent, and how many receives it has posted, by channel; any thread may ask."""
        sent = {channel: self._num_sent for channel, _ in self._to.values()}
        return sent if self._from is None else {**sent, _receipt(self._from[0]): self._num_posted}

    def abandon(self) -> None:
        """Drop what is under way, after a failure: it keeps connections open."""
        self._pending.clear()
        self._posted.clear()


def _channel(name: str, sender: int, receiver: int) -> str:
    return f"{name} from rank {sender} to rank {receiver}"


def _receipt(channel: str) -> str:
    return f"receipt of {channel}"


class TreeBroadcast:
    """Broadcasts a tree of tensors and plain values from one rank to all of a group, again and again.

    What is small travels together, in a packet that is as long as that of the tree before, so that a tree like it
    takes one message; a longer one takes a second message for the rest::

        source                                                                      the others
        [what comes | lengths | pickle of what is new and of values | small tensors | padding]  ---->
        [the rest, if it is longer]                                                             ---->
        larger tensors, and those of a device, one message each; numbers of a device together   ---->

    The meta of a tree is sent when it is new, and then known by its number. What is on the host stays there: it travels
    through the host, so a number can be read where it arrives, and nobody waits for a device. The next packet's receive
    is posted as soon as a tree has come. The source copies what it sends, and goes on.

    Args:
        messages: From the rank that has the trees to the others: for decisions, and for what is on the host.
        group: The same ranks in the same order, for what is on ``device``.
        device: Where received tensors shall be that are not on the source's host.
        pin_memory: Whether tensors of the host are received in page-locked memory, from which they can move to a device
            without making the host wait.

    Attributes:
        is_source: Whether this rank's trees count.
        about: A number for what the next trees are about, set on all ranks: one that was sent while the others were
            elsewhere is not taken for another one.
    """

    def __init__(
        self,
        messages: PostedBroadcast,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        pin_memory: bool = False,
    ) -> None:
        self._messages = messages
        self._group = GroupRef(group)
        self._device = device
        self._pins = pin_memory
        self.is_source = messages.is_source
        self._is_sending = False
        self._length = _LEAST  # of the next packet, as far as it is one message
        self.about = 0
        self._numbers: dict[TreeMeta, int] = {}
        self._metas: list[TreeMeta] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> TreeBroadcast:
        """Itself: what is known on both sides of the messages is known once."""
        return self

    def __call__(self, tree: Any = None) -> Any:
        """Broadcast a tree.

        Args:
            tree: The tree; only the source's counts.

        Returns:
            The source's tree. On the source it is the object that was given.
        """
        if self.is_source:
            self._send(tree)
            return tree
        return self.receive()

    def fail(self, error: BaseException) -> None:
        """On the source, instead of a tree: the others raise this error's text as a :class:`PeerFailedError`.

        If the error came while a tree was being sent, as that of a signal's handler may (PyTorch's, when a worker of a
        loader is killed), nothing is said: the others would read it as the rest. They notice when this rank leaves.
        """
        if not self._is_sending:
            text = f"Rank {dist.get_rank()} failed: {type(error).__name__}: {error}"
            self._send_packet(_FAILED, pickle.dumps(text))

    def end(self) -> None:
        """On the source, instead of a tree: the others raise `StopIteration`."""
        self._send_packet(_END)

    def _send(self, tree: Any) -> None:
        self._messages.retire()  # of the tree before, which the others have used since
        leaves, spec = flatten(tree)
        leaves = [self._detached(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        meta, values = _split(leaves, spec)
        number = self._numbers.get(meta)
        is_new = number is None
        # Pickled before anything is sent: after an error :meth:`fail` still reaches the others.
        pickled = pickle.dumps((meta if is_new else None, values)) if is_new or meta.has_values else b""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() > 0]
        self._is_sending = True
        self._send_packet(_NEW if number is None else number, pickled, list(filter(_is_small, tensors)))
        if is_new:
            if len(self._numbers) == _MOST_METAS:
                self._numbers.clear()
            self._numbers[meta] = len(self._numbers) + 1
        self._exchange_tensors([tensor for tensor in tensors if not _is_small(tensor)])
        self._is_sending = False

    def _detached(self, leaf: Tensor) -> Tensor:
        """Without a graph; and on the host, if all of a tree travels there."""
        return leaf.detach().cpu() if self._device.type == "cpu" else leaf.detach()

    def receive(self) -> Any:
        """Receive a tree that the source sends.

        Raises:
            StopIteration: If the source has no more.
            PeerFailedError: If the source failed; the text is the source's.
            WrongUseError: If the tree is about something else.
        """
        code, pickled, packed = self._receive_packet()
        if code in (_END, _FAILED):
            self._messages.post_ahead(self._length)
            raise StopIteration if code == _END else PeerFailedError(pickle.loads(pickled))
        new, values = pickle.loads(pickled) if len(pickled) else (None, None)
        if new is not None:
            if len(self._metas) == _MOST_METAS:
                self._metas.clear()
            self._metas.append(new)
        meta = self._metas[-1 if new is not None else code - 1]
        assert meta.spec is not None
        leaves = values or [None] * len(meta.leaves)
        tensors = [each for each in _allocate(meta, leaves, self._device, pin_memory=self._pins) if each.numel() > 0]
        for tensor in filter(_is_small, tensors):
            as_bytes(tensor).copy_(packed[: tensor.nbytes])
            packed = packed[tensor.nbytes :]
        self._exchange_tensors([tensor for tensor in tensors if not _is_small(tensor)])
        self._messages.post_ahead(self._length)
        return unflatten(leaves, meta.spec)

    def _send_packet(self, code: int, pickled: bytes = b"", tensors: Sequence[Tensor] = ()) -> None:
        packed = [as_bytes(tensor).numpy().tobytes() for tensor in tensors]
        length = _HEADER.size + len(pickled) + sum(map(len, packed))
        parts = [
            _HEADER.pack(code, len(pickled), length, self.about),
            pickled,
            *packed,
            bytes(max(0, self._length - length)),
        ]
        packet = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        self._messages.send(packet[: self._length])
        if length > self._length:
            self._messages.send(packet[self._length :])
        self._length = max(_LEAST, length)

    def _receive_packet(self) -> tuple[int, bytes, Tensor]:
        """What comes, its pickle, and the bytes of its small tensors."""
        packet = self._messages.receive(self._length)
        code, num_pickled, length, about = _HEADER.unpack(packet[: _HEADER.size].numpy().tobytes())
        if length > self._length:
            packet = torch.cat([packet, self._messages.receive(length - self._length)])
        if about != self.about:
            raise WrongUseError(
                f"What has come from rank {self._messages.source} of this model group is not what this rank waits for"
                f" ({about}, not {self.about}): that one has iterated a loader, or computed a metric, and others have"
                " not. Do so on all ranks or on none."
            )
        self._length = max(_LEAST, length)
        begin = _HEADER.size + num_pickled
        return code, packet[_HEADER.size : begin].numpy().tobytes(), packet[begin:length]

    def _exchange_tensors(self, tensors: list[Tensor]) -> None:
        """Send or receive those that are not in the packet, in place."""
        on_host = [tensor for tensor in tensors if tensor.is_cpu]
        numbers = [tensor for tensor in tensors if not tensor.is_cpu and _fits_float64(tensor)]
        for tensor in on_host:
            if self.is_source:
                self._messages.send(as_bytes(tensor).clone())
            else:
                self._messages.post(as_bytes(tensor))
        if numbers:
            packed = torch.stack([number.reshape(()).to(torch.float64) for number in numbers])
            self._broadcast(packed)
            if not self.is_source:
                for number, value in zip(numbers, packed.unbind(), strict=True):
                    number.copy_(value.view_as(number))
        for tensor in tensors:
            if not tensor.is_cpu and not _fits_float64(tensor):
                self._broadcast(as_bytes(tensor))
        for _ in on_host if not self.is_source else ():
            self._messages.wait()

    def _broadcast(self, tensor: Tensor) -> None:
        broadcast(tensor, group_src=self._messages.source, group=self._group())


def _is_small(tensor: Tensor) -> bool:
    """Whether a tensor travels together with others."""
    return tensor.is_cpu and tensor.nbytes <= _SMALL


def _fits_float64(tensor: Tensor) -> bool:
    """Whether one float64 holds the tensor: numbers that were logged, losses."""
    return tensor.numel() == 1 and tensor.is_floating_point()

"""Activations and gradients between stages: shapes that travel once, fresh buffers, sends that end by proof."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_hybrid.distributed.mesh import STAGE_TAGS, Mesh
from lightning_hybrid.distributed.messages.host_messages import HostMessages, Work
from lightning_hybrid.distributed.process_group import GroupRef, device_backends
from lightning_hybrid.distributed.pytree import FIRST_PART, Message, TensorMeta, TreeMeta, TreeSpec, encode
from lightning_hybrid.distributed.tensor_bytes import as_bytes
from lightning_hybrid.pipeline_parallel.schedules import ChannelKey, Placement

# The first number of a message that stands for one that is not made, as an integer of the same size: no computation
# gives this NaN.
_BLANK = {
    torch.float64: (torch.int64, 0x7FF8B1A9C0DE0B1A),
    torch.float32: (torch.int32, 0x7FC0B1A9),
    torch.bfloat16: (torch.int16, 0x7FE5),
    torch.float16: (torch.int16, 0x7EA5),
}
# What every backend moves as it is; everything else moves as bytes.
_NATIVE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}
)


class BlankMessageError(Exception):
    """A message that has arrived stands for one that the other side does not make."""


class Send:
    """A message on its way: its tensors stay alive until it is known to be received.

    Attributes:
        pending: What is to be waited for, and its tensor; nothing of what a socket has taken, which is a copy.
    """

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: list[tuple[Work, Tensor]] = []

    def wait(self) -> None:
        """Return when the receiver has everything, and drop the tensors.

        Gloo's works do not complete by themselves (``is_completed()`` is ``False`` until ``wait()``), so this is called
        even when the message is proven received; then it returns at once. For NCCL the current stream waits, not the
        host.
        """
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()


class Recv:
    """A posted receive.

    Attributes:
        number: The number of its message in the channel, from 1.
    """

    __slots__ = ("_channel", "format", "key", "number", "pending")

    def __init__(self, channel: Channel, key: Hashable, number: int) -> None:
        self._channel = channel
        self.key = key
        self.number = number
        self.format: _Format | None = None
        self.pending: list[tuple[_WireTensor, Tensor, Work | None]] = []

    def is_of(self, channel: Channel) -> bool:
        """Whether it is a receive of this channel."""
        return self._channel is channel

    def wait(self) -> tuple[list[Any], TreeSpec | None]:
        """The message, when it has arrived.

        Returns:
            The leaves, each tensor freshly allocated and with the sender's ``requires_grad``, and the spec of the tree.

        Raises:
            BlankMessageError: If it is seen to stand for a message that is not made.
        """
        format = self.format or self._channel.read_metas_until(self)
        if format is _BLANK_FORMAT:
            raise BlankMessageError
        meta, _, has_values, _ = format
        leaves = meta.values() if has_values else [None] * len(meta.leaves)
        for wire, tensor, work in self.pending:
            if work is not None:
                work.wait()
            if wire.moves:
                tensor = self._channel.to_device(tensor)
            leaves[wire.index] = tensor.requires_grad_() if wire.requires_grad else tensor
        return leaves, meta.spec

    def take_blank(self) -> bool:
        """Return whether a message that has arrived says by its first number that it is blank, which becomes zero.

        Where a host would have to wait for a device to see it, no message says so.
        """
        first = next((each for each in self.pending if each[0].is_markable), None)
        return first is not None and first[0].take_blank(first[1])


#: Formats that a channel remembers; of messages with older keys the meta is sent again.
MOST_FORMATS = 4096


class Channel:
    """One direction between two ranks, for one kind of message (activations or gradients).

    A message is the leaves of a tree. Its tensors travel as they are; everything else - tree, shapes, dtypes,
    ``requires_grad``, values - is its *meta*, which travels only when the key is new to the channel::

        sender    send(a)           send(a)     send(b)                send(a)
                  meta, tensors     tensors     meta, tensors          tensors
                  ===== =======>    =======>    ===== =======>         =======>
        receiver  post(a)           post(a)     post(b)                post(a)
                  `- waits for      `- receives `- nothing yet: the    `- nothing yet: it must not
                     its wait()        at once     meta is unknown        overtake b's meta

    Posting never blocks. A receive whose meta is unknown, and all receives behind it, start when somebody waits for
    one of them.

    A tensor that is sent must not be changed in place before it is received.

    Args:
        group: A process group with the two ranks, or messages of the host between them. Its own ``send`` and ``recv``
            are used: ``torch.distributed.isend`` adds microseconds of checks to every message.
        peer: Rank of the other side inside ``group``.
        device: Where the tensors of this rank live. CUDA tensors cross a gloo group through pinned host memory.
        dynamic_shapes: Send the meta with every message, because shapes (or values) depend on data.
        tag: Of the messages; nothing else in this direction between the two ranks has it in ``group``, so the k-th send
            meets the k-th receive.
        of_host: How metas and tensors of the host travel, the peer's rank there, and a tag; by default as other tensors
            do. On the device, the host would wait until they are copied from there.

    Attributes:
        num_messages: How many have been sent, or posted.
        num_bytes: Of the tensors of all that have been sent.
    """

    def __init__(
        self,
        group: ProcessGroup | HostMessages,
        peer: int,
        device: torch.device,
        dynamic_shapes: bool = False,
        tag: int = 0,
        of_host: tuple[HostMessages, int, int] | None = None,
    ) -> None:
        self.num_messages = self.num_bytes = 0
        self._group = GroupRef(cast(ProcessGroup, group))  # messages of the host are sent as those of a group
        self._peer, self._tag = peer, tag
        self._device = device
        self._wire = _wire_device(group, device)
        self._dynamic = dynamic_shapes
        host_group, self._host_peer, self._host_tag = of_host or (group, peer, tag)
        self._host_group = GroupRef(cast(ProcessGroup, host_group))
        self._host_wire = self._wire if of_host is None else torch.device("cpu")
        self._formats: dict[Hashable, _Format] = {}
        # Posted receives that have not started, because a meta before them is unread.
        self._unread: deque[Recv] = deque()

    @property
    def has_dynamic_shapes(self) -> bool:
        """If True, each message has its meta. Change it between runs, on both sides."""
        return self._dynamic

    @has_dynamic_shapes.setter
    def has_dynamic_shapes(self, dynamic: bool) -> None:
        self._dynamic = dynamic

    @property
    def is_on_device(self) -> bool:
        """Whether a posted receive is a kernel, which runs until its message is there."""
        return self._wire.type != "cpu"

    @property
    def largest_message(self) -> int:
        """The bytes of the largest message so far."""
        return max((each.num_bytes for each in self._formats.values()), default=0)

    def abandon(self) -> None:
        """Drop the receives that have not started, after a failure."""
        self._unread.clear()

    def connect(self, *, sends: bool) -> None:
        """Open the connection, which NCCL does at the first message and with both hosts waiting for each other.

        To be called on all channels in one order that is the same on all ranks; otherwise the first messages of
        different channels could wait in a circle.

        Args:
            sends: Whether this side is the sender.
        """
        if self._wire.type == "cpu":
            return
        first = torch.zeros(1, dtype=torch.uint8, device=self._wire)
        group = self._group()
        (group.send if sends else group.recv)([first], self._peer, self._tag).wait()

    def send(self, key: Hashable, leaves: list[Any], spec: TreeSpec | None) -> Send:
        """Send one message; never blocks.

        Args:
            key: Signature of the message: messages with equal keys have equal metas.
            leaves: Tensors and values that can be pickled. Tensors may require gradients; they are sent detached. None
                at all, where nothing is to be sent; then each message has its meta.
            spec: The tree; ``None`` for a bare list of leaves.

        Raises:
            ValueError: If the message differs from the first one with this key in anything but the contents of its
                tensors.
            TypeError: If a leaf cannot travel.
        """
        send = Send()
        known = None if self._dynamic else self._formats.get(key)
        try:
            if known is None:
                meta = TreeMeta.of(leaves, spec)
                self._send_meta(Message.make(encode(meta), size=FIRST_PART), send)
                known = self._remember(key, _Format.of(meta, self._wire))
            elif not known.meta.fits(leaves, spec):
                _check_equal(known.meta, TreeMeta.of(leaves, spec))
        except TypeError as error:
            raise TypeError(
                "A value cannot be sent to another stage. Between the layers of the body, pass only dense tensors and"
                f" plain Python values, or move the stage boundary with `partition`. Reason: {error}"
            ) from error
        self._send_tensors(known, leaves, send)
        return send

    def send_blank(self, key: Hashable) -> Send:
        """Send what stands for a message that is not made: the receiver waits for one.

        Where the meta is known, these are zeros, and where the receiver can look at it the first number says what they
        are. Otherwise the meta says it, and is not remembered.

        Args:
            key: Signature of the message.
        """
        send = Send()
        known = None if self._dynamic else self._formats.get(key)
        if known is None:
            self._send_meta(Message.make(code=_BLANK_META, size=FIRST_PART), send)
            self.num_messages += 1
            return send
        leaves: list[Any] = [None] * len(known.meta.leaves)
        marked = next((wire for wire in known.tensors if wire.is_markable), None)
        for wire in known.tensors:
            leaves[wire.index] = wire.blank(self._device, marks=wire is marked)
        self._send_tensors(known, leaves, send)
        return send

    def _send_tensors(self, known: _Format, leaves: list[Any], send: Send) -> None:
        group: Any = self._group.weak()  # at every message: no call of Python
        for wire in known.tensors:
            if wire.has_elements:
                tensor = leaves[wire.index].detach().contiguous().resolve_neg()
                if wire.moves or wire.as_bytes:
                    tensor = self._to_wire(tensor)
                if wire.of_host:
                    tensor = tensor.clone()  # as those of the device, whose copy is in the order of its stream
                    work = self._host_group().send([tensor], self._host_peer, self._host_tag)
                else:
                    work = group.send([tensor], self._peer, self._tag)
                if work is not None:
                    send.pending.append((work, tensor))
        self.num_messages += 1
        self.num_bytes += known.num_bytes

    def post(self, key: Hashable) -> Recv:
        """Receive the next message as soon as its meta is known; never blocks.

        Args:
            key: The key with which the other side sends it.
        """
        self.num_messages += 1
        recv = Recv(self, key, self.num_messages)
        known = None if self._dynamic or self._unread else self._formats.get(key)
        if known is None:
            self._unread.append(recv)
        else:
            self._start(recv, known)
        return recv

    def read_metas_until(self, recv: Recv) -> _Format:
        """Start ``recv`` and everything before it, waiting for the metas that are unknown."""
        while recv.format is None:
            first = self._unread.popleft()
            known = None if self._dynamic else self._formats.get(first.key)
            if known is None:
                message = Message.receive(self._receive_host, FIRST_PART)
                if message.code == _BLANK_META:
                    known = _BLANK_FORMAT
                else:
                    known = self._remember(first.key, _Format.of(message.value(), self._wire))
            self._start(first, known)
        # Behind a meta that has just been read, up to the next unknown one.
        while self._unread and not self._dynamic:
            known = self._formats.get(self._unread[0].key)
            if known is None:
                break
            self._start(self._unread.popleft(), known)
        return recv.format

    def to_device(self, tensor: Tensor) -> Tensor:
        """A tensor of the device that has arrived through the host."""
        # Pinned memory needs no wait: its allocator keeps it until the copy is done.
        return tensor.to(self._device, non_blocking=True)

    def _remember(self, key: Hashable, new: _Format) -> _Format:
        """Keep a format; the oldest one goes where there are many, at the same message on both sides."""
        if len(self._formats) >= MOST_FORMATS and key not in self._formats:
            del self._formats[next(iter(self._formats))]
        self._formats[key] = new
        return new

    def _start(self, recv: Recv, known: _Format) -> None:
        recv.format = known
        group: Any = self._group.weak()  # at every message: no call of Python
        for wire in known.tensors:
            # Never a tensor that autograd has seen: hooks would stay on it (pytorch#185331).
            tensor = wire.allocate()
            work = None
            if wire.has_elements:
                parts = [as_bytes(tensor) if wire.as_bytes else tensor]
                if wire.of_host:
                    work = self._host_group().recv(parts, self._host_peer, self._host_tag)
                else:
                    work = group.recv(parts, self._peer, self._tag)
            recv.pending.append((wire, tensor, work))

    def _send_meta(self, message: Message, send: Send) -> None:
        group: Any = self._host_group()
        for part in message.parts:
            tensor = part.to(self._host_wire)
            work = group.send([tensor], self._host_peer, self._host_tag)
            if work is not None:
                send.pending.append((work, tensor))

    def _to_wire(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor, in a dtype and in a memory that the backend can send."""
        if tensor.dtype not in _NATIVE:
            tensor = as_bytes(tensor)
        if tensor.is_cpu or self._wire.type != "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()  # gloo reads the memory at once
        return host

    def _receive_host(self, size: int) -> Tensor:
        part = torch.empty(size, dtype=torch.uint8, device=self._host_wire)
        self._host_group().recv([part], self._host_peer, self._host_tag).wait()
        return part.cpu()


def make_channels(
    mesh: Mesh, placement: Placement, device: torch.device, *, dynamic_shapes: bool
) -> dict[ChannelKey, Channel]:
    """One channel for each ordered pair of neighbours and kind of message; on every rank in the same order.

    On a device each has a group of its own, as a receive that waits there holds up all behind it. Messages of the host
    are told apart by their tags, among those of the control group: each group more takes time to connect.

    Args:
        mesh: The ranks.
        placement: The rank of each stage.
        device: Where activations live.
        dynamic_shapes: Whether every message carries its meta.

    Returns:
        The channels of this rank by (sender, receiver, kind).
    """
    through_host = _wire_device(mesh.model_group, device).type == "cpu"
    channels: dict[ChannelKey, Channel] = {}
    for disjoint in _disjoint(placement.hops):
        own = next((hop for hop in disjoint if mesh.pipeline_rank in hop), None)
        for kind in STAGE_TAGS:
            group = None if through_host else mesh.new_p2p_group(disjoint)
            if own is None:
                continue
            sender, receiver = own if kind == "activation" else own[::-1]
            key: ChannelKey = sender, receiver, kind
            of_host = _through_host(mesh, key)
            if through_host:
                channels[key] = Channel(of_host[0], of_host[1], device, dynamic_shapes, of_host[2])
            else:
                assert group is not None
                peer = int(mesh.pipeline_rank == min(own))  # the lower rank comes first in the group
                channels[key] = Channel(group, peer, device, dynamic_shapes, of_host=of_host)
    return channels


def _disjoint(hops: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The hops in few lists, none of which has a rank twice: groups of one list are made together.

    Of a pipeline these are two, of a ring with an odd number of ranks three::

        0 --- 1     2 --- 3     4 --- 5
              1 --- 2     3 --- 4
    """
    lists: list[list[tuple[int, int]]] = []
    for hop in hops:
        taken = (each for each in lists if not any(set(hop) & set(other) for other in each))
        fitting = next(taken, None)
        if fitting is None:
            lists.append(fitting := [])
        fitting.append(hop)
    return lists


def _through_host(mesh: Mesh, key: ChannelKey) -> tuple[HostMessages, int, int]:
    """How a channel's messages of the host travel, and there the other side's rank and a tag."""
    sender, receiver, kind = key
    other = receiver if mesh.pipeline_rank == sender else sender
    return mesh.host_messages, mesh.model_group_rank(other, mesh.tensor_rank, mesh.context_rank), STAGE_TAGS[kind]


class _WireTensor:
    """How a tensor of a message travels.

    Attributes:
        index: Its index among the leaves.
        has_elements: Whether there is anything to send.
        as_bytes: Whether the backend moves it as bytes.
        moves: Whether it lives on the device, and the backend moves what is on the host.
        of_host: Whether it lives on the host, and the backend moves what is on the device: it travels with the metas.
        is_markable: Whether its first number can say that the message is blank, and arrives on the host.
    """

    __slots__ = ("_template", "as_bytes", "has_elements", "index", "is_markable", "moves", "of_host", "requires_grad")

    def __init__(self, index: int, meta: TensorMeta, wire: torch.device) -> None:
        self.index = index
        self.requires_grad = meta.requires_grad
        self.has_elements = meta.shape.numel() > 0
        self.as_bytes = meta.dtype not in _NATIVE
        self.moves = not meta.on_host and wire.type == "cpu"
        self.of_host = meta.on_host and wire.type != "cpu"
        # One element that stands for all: `empty_like` is faster than `empty`, which reads its arguments every time.
        where = torch.device("cpu") if self.of_host else wire
        self._template = torch.empty((), dtype=meta.dtype, device=where).expand(meta.shape)
        self.is_markable = self.has_elements and where.type == "cpu" and meta.dtype in _BLANK

    def blank(self, device: torch.device, *, marks: bool) -> Tensor:
        """Return zeros in its place.

        Args:
            device: Where the others are that do not live on the host.
            marks: Whether the first number says that the message is blank.
        """
        where = torch.device("cpu") if self._template.is_cpu and not self.moves else device
        zeros = torch.zeros(self._template.shape, dtype=self._template.dtype, device=where)
        if marks:
            integers, number = _BLANK[zeros.dtype]
            zeros.view(integers).view(-1)[:1] = number
        return zeros

    def take_blank(self, tensor: Tensor) -> bool:
        """Return whether the first number of a tensor says that the message is blank; it becomes zero."""
        integers, number = _BLANK[self._template.dtype]
        first = tensor.detach().view(-1)[:1].view(integers)
        if first.item() != number:
            return False
        first.zero_()
        return True

    @property
    def num_bytes(self) -> int:
        """The bytes of it."""
        return self._template.nbytes

    def allocate(self) -> Tensor:
        """Fresh memory that the backend can write to."""
        if self.moves and self._template.is_cpu:
            return torch.empty(self._template.shape, dtype=self._template.dtype, pin_memory=True)
        return torch.empty_like(self._template, memory_format=torch.contiguous_format)


_BLANK_META = 1  # the code of a meta that says: this message is not made


class _Format(NamedTuple):
    """A meta, and how the tensors travel of every message that has it."""

    meta: TreeMeta
    tensors: list[_WireTensor]
    has_values: bool
    num_bytes: int  # of the tensors

    @classmethod
    def of(cls, meta: TreeMeta, wire: torch.device) -> _Format:
        tensors = [_WireTensor(index, tensor, wire) for index, tensor in meta.tensors()]
        return cls(meta, tensors, meta.has_values, sum(each.num_bytes for each in tensors))


_BLANK_FORMAT = _Format(TreeMeta(None, ()), [], has_values=False, num_bytes=0)


def _check_equal(known: TreeMeta, meta: TreeMeta) -> None:
    if known.equals(meta):
        return
    raise ValueError(
        "The activations between two stages changed, although the shape of the batch is the same.\n"
        f"    first: {known}\n"
        f"    now:   {meta}\n"
        "If their structure, shapes, dtypes, requires_grad or Python values depend on the data, or if you switch"
        " gradients on and off around the body (`torch.set_grad_enabled`), set HybridStrategy(dynamic_shapes=True)."
        " Freezing parameters does not require this setting. [LH438]"
    )


def _wire_device(group: ProcessGroup | HostMessages, device: torch.device) -> torch.device:
    """Where the backend wants tensors: gloo sends and receives only those of the host."""
    if device.type == "cpu":
        return device
    if isinstance(group, HostMessages):
        return torch.device("cpu")
    return torch.device("cpu") if device_backends(group).get(device.type, "gloo") == "gloo" else device

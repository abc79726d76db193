"""Channels that transfer activations and gradients between stages.

The engine sends and receives through these channels. `World`, which owns the process groups of a strategy, makes them
once with :func:`make_channels`, and all runs of the Trainer use them.

The receiver does not know the shapes of activations, which depend on the batch. So the structure, shapes and dtypes of
a message, its *meta*, are sent only once for all messages with the same key, or with each message if shapes are
dynamic. Each receive allocates new tensors. The *wire* device is the device whose memory the backend of the process
group can transfer. A *blank* message replaces a message that its sender will not compute.
"""

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

# The first number of a blank message, by dtype: an integer dtype of the same size, and a NaN as an integer. No
# computation returns this NaN.
_BLANK = {
    torch.float64: (torch.int64, 0x7FF8B1A9C0DE0B1A),
    torch.float32: (torch.int32, 0x7FC0B1A9),
    torch.bfloat16: (torch.int16, 0x7FE5),
    torch.float16: (torch.int16, 0x7EA5),
}
# The dtypes that every backend can transfer. Tensors of other dtypes are transferred as bytes.
_NATIVE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}
)


class BlankMessageError(Exception):
    """Error: a blank message has arrived, because the sender has not computed the real message."""


class Send:
    """Message that has been sent. It keeps its tensors alive until the message is received.

    Attributes:
        pending: The unfinished transfers, each with its tensor. A transfer that works on a copy of the tensor is not in
            the list.
    """

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: list[tuple[Work, Tensor]] = []

    def wait(self) -> None:
        """Wait until the receiver has the message, and drop the tensors.

        Call this even if the message is proven to be received, because works of gloo do not complete without it
        (``is_completed()`` stays ``False`` until ``wait()``). In this case, it returns at once. With NCCL, the current
        stream waits, not the host.
        """
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()


class Recv:
    """Posted receive.

    Attributes:
        number: The number of its message in the channel, from 1.
        key: The key of the message.
        format: The format of the message; ``None`` until the receive has started.
        pending: For each tensor of the message, its description, the allocated tensor, and the transfer; ``None`` in
            place of the transfer if the tensor has no elements.
    """

    __slots__ = ("_channel", "format", "key", "number", "pending")

    def __init__(self, channel: Channel, key: Hashable, number: int) -> None:
        self._channel = channel
        self.key = key
        self.number = number
        self.format: _Format | None = None
        self.pending: list[tuple[_WireTensor, Tensor, Work | None]] = []

    def is_of(self, channel: Channel) -> bool:
        """Return whether the receive belongs to a channel."""
        return self._channel is channel

    def wait(self) -> tuple[list[Any], TreeSpec | None]:
        """Wait for the message and return it. Call this once.

        Returns:
            The leaves and the structure of the tree. Each tensor is newly allocated, with the sender's
            ``requires_grad``.

        Raises:
            BlankMessageError: If the meta of the message states that the message is blank.
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
        """Return whether a message that has arrived is marked as blank, and set the mark to zero. Call it after `wait`.

        Only a tensor that arrives on the host can have a mark. To read a mark on a device, the host would have to wait.
        """
        first = next((each for each in self.pending if each[0].is_markable), None)
        return first is not None and first[0].take_blank(first[1])


#: Maximum number of formats that a channel stores. For messages with older keys, the meta is sent again.
MOST_FORMATS = 4096


class Channel:
    """One direction between two ranks, for one kind of message (activations or gradients).

    A message consists of the leaves of a tree. Everything except the contents of its tensors, which is the tree,
    shapes, dtypes, ``requires_grad`` and other values, is the *meta* of the message. The meta is sent only if the key
    is new to the channel::

        sender    send(a)           send(a)     send(b)                send(a)
                  meta, tensors     tensors     meta, tensors          tensors
                  ===== =======>    =======>    ===== =======>         =======>
        receiver  post(a)           post(a)     post(b)                post(a)
                  `- starts in      `- starts   `- starts in wait():   `- starts later: it must
                     wait()            at once     b's meta is unknown    not overtake b's meta

    Posting never blocks. A receive whose meta is unknown, and all receives after it, start when the caller waits for
    one of them.

    Do not change a tensor in place after it is sent and before it is received.

    Args:
        group: A process group of the two ranks, or the host messages between them. The channel calls ``send`` and
            ``recv`` of the group, because ``torch.distributed.isend`` adds microseconds of checks to every message.
        peer: The rank of the other side in ``group``.
        device: The device of this rank's tensors. CUDA tensors are sent over a gloo group through pinned host memory.
        dynamic_shapes: If True, send the meta with every message, because shapes (or values) depend on data.
        tag: The tag of the messages. No other messages in this direction between the two ranks have this tag in
            ``group``, so the k-th send matches the k-th receive.
        of_host: How metas and host tensors are sent: the host messages, the peer's rank in them, and a tag. By default,
            they are sent like other tensors. If they were sent through the device, the host would have to wait for the
            copy from the device.

    Attributes:
        num_messages: The number of messages sent or posted on this side, including blank messages.
        num_bytes: The number of bytes in the tensors of all messages sent; 0 on the receiving side.
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
        self._group = GroupRef(cast(ProcessGroup, group))  # host messages have the same methods
        self._peer, self._tag = peer, tag
        self._device = device
        self._wire = _wire_device(group, device)
        self._dynamic = dynamic_shapes
        host_group, self._host_peer, self._host_tag = of_host or (group, peer, tag)
        self._host_group = GroupRef(cast(ProcessGroup, host_group))
        self._host_wire = self._wire if of_host is None else torch.device("cpu")
        self._formats: dict[Hashable, _Format] = {}
        # Posted receives that have not started, because their meta or the meta of an earlier receive is unread.
        self._unread: deque[Recv] = deque()

    @property
    def has_dynamic_shapes(self) -> bool:
        """True if each message contains its meta. Change it between runs, on both sides."""
        return self._dynamic

    @has_dynamic_shapes.setter
    def has_dynamic_shapes(self, dynamic: bool) -> None:
        self._dynamic = dynamic

    @property
    def is_on_device(self) -> bool:
        """True if a posted receive is a kernel, which runs until its message arrives."""
        return self._wire.type != "cpu"

    @property
    def largest_message(self) -> int:
        """The size of the largest message so far, in bytes."""
        return max((each.num_bytes for each in self._formats.values()), default=0)

    def abandon(self) -> None:
        """Drop the receives that have not started, after a failure."""
        self._unread.clear()

    def connect(self, *, sends: bool) -> None:
        """Open the connection; do nothing if messages are sent through host memory.

        NCCL connects at the first message, while both hosts wait for each other. Call this on all channels in the same
        order on all ranks. Otherwise, the first messages of different channels could deadlock.

        Args:
            sends: True if this side is the sender.
        """
        if self._wire.type == "cpu":
            return
        first = torch.zeros(1, dtype=torch.uint8, device=self._wire)
        group = self._group()
        (group.send if sends else group.recv)([first], self._peer, self._tag).wait()

    def send(self, key: Hashable, leaves: list[Any], spec: TreeSpec | None) -> Send:
        """Send one message without waiting for the receiver.

        If a CUDA tensor is sent through host memory, the host waits for the copy.

        Args:
            key: The signature of the message. Messages with equal keys have equal metas.
            leaves: Tensors, and values that can be pickled. Tensors may require gradients; they are sent detached. With
                dynamic shapes, the list may be empty.
            spec: The structure of the tree; ``None`` for a plain list of leaves.

        Raises:
            ValueError: If the message differs from the first message with this key in more than the contents of its
                tensors.
            TypeError: If a leaf cannot be sent.
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
        """Send a blank message in place of a message that the receiver waits for.

        If the meta is known, the message consists of zeros, and the first number of a tensor that arrives on the host
        marks it as blank. Otherwise, a special meta marks it, and the channel does not store this meta.

        Args:
            key: The signature of the message.
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
        """Send the tensors of a message, and count the message."""
        group: Any = self._group.weak()  # avoids a Python call for every message
        for wire in known.tensors:
            if wire.has_elements:
                tensor = leaves[wire.index].detach().contiguous().resolve_neg()
                if wire.moves or wire.as_bytes:
                    tensor = self._to_wire(tensor)
                if wire.of_host:
                    tensor = tensor.clone()  # no stream orders the transfer before later changes of the tensor
                    work = self._host_group().send([tensor], self._host_peer, self._host_tag)
                else:
                    work = group.send([tensor], self._peer, self._tag)
                if work is not None:
                    send.pending.append((work, tensor))
        self.num_messages += 1
        self.num_bytes += known.num_bytes

    def post(self, key: Hashable) -> Recv:
        """Post a receive for the next message without blocking.

        Args:
            key: The key with which the other side sends the message.

        Returns:
            The receive. It has not started if the meta of this message or of an earlier message is unknown.
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
        """Start a receive and all receives before it, and wait for their unknown metas. This may block.

        Returns:
            The format of the message of the receive.
        """
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
        # Also start the receives after it, up to the next unknown meta.
        while self._unread and not self._dynamic:
            known = self._formats.get(self._unread[0].key)
            if known is None:
                break
            self._start(self._unread.popleft(), known)
        return recv.format

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor that has arrived in host memory, on the device."""
        # No wait is needed: the allocator keeps pinned memory until the copy is done.
        return tensor.to(self._device, non_blocking=True)

    def _remember(self, key: Hashable, new: _Format) -> _Format:
        """Store a format.

        If there are too many formats, the oldest one is dropped, at the same message on both sides.
        """
        if len(self._formats) >= MOST_FORMATS and key not in self._formats:
            del self._formats[next(iter(self._formats))]
        self._formats[key] = new
        return new

    def _start(self, recv: Recv, known: _Format) -> None:
        """Allocate the tensors of a message, and begin to receive them."""
        recv.format = known
        group: Any = self._group.weak()  # avoids a Python call for every message
        for wire in known.tensors:
            # Do not reuse tensors that autograd has seen, because hooks stay on them (pytorch#185331).
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
        """Send the parts of a meta."""
        group: Any = self._host_group()
        for part in message.parts:
            tensor = part.to(self._host_wire)
            work = group.send([tensor], self._host_peer, self._host_tag)
            if work is not None:
                send.pending.append((work, tensor))

    def _to_wire(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor in a dtype and in a memory that the backend can send."""
        if tensor.dtype not in _NATIVE:
            tensor = as_bytes(tensor)
        if tensor.is_cpu or self._wire.type != "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()  # gloo reads the memory at once
        return host

    def _receive_host(self, size: int) -> Tensor:
        """Receive bytes of a meta, and return them on the host."""
        part = torch.empty(size, dtype=torch.uint8, device=self._host_wire)
        self._host_group().recv([part], self._host_peer, self._host_tag).wait()
        return part.cpu()


def make_channels(
    mesh: Mesh, placement: Placement, device: torch.device, *, dynamic_shapes: bool
) -> dict[ChannelKey, Channel]:
    """Create a channel for each ordered pair of neighboring ranks and kind of message, in the same order on all ranks.

    Every rank of the world must call this with equal arguments, because it may create process groups. On a device, each
    channel has its own group, because a receive that waits there delays all later operations of its group. Host
    messages of all channels use the control group, where tags distinguish them, because each additional group takes
    time to connect.

    Args:
        mesh: The ranks.
        placement: The rank of each stage.
        device: The device of the activations.
        dynamic_shapes: If True, every message contains its meta.

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
    """Group hops into few lists so that no rank is in a list twice. The process groups of a list are created together.

    A pipeline has two lists. A ring with an odd number of ranks has three::

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
    """Return the host messages of a channel, the rank of the other side in them, and a tag."""
    sender, receiver, kind = key
    other = receiver if mesh.pipeline_rank == sender else sender
    return mesh.host_messages, mesh.model_group_rank(other, mesh.tensor_rank, mesh.context_rank), STAGE_TAGS[kind]


class _WireTensor:
    """Description of how one tensor of a message is transferred.

    Attributes:
        index: The index among the leaves.
        requires_grad: The sender's ``requires_grad``.
        has_elements: True if the tensor has elements to send.
        as_bytes: True if the backend transfers the tensor as bytes.
        moves: True if the tensor is on the device, but the backend transfers host memory.
        of_host: True if the tensor is on the host, but the backend transfers device memory. It is then sent like the
            metas.
        is_markable: True if the first number of the tensor can mark the message as blank, and arrives on the host.
    """

    __slots__ = ("_template", "as_bytes", "has_elements", "index", "is_markable", "moves", "of_host", "requires_grad")

    def __init__(self, index: int, meta: TensorMeta, wire: torch.device) -> None:
        self.index = index
        self.requires_grad = meta.requires_grad
        self.has_elements = meta.shape.numel() > 0
        self.as_bytes = meta.dtype not in _NATIVE
        self.moves = not meta.on_host and wire.type == "cpu"
        self.of_host = meta.on_host and wire.type != "cpu"
        # Memory for one element, expanded. `empty_like` is faster than `empty`, which parses its arguments every time.
        where = torch.device("cpu") if self.of_host else wire
        self._template = torch.empty((), dtype=meta.dtype, device=where).expand(meta.shape)
        self.is_markable = self.has_elements and where.type == "cpu" and meta.dtype in _BLANK

    def blank(self, device: torch.device, *, marks: bool) -> Tensor:
        """Return zeros in place of the tensor.

        Args:
            device: The device of tensors that are not on the host.
            marks: If True, the first number marks the message as blank.
        """
        where = torch.device("cpu") if self._template.is_cpu and not self.moves else device
        zeros = torch.zeros(self._template.shape, dtype=self._template.dtype, device=where)
        if marks:
            integers, number = _BLANK[zeros.dtype]
            zeros.view(integers).view(-1)[:1] = number
        return zeros

    def take_blank(self, tensor: Tensor) -> bool:
        """Return whether the first number of a tensor marks the message as blank, and set the mark to zero."""
        integers, number = _BLANK[self._template.dtype]
        first = tensor.detach().view(-1)[:1].view(integers)
        if first.item() != number:
            return False
        first.zero_()
        return True

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in bytes."""
        return self._template.nbytes

    def allocate(self) -> Tensor:
        """Return new memory that the backend can write to."""
        if self.moves and self._template.is_cpu:
            return torch.empty(self._template.shape, dtype=self._template.dtype, pin_memory=True)
        return torch.empty_like(self._template, memory_format=torch.contiguous_format)


_BLANK_META = 1  # the code of a meta that marks a message as blank


class _Format(NamedTuple):
    """Meta of a message, and how the tensors of all messages with this meta are transferred.

    Attributes:
        meta: The meta.
        tensors: The description of each tensor of the message.
        has_values: True if the message contains leaves that are not tensors. They are part of the meta.
        num_bytes: The total size of the tensors.
    """

    meta: TreeMeta
    tensors: list[_WireTensor]
    has_values: bool
    num_bytes: int  # total size of the tensors

    @classmethod
    def of(cls, meta: TreeMeta, wire: torch.device) -> _Format:
        """Return the format for a meta, on a channel whose backend transfers memory of the device `wire`."""
        tensors = [_WireTensor(index, tensor, wire) for index, tensor in meta.tensors()]
        return cls(meta, tensors, meta.has_values, sum(each.num_bytes for each in tensors))


_BLANK_FORMAT = _Format(TreeMeta(None, ()), [], has_values=False, num_bytes=0)


def _check_equal(known: TreeMeta, meta: TreeMeta) -> None:
    """Raise an error if a message has another meta than the first message with its key."""
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
    """Return the device whose memory the backend transfers. Gloo transfers only host memory."""
    if device.type == "cpu":
        return device
    if isinstance(group, HostMessages):
        return torch.device("cpu")
    return torch.device("cpu") if device_backends(group).get(device.type, "gloo") == "gloo" else device

"""Activations and gradients between stages: headers, fresh buffers, sends that end by proof."""

from __future__ import annotations

import pickle
import weakref
from collections import deque
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from lightning_hybrid.distributed.pytree import TreeSpec
from lightning_hybrid.pipeline_parallel.message import (
    MessageMeta,
    PickledLeaf,
    PlainLeaf,
    TensorLeaf,
    check_equal,
    describe,
)

__all__ = ["Channel", "Recv", "Send"]

# What every backend moves as it is; everything else moves as bytes.
_NATIVE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}
)
# Messages of one channel never need telling apart: the k-th send meets the k-th receive.
_TAG = 0


class Send:
    """A message on its way: its tensors stay alive until it is known to be received."""

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
    """A posted receive."""

    __slots__ = ("_channel", "key", "learnt", "pending")

    def __init__(self, channel: Channel, key: Hashable) -> None:
        self._channel = channel
        self.key = key
        self.learnt: _Learnt | None = None
        self.pending: list[tuple[_Part, Tensor, Work | None]] = []

    def wait(self) -> tuple[list[Any], TreeSpec | None]:
        """The message, when it has arrived.

        Returns:
            The leaves, each tensor freshly allocated and with the sender's ``requires_grad``, and the spec of the tree.
        """
        learnt = self.learnt or self._channel.read_headers_until(self)
        leaves = learnt.values()
        for part, tensor, work in self.pending:
            if work is not None:
                work.wait()
            if part.moves:
                tensor = self._channel.bring_home(tensor, part)
            leaves[part.index] = tensor.requires_grad_() if part.requires_grad else tensor
        return leaves, learnt.header.spec


class Channel:
    """One direction between two ranks, for one kind of message (activations or gradients).

    A message is the leaves of a tree. Its tensors travel as they are; everything else - tree, shapes, dtypes,
    ``requires_grad``, plain values - is its *header*, which travels only when the channel has not seen the key::

        sender    send(a)           send(a)     send(b)                send(a)
                  header, tensors   tensors     header, tensors        tensors
                  ======= =======>  =======>    ======= =======>       =======>
        receiver  post(a)           post(a)     post(b)                post(a)
                  `- waits for      `- receives `- nothing yet: the    `- nothing yet: it must not
                     its wait()        at once     header is unknown      overtake b's header

    Posting never blocks. A receive whose header is unknown, and all receives behind it, start when somebody waits for
    one of them.

    A tensor that is sent must not be changed in place before it is received.

    Args:
        group: Process group of the two ranks that carries nothing else. Its own ``send`` and ``recv`` are used:
            ``torch.distributed.isend`` adds microseconds of checks to every message.
        peer: Rank of the other side inside ``group``.
        device: Where the tensors of this rank live. CUDA tensors cross a gloo group through pinned host memory.
        dynamic_shapes: Send a header with every message, because shapes (or plain values) depend on data.
    """

    def __init__(self, group: ProcessGroup, peer: int, device: torch.device, dynamic_shapes: bool = False) -> None:
        self._reference = weakref.ref(group)  # torch owns groups: destroyed ones must close their connections
        self._peer = peer
        self._device = device
        self._wire = _wire_device(group, device)
        self._dynamic = dynamic_shapes
        self._learnt: dict[Hashable, _Learnt] = {}
        # Posted receives that have not started, because a header before them is unread.
        self._unread: deque[Recv] = deque()

    @property
    def _group(self) -> ProcessGroup:
        group = self._reference()
        assert group is not None, "the process groups have been destroyed"
        return group

    def abandon(self) -> None:
        """Let go of the receives that have not started, after a failure."""
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
        (self._group.send if sends else self._group.recv)([first], self._peer, _TAG).wait()

    def send(self, key: Hashable, leaves: list[Any], spec: TreeSpec | None) -> Send:
        """Send one message; never blocks.

        Args:
            key: Signature of the message: messages with equal keys have equal headers.
            leaves: Tensors and plain (picklable) values. Tensors may require gradients; they are sent detached.
            spec: The tree; ``None`` for a bare list of leaves.

        Raises:
            ValueError: If the message differs from the first one with this key in anything but the contents of its
                tensors.
            TypeError: If a leaf cannot travel.
        """
        sent = Send()
        learnt = None if self._dynamic else self._learnt.get(key)
        if learnt is None:
            learnt = self._learnt[key] = self._send_header(leaves, spec, sent)
        elif not learnt.header.fits(leaves, spec):
            check_equal(learnt.header, describe(leaves, spec))
        group = self._group
        for part in learnt.parts:
            if part.has_elements:
                tensor = leaves[part.index].detach().contiguous().resolve_neg()
                if part.moves or part.as_bytes:
                    tensor = self._to_wire(tensor)
                sent.pending.append((group.send([tensor], self._peer, _TAG), tensor))
        return sent

    def post(self, key: Hashable) -> Recv:
        """Receive the next message as soon as its header is known; never blocks.

        Args:
            key: The key with which the other side sends it.
        """
        receipt = Recv(self, key)
        learnt = None if self._dynamic or self._unread else self._learnt.get(key)
        if learnt is None:
            self._unread.append(receipt)
        else:
            self._start(receipt, learnt)
        return receipt

    def read_headers_until(self, receipt: Recv) -> _Learnt:
        """Start ``receipt`` and everything before it, waiting for the headers that are unknown."""
        while receipt.learnt is None:
            first = self._unread.popleft()
            known = None if self._dynamic else self._learnt.get(first.key)
            if known is None:
                known = self._learnt[first.key] = _Learnt(self._receive_header(), self._wire)
            self._start(first, known)
        self._start_known()
        return receipt.learnt

    def bring_home(self, tensor: Tensor, part: _Part) -> Tensor:
        """A tensor that has arrived, moved from where the backend left it to where the sender's was."""
        # Pinned memory needs no wait: its allocator keeps it until the copy is done.
        return tensor.to("cpu") if part.on_host else tensor.to(self._device, non_blocking=True)

    def _start_known(self) -> None:
        """Start the receives behind a header that has just been read, up to the next unknown one."""
        while self._unread and not self._dynamic:
            learnt = self._learnt.get(self._unread[0].key)
            if learnt is None:
                return
            self._start(self._unread.popleft(), learnt)

    def _start(self, receipt: Recv, learnt: _Learnt) -> None:
        receipt.learnt = learnt
        group = self._group
        for part in learnt.parts:
            # Never a tensor that autograd has seen: hooks would stay on it (pytorch#185331).
            tensor = part.allocate()
            work = None
            if part.has_elements:
                work = group.recv([_as_bytes(tensor) if part.as_bytes else tensor], self._peer, _TAG)
            receipt.pending.append((part, tensor, work))

    def _send_header(self, leaves: list[Any], spec: TreeSpec | None, sent: Send) -> _Learnt:
        header = describe(leaves, spec)
        data = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
        for tensor in map(self._to_wire, (torch.tensor([data.numel()]), data)):
            sent.pending.append((self._group.send([tensor], self._peer, _TAG), tensor))
        return _Learnt(header, self._wire)

    def _to_wire(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor, in a dtype and in a memory that the backend can send."""
        if tensor.dtype not in _NATIVE:
            tensor = _as_bytes(tensor.resolve_conj())
        if tensor.is_cpu or self._wire.type != "cpu":
            return tensor.to(self._wire)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()  # gloo reads the memory at once
        return host

    def _receive_header(self) -> MessageMeta:
        length = torch.empty(1, dtype=torch.int64, device=self._wire)
        self._group.recv([length], self._peer, _TAG).wait()
        data = torch.empty(int(length.item()), dtype=torch.uint8, device=self._wire)
        self._group.recv([data], self._peer, _TAG).wait()
        header: MessageMeta = pickle.loads(data.cpu().numpy().tobytes())
        return header


class _Part:
    """A tensor of a message, and how it travels.

    Attributes:
        index: Its index among the leaves.
        has_elements: Whether there is anything to send.
        as_bytes: Whether the backend has to be told that it is bytes.
        moves: Whether it lives in another memory than the one from which, and to which, the backend moves it.
    """

    __slots__ = ("_template", "as_bytes", "has_elements", "index", "moves", "on_host", "requires_grad")

    def __init__(self, index: int, leaf: TensorLeaf, wire: torch.device) -> None:
        self.index = index
        self.requires_grad = leaf.requires_grad
        self.on_host = leaf.on_host
        self.has_elements = leaf.shape.numel() > 0
        self.as_bytes = leaf.dtype not in _NATIVE
        self.moves = leaf.on_host != (wire.type == "cpu")
        # One element that stands for all: `empty_like` is faster than `empty`, which reads its arguments every time.
        self._template = torch.empty((), dtype=leaf.dtype, device=wire).expand(leaf.shape)

    def allocate(self) -> Tensor:
        """Fresh memory that the backend can write to."""
        if self.moves and self._template.is_cpu:
            return torch.empty(self._template.shape, dtype=self._template.dtype, pin_memory=True)
        return torch.empty_like(self._template, memory_format=torch.contiguous_format)


class _Learnt:
    """A header, and what follows from it for every message that has it."""

    def __init__(self, header: MessageMeta, wire: torch.device) -> None:
        self.header = header
        self.parts = [_Part(i, leaf, wire) for i, leaf in enumerate(header.leaves) if isinstance(leaf, TensorLeaf)]
        self._values = [leaf.value if isinstance(leaf, PlainLeaf) else None for leaf in header.leaves]
        self._pickled = [(i, leaf.pickled) for i, leaf in enumerate(header.leaves) if isinstance(leaf, PickledLeaf)]

    def values(self) -> list[Any]:
        """The leaves that are no tensors, at their places; what could be changed is a copy of its own."""
        values = self._values.copy()
        for index, pickled in self._pickled:
            values[index] = pickle.loads(pickled)
        return values


def _wire_device(group: ProcessGroup, device: torch.device) -> torch.device:
    """Where the backend wants tensors: gloo sends and receives only those of the host."""
    if device.type == "cpu":
        return device
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return torch.device("cpu") if backends.get(device.type, "gloo") == "gloo" else device


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)

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

from lightning_hybrid.header import Header, PlainLeaf, TensorLeaf, check_equal, describe
from lightning_hybrid.pytree import TreeSpec

__all__ = ["Channel", "Receipt", "Sent"]

# What every backend moves as it is; everything else moves as bytes.
_NATIVE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}
)
# Messages of one channel never need telling apart: the k-th send meets the k-th receive.
_TAG = 0


class Sent:
    """A message on its way: its tensors stay alive until it is known to be received."""

    __slots__ = ("_pending",)

    def __init__(self, pending: list[tuple[Work, Tensor]]) -> None:
        self._pending = pending

    def wait(self) -> None:
        """Return when the receiver has everything, and drop the tensors.

        Gloo's works do not complete by themselves (``is_completed()`` is ``False`` until ``wait()``), so this is called
        even when the message is proven received; then it returns at once. For NCCL the current stream waits, not the
        host.
        """
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()


class Receipt:
    """A posted receive.

    Args:
        channel: Where the message comes from.
        key: With which key it was sent.
    """

    __slots__ = ("_channel", "_pending", "header", "key")

    def __init__(self, channel: Channel, key: Hashable) -> None:
        self._channel = channel
        self.key = key
        self.header: Header | None = None
        self._pending: list[tuple[Work | None, Tensor]] = []

    def wait(self) -> tuple[list[Any], TreeSpec | None]:
        """The message, when it has arrived.

        Returns:
            The leaves, each tensor freshly allocated and with the sender's ``requires_grad``, and the spec of the tree.
        """
        if self.header is None:
            self._channel.read_headers_until(self)
        assert self.header is not None
        pending = iter(self._pending)
        leaves: list[Any] = []
        for described in self.header.leaves:
            if isinstance(described, TensorLeaf):
                work, tensor = next(pending)
                if work is not None:
                    work.wait()
                leaves.append(self._channel.bring_home(tensor, described))
            elif isinstance(described, PlainLeaf):
                leaves.append(described.value)
            else:
                leaves.append(pickle.loads(described.pickled))
        self._pending.clear()
        return leaves, self.header.spec


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

    The messages of a channel are not to be changed in place before they are received.

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
        self._dynamic = dynamic_shapes
        self._wire = _wire_device(group, device)
        self._wire_is_host = self._wire.type == "cpu"
        self._headers: dict[Hashable, Header] = {}
        # Posted receives that have not started, because a header before them is unread.
        self._unread: deque[Receipt] = deque()

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
        if self._wire_is_host:
            return
        first = torch.zeros(1, dtype=torch.uint8, device=self._wire)
        (self._group.send if sends else self._group.recv)([first], self._peer, _TAG).wait()

    def send(self, key: Hashable, leaves: list[Any], spec: TreeSpec | None) -> Sent:
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
        header = describe(leaves, spec)
        pending: list[tuple[Work, Tensor]] = []
        known = None if self._dynamic else self._headers.get(key)
        if known is None:
            _check_layouts(leaves)
            self._headers[key] = header
            data = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
            self._transmit(torch.tensor([data.numel()]), pending)
            self._transmit(data, pending)
        else:
            check_equal(known, header)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.numel():
                self._transmit(leaf.detach(), pending)
        return Sent(pending)

    def post(self, key: Hashable) -> Receipt:
        """Receive the next message as soon as its header is known; never blocks.

        Args:
            key: The key with which the other side sends it.
        """
        receipt = Receipt(self, key)
        self._unread.append(receipt)
        self._start_known()
        return receipt

    def read_headers_until(self, receipt: Receipt) -> None:
        """Start ``receipt`` and everything before it, waiting for the headers that are unknown."""
        while receipt.header is None:
            first = self._unread.popleft()
            self._headers[first.key] = header = self._receive_header()
            self._start(first, header)
            self._start_known()

    def bring_home(self, tensor: Tensor, described: TensorLeaf) -> Tensor:
        """A tensor that has arrived, on the device and with the flags that the sender's had."""
        if described.on_host != self._wire_is_host:
            # Pinned memory needs no wait: its allocator keeps it until the copy is done.
            tensor = tensor.to("cpu") if described.on_host else tensor.to(self._device, non_blocking=True)
        return tensor.requires_grad_() if described.requires_grad else tensor

    def _start_known(self) -> None:
        while self._unread and not self._dynamic:
            header = self._headers.get(self._unread[0].key)
            if header is None:
                return
            self._start(self._unread.popleft(), header)

    def _start(self, receipt: Receipt, header: Header) -> None:
        receipt.header = header
        for described in header.leaves:
            if isinstance(described, TensorLeaf):
                # Never a tensor that autograd has seen: hooks would stay on it (pytorch#185331).
                pinned = self._wire_is_host and not described.on_host
                tensor = torch.empty(described.shape, dtype=described.dtype, device=self._wire, pin_memory=pinned)
                receipt._pending.append((self._receive(tensor) if tensor.numel() else None, tensor))

    def _transmit(self, tensor: Tensor, pending: list[tuple[Work, Tensor]]) -> None:
        tensor = tensor.contiguous().resolve_neg()
        if tensor.dtype not in _NATIVE:
            tensor = _as_bytes(tensor.resolve_conj())
        if tensor.device != self._wire:
            tensor = self._to_wire(tensor)
        pending.append((self._group.send([tensor], self._peer, _TAG), tensor))

    def _to_wire(self, tensor: Tensor) -> Tensor:
        if not self._wire_is_host:
            return tensor.to(self._wire)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()  # gloo reads the memory at once
        return host

    def _receive(self, tensor: Tensor) -> Work:
        buffer = tensor if tensor.dtype in _NATIVE else _as_bytes(tensor)
        return self._group.recv([buffer], self._peer, _TAG)

    def _receive_header(self) -> Header:
        length = torch.empty(1, dtype=torch.int64, device=self._wire)
        self._receive(length).wait()
        data = torch.empty(int(length.item()), dtype=torch.uint8, device=self._wire)
        self._receive(data).wait()
        header: Header = pickle.loads(data.cpu().numpy().tobytes())
        return header


def _wire_device(group: ProcessGroup, device: torch.device) -> torch.device:
    """Where the backend wants tensors: gloo sends and receives only those of the host."""
    if device.type == "cpu":
        return device
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return torch.device("cpu") if backends.get(device.type, "gloo") == "gloo" else device


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _check_layouts(leaves: list[Any]) -> None:
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            raise TypeError(
                f"a tensor with layout {leaf.layout} cannot cross a stage boundary; convert it with `.to_dense()`, or "
                "move the boundary with `partition`"
            )

"""Trees of values from one rank to its group: the meta is sent when it is new, the numbers every time."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import broadcast  # torch's own, also while the user's collectives are looked at

from lightning_hybrid.distributed.failure import PeerFailedError
from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.distributed.pytree import TreeMeta, TreeSpec, flatten, unflatten
from lightning_hybrid.distributed.tensor_bytes import as_bytes, tell_autograd

_NEW, _FAILED, _END = -1, -2, 0  # what comes, if it is no tree whose meta is known; the numbers of metas begin at 1
_HEADER = struct.Struct("qqq")  # of a packet: what comes, the bytes of its pickle, and of all
_LEAST = 1 << 10  # bytes of a packet
_SMALL = 1 << 16  # bytes of a tensor, up to which it is worth a copy to save a message


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


class TreeBroadcast:
    """Broadcasts a tree of tensors and plain values from one rank to all of a group, again and again.

    What is small travels together, in a packet that is as long as that of the tree before, so that a tree like it
    takes one message; a longer one takes a second message for the rest::

        source                                                                      the others
        [what comes | lengths | pickle of what is new and of values | small tensors | padding]  ---->
        [the rest, if it is longer]                                                             ---->
        larger tensors, and those of a device, one message each; numbers of a device together   ---->

    The meta of a tree is sent when it is new, and then known by its number. What is on the host stays there: it travels
    over the control group, so a number can be read where it arrives, and nobody waits for a device.

    Args:
        control_group: The ranks, over gloo: for decisions, and for what is on the host.
        group: The same ranks in the same order, for what is on ``device``.
        source: The rank inside the group that has the trees.
        device: Where received tensors shall be that are not on the source's host.
        pin_memory: Whether tensors of the host are received in page-locked memory, from which they can move to a device
            without making the host wait.

    Attributes:
        is_source: Whether this rank's trees count.
    """

    def __init__(
        self,
        control_group: dist.ProcessGroup,
        group: dist.ProcessGroup,
        source: int,
        device: torch.device,
        *,
        pin_memory: bool = False,
    ) -> None:
        self._control_group = GroupRef(control_group)
        self._group = GroupRef(group)
        self._source = source
        self._device = device
        self._pins = pin_memory
        self.is_source = dist.get_rank(control_group) == source
        self._is_sending = False
        self._length = _LEAST  # of the next packet, as far as it is one message
        self._numbers: dict[TreeMeta, int] = {}
        self._metas: list[TreeMeta] = []

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
        leaves, spec = flatten(tree)
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        meta, values = _split(leaves, spec)
        number = self._numbers.get(meta)
        is_new = number is None
        # Pickled before anything is sent: after an error :meth:`fail` still reaches the others.
        pickled = pickle.dumps((meta if is_new else None, values)) if is_new or meta.has_values else b""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() > 0]
        self._is_sending = True
        self._send_packet(_NEW if number is None else number, pickled, list(filter(_is_small, tensors)))
        if is_new:
            self._numbers[meta] = len(self._numbers) + 1
        self._exchange_tensors([tensor for tensor in tensors if not _is_small(tensor)])
        self._is_sending = False

    def receive(self) -> Any:
        """Receive a tree that the source sends.

        Raises:
            StopIteration: If the source has no more.
            PeerFailedError: If the source failed; the text is the source's.
        """
        code, pickled, packed = self._receive_packet()
        if code == _END:
            raise StopIteration
        if code == _FAILED:
            raise PeerFailedError(pickle.loads(pickled))
        new, values = pickle.loads(pickled) if len(pickled) else (None, None)
        if new is not None:
            self._metas.append(new)
        meta = self._metas[-1 if new is not None else code - 1]
        assert meta.spec is not None
        leaves = values or [None] * len(meta.leaves)
        tensors = [each for each in _allocate(meta, leaves, self._device, pin_memory=self._pins) if each.numel() > 0]
        for tensor in filter(_is_small, tensors):
            as_bytes(tensor).copy_(packed[: tensor.nbytes])
            packed = packed[tensor.nbytes :]
        self._exchange_tensors([tensor for tensor in tensors if not _is_small(tensor)])
        return unflatten(leaves, meta.spec)

    def _send_packet(self, code: int, pickled: bytes = b"", tensors: Sequence[Tensor] = ()) -> None:
        packed = [as_bytes(tensor).numpy().tobytes() for tensor in tensors]
        length = _HEADER.size + len(pickled) + sum(map(len, packed))
        parts = [_HEADER.pack(code, len(pickled), length), pickled, *packed, bytes(max(0, self._length - length))]
        packet = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        self._broadcast(packet[: self._length], self._control_group)
        if length > self._length:
            self._broadcast(packet[self._length :], self._control_group)
        self._length = max(_LEAST, length)

    def _receive_packet(self) -> tuple[int, bytes, Tensor]:
        """What comes, its pickle, and the bytes of its small tensors."""
        packet = torch.empty(self._length, dtype=torch.uint8)
        self._broadcast(packet, self._control_group)
        code, num_pickled, length = _HEADER.unpack(packet[: _HEADER.size].numpy().tobytes())
        if length > self._length:
            rest = torch.empty(length - self._length, dtype=torch.uint8)
            self._broadcast(rest, self._control_group)
            packet = torch.cat([packet, rest])
        self._length = max(_LEAST, length)
        begin = _HEADER.size + num_pickled
        return code, packet[_HEADER.size : begin].numpy().tobytes(), packet[begin:length]

    def _exchange_tensors(self, tensors: list[Tensor]) -> None:
        """Send or receive those that are not in the packet, in place."""
        numbers = [tensor for tensor in tensors if not tensor.is_cpu and _fits_float64(tensor)]
        if numbers:
            packed = torch.stack([number.reshape(()).to(torch.float64) for number in numbers])
            self._broadcast(packed, self._group)
            if not self.is_source:
                for number, value in zip(numbers, packed.unbind(), strict=True):
                    number.copy_(value.view_as(number))
        for tensor in tensors:
            if tensor.is_cpu or not _fits_float64(tensor):
                self._broadcast(as_bytes(tensor), self._control_group if tensor.is_cpu else self._group)

    def _broadcast(self, tensor: Tensor, reference: GroupRef) -> None:
        group = reference.weak()
        assert group is not None, "the process groups have been destroyed"
        broadcast(tensor, group_src=self._source, group=group)


def _is_small(tensor: Tensor) -> bool:
    """Whether a tensor travels together with others."""
    return tensor.is_cpu and tensor.nbytes <= _SMALL


def _fits_float64(tensor: Tensor) -> bool:
    """Whether one float64 holds the tensor: numbers that were logged, losses."""
    return tensor.numel() == 1 and tensor.is_floating_point()

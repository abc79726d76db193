"""Broadcasts of trees from one rank to its group: a tree's meta is sent only if it is new, its values every time.

`trainer.dataloader` broadcasts batches from the rank that loads them. `StepContext` broadcasts the results of a step
and metrics from the last stage, and `trainer.layer_exchange` broadcasts outputs of layers in steps that all ranks run
together. They use a :class:`TreeBroadcast` instead of torch's `broadcast_object_list`, which pickles tensors, and takes
two collectives in which each rank waits.

A *meta* is the description of a tree without the values of its tensors, see
:mod:`~lightning_hybrid.distributed.pytree`. A *subject* is a number with which sender and receiver check that they run
the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import broadcast  # torch's function, also while `dist.broadcast` is replaced to check user code

from lightning_hybrid.distributed.failure import PeerFailedError, WrongUseError
from lightning_hybrid.distributed.messages.posted_broadcast import PostedBroadcast
from lightning_hybrid.distributed.process_group import GroupRef, device_backends
from lightning_hybrid.distributed.pytree import FIRST_PART, Message, TreeMeta, encode, flatten, split_values, unflatten
from lightning_hybrid.distributed.tensor_bytes import as_bytes, tell_autograd

_NEW, _FAILED, _END = -1, -2, 0  # codes of messages; a positive code is the number of a known meta
_FIRST = 12 << 10  # bytes of the first part of the first message: TCP sends this many at once (RFC 6928)
_LEAST = 1 << 10  # bytes of the first part of other messages, at least
SMALL = 1 << 20  # bytes of the largest tensor for which a second copy is cheaper than a separate message
_MOST_METAS = 4096  # the number of metas that are remembered


def broadcast_object(value: Any, source: int, group: dist.ProcessGroup) -> Any:
    """Broadcast a picklable value, in one message if it is small. torch sends the length in a separate message.

    Every rank of the group must call this.

    Args:
        value: The value on the source; ignored on other ranks.
        source: The rank in the group that has the value.
        group: The ranks.

    Returns:
        The value of the source.
    """
    is_source, root = dist.get_rank(group) == source, dist.get_global_rank(group, source)
    device = "cpu" if "cpu" in device_backends(group) else f"cuda:{torch.cuda.current_device()}"

    def receive(size: int) -> Tensor:
        part = torch.empty(size, dtype=torch.uint8, device=device)
        broadcast(part, src=root, group=group)
        return part.cpu()

    if not is_source:
        return Message.receive(receive, FIRST_PART).value()
    for part in Message.make(encode(value), size=FIRST_PART).parts:
        broadcast(part.to(device), src=root, group=group)
    return value


def contiguous(tree: Any) -> Any:
    """Return a tree with contiguous tensors, as the other ranks receive them; the same object if they are contiguous.

    Products of tensors with other strides can round differently, so ranks would differ in the last bit.
    """
    leaves, spec = flatten(tree)
    dense = [leaf if isinstance(leaf, Tensor) and leaf.layout is torch.strided else None for leaf in leaves]
    if all(leaf is None or leaf.is_contiguous() for leaf in dense):
        return tree
    return unflatten(
        [leaf if found is None else found.contiguous() for leaf, found in zip(leaves, dense, strict=True)], spec
    )


def reduce_over(tensor: Tensor, group: dist.ProcessGroup, operation: Any) -> Tensor:
    """Reduce a tensor over a group. The mean is supported also on backends that do not support it.

    Every rank of the group must call this.

    Args:
        tensor: The tensor, which may be modified in place.
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
        tensor = tensor.clone()  # the mean of integers need not be an integer
    named = getattr(dist.ReduceOp, name.upper()) if isinstance(name, str) and not mean else name
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM if mean else named, group=group)
    tell_autograd(tensor)
    if not mean:
        return tensor
    return tensor.div_(group.size()) if tensor.is_floating_point() else tensor / group.size()


def _allocate(
    meta: TreeMeta,
    leaves: list[Any],
    device: torch.device,
    *,
    pin_memory: bool,
    comes: Sequence[bool],
) -> list[Tensor]:
    """Put empty tensors at their positions among the leaves, and return these tensors.

    Tensors that were on the host of the source are on the host here too.

    Args:
        meta: The meta of the tree.
        leaves: The leaves, with the values that are not tensors.
        device: The device of the other tensors.
        pin_memory: If True, tensors on the host are in page-locked memory.
        comes: For each leaf, True if this rank receives it; empty if it receives all leaves.
    """
    tensors = []
    for index, tensor in meta.tensors():
        if comes and not comes[index]:
            continue
        on_host = tensor.on_host or device.type == "cpu"
        where = torch.device("cpu") if on_host else device
        leaves[index] = torch.empty(tensor.shape, dtype=tensor.dtype, device=where, pin_memory=pin_memory and on_host)
        tensors.append(leaves[index])
    return tensors


#: For each leaf of a tree, the ranks of the group to which it is sent; ``None`` for all ranks.
Readers = tuple[frozenset[int] | None, ...]


class Selection(Protocol):
    """A choice of the ranks that receive each tensor of a tree."""

    def choose(self, meta: TreeMeta, leaves: list[Any]) -> Readers | None:
        """Return the ranks that receive each leaf; ``None`` if all ranks receive all. The source calls this."""

    def fill(self, meta: TreeMeta, readers: Readers | None, leaves: list[Any]) -> None:
        """Put values at the positions of tensors that were not received. The other ranks call this."""


class TreeBroadcast:
    """A repeated broadcast of a tree of tensors and plain values from one rank to the other ranks of a group.

    Small tensors and values are sent together in a :class:`~.pytree.Message`. Its first part has the length of the
    previous message, so that a similar tree takes one part::

        source                                                                      the others
        [header | new meta and values | small tensors | padding]                                ---->
        [the rest, if the message is longer]                                                    ---->
        larger tensors, and tensors on a device, one message each; numbers on a device together ---->
        (on the host: only to ranks that read the tensor)

    The meta of a tree is sent when it is new, and later referred to by number. Tensors on the host are sent through the
    host, so that receivers can read them without waiting for a device. The receive of the first message is posted when
    this object is made, and the receive of each later message when a tree has arrived. The source copies the tensors
    that it sends through the host, and waits only for messages of the previous tree that gloo has not delivered yet.

    Args:
        messages: The messages from the source to the other ranks, for decisions and for tensors on the host.
        group: The same ranks in the same order, for tensors on ``device``.
        device: The device of received tensors that are not on the source's host.
        pin_memory: If True, tensors on the host are received in page-locked memory, so that a copy to a device does not
            block the host.

    Attributes:
        is_source: True if this rank is the source.
        about: The number of the subject of the next trees, which callers set on all ranks. A receiver raises an error
            for a tree with another subject, which was sent while this rank was running other code.
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
        self._length = _FIRST  # length of the first part of the next message
        self.about = 0
        self._numbers: dict[tuple[TreeMeta, Readers | None], int] = {}
        self._metas: list[tuple[TreeMeta, Readers | None]] = []
        if not self.is_source:
            messages.post_ahead(self._length)

    def __deepcopy__(self, memo: dict[int, Any]) -> TreeBroadcast:
        """Return the same object, because both sides of the messages must know the same metas."""
        return self

    def __call__(self, tree: Any = None, selection: Selection | None = None) -> Any:
        """Broadcast a tree. Every rank calls this, or :meth:`receive` on ranks other than the source.

        Args:
            tree: The tree on the source; ignored on other ranks.
            selection: Chooses the ranks that receive each tensor on the host. It is passed on all ranks or on none;
                ``None`` sends all tensors to all ranks.

        Returns:
            The tree of the source. On the source, this is the same object.

        Raises:
            Exception: On the source, any exception if a value cannot be pickled, or a `TypeError` if a tensor is not
                dense. Nothing has been sent then, so the source can call :meth:`fail`.
            StopIteration, PeerFailedError, WrongUseError: On other ranks, as in :meth:`receive`.
        """
        if self.is_source:
            self._send(tree, selection)
            return tree
        return self.receive(selection)

    def fail(self, error: BaseException) -> None:
        """Send an error from the source instead of a tree. The others raise :class:`PeerFailedError` with its text.

        Nothing is sent if the error was raised while a tree was being sent, for example by a signal handler (PyTorch's,
        when a worker of a loader is killed). The other ranks would take the message for the rest of the tree. They
        notice when this rank leaves.
        """
        if not self._is_sending:
            text = f"Rank {dist.get_rank()} failed: {type(error).__name__}: {error}"
            self._send_message(_FAILED, encode(text))

    def end(self) -> None:
        """Send the end from the source instead of a tree. The other ranks raise `StopIteration`."""
        self._send_message(_END)

    def _send(self, tree: Any, selection: Selection | None) -> None:
        self._messages.retire()  # messages of the previous tree, which the receivers have used by now
        leaves, spec = flatten(tree)
        leaves = [self._detached(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        meta, values = split_values(leaves, spec)
        readers = None if selection is None else selection.choose(meta, leaves)
        number = self._numbers.get((meta, readers))
        is_new = number is None
        has_values = any(value is not None for value in values)
        # Encode first: if that raises an error, no part of the tree has been sent, and :meth:`fail` can be called.
        encoded = encode(((meta, readers) if is_new else None, values)) if is_new or has_values else b""
        tensors, selected = self._sort(leaves, readers)
        self._is_sending = True
        self._send_message(_NEW if number is None else number, encoded, list(filter(_is_small, tensors)))
        if is_new:
            if len(self._numbers) == _MOST_METAS:
                self._numbers.clear()
            self._numbers[meta, readers] = len(self._numbers) + 1
        self._exchange_tensors([tensor for tensor in tensors if not _is_small(tensor)])
        self._exchange_selected(selected)
        self._is_sending = False

    def _detached(self, leaf: Tensor) -> Tensor:
        """Return a tensor without a graph, on the host if all tensors are sent through the host."""
        return leaf.detach().cpu() if self._device.type == "cpu" else leaf.detach()

    def receive(self, selection: Selection | None = None) -> Any:
        """Receive a tree from the source.

        Args:
            selection: The selection that the source uses.

        Raises:
            StopIteration: If the source has called :meth:`end`.
            PeerFailedError: If the source has called :meth:`fail`.
            WrongUseError: If the tree has another subject.
        """
        message = self._receive_message()
        if message.code in (_END, _FAILED):
            self._messages.post_ahead(self._length)
            raise StopIteration if message.code == _END else PeerFailedError(message.value())
        new, values = message.value() or (None, None)
        if new is not None:
            if len(self._metas) == _MOST_METAS:
                self._metas.clear()
            self._metas.append(new)
        meta, readers = self._metas[-1 if new is not None else message.code - 1]
        assert meta.spec is not None
        leaves = values or [None] * len(meta.leaves)
        comes = [self._messages.passes(each) for each in readers or ()]
        _allocate(meta, leaves, self._device, pin_memory=self._pins, comes=comes)
        tensors, selected = self._sort(leaves, readers)
        small = list(filter(_is_small, tensors))
        for tensor, part in zip(small, message.tensors(small), strict=True):
            tensor.copy_(part)
        self._exchange_tensors([tensor for tensor in tensors if not _is_small(tensor)])
        self._exchange_selected(selected)
        self._messages.post_ahead(self._length)
        if selection is not None:
            selection.fill(meta, readers, leaves)
        return unflatten(leaves, meta.spec)

    def _sort(
        self, leaves: list[Any], readers: Readers | None
    ) -> tuple[list[Tensor], list[tuple[Tensor, frozenset[int]]]]:
        """Return the tensors for all ranks, and the tensors for some ranks with these ranks, without empty tensors."""
        whom = readers or (None,) * len(leaves)
        pairs = [
            (leaf, to) for leaf, to in zip(leaves, whom, strict=True) if isinstance(leaf, Tensor) and leaf.numel() > 0
        ]
        return [leaf for leaf, to in pairs if to is None], [(leaf, to) for leaf, to in pairs if to is not None]

    def _send_message(self, code: int, encoded: bytes = b"", tensors: Sequence[Tensor] = ()) -> None:
        message = Message.make(encoded, tensors, code=code, subject=self.about, size=self._length)
        for part in message.parts:
            self._messages.send(part)
        self._length = max(_LEAST, message.num_bytes)

    def _receive_message(self) -> Message:
        message = Message.receive(self._messages.receive, self._length)
        if message.subject != self.about:
            raise WrongUseError(
                f"The ranks of a model group are out of step. Rank {self._messages.source} sent {message.subject}, but"
                f" this rank expected {self.about}. Some ranks probably iterate over a loader or compute a metric,"
                " while other ranks do not. Iterate over each loader and compute each metric either on all ranks or on"
                " none. [LH702]"
            )
        self._length = max(_LEAST, message.num_bytes)
        return message

    def _exchange_tensors(self, tensors: list[Tensor]) -> None:
        """Send or receive, in place, the tensors that are not part of the message."""
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

    def _exchange_selected(self, selected: list[tuple[Tensor, frozenset[int]]]) -> None:
        """Send or receive, in place, the tensors on the host that are for some of the ranks."""
        for tensor, readers in selected:
            if not self.is_source:
                self._messages.post(as_bytes(tensor), readers)
            elif readers:
                self._messages.send(as_bytes(tensor).clone(), readers)
        for _ in selected if not self.is_source else ():
            self._messages.wait()

    def _broadcast(self, tensor: Tensor) -> None:
        broadcast(tensor, group_src=self._messages.source, group=self._group())


def _is_small(tensor: Tensor) -> bool:
    """Return True if a tensor is sent as part of the message."""
    return tensor.is_cpu and tensor.nbytes <= SMALL


def _fits_float64(tensor: Tensor) -> bool:
    """Return True if one float64 holds the tensor, such as a logged number or a loss."""
    return tensor.numel() == 1 and tensor.is_floating_point()

"""Trees of values from one rank to its group: the meta is sent when it is new, the numbers every time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import broadcast  # torch's own, also while the user's collectives are looked at

from lightning_hybrid.distributed.failure import PeerFailedError, WrongUseError
from lightning_hybrid.distributed.messages.posted_broadcast import PostedBroadcast
from lightning_hybrid.distributed.process_group import GroupRef, device_backends
from lightning_hybrid.distributed.pytree import FIRST_PART, Message, TreeMeta, encode, flatten, split_values, unflatten
from lightning_hybrid.distributed.tensor_bytes import as_bytes, tell_autograd

_NEW, _FAILED, _END = -1, -2, 0  # what comes, if it is no tree whose meta is known; the numbers of metas begin at 1
_FIRST = 12 << 10  # bytes of the first part of the first message: TCP sends so many at once (RFC 6928)
_LEAST = 1 << 10  # bytes of the first part of a message
SMALL = 1 << 20  # bytes of a tensor, up to which it is worth a second copy to save a message
_MOST_METAS = 4096  # that are remembered


def broadcast_object(value: Any, source: int, group: dist.ProcessGroup) -> Any:
    """Broadcast anything that can be pickled: by one message, where torch sends the length in one of its own.

    Args:
        value: The value; only the source's counts.
        source: The rank inside the group that has it.
        group: The ranks.
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


def _allocate(
    meta: TreeMeta,
    leaves: list[Any],
    device: torch.device,
    *,
    pin_memory: bool,
    comes: Sequence[bool],
) -> list[Tensor]:
    """Put empty tensors at their positions among the leaves, and return them: on the host those that were there.

    Args:
        meta: Of the tree.
        leaves: The leaves that are no tensors.
        device: Where those shall be that were on a device.
        pin_memory: Whether those of the host are in page-locked memory.
        comes: For each leaf whether it comes; nothing if all do.
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


#: For each leaf of a tree the ranks of the group that it is sent to; ``None`` for all.
Readers = tuple[frozenset[int] | None, ...]


class Selection(Protocol):
    """Who reads what of the trees of one kind."""

    def choose(self, meta: TreeMeta, leaves: list[Any]) -> Readers | None:
        """On the source, for each tree: who it goes to; ``None`` if all of it goes to all."""

    def fill(self, meta: TreeMeta, readers: Readers | None, leaves: list[Any]) -> None:
        """On the others, for each tree: put something in the places of tensors that have not come."""


class TreeBroadcast:
    """Broadcasts a tree of tensors and plain values from one rank to all of a group, again and again.

    What is small travels together, in a :class:`~.pytree.Message` whose first part is as long as that of the tree
    before, so that a tree like it takes one part::

        source                                                                      the others
        [header | what is new, and values | small tensors | padding]                            ---->
        [the rest, if it is longer]                                                             ---->
        larger tensors, and those of a device, one message each; numbers of a device together   ---->
        (on the host: only to ranks that read it)

    The meta of a tree is sent when it is new, and then known by its number. What is on the host stays there: it travels
    through the host, so a number can be read where it arrives, and nobody waits for a device. The receive of the first
    message is posted here, that of the next one as soon as a tree has come. The source copies what it sends and goes
    on.

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
        self._length = _FIRST  # of the first part of the next message
        self.about = 0
        self._numbers: dict[tuple[TreeMeta, Readers | None], int] = {}
        self._metas: list[tuple[TreeMeta, Readers | None]] = []
        if not self.is_source:
            messages.post_ahead(self._length)

    def __deepcopy__(self, memo: dict[int, Any]) -> TreeBroadcast:
        """Itself: what is known on both sides of the messages is known once."""
        return self

    def __call__(self, tree: Any = None, selection: Selection | None = None) -> Any:
        """Broadcast a tree.

        Args:
            tree: The tree; only the source's counts.
            selection: Who reads what, on all ranks or on none; for tensors of the host.

        Returns:
            The source's tree. On the source it is the object that was given.
        """
        if self.is_source:
            self._send(tree, selection)
            return tree
        return self.receive(selection)

    def fail(self, error: BaseException) -> None:
        """On the source, instead of a tree: the others raise this error's text as a :class:`PeerFailedError`.

        If the error came while a tree was being sent, as that of a signal's handler may (PyTorch's, when a worker of a
        loader is killed), nothing is said: the others would read it as the rest. They notice when this rank leaves.
        """
        if not self._is_sending:
            text = f"Rank {dist.get_rank()} failed: {type(error).__name__}: {error}"
            self._send_message(_FAILED, encode(text))

    def end(self) -> None:
        """On the source, instead of a tree: the others raise `StopIteration`."""
        self._send_message(_END)

    def _send(self, tree: Any, selection: Selection | None) -> None:
        self._messages.retire()  # of the tree before, which the others have used since
        leaves, spec = flatten(tree)
        leaves = [self._detached(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        meta, values = split_values(leaves, spec)
        readers = None if selection is None else selection.choose(meta, leaves)
        number = self._numbers.get((meta, readers))
        is_new = number is None
        has_values = any(value is not None for value in values)
        # Encoded before anything is sent: after an error :meth:`fail` still reaches the others.
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
        """Without a graph; and on the host, if all of a tree travels there."""
        return leaf.detach().cpu() if self._device.type == "cpu" else leaf.detach()

    def receive(self, selection: Selection | None = None) -> Any:
        """Receive a tree that the source sends.

        Args:
            selection: As the source has it.

        Raises:
            StopIteration: If the source has no more.
            PeerFailedError: If the source failed; the text is the source's.
            WrongUseError: If the tree is about something else.
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
        """The tensors with numbers that go to all, and those that go to some, with these."""
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
        """Send or receive those that are not in the message, in place."""
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
        """Send or receive tensors of the host, each for some ranks."""
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
    """Whether a tensor travels together with others."""
    return tensor.is_cpu and tensor.nbytes <= SMALL


def _fits_float64(tensor: Tensor) -> bool:
    """Whether one float64 holds the tensor: numbers that were logged, losses."""
    return tensor.numel() == 1 and tensor.is_floating_point()

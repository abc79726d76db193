"""Trees of values from one rank to its group: the shape is sent when it is new, the numbers every time."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.distributed.pytree import TreeSpec, flatten, unflatten

__all__ = ["TreeBroadcast", "broadcast_object", "receive_tree", "reduce_over", "send_tree"]

_NEW, _FAILED, _END = -1, -2, 0  # the numbers of forms begin at 1


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
    if not mean:
        return tensor
    return tensor.div_(group.size()) if tensor.is_floating_point() else tensor / group.size()


@dataclass(frozen=True)
class _Form:
    """What must be known of a tree before its numbers can be received.

    Attributes:
        spec: The shape of the tree.
        tensors: For each leaf its shape and dtype, ``None`` for plain values.
    """

    spec: TreeSpec
    tensors: tuple[Any, ...]

    @classmethod
    def of(cls, leaves: list[Any], spec: TreeSpec) -> _Form:
        return cls(spec, tuple([(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves]))

    @property
    def has_plain(self) -> bool:
        return None in self.tensors


def send_tree(tree: Any, target: int, group: dist.ProcessGroup, prepare: Callable[[Any], Any]) -> None:
    """Send a tree to one rank, tensor by tensor.

    Args:
        tree: Tensors and values that can be pickled, of which tensors must keep shape and dtype.
        target: The global rank, which calls :func:`receive_tree`.
        group: A group over a backend that takes tensors of the host.
        prepare: Makes of each leaf, when its turn comes, what is sent: a tensor on the host.
    """
    leaves, spec = flatten(tree)
    plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    dist.send_object_list([(_Form.of(leaves, spec), plain)], dst=target, group=group)
    for leaf in leaves:
        ready = prepare(leaf)
        if isinstance(ready, Tensor) and ready.numel() > 0:
            dist.send(_bytes_of(ready), dst=target, group=group)


def receive_tree(source: int, group: dist.ProcessGroup) -> Any:
    """Receive the tree that a rank sends with :func:`send_tree`; tensors are on the host."""
    received: list[Any] = [None]
    dist.recv_object_list(received, src=source, group=group)
    form, leaves = received[0]
    for index, known in enumerate(form.tensors):
        if known is not None:
            leaves[index] = torch.empty(known[0], dtype=known[1])
            if leaves[index].numel() > 0:
                dist.recv(_bytes_of(leaves[index]), src=source, group=group)
    return unflatten(leaves, form.spec)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The numbers of a tensor as bytes, for no backend knows every dtype."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


class TreeBroadcast:
    """Broadcasts a tree of tensors and plain values from one rank to all of a group, again and again.

    ::

        source                             the others
        number of the form, or NEW  ---->  known form: allocate
        [NEW: the form, pickled]    ---->  remember it
        [plain values, pickled]     ---->
        tensors of one element, packed as float64, one message
        other tensors, one message each

    Args:
        control_group: The ranks, over gloo: decisions travel through the host, so nobody waits for a device.
        group: The same ranks in the same order, for tensors on ``device``.
        source: The rank inside the group that has the trees.
        device: Where received tensors shall be.
    """

    def __init__(
        self, control_group: dist.ProcessGroup, group: dist.ProcessGroup, source: int, device: torch.device
    ) -> None:
        self._control_reference = weakref.ref(control_group)
        self._reference = weakref.ref(group)
        self._source = source
        self._device = device
        self._is_source = dist.get_rank(control_group) == source
        self._numbers: dict[Hashable, int] = {}
        self._forms: list[_Form] = []

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._reference()
        assert group is not None, "the process groups have been destroyed"
        return group

    @property
    def _control_group(self) -> dist.ProcessGroup:
        group = self._control_reference()
        assert group is not None, "the process groups have been destroyed"
        return group

    @property
    def is_source(self) -> bool:
        """Whether this rank's trees count."""
        return self._is_source

    def __call__(self, tree: Any = None) -> Any:
        """Broadcast a tree.

        Args:
            tree: The tree; only the source's counts.

        Returns:
            The source's tree. On the source it is the object that was given.
        """
        if self._is_source:
            self._send(tree)
            return tree
        return self.receive()

    def fail(self, error: BaseException) -> None:
        """On the source, instead of a tree: the others raise this error's text as a `RuntimeError`."""
        self._control(_FAILED)
        broadcast_object(f"{type(error).__name__}: {error}", self._source, self._control_group)

    def end(self) -> None:
        """On the source, instead of a tree: the others raise `StopIteration`."""
        self._control(_END)

    def _control(self, code: int) -> int:
        message = torch.tensor(code)
        self._broadcast(message, self._control_group)
        return int(message)

    def _broadcast(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        dist.broadcast(tensor, group_src=self._source, group=group)

    def _send(self, tree: Any) -> None:
        leaves, spec = flatten(tree)
        form = _Form.of(leaves, spec)
        number = self._numbers.get(form)
        # Pickled before anything is sent: if it fails, the others can still be told.
        pickled_form = pickle.dumps(form) if number is None else None
        plain = pickle.dumps([leaf for leaf in leaves if not isinstance(leaf, Tensor)]) if form.has_plain else None
        self._control(_NEW if number is None else number)
        if pickled_form is not None:
            broadcast_object(pickled_form, self._source, self._control_group)
            self._numbers[form] = len(self._numbers) + 1
        if plain is not None:
            broadcast_object(plain, self._source, self._control_group)
        self._exchange_tensors([leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)])

    def receive(self) -> Any:
        """Receive a tree that the source sends.

        Raises:
            StopIteration: If the source has no more.
            RuntimeError: If the source failed; the text is the source's.
        """
        code = self._control(0)
        if code == _END:
            raise StopIteration
        if code == _FAILED:
            raise RuntimeError(broadcast_object(None, self._source, self._control_group))
        if code == _NEW:
            self._forms.append(pickle.loads(broadcast_object(None, self._source, self._control_group)))
            code = len(self._forms)
        form = self._forms[code - 1]
        pickled = broadcast_object(None, self._source, self._control_group) if form.has_plain else None
        plain = iter(pickle.loads(pickled) if pickled is not None else ())
        tensors = iter(
            self._exchange_tensors(
                [
                    torch.empty(known[0], dtype=known[1], device=self._device)
                    for known in form.tensors
                    if known is not None
                ]
            )
        )
        return unflatten([next(plain) if known is None else next(tensors) for known in form.tensors], form.spec)

    def _exchange_tensors(self, tensors: list[Tensor]) -> list[Tensor]:
        """Send or receive, in place; returns the tensors."""
        scalars = [tensor for tensor in tensors if _fits_float64(tensor)]
        if scalars:
            packed = torch.stack([scalar.reshape(()).to(self._device, torch.float64) for scalar in scalars])
            self._broadcast(packed, self._group)
            if not self._is_source:
                for scalar, value in zip(scalars, packed.unbind(), strict=True):
                    scalar.copy_(value)
        for tensor in tensors:
            if not _fits_float64(tensor) and tensor.numel() > 0:
                self._broadcast(_bytes_of(tensor.to(self._device)), self._group)
        return tensors


def _fits_float64(tensor: Tensor) -> bool:
    """Whether one float64 holds the tensor: numbers that were logged, losses."""
    return tensor.numel() == 1 and tensor.is_floating_point()

"""Trees of values from one rank to its group: the meta is sent when it is new, the numbers every time."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.distributed.failure import PeerFailedError
from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.distributed.pytree import TreeMeta, TreeSpec, flatten, unflatten
from lightning_hybrid.distributed.tensor_bytes import as_bytes, tell_autograd

_NEW, _FAILED, _END = -1, -2, 0  # the numbers of metas begin at 1


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

    ::

        source                              the others
        number of the meta, or NEW   ---->  known meta: allocate
        [NEW: the meta, pickled]     ---->  remember it
        [other values, pickled]      ---->
        tensors of one element, packed as float64, one message for those of the host and one for those of a device
        other tensors, one message each

    What is on the host stays there: it travels over the control group, so a number can be read where it arrives, and
    nobody waits for a device.

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
        if self._is_sending:
            return
        self._control(_FAILED)
        self._broadcast_object(f"Rank {dist.get_rank()} failed: {type(error).__name__}: {error}")

    def end(self) -> None:
        """On the source, instead of a tree: the others raise `StopIteration`."""
        self._control(_END)

    def _control(self, code: int) -> int:
        message = torch.tensor(code)
        self._broadcast(message, self._control_group())
        return int(message)

    def _broadcast_object(self, value: Any = None) -> Any:
        return broadcast_object(value, self._source, self._control_group())

    def _broadcast(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        dist.broadcast(tensor, group_src=self._source, group=group)

    def _send(self, tree: Any) -> None:
        leaves, spec = flatten(tree)
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        meta, values = _split(leaves, spec)
        number = self._numbers.get(meta)
        # Pickled before anything is sent: after an error :meth:`fail` still reaches the others.
        pickled_meta = pickle.dumps(meta) if number is None else None
        pickled_values = pickle.dumps(values) if meta.has_values else None
        self._is_sending = True
        self._control(_NEW if number is None else number)
        if pickled_meta is not None:
            self._broadcast_object(pickled_meta)
            self._numbers[meta] = len(self._numbers) + 1
        if pickled_values is not None:
            self._broadcast_object(pickled_values)
        self._exchange_tensors([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        self._is_sending = False

    def receive(self) -> Any:
        """Receive a tree that the source sends.

        Raises:
            StopIteration: If the source has no more.
            PeerFailedError: If the source failed; the text is the source's.
        """
        code = self._control(0)
        if code == _END:
            raise StopIteration
        if code == _FAILED:
            raise PeerFailedError(self._broadcast_object())
        if code == _NEW:
            self._metas.append(pickle.loads(self._broadcast_object()))
            code = len(self._metas)
        meta = self._metas[code - 1]
        assert meta.spec is not None
        leaves = pickle.loads(self._broadcast_object()) if meta.has_values else [None] * len(meta.leaves)
        self._exchange_tensors(_allocate(meta, leaves, self._device, pin_memory=self._pins))
        return unflatten(leaves, meta.spec)

    def _exchange_tensors(self, tensors: list[Tensor]) -> None:
        """Send or receive, in place."""
        host = torch.device("cpu")
        for device, group in {host: self._control_group(), self._device: self._group()}.items():
            here = [tensor for tensor in tensors if (host if tensor.is_cpu else self._device) == device]
            scalars = [tensor for tensor in here if _fits_float64(tensor)]
            if scalars:
                packed = torch.stack([scalar.reshape(()).to(device, torch.float64) for scalar in scalars])
                self._broadcast(packed, group)
                if not self.is_source:
                    for scalar, value in zip(scalars, packed.unbind(), strict=True):
                        scalar.copy_(value.view_as(scalar))
            for tensor in here:
                if not _fits_float64(tensor) and tensor.numel() > 0:
                    self._broadcast(as_bytes(tensor.to(device)), group)


def _fits_float64(tensor: Tensor) -> bool:
    """Whether one float64 holds the tensor: numbers that were logged, losses."""
    return tensor.numel() == 1 and tensor.is_floating_point()

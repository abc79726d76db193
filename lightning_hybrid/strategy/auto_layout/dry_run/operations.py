"""What a step computes and sends, counted operation by operation on tensors without numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import ScriptObject, Tensor

from lightning_hybrid.distributed.modes import OperatorMode
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.distributed.replaced import replaced_attributes
from lightning_hybrid.strategy.auto_layout.machine import NO_MESSAGES, Messages, in_ring
from lightning_hybrid.tensor_parallel.context_parallel.sharded_sequence import ShardedSequence
from lightning_hybrid.tensor_parallel.mappings import TensorGroup
from lightning_hybrid.tensor_parallel.sharded_activation import ShardedActivation
from lightning_hybrid.torch_internals import (
    ALL_GATHER,
    FLASH_ATTENTION,
    REDUCE_SCATTER,
    SCALED_DOT_PRODUCT,
    operator_name,
)

FLOPS: dict[Any, Callable[..., int]]
try:
    from torch.utils.flop_counter import flop_registry as FLOPS
except ImportError:
    FLOPS = {}

# The share of a tensor that a rank of a group of n sends, and its hops, in units of (n - 1) / n and n - 1.
_COLLECTIVES = {"allreduce_": 2, ALL_GATHER: 1, REDUCE_SCATTER: 1, "alltoall_base_": 1}
_OF_SUMS = torch.float32.itemsize  # at least, of gradients that are added up


@dataclass(frozen=True)
class Operation:
    """One operation of a forward.

    Attributes:
        flops: Of products of matrices and convolutions: two for each multiplication.
        bytes: Of tensors that it reads and writes.
        is_kept: Whether selective recomputation saves its result.
        is_attention: Whether it is attention, or may be: fused, or a product of batches of matrices.
    """

    flops: float
    bytes: float
    is_kept: bool
    is_attention: bool


@dataclass(frozen=True)
class Message:
    """One collective of a forward, or one message to a neighbour.

    Attributes:
        there: What a rank sends.
        back: What it sends for it in backward.
    """

    there: Messages = NO_MESSAGES
    back: Messages = NO_MESSAGES


def _lists() -> dict[Hashable, list[Any]]:
    return defaultdict(list)


@dataclass(frozen=True)
class Counts:
    """The operations and messages of a step, by the label of the place where it was.

    Attributes:
        operations: In order, by label.
        messages: Among the ranks that share a layer, in order, by label.
        context_messages: Among those that share sequences, likewise.
    """

    operations: dict[Hashable, list[Operation]] = field(default_factory=_lists)
    messages: dict[Hashable, list[Message]] = field(default_factory=_lists)
    context_messages: dict[Hashable, list[Message]] = field(default_factory=_lists)

    def of(self, label: Hashable) -> tuple[Sequence[Operation], Sequence[Message], Sequence[Message]]:
        """Return the operations of a label, its messages and those among the ranks that share sequences."""
        return self.operations.get(label, ()), self.messages.get(label, ()), self.context_messages.get(label, ())


class OperationCounter:
    """Records the operations of a step, by the label of the place where they are called.

    Args:
        place: Says where the step is.
        context_group: The ranks that share sequences; ``None`` if there are none.
        tensor_group: The ranks that share the layers whose vector gradients are summed; ``None`` if there are none.

    Attributes:
        counts: What it has recorded.
    """

    def __init__(
        self, place: Callable[[], Hashable], context_group: dist.ProcessGroup | None, tensor_group: TensorGroup | None
    ) -> None:
        self._place, self._context_group, self._tensor_group = place, context_group, tensor_group
        self.counts = Counts()
        self._is_paused = False
        self._mode: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter it around the step."""
        if OperatorMode is None:
            raise ValueError(f"torch {torch.__version__} cannot count the operations of a step. [LH135]")
        self._mode = OperatorMode(self._call)
        with self._mode:
            yield

    def paused(self) -> AbstractContextManager[None]:
        """Record no operations while entered."""
        return replaced_attributes(self, _is_paused=True)

    def lists_of(self, place: Hashable) -> Sequence[list[Any]]:
        """Return what grows while the step is in a place: operations and messages."""
        counts = self.counts
        return counts.operations[place], counts.messages[place], counts.context_messages[place]

    def enter_layer(self, place: Hashable, tensors: list[Tensor]) -> None:
        """A layer is about to get its share of what it is given whole: for these tensors gradients have to be sent.

        Args:
            place: The layer's.
            tensors: What it is given; the first one of three dimensions is divided, and others are not.
        """
        if self._context_group is None:
            return
        hidden = next((each for each in tensors if each.is_floating_point() and each.ndim == 3), None)
        for tensor in tensors:
            if tensor.requires_grad and not isinstance(tensor, ShardedSequence):
                back = in_ring(self._context_group.size(), 1 if tensor is hidden else 2, tensor.nbytes)
                self.counts.context_messages[place].append(Message(back=back))

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        given = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        for tensor in given:
            if isinstance(tensor, ShardedActivation):
                with self._mode:  # what an operator of such a tensor does is not seen here
                    self._record_read(tensor)
        result = function(*args, **kwargs)
        self._record(function, args, kwargs, given, result)
        return result

    def _record_read(self, activation: ShardedActivation) -> None:
        """A sequence in shares is gathered, now if it has not been; its gradient needs no message."""
        messages = self.counts.context_messages[self._place()]
        before = len(messages)
        activation.read()
        messages[before:] = [Message(each.there) for each in messages[before:]]

    def _record(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor], result: Any) -> None:
        namespace, _, name = operator_name(function).partition("::")
        if namespace == "c10d":
            self._record_message(name, args, tensors)
            return
        if self._is_paused or function.is_view or namespace == "prim":  # `prim` operators tell the device of a tensor
            return
        made = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
        moved = sum(tensor.nbytes for tensor in (*tensors, *made))
        flops = _count_flops(function, args, kwargs, result)
        is_batched = name in ("bmm", "baddbmm")
        is_attention = is_batched or name.startswith(FLASH_ATTENTION)
        if moved:
            operation = Operation(flops, moved, flops > 0 and not is_batched, is_attention)
            self.counts.operations[self._place()].append(operation)

    def _record_message(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        group = dist.ProcessGroup.unbox(next(each for each in args if isinstance(each, ScriptObject)))
        is_context = group is self._context_group
        messages = (self.counts.context_messages if is_context else self.counts.messages)[self._place()]
        if name in _COLLECTIVES:
            there = in_ring(group.size(), _COLLECTIVES[name], max(tensor.nbytes for tensor in tensors))
            # What is exchanged goes back in backward, and what was gathered is reduce-scattered.
            back = there if name != "allreduce_" or not is_context else NO_MESSAGES
            shared = self._tensor_group
            if name == ALL_GATHER and shared is not None and group is not shared():
                # For a product, and for that of a gradient once more. Copies of a weight sum its gradient.
                num_bytes, copies = min(tensor.nbytes for tensor in tensors), shared.weight_copies(group)
                back += there + (in_ring(copies, 2, num_bytes) if copies > 1 else NO_MESSAGES)
            messages.append(Message(there, back))
        elif name == "send" and is_context:
            messages.append(_hop(group.size(), tensors[0]))

    def enter_block(self, vectors: list[Tensor]) -> None:
        """A layer in blocks is about to run: ranks with the same features sum the gradients of its biases.

        Args:
            vectors: What this rank has of them.
        """
        assert self._tensor_group is not None
        alike = self._tensor_group.size // self._tensor_group.feature_parts
        self.counts.messages[self._place()] += [Message(back=in_ring(alike, 2, vector.nbytes)) for vector in vectors]


def _hop(size: int, block: Tensor) -> Message:
    """One of a ring's ``size - 1`` for keys and values; in backward they go round again, and gradients come home."""
    share = size / (size - 1)
    gradients = block.nbytes * max(1.0, _OF_SUMS / block.itemsize)
    return Message(Messages(block.nbytes, 1, 1), Messages(block.nbytes + share * gradients, 1 + share, 1 + share))


def _count_flops(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    packet, name = function.overloadpacket, operator_name(function)
    # The kernel of the CPU. No backward is traced, but where it is tried whether the kernel is right.
    if packet not in FLOPS and name.startswith(f"aten::{FLASH_ATTENTION}") and not name.endswith("backward"):
        packet = getattr(torch.ops.aten, FLASH_ATTENTION)
    if name.startswith(f"aten::{SCALED_DOT_PRODUCT}") and args[1].shape[1] < args[0].shape[1]:
        # Heads of keys that serve several of the queries, which the formula of torch 2.11 does not know.
        query, key, value, *others = args
        args = query, *(each[:, :1].expand(-1, query.shape[1], -1, -1) for each in (key, value)), *others
    return FLOPS[packet](*args, **kwargs, out_val=result) if packet in FLOPS else 0

"""The operations and messages of a step, counted on fake tensors.

A `TraceRecorder` enters an :class:`OperationCounter` around the forward of a dry run, and :mod:`~.stage_parts` converts
the counts to seconds. The counter is a mode that sees each operator below autograd, so it needs no knowledge of the
user's layers. torch's `FlopCounterMode` would not be enough: times also depend on bytes and messages, and each
operation needs a *label*, which is the position of its layer or a text for code outside the layers.

Only forwards run. The messages of a backward are derived from the messages of the forward, and from the inputs and
vectors of layers: the backward of an all-gather is a reduce-scatter of the same bytes, for example.
"""

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
from lightning_hybrid.tensor_parallel.context_parallel.sharded_sequence import ShardedSequence
from lightning_hybrid.tensor_parallel.experts import Tokens
from lightning_hybrid.tensor_parallel.mappings import TensorGroup
from lightning_hybrid.tensor_parallel.sharded_activation import ShardedActivation
from lightning_hybrid.torch_internals import (
    ALL_GATHER,
    FLASH_ATTENTION,
    GROUPED_PRODUCT,
    REDUCE_SCATTER,
    SCALED_DOT_PRODUCT,
    operator_name,
)
from lightning_hybrid.tuning.messages import NO_MESSAGES, Exchange, Messages, in_ring

FLOPS: dict[Any, Callable[..., int]]
try:
    from torch.utils.flop_counter import flop_registry as FLOPS
except ImportError:
    FLOPS = {}

# The number of passes of a tensor through a ring, see `in_ring`.
_COLLECTIVES = {"allreduce_": 2, ALL_GATHER: 1, REDUCE_SCATTER: 1, "alltoall_base_": 1}
_EXPERT_BYTES = torch.int32.itemsize  # the number of a row's expert, see `TokenDispatch`
_OF_SUMS = torch.float32.itemsize  # gradients are added up at least in float32


@dataclass(frozen=True)
class Operation:
    """One operation of a forward.

    Attributes:
        flops: FLOPs of matrix products, convolutions and attention: two for each multiplication; 0 for other
            operations.
        bytes: Bytes of the tensors that it reads and writes.
        is_kept: True if selective recomputation saves its result.
        is_attention: True if it is, or can be, a part of attention: fused attention, or a batched matrix product.
    """

    flops: float
    bytes: float
    is_kept: bool
    is_attention: bool


def _lists() -> dict[Hashable, list[Any]]:
    return defaultdict(list)


@dataclass(frozen=True)
class Counts:
    """The operations and messages of a step, by label and in order.

    Attributes:
        operations: The operations.
        messages: The messages in the tensor-parallel group.
        context_messages: The messages in the context-parallel group.
        token_messages: The rows that modules with experts receive and return, in bytes, as if all were sent.
    """

    operations: dict[Hashable, list[Operation]] = field(default_factory=_lists)
    messages: dict[Hashable, list[Exchange]] = field(default_factory=_lists)
    context_messages: dict[Hashable, list[Exchange]] = field(default_factory=_lists)
    token_messages: dict[Hashable, list[Exchange]] = field(default_factory=_lists)

    def of(
        self, label: Hashable
    ) -> tuple[Sequence[Operation], Sequence[Exchange], Sequence[Exchange], Sequence[Exchange]]:
        """Return the operations and the messages of a label: tensor-parallel, context-parallel, and of tokens."""
        messages = self.messages, self.context_messages, self.token_messages
        first, second, third = (each.get(label, ()) for each in messages)
        return self.operations.get(label, ()), first, second, third


class OperationCounter:
    """A counter of the operations and messages of a step, by label.

    Args:
        label: Returns the label under which operations and messages are recorded now.
        context_group: The context-parallel group; ``None`` if there is none.
        tensor_group: The tensor-parallel group of layers that sum gradients of vectors; ``None`` if there are none.

    Attributes:
        counts: The recorded operations and messages.
    """

    def __init__(
        self, label: Callable[[], Hashable], context_group: dist.ProcessGroup | None, tensor_group: TensorGroup | None
    ) -> None:
        self._label, self._context_group, self._tensor_group = label, context_group, tensor_group
        self.counts = Counts()
        self._is_paused = False
        self._mode: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Record while entered. Enter it around the step.

        Raises:
            ValueError: If this version of torch cannot count operations.
        """
        if OperatorMode is None:
            raise ValueError(f"torch {torch.__version__} cannot count the operations of a step. [LH135]")
        self._mode = OperatorMode(self._call)
        with self._mode:
            yield

    def paused(self) -> AbstractContextManager[None]:
        """Record messages but no operations while entered."""
        return replaced_attributes(self, _is_paused=True)

    def lists_of(self, label: Hashable) -> Sequence[list[Any]]:
        """Return the lists that grow while the step has a label: operations, and each kind of messages."""
        counts = self.counts
        messages = counts.messages[label], counts.context_messages[label], counts.token_messages[label]
        return counts.operations[label], *messages

    def enter_layer(self, label: Hashable, tensors: list[Tensor]) -> None:
        """Record the backward messages of inputs that a layer receives in full and shards, before it runs.

        Args:
            label: The label of the layer.
            tensors: The inputs of the layer. The first one with three dimensions is sharded, the others are not.
        """
        if self._context_group is None:
            return
        hidden = next((each for each in tensors if each.is_floating_point() and each.ndim == 3), None)
        for tensor in tensors:
            if tensor.requires_grad and not isinstance(tensor, ShardedSequence):
                backward = in_ring(self._context_group.size(), 1 if tensor is hidden else 2, tensor.nbytes)
                self.counts.context_messages[label].append(Exchange(backward=backward))

    def enter_experts(self, tokens: Tokens) -> None:
        """Record the rows that a module with experts receives and returns, before it runs.

        Expert parallelism sends them as `TokenDispatch` does, with one exchange of the numbers of rows.

        Args:
            tokens: The arguments of the module.
        """
        hidden, weights = tokens.hidden, tokens.weights
        states = weights.numel() * hidden.shape[-1] * hidden.itemsize
        forward = Messages(2 * states + weights.nbytes + _EXPERT_BYTES * weights.numel(), 0, 3)
        exchange = Exchange(forward, Messages(2 * states + weights.nbytes, 0, 2))
        self.counts.token_messages[self._label()].append(exchange)

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        given = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        for tensor in given:
            if isinstance(tensor, ShardedActivation):
                with self._mode:  # this mode does not see the operators of such a tensor otherwise
                    self._record_read(tensor)
        result = function(*args, **kwargs)
        self._record(function, args, kwargs, given, result)
        return result

    def _record_read(self, activation: ShardedActivation) -> None:
        """Gather a sharded sequence, unless it has been gathered, and count only messages of the forward."""
        messages = self.counts.context_messages[self._label()]
        before = len(messages)
        activation.read()
        messages[before:] = [Exchange(each.forward) for each in messages[before:]]

    def _record(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor], result: Any) -> None:
        namespace, _, name = operator_name(function).partition("::")
        if namespace == "c10d":
            self._record_message(name, args, tensors)
            return
        if self._is_paused or function.is_view or namespace == "prim":  # `prim` operators return properties of a tensor
            return
        made = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
        moved = sum(tensor.nbytes for tensor in (*tensors, *made))
        flops = _count_flops(function, args, kwargs, result)
        is_batched = name in ("bmm", "baddbmm")
        is_attention = is_batched or name.startswith(FLASH_ATTENTION)
        if moved:
            operation = Operation(flops, moved, flops > 0 and not is_batched, is_attention)
            self.counts.operations[self._label()].append(operation)

    def _record_message(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        """Record a collective or a send of the forward, and the messages of its backward."""
        group = dist.ProcessGroup.unbox(next(each for each in args if isinstance(each, ScriptObject)))
        is_context = group is self._context_group
        messages = (self.counts.context_messages if is_context else self.counts.messages)[self._label()]
        if name in _COLLECTIVES:
            forward = in_ring(group.size(), _COLLECTIVES[name], max(tensor.nbytes for tensor in tensors))
            # The backward of an all-to-all is an all-to-all, and the backward of an all-gather is a reduce-scatter.
            backward = forward if name != "allreduce_" or not is_context else NO_MESSAGES
            shared = self._tensor_group
            if name == ALL_GATHER and shared is not None and group is not shared():
                # The backward gathers once more, for the product with the gradient. Copies of a weight sum gradients.
                num_bytes, copies = min(tensor.nbytes for tensor in tensors), shared.weight_copies(group)
                backward += forward + (in_ring(copies, 2, num_bytes) if copies > 1 else NO_MESSAGES)
            messages.append(Exchange(forward, backward))
        elif name == "send" and is_context:
            messages.append(_hop(group.size(), tensors[0]))

    def enter_block(self, vectors: list[Tensor]) -> None:
        """Record the messages in which ranks with the same features sum gradients of vectors, before a layer runs.

        Args:
            vectors: The parts of the layer's vectors, such as biases, on this rank.
        """
        assert self._tensor_group is not None
        alike = self._tensor_group.size // self._tensor_group.feature_parts
        sums = [in_ring(alike, 2, vector.nbytes) for vector in vectors]
        self.counts.messages[self._label()] += [Exchange(backward=each) for each in sums]


def _hop(size: int, block: Tensor) -> Exchange:
    """Return one of the ``size - 1`` messages of ring attention.

    The forward sends keys and values. The backward sends them again, and their gradients back to their rank.
    """
    share = size / (size - 1)
    gradients = block.nbytes * max(1.0, _OF_SUMS / block.itemsize)
    return Exchange(Messages(block.nbytes, 1, 1), Messages(block.nbytes + share * gradients, 1 + share, 1 + share))


def _count_flops(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of an operator by torch's formulas; 0 for an operator without a formula."""
    packet, name = function.overloadpacket, operator_name(function)
    # The kernel of the CPU. A step runs no backward here, except to test whether the kernel is correct.
    if packet not in FLOPS and name.startswith(f"aten::{FLASH_ATTENTION}") and not name.endswith("backward"):
        packet = getattr(torch.ops.aten, FLASH_ATTENTION)
    if name.startswith(f"aten::{SCALED_DOT_PRODUCT}") and args[1].shape[1] < args[0].shape[1]:
        # Each key head belongs to several query heads, which the formula of torch 2.11 does not support.
        query, key, value, *others = args
        args = query, *(each[:, :1].expand(-1, query.shape[1], -1, -1) for each in (key, value)), *others
    if packet not in FLOPS and name == f"aten::{GROUPED_PRODUCT}":  # in a forward, each row is multiplied by one matrix
        return int(2 * result.numel() * args[0].shape[-1])
    return FLOPS[packet](*args, **kwargs, out_val=result) if packet in FLOPS else 0

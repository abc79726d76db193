"""The order in which layers are unsharded, which is the same on every replica, whichever layers it uses.

`ZeroParameters` has a prefetcher for all layers of this rank, which gathers each layer once in a step, and one for each
stage, which gathers its layers in each forward and each backward. Its hooks call :meth:`Prefetcher.unshard` when a
layer runs. A gather when each layer runs would be simpler. But then the device would wait for each gather, and replicas
that use different layers would start different collectives.

The layer *in flight* is the layer whose gather has started. A layer is *reached* when it is unsharded in the order, or
skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.data_parallel.zero.param_group import ParameterGroup
from lightning_hybrid.distributed.pytree import flatten, unflatten


class Prefetcher:
    """Unshards layers one after the other, each while the layer before it computes.

    Collectives of a group must have the same order on all ranks. So a layer that this replica skips is still unsharded,
    and then resharded at once. Other collectives of a backward are started at fixed points in this order::

        layers used here            2           0
        on another replica          2     1     0
        backward, on both           gather 2, gather 1, [scatter 2], gather 0, [scatter 1], and after it [scatter 0]

    Args:
        groups: The parameters of each layer, in the order of the model.
        keeps_unsharded: If True, layers stay unsharded until other code reshards them, so each step gathers each layer
            once.
        on_unshard: Called in a backward with the index of each layer that is reached, also of a layer that this replica
            skips, but only while `is_in_order` is True. The gradients of later layers are final then.

    Attributes:
        is_in_order: True if each layer was used at most once, in order. The caller sets it to True at the start of a
            step.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        *,
        keeps_unsharded: bool,
        on_unshard: Callable[[int], None] = lambda index: None,
    ) -> None:
        self._groups = groups
        self._keeps_unsharded = keeps_unsharded
        self._on_unshard = on_unshard
        self._is_backward = False
        self.is_in_order = True
        self._pending: list[int] = []  # layers that are not gathered yet, in order
        self._in_flight: int | None = None  # the layer that is being gathered, but was not requested yet

    def begin(self, *, is_backward: bool = False) -> None:
        """Start a forward or a backward, after finishing the previous one."""
        self.finish()
        self._is_backward = is_backward
        self._pending = list(range(len(self._groups)))
        if is_backward:
            self._pending.reverse()

    def unshard(self, index: int) -> None:
        """Unshard a layer.

        Args:
            index: The index of the layer. If the order is already past it, the order starts again, because layers may
                run several times outside of training.
        """
        group = self._groups[index]
        if group.is_unsharded:
            return
        if index != self._in_flight and index not in self._pending:
            self.is_in_order = False
            self.begin()
        while self._prefetch() != index:
            self._skip()
        self._reach(index)
        group.wait_for_unshard()
        self._prefetch()

    def finish(self) -> None:
        """Take part in the remaining collectives, because this replica uses no more layers."""
        while self._prefetch() is not None:
            self._skip()

    def abandon(self) -> None:
        """Drop everything after a failure, without waiting."""
        self._pending.clear()
        self._in_flight = None

    def _prefetch(self) -> int | None:
        """Start to gather the next layer, unless a layer is in flight; return the layer in flight."""
        if self._in_flight is None and self._pending:
            self._in_flight = self._pending.pop(0)
            self._groups[self._in_flight].unshard_async()
        return self._in_flight

    def _reach(self, index: int) -> None:
        self._in_flight = None
        if self._is_backward and self.is_in_order:
            self._on_unshard(index)

    def _skip(self) -> None:
        """Pass the layer in flight, which this replica does not use."""
        index = self._in_flight
        assert index is not None
        self._reach(index)
        if self._keeps_unsharded:
            self._groups[index].wait_for_unshard()
        else:
            self._groups[index].reshard()


def post_backward_hook(tree: Any, hook: Callable[[], None]) -> Any:
    """Return the inputs of a layer, with a hook that is called when the gradients of all inputs have been computed.

    Without gradients, or if no input requires one, the inputs are returned as they are, and the hook is never called.

    Args:
        tree: The inputs.
        hook: The hook.
    """
    leaves, spec = flatten(tree)
    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not indices or not torch.is_grad_enabled():
        return tree
    passed = _PostBackward.apply(hook, *(leaves[index] for index in indices))  # type: ignore[no-untyped-call]
    for index, leaf in zip(indices, passed, strict=True):
        leaves[index] = leaf
    return unflatten(leaves, spec)


class _PostBackward(torch.autograd.Function):
    """The identity at the inputs of a layer. Autograd runs its node after all nodes of the layer, which are younger."""

    @staticmethod
    def forward(ctx: Any, hook: Callable[[], None], *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.hook = hook
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.hook()
        return (None, *gradients)

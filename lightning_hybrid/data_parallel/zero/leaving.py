"""Where a backward leaves a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.distributed.pytree import flatten, unflatten

__all__ = ["post_backward_hook"]


def post_backward_hook(tree: Any, leave: Callable[[], None]) -> Any:
    """The inputs of a layer; `leave` is called when the gradients of all of them have been computed."""
    leaves, spec = flatten(tree)
    wanted = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return tree
    passed = _Leave.apply(leave, *(leaves[index] for index in wanted))  # type: ignore[no-untyped-call]
    for index, leaf in zip(wanted, passed, strict=True):
        leaves[index] = leaf
    return unflatten(leaves, spec)


class _Leave(torch.autograd.Function):
    """The identity, where a backward leaves a layer: its nodes run after all of the layer's own, which are younger."""

    @staticmethod
    def forward(ctx: Any, leave: Callable[[], None], *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.leave = leave
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.leave()
        return (None, *gradients)

"""One piece of the model: forward and backward of one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.pytree import LEAF, TreeSpec, flatten, unflatten
from lightning_hybrid.torch_internals import run_backward

Message = tuple[list[Any], TreeSpec]
"""A message between stages: the leaves of a tree, and its structure. A gradient is sent back for each tensor that
requires one."""

Gradients = list[Tensor | None]
"""The reply to a message: one gradient per leaf, or ``None`` for a leaf without a gradient. The list is empty if the
microbatch has no loss."""


class Nothing(Enum):
    """The value of a stage where a step that has no loss ends before the layers of the stage, or before its loss."""

    NOTHING = "nothing"


NOTHING = Nothing.NOTHING

Root = Any
"""The starting point of backward: an output tensor, or a gradient edge, which refers to an output without keeping
its data."""

# Up to this many elements an input is copied, and an output kept: that takes less time than not to.
_SMALL = 4096


class Stage:
    """One piece of the model, and the microbatches that are under way in it.

    ::

        message --> enter --> inputs --> layers --> outputs --> leave --> message     the graph of a microbatch begins
                                :                      :                              at its inputs and ends at its
        gradients <---------- inputs <--- backward --- outputs <--------- gradients   outputs

    Between forward and backward a stage keeps nothing of size but what autograd saves, neither inputs nor outputs: a
    gradient edge names an output without its data. And the inputs are no leaves of the graph but results of an
    identity, so a first layer may change them in place.

    Args:
        index: Index of the stage in the whole model.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._kept: dict[int, _Kept] = {}

    def __len__(self) -> int:
        """Number of microbatches that wait for their backward."""
        return len(self._kept)

    def enter(self, microbatch: int, message: Message | None) -> Any:
        """Begin the forward of one microbatch, whose backward will follow.

        Args:
            microbatch: Index of the microbatch.
            message: What the stage before made; ``None`` on the first stage.

        Returns:
            The inputs of the layers; :data:`NOTHING` if the message is empty.
        """
        inputs, sources = (NOTHING, []) if _is_empty(message) else _enter(message)
        self._kept[microbatch] = _Kept(sources)
        return inputs

    def leave(self, microbatch: int, outputs: Any) -> Message:
        """End such a forward.

        Args:
            microbatch: Index of the microbatch.
            outputs: Of the layers; :data:`NOTHING` if they have not run.

        Returns:
            The outputs. They are still attached to the graph: drop them once they are handed on.
        """
        if outputs is NOTHING:
            self._kept[microbatch].has_loss = False
            return [], EMPTY
        leaves, spec = ([outputs], LEAF) if isinstance(outputs, Tensor) else flatten(outputs)
        self._kept[microbatch].roots = [_root(leaf) for leaf in leaves]
        return leaves, spec

    def leave_with_loss(self, microbatch: int, loss: Any) -> None:
        """End such a forward on the last stage, where the loss (a scalar) is what backward begins with.

        Args:
            microbatch: Index of the microbatch.
            loss: The loss; :data:`NOTHING` if the microbatch has none.
        """
        # Everything may be frozen: then there is nothing to do in backward.
        self._kept[microbatch].loss = loss if _requires_grad(loss) else None
        self._kept[microbatch].has_loss = loss is not NOTHING

    def drop(self, microbatch: int) -> None:
        """Forget a microbatch whose backward does not come, if its forward has begun."""
        self._kept.pop(microbatch, None)

    def inputs(self, message: Message | None) -> Any:
        """The inputs of the layers for a forward without a backward, of which nothing is kept."""
        return _enter(message)[0]

    def backward(self, microbatch: int, gradients: Gradients | None) -> Gradients:
        """Backward of one microbatch; gradients of parameters are accumulated in their ``grad``.

        Args:
            microbatch: Index of the microbatch.
            gradients: Gradients of the outputs, leaf by leaf; ``None`` on the last stage, where the loss is the root.

        Returns:
            Gradients of the inputs, leaf by leaf.

        Raises:
            ValueError: If the loss is not a real scalar.
        """
        kept = self._kept.pop(microbatch)
        sources, roots, loss = kept.sources, kept.roots, kept.loss
        if not kept.has_loss or (roots and gradients == []):
            return []  # not zeros: where activations are not finite, gradients would be NaN
        if loss is not None:
            if loss.numel() != 1 or not loss.is_floating_point():
                raise ValueError(
                    f"the loss must be a real scalar, got {loss.dtype} of shape {list(loss.shape)} [LH719]"
                )
            _propagate((loss,), (torch.ones_like(loss),))
        elif gradients is not None:
            pairs = [(r, g) for r, g in zip(roots, gradients, strict=True) if r is not None and g is not None]
            if pairs:
                _propagate(tuple([root for root, _ in pairs]), tuple([gradient for _, gradient in pairs]))
        gradients = [None if source is None else source.grad for source in sources]
        return [full_tensor(each) if isinstance(each, DTensor) else each for each in gradients]


def _propagate(roots: tuple[Root, ...], gradients: tuple[Tensor, ...]) -> None:
    """``torch.autograd.backward``, without its checks of shapes and types, which have been made before.

    They take as long as the backward of a small layer.
    """
    if _RUN_BACKWARD is None:
        torch.autograd.backward(roots, gradients)
    else:
        _RUN_BACKWARD(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _find_run_backward() -> Callable[..., Any] | None:
    """What ``torch.autograd.backward`` calls after its checks: private, so it is tried before it is relied upon."""
    try:
        assert run_backward is not None
        leaf = torch.ones((), device="cpu", requires_grad=True)
        run_backward(
            (leaf * 2,), (torch.ones((), device="cpu"),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        return run_backward if leaf.grad is not None and leaf.grad.item() == 2 else None
    except Exception:  # it is gone, or takes other arguments
        return None


class _Source:
    """Where the gradient of a large input arrives; it has the attribute of a tensor, but no data."""

    __slots__ = ("grad",)

    def __init__(self) -> None:
        self.grad: Tensor | None = None


@dataclass(slots=True)
class _Kept:
    """What a microbatch leaves behind for its backward."""

    sources: list[Tensor | _Source | None]
    roots: list[Root | None] = field(default_factory=list)
    loss: Tensor | None = None
    has_loss: bool = True


def _enter(message: Message | None) -> tuple[Any, list[Tensor | _Source | None]]:
    """The inputs as the layers see them, and for each leaf where its gradient will be."""
    if message is None:
        return None, []
    leaves, spec = message
    inputs: list[Any] = []
    sources: list[Tensor | _Source | None] = []
    for leaf in leaves:
        source: Tensor | _Source | None = None
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            if leaf.numel() <= _SMALL:
                source = leaf.detach().requires_grad_()
                leaf = source.clone()
            else:
                source = _Source()
                leaf = _Identity.apply(source, _ANCHOR, leaf.detach())  # type: ignore[no-untyped-call]
        inputs.append(leaf)
        sources.append(source)
    return (inputs[0] if spec.kind is None else unflatten(inputs, spec)), sources


def _is_empty(message: Message | None) -> bool:
    return message is not None and not message[0] and message[1] == EMPTY


def _root(leaf: Any) -> Root | None:
    if not _requires_grad(leaf):
        return None
    return leaf if leaf.numel() <= _SMALL else get_gradient_edge(leaf)


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Identity(torch.autograd.Function):
    """The identity, where a gradient leaves the graph.

    The tensor that goes in does not require grad: if it were a leaf of the graph, the graph would hold its data,
    whether or not a layer needs them. An anchor without elements makes the one that comes out require grad.
    """

    @staticmethod
    def forward(ctx: Any, source: _Source, anchor: Tensor, leaf: Tensor) -> Tensor:
        ctx.source = source
        return leaf.detach()  # not a view for autograd: it may be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.source.grad = gradient
        return None, None, None


EMPTY = TreeSpec.of(Nothing, (), ())
_RUN_BACKWARD = _find_run_backward()
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)

"""One piece of the model: forward and backward of one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_hybrid.pytree import TreeSpec, flatten, unflatten

__all__ = ["Compute", "Gradients", "Message", "Stage"]

Compute = Callable[[int, int, Any], Any]
"""``compute(stage, microbatch, inputs) -> outputs``: runs the layers of a stage."""

Message = tuple[list[Any], TreeSpec]
"""What goes from stage to stage: the leaves of a tree, and the tree. Tensors that require grad get a gradient back."""

Gradients = list[Tensor | None]
"""What comes back: one gradient per leaf of the message, ``None`` for leaves without one."""

_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


class _Kept(NamedTuple):
    """What a microbatch leaves behind for its backward, besides what autograd saves.

    Neither its inputs nor its outputs: a gradient edge names an output without keeping its data alive.
    """

    input_gradients: Gradients
    edges: list[GradientEdge | None]
    loss: Tensor | None


class Stage:
    """One piece of the model, and the microbatches that are under way in it.

    ::

        inputs  --detach--> enter --> compute --> outputs --> gradient edges (kept), outputs (handed out)
                              |          :           :
        input_gradients <-----'..........:...........:..... gradients of the outputs

    Autograd's graph begins at the inputs and ends at the outputs: stages are joined by messages only. The inputs enter
    through an identity function and not as leaves, so a first layer may change them in place.

    Args:
        index: Index of the stage in the whole model.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._kept: dict[int, _Kept] = {}

    def __len__(self) -> int:
        """Number of microbatches that wait for their backward."""
        return len(self._kept)

    def forward(self, compute: Compute, microbatch: int, message: Message | None) -> Message:
        """Forward of one microbatch, whose backward will follow.

        Args:
            compute: Runs the layers.
            microbatch: Index of the microbatch.
            message: What the stage before made; ``None`` on the first stage.

        Returns:
            The outputs. They are still attached to the graph: drop them once they are handed on.
        """
        inputs, input_gradients = _enter(message)
        leaves, spec = flatten(compute(self.index, microbatch, inputs))
        edges = [get_gradient_edge(leaf) if _requires_grad(leaf) else None for leaf in leaves]
        self._kept[microbatch] = _Kept(input_gradients, edges, None)
        return leaves, spec

    def forward_loss(self, compute: Compute, microbatch: int, message: Message | None) -> None:
        """Forward of one microbatch on the last stage, where ``compute`` returns the loss (a scalar)."""
        inputs, input_gradients = _enter(message)
        loss = compute(self.index, microbatch, inputs)
        # Everything may be frozen: then there is nothing to do in backward.
        self._kept[microbatch] = _Kept(input_gradients, [], loss if _requires_grad(loss) else None)

    def evaluate(self, compute: Compute, microbatch: int, message: Message | None) -> Any:
        """Forward of one microbatch without a backward: returns the outputs and keeps nothing."""
        return compute(self.index, microbatch, _enter(message)[0])

    def backward(self, microbatch: int, gradients: Gradients | None) -> Gradients:
        """Backward of one microbatch; gradients of parameters are accumulated in their ``grad``.

        Args:
            microbatch: Index of the microbatch.
            gradients: Gradients of the outputs, leaf by leaf; ``None`` on the last stage, where the loss is the root.

        Returns:
            Gradients of the inputs, leaf by leaf.
        """
        input_gradients, edges, loss = self._kept.pop(microbatch)
        if loss is not None:
            torch.autograd.backward(loss)
        elif gradients is not None:
            pairs = [(e, g) for e, g in zip(edges, gradients, strict=True) if e is not None and g is not None]
            if pairs:
                torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        return input_gradients


def _enter(message: Message | None) -> tuple[Any, Gradients]:
    """The inputs as the layers see them, and the list in which backward will leave their gradients."""
    if message is None:
        return None, []
    leaves, spec = message
    gradients: Gradients = [None] * len(leaves)
    wanted = [i for i, leaf in enumerate(leaves) if _requires_grad(leaf)]
    if wanted:
        leaves = list(leaves)
        entered: tuple[Tensor, ...] = _Enter.apply(  # type: ignore[no-untyped-call]
            gradients, wanted, _ANCHOR, *[leaves[i].detach() for i in wanted]
        )
        for i, leaf in zip(wanted, entered, strict=True):
            leaves[i] = leaf
    return unflatten(leaves, spec), gradients


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Enter(torch.autograd.Function):
    """The identity, where gradients leave the graph.

    The tensors that go in do not require grad (otherwise the graph would keep them alive, whether or not a layer needs
    them); an anchor without elements makes those that come out require it.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, wanted: list[int], anchor: Tensor, *leaves: Tensor) -> Any:
        ctx.gradients = gradients
        ctx.wanted = wanted
        ctx.set_materialize_grads(False)
        return tuple([leaf.detach() for leaf in leaves])  # no views: these may be changed in place

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor | None) -> Any:
        for i, gradient in zip(ctx.wanted, arrived, strict=True):
            ctx.gradients[i] = gradient
        return (None,) * (3 + len(arrived))

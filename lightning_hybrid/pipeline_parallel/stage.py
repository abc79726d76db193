"""One stage of the model: forward and backward of one microbatch.

The engine makes a :class:`Stage` for each stage of its rank when it first runs a schedule. For a forward that needs a
backward, the engine calls :meth:`Stage.enter`, runs the layers, and calls :meth:`Stage.leave`, or on the last stage
:meth:`Stage.leave_with_loss`. For each backward, it calls :meth:`Stage.backward`. For a forward without a backward, it
only calls :meth:`Stage.inputs`. The engine also sends and receives the messages.

To keep the inputs and outputs of each microbatch until its backward would be simpler, and would give the same
gradients. But it needs more memory: here, only what autograd saves stays in memory between forward and backward.
"""

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
    """Value in place of the inputs, outputs or loss of a microbatch for which the user's step returns ``None``."""

    NOTHING = "nothing"


NOTHING = Nothing.NOTHING

Root = Any
"""The starting point of backward: an output tensor, or a gradient edge, which refers to an output without keeping
its data."""

# Inputs with up to this many elements are copied, and outputs with up to this many are kept, which is faster.
_SMALL = 4096


class Stage:
    """One stage of the model, with the microbatches whose backward has not run yet.

    ::

        message --> enter --> inputs --> layers --> outputs --> leave --> message     the graph of a microbatch begins
                                :                      :                              at its inputs and ends at its
        gradients <---------- inputs <--- backward --- outputs <--------- gradients   outputs

    Between forward and backward, a stage stores no large inputs or outputs, only the tensors that autograd saves. A
    gradient edge refers to an output without storing its data. The inputs are not leaves of the graph, but results of
    an identity or a copy, so a first layer may change them in place.

    Args:
        index: The index of the stage in the whole model.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._kept: dict[int, _Kept] = {}

    def __len__(self) -> int:
        """Return the number of microbatches that wait for their backward."""
        return len(self._kept)

    def enter(self, microbatch: int, message: Message | None) -> Any:
        """Begin the forward of a microbatch whose backward will follow.

        Args:
            microbatch: The index of the microbatch.
            message: The output of the previous stage; ``None`` on the first stage.

        Returns:
            The inputs of the layers; :data:`NOTHING` if the message is empty.
        """
        inputs, sources = (NOTHING, []) if _is_empty(message) else _enter(message)
        self._kept[microbatch] = _Kept(sources)
        return inputs

    def leave(self, microbatch: int, outputs: Any) -> Message:
        """End the forward of a microbatch whose backward will follow.

        Args:
            microbatch: The index of the microbatch.
            outputs: The outputs of the layers; :data:`NOTHING` if the layers did not run.

        Returns:
            The outputs as a message. They keep the graph in memory, so delete the message after it was sent.
        """
        if outputs is NOTHING:
            self._kept[microbatch].has_loss = False
            return [], EMPTY
        leaves, spec = ([outputs], LEAF) if isinstance(outputs, Tensor) else flatten(outputs)
        self._kept[microbatch].roots = [_root(leaf) for leaf in leaves]
        return leaves, spec

    def leave_with_loss(self, microbatch: int, loss: Any) -> None:
        """End the forward of a microbatch on the last stage, where backward begins at the loss.

        Args:
            microbatch: The index of the microbatch.
            loss: The loss, a scalar; :data:`NOTHING` if the microbatch has no loss.
        """
        # If all parameters are frozen, backward has nothing to do.
        self._kept[microbatch].loss = loss if _requires_grad(loss) else None
        self._kept[microbatch].has_loss = loss is not NOTHING

    def drop(self, microbatch: int) -> None:
        """Forget a microbatch without a backward after the run was broken off. Its forward may not have begun."""
        self._kept.pop(microbatch, None)

    def inputs(self, message: Message | None) -> Any:
        """Return the inputs of the layers for a forward without a backward, as in evaluation. Nothing is stored."""
        return _enter(message)[0]

    def backward(self, microbatch: int, gradients: Gradients | None) -> Gradients:
        """Run the backward of a microbatch. Gradients of parameters are accumulated in their ``grad``.

        If the gradient of an input is sharded over tensor-parallel ranks (a `DTensor`), it is gathered, and all these
        ranks must call this method.

        Args:
            microbatch: The index of the microbatch.
            gradients: The gradient of each output leaf; an empty list if a later stage has found that the microbatch
                has no loss; ``None`` on the last stage, where backward begins at the loss.

        Returns:
            The gradient of each input leaf, ``None`` for a leaf without a gradient; an empty list on the first stage,
            and if the microbatch has no loss.

        Raises:
            ValueError: If the loss is not a real scalar.
        """
        kept = self._kept.pop(microbatch)
        sources, roots, loss = kept.sources, kept.roots, kept.loss
        if not kept.has_loss or (roots and gradients == []):
            return []  # not zeros, because gradients of non-finite activations would be NaN
        if loss is not None:
            if loss.numel() != 1 or not loss.is_floating_point():
                raise ValueError(
                    f"the loss must be a real scalar, got dtype {loss.dtype} and shape {list(loss.shape)} [LH719]"
                )
            _propagate((loss,), (torch.ones_like(loss),))
        elif gradients is not None:
            pairs = [(r, g) for r, g in zip(roots, gradients, strict=True) if r is not None and g is not None]
            if pairs:
                _propagate(tuple([root for root, _ in pairs]), tuple([gradient for _, gradient in pairs]))
        gradients = [None if source is None else source.grad for source in sources]
        return [full_tensor(each) if isinstance(each, DTensor) else each for each in gradients]


def _propagate(roots: tuple[Root, ...], gradients: tuple[Tensor, ...]) -> None:
    """Run ``torch.autograd.backward`` without its checks of shapes and types, which the caller has already made.

    The checks take as long as the backward of a small layer.
    """
    if _RUN_BACKWARD is None:
        torch.autograd.backward(roots, gradients)
    else:
        _RUN_BACKWARD(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _find_run_backward() -> Callable[..., Any] | None:
    """Return the function that ``torch.autograd.backward`` calls after its checks.

    The function is private, so it is tested before use.

    Returns:
        The function; ``None`` if it does not exist or takes other arguments.
    """
    try:
        assert run_backward is not None
        leaf = torch.ones((), device="cpu", requires_grad=True)
        run_backward(
            (leaf * 2,), (torch.ones((), device="cpu"),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        return run_backward if leaf.grad is not None and leaf.grad.item() == 2 else None
    except Exception:  # the function does not exist, or takes other arguments
        return None


class _Source:
    """Object that receives the gradient of a large input. It has a ``grad`` attribute like a tensor, but no data."""

    __slots__ = ("grad",)

    def __init__(self) -> None:
        self.grad: Tensor | None = None


@dataclass(slots=True)
class _Kept:
    """State that a microbatch needs for its backward.

    Attributes:
        sources: For each input leaf, the object that receives its gradient; ``None`` if it has no gradient.
        roots: For each output leaf, the starting point of backward; ``None`` if the leaf requires no gradient.
        loss: The loss on the last stage; ``None`` on other stages, and if the loss requires no gradient.
        has_loss: False if this stage's forward has shown that the microbatch has no loss. Other stages only learn it
            from an empty list of gradients.
    """

    sources: list[Tensor | _Source | None]
    roots: list[Root | None] = field(default_factory=list)
    loss: Tensor | None = None
    has_loss: bool = True


def _enter(message: Message | None) -> tuple[Any, list[Tensor | _Source | None]]:
    """Return the inputs of the layers and, for each leaf, the object that receives its gradient."""
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
    """Return whether a message is the message of a stage whose layers did not run."""
    return message is not None and not message[0] and message[1] == EMPTY


def _root(leaf: Any) -> Root | None:
    """Return the starting point of backward for an output leaf."""
    if not _requires_grad(leaf):
        return None
    return leaf if leaf.numel() <= _SMALL else get_gradient_edge(leaf)


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Identity(torch.autograd.Function):
    """Identity whose backward stores the gradient in a :class:`_Source`.

    The input tensor does not require grad. If it were a leaf of the graph, the graph would keep its data alive even if
    no layer needs the data. An anchor without elements makes the output require grad.
    """

    @staticmethod
    def forward(ctx: Any, source: _Source, anchor: Tensor, leaf: Tensor) -> Tensor:
        ctx.source = source
        return leaf.detach()  # not a view for autograd, so layers may change it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.source.grad = gradient
        return None, None, None


EMPTY = TreeSpec.of(Nothing, (), ())
_RUN_BACKWARD = _find_run_backward()
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)

"""Losses that leave a layer beside its results, and so are of one share of the sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from lightning_hybrid.distributed.pytree import flatten


class Leaks:
    """Finds, in autograd's graph, ways out of layers that do not go through their results.

    ::

        x --> entry --> layer --> exit --> ... --> loss        a way from the loss to an entry, by no exit:
                          `------> self.balance --'            what went this way is of one share

    Examples are a balancing loss that a layer keeps as an attribute, and sums over positions that a hook collects: they
    cover the positions of one share only. Nodes are marked in one call of each layer: an entry by a product with one,
    an exit by the node that joins the shares.
    """

    def __init__(self) -> None:
        self._entries: dict[Node, str] = {}
        self._exits: set[Node] = set()

    def enter(self, name: str, x: Tensor) -> Tensor:
        """What a layer is given."""
        x = _marked(x)
        if x.grad_fn is not None:
            self._entries[x.grad_fn] = name
        return x

    def leave(self, x: Tensor) -> None:
        """Mark a whole sequence that code around a layer, or a hook inside it, receives."""
        if x.grad_fn is not None and self._entries:  # without entries, the layer is being recomputed in backward
            self._exits.add(x.grad_fn)

    def find(self, value: Any) -> str | None:
        """The layer out of which a tensor of a tree came another way, if there is one; marks are gone afterwards."""
        if not self._entries:  # as in all steps but the first ones
            return None
        ahead = [leaf.grad_fn for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
        seen = set(self._exits)
        try:
            while ahead:
                node = ahead.pop()
                if node is None or node in seen:
                    continue
                if node in self._entries:
                    return self._entries[node]
                seen.add(node)
                ahead += [each for each, _ in node.next_functions]
            return None
        finally:
            self._entries.clear()
            self._exits.clear()


def _marked(x: Tensor) -> Tensor:
    """The same numbers, as the result of an operation of its own; no view, as what is written into one moves nodes."""
    return x * 1 if x.requires_grad and x.is_floating_point() else x

"""The detection of losses that depend on values of a single sequence shard.

`ContextParallel` marks the tensors of a layer in the first call of the layer (`Division.mark`), and searches the graph
of the loss in `ContextParallel.leave`. Without this check, such a loss would be wrong without an error: each rank would
have another value.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from lightning_hybrid.distributed.pytree import flatten


class Leaks:
    """A search in the autograd graph for paths out of layers that do not go through their results.

    ::

        x --> entry --> layer --> exit --> ... --> loss        a path from the loss to an entry without an exit:
                          `------> self.balance --'            the tensor on this path covers one shard

    Examples are a balancing loss that a layer stores in an attribute, and sums over positions that a hook collects.
    They cover only the positions of one shard. Nodes are marked only in calls of layers that come after a trial, so
    later steps cost nothing. An entry is marked by a product with 1, and an exit by the node that joins the shards.
    """

    def __init__(self) -> None:
        self._entries: dict[Node, str] = {}
        self._exits: set[Node] = set()

    def enter(self, name: str, x: Tensor) -> Tensor:
        """Mark a tensor that enters a layer, and return its replacement.

        Args:
            name: The name of the layer.
            x: A shard, or a full tensor that the layer receives. Tensors without a gradient are returned unchanged.
        """
        x = _marked(x)
        if x.grad_fn is not None:
            self._entries[x.grad_fn] = name
        return x

    def leave(self, x: Tensor) -> None:
        """Mark a full sequence that code around a layer, or a hook inside it, receives."""
        if x.grad_fn is not None and self._entries:  # without entries, the layer is being recomputed in backward
            self._exits.add(x.grad_fn)

    def find(self, value: Any) -> str | None:
        """Find a layer on which a tensor depends in another way than by the layer's results, and remove all marks.

        Args:
            value: A tree with the tensors.

        Returns:
            The name of the layer; ``None`` if there is none.
        """
        if not self._entries:  # in all steps except the first ones
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
    """Return the values as the result of a new operation. A view would get another node when it is written."""
    return x * 1 if x.requires_grad and x.is_floating_point() else x

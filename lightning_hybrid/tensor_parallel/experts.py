"""Experts of a mixture of experts, sharded over the tensor-parallel ranks, and the form of modules with experts.

`styles` maps the style ``"experts"`` to :class:`ParallelExperts`; ``HybridStrategy(expert_parallel="tensor")`` gives
this style to all modules with experts. The package `expert_parallel` shards the same modules over replicas.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_hybrid.distributed.dtensor import shard_of, uncompiled
from lightning_hybrid.distributed.random import own_draws
from lightning_hybrid.distributed.replaced import replaced_entries
from lightning_hybrid.tensor_parallel.layers import ParallelLayer, original_class
from lightning_hybrid.tensor_parallel.mappings import gather_from_sp, gather_input, reduce_from_tp, reduce_scatter_to_sp

_INDEX, _WEIGHT = ("index", "indices"), ("weight",)


def is_experts(module: nn.Module) -> bool:
    """Return True if each row of a module's parameters belongs to an expert, and its forward receives the experts.

    The forward takes the hidden states of tokens, ``(tokens, features)``; the experts of each token, ``(tokens, k)``;
    and the weights of their results, ``(tokens, k)``::

        class Experts(nn.Module):  # num_experts, gate_up_proj (experts, ...), down_proj (experts, ...)
            def forward(self, hidden_states, top_k_index, top_k_weights): ...
    """
    count = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    if not isinstance(count, int) or not own or any(each.ndim < 2 or len(each) != count for each in own):
        return False
    names = argument_names(module)
    return len(names) == 3 and names[1].endswith(_INDEX) and any(word in names[2] for word in _WEIGHT)


@functools.lru_cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:4]  # type: ignore[attr-defined]


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the first three arguments of a module's forward."""
    return _names(original_class(module))


class Tokens(NamedTuple):
    """The arguments of a module with experts.

    Attributes:
        hidden: The hidden states, ``(tokens, features)``.
        chosen: The experts of each token, ``(tokens, k)``.
        weights: The weights of their results, ``(tokens, k)``.
        others: The other arguments, by name.
    """

    hidden: Tensor
    chosen: Tensor
    weights: Tensor
    others: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tokens:
        """Return the arguments of a call."""
        names = argument_names(module)
        others = dict(zip(names, args, strict=False)) | dict(kwargs)
        hidden, chosen, weights = (others.pop(name) for name in names)
        return cls(hidden, chosen, weights, others)


class ParallelExperts(ParallelLayer):
    """A module that computes this rank's experts. The results of all ranks are summed.

    All ranks have all tokens; in a region of sequence parallelism, tokens are gathered. A *row* is a token for one of
    its experts. With 4 experts over 2 ranks::

        tokens  experts        rank 0: module on the rows a0 b1, with local experts 0 and 1
        a       0, 3     --->  rank 1: module on the rows a3 b2, with local experts 0 and 1     sum over rows and ranks
        b       1, 2

    The module receives rows as tokens with one expert each (k = 1).
    """

    num_experts: int

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Map tokens ``(tokens, features)``, their experts and weights ``(tokens, k)`` to ``(tokens, features)``."""
        assert isinstance(self, nn.Module)
        tokens, group = Tokens.of(self, args, kwargs), self.tensor_group
        # In a region, each rank has other tokens. Their order does not matter, so they are gathered as they are.
        dim = None if self.sequence_dim is None else 0
        hidden, weights = (gather_input(each, dim, group) for each in (tokens.hidden, tokens.weights))
        chosen = tokens.chosen if dim is None else gather_from_sp(tokens.chosen, dim, group)
        index, k, local = chosen.reshape(-1), chosen.shape[1], self.num_experts // group.size
        (rows,) = (index.div(local, rounding_mode="floor") == group.rank).nonzero(as_tuple=True)
        received = hidden[rows.div(k, rounding_mode="floor")], weights.reshape(-1)[rows].unsqueeze(1)
        parameters = {name: shard_of(parameter) for name, parameter in self._parameters.items()}
        # Ranks compute different rows, so that they would draw different numbers from equal generators.
        draws = own_draws(group.rank, hidden.device) if self.training else nullcontext()
        with replaced_entries([(vars(self), {**parameters, "num_experts": local})]), draws:
            result = super().forward(received[0], (index % local)[rows].unsqueeze(1), received[1], **tokens.others)  # type: ignore[misc]
        if not len(rows):
            result = connected(result, [*received, *filter(None.__ne__, parameters.values())])
        # Not `index_add`, which is not deterministic on CUDA.
        summands = result.new_zeros(len(index), *result.shape[1:]).index_copy(0, rows, result)
        partial = summands.view(*chosen.shape, *result.shape[1:]).sum(1)
        return reduce_from_tp(partial, group) if dim is None else reduce_scatter_to_sp(partial, dim, group)


class _Connected(torch.autograd.Function):
    """A tensor whose backward also reaches other tensors, with zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        """Return the tensor."""
        ctx.save_for_backward(*others)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient, and zeros for the other tensors that need a gradient."""
        needs = ctx.needs_input_grad[1:]
        zeros = [torch.zeros_like(each) if need else None for each, need in zip(ctx.saved_tensors, needs, strict=True)]
        return gradient, *zeros


def connected(tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return a tensor whose backward also reaches other tensors, with zeros as gradients.

    A rank without tokens must take part in the collectives of backward, although nothing was computed from the tokens.

    Args:
        tensor: The tensor.
        others: The other tensors.
    """
    return _Connected.apply(tensor, *others)  # type: ignore[no-untyped-call, no-any-return]

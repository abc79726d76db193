"""`nn.MultiheadAttention` with its heads sharded over the tensor-parallel ranks.

The plan gives such layers the style ``"attention"`` (`styles`), and :func:`~.layers.parallelize_layer` then changes the
class of the user's layer to :class:`ParallelAttention`. torch's forward cannot run on shards, because it compares the
shapes of its weights with the full sizes. The layer for ranks in a square or cube, `grid.layers.GridAttention`, is a
subclass that replaces the private methods.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hybrid.distributed.dtensor import shard_of, uncompiled
from lightning_hybrid.distributed.random import own_draws
from lightning_hybrid.tensor_parallel.context_parallel.attention import additive_mask, whole_keys
from lightning_hybrid.tensor_parallel.layers import ParallelLayer
from lightning_hybrid.tensor_parallel.mappings import copy_to_tp, gather_from_tp, reduce_from_tp


class ParallelAttention(ParallelLayer):
    """An `nn.MultiheadAttention` that computes this rank's heads. Arguments and results are the same as in torch.

    The plan rejects layers with `bias_k`, `bias_v` or `add_zero_attn`. "Region" means a sequence region of the plan, in
    which activations are sequence shards::

        query, key, value     replicated (in regions: sequence shards, which are gathered)
        in-projection         rows of this rank's heads, for q, k and v
        attention             this rank's heads
        out-projection        columns of this rank's heads; the results are summed over the ranks
                              (in regions: reduce-scattered)
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    training: bool
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    q_proj_weight: Tensor | None
    k_proj_weight: Tensor | None
    v_proj_weight: Tensor | None
    out_proj: nn.Linear
    #: True if keys and values are replicated although queries are sequence shards: the memory of a decoder (style
    #: ``"attention:memory"``).
    memory_is_replicated = False

    @uncompiled
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `nn.MultiheadAttention.forward`, with the same shapes. All ranks must call it.

        Raises:
            RuntimeError: If `is_causal` is True without an `attn_mask`, as in torch.
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal=True requires attn_mask.")
        is_batched = query.dim() == 3
        query, key, value = self._gather_inputs(query, key, value)
        q, k, v = self._project(query, key, value)
        if not is_batched:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        # (batch, heads, length, head_dim)
        heads = [x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for x in (q, k, v)]
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(attn_mask, key_padding_mask, heads[0])
        mixed, weights = self._attend(heads, mask, causal=causal, need_weights=need_weights)
        concatenated = mixed.transpose(1, 2).flatten(2)
        if not is_batched:
            concatenated = concatenated.squeeze(0)
        elif not self.batch_first:
            concatenated = concatenated.transpose(0, 1)
        out = self._project_out(concatenated)
        return out, self._gather_weights(weights, average=average_attn_weights, is_batched=is_batched)

    def _gather_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gathered = self.gather_input(query)
        if self.memory_is_replicated:
            return gathered, copy_to_tp(key, self.tensor_group), copy_to_tp(value, self.tensor_group)
        k, v = (gathered if is_same(other, query) else self.gather_input(other) for other in (key, value))
        return gathered, k, v

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: int = 1) -> Tensor:
        """Project inputs to the features of this rank's heads.

        Args:
            x: The gathered input.
            weight: This rank's shard of one projection, or of several packed projections.
            bias: This rank's shard of the bias, or ``None``.
            blocks: The number of packed projections in the weight. Only the subclass for grids needs it.
        """
        return F.linear(x, weight, bias)

    def _project_out(self, x: Tensor) -> Tensor:
        """Project the features of this rank's heads to the output. This is a collective."""
        out = self.reduce_output(F.linear(x, shard_of(self.out_proj.weight)))
        return out if self.out_proj.bias is None else out + self.out_proj.bias.to(out.dtype)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bias = shard_of(self.in_proj_bias)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        if self.in_proj_weight is None:
            weights = [shard_of(w) for w in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)]
        else:
            packed = shard_of(self.in_proj_weight)
            if key is query and value is query:
                q, k, v = self._linear(query, packed, bias, 3).chunk(3, -1)
                return q, k, v
            weights = list(packed.chunk(3))
        inputs = (query, key, value)
        q, k, v = (self._linear(x, weight, b) for x, weight, b in zip(inputs, weights, biases, strict=True))
        return q, k, v

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Combine both masks into one that is added to the scores.

        Args:
            attn_mask: The mask ``(L, S)`` or ``(batch * all heads, L, S)``, boolean or additive, or ``None``.
            padding: The mask of keys ``(batch, S)``, boolean or additive, or ``None``.
            q: This rank's queries, for the dtype.

        Returns:
            The mask, which broadcasts to ``(batch, this rank's heads, L, S)``; ``None`` if both masks are ``None``.
        """
        mask = None if attn_mask is None else additive_mask(attn_mask, q.dtype)
        if mask is not None and mask.dim() == 3:  # one mask per head: (batch * all heads, L, S)
            mask = self.tensor_group.local_chunk(mask.view(-1, self.num_heads, *mask.shape[1:]), 1)
        if padding is None:
            return mask
        padding = additive_mask(whole_keys(padding), q.dtype)[:, None, None, :]
        return padding if mask is None else mask + padding

    def _attend(
        self, heads: list[Tensor], mask: Tensor | None, *, causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = heads
        dropout = self.dropout if self.training else 0.0
        with own_draws(self.tensor_group.rank, q.device) if dropout else nullcontext():
            if not need_weights:
                return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal), None
            scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            return weights @ v, weights

    def _gather_weights(self, weights: Tensor | None, *, average: bool, is_batched: bool) -> Tensor | None:
        """Return the attention weights of all heads, or their average. This is a collective, unless they are None."""
        if weights is None:
            return None
        if average:
            weights = reduce_from_tp(weights.sum(1) / self.num_heads, self.tensor_group)
        else:
            weights = gather_from_tp(weights, 1, self.tensor_group)
        return weights if is_batched else weights.squeeze(0)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are one tensor, or were one before a hook of the layer made new tensors from it.

    Self-attention then gathers its input only once.
    """
    if one is other:
        return True
    is_passed_on = one.grad_fn is not None and one.grad_fn is other.grad_fn
    return is_passed_on and one.data_ptr() == other.data_ptr() and one.shape == other.shape

"""Attention between sequence shards, which replaces `F.scaled_dot_product_attention` inside layers.

`ContextParallel` enters a :class:`Region` around each call of a layer, in training and evaluation, and again while the
layer is recomputed. The trial of a layer enters a region too. The user's layers are unchanged, so attention is found by
its torch functions (a function mode), not by modules: many libraries call the functions directly.

There are three kinds (`HybridStrategy(context_parallel=...)`)::

    ulysses      all-to-all from positions to heads, and back       each rank: all positions, some heads
                 Jacobs et al., "DeepSpeed Ulysses", 2023, https://arxiv.org/abs/2309.14509
    all_gather   all-gather of keys and values                      each rank: its queries, all heads
                 Llama Team, "The Llama 3 Herd of Models", 2024, https://arxiv.org/abs/2407.21783, section 3.3.2
    ring         keys and values are sent from rank to rank         each rank: its queries, all heads
                 Liu et al., "Ring Attention with Blockwise Transformers", 2023, https://arxiv.org/abs/2310.01889

If a layer computes attention with matrix products, as models with attention sinks do, keys and values are gathered for
every kind. Each rank computes the scores of its own queries::

    queries @ keys^T       keys gathered           (own positions, all positions)
    + mask                 its own rows
    softmax                unchanged
    weights @ values       values gathered

A mask or `is_causal` always refers to the full sequence. All context-parallel ranks must call attention together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.no_draws import MULTI_HEAD, NoDraws
from lightning_hybrid.distributed.replaced import replaced_attributes
from lightning_hybrid.tensor_parallel.context_parallel.block_attention.all_gather import causal_attention
from lightning_hybrid.tensor_parallel.context_parallel.block_attention.block_attention import (
    Products,
    cast_by_autocast,
    find_kernel,
)
from lightning_hybrid.tensor_parallel.context_parallel.block_attention.ring import Ring, ring_attention
from lightning_hybrid.tensor_parallel.context_parallel.draws import Draws
from lightning_hybrid.tensor_parallel.context_parallel.mappings import gather_keys, to_heads, to_sequence
from lightning_hybrid.tensor_parallel.sharding import Shares, all_gather_shares

#: The kinds of attention: the methods by which it communicates.
KINDS = ("ulysses", "ring", "all_gather")


def is_balanced(kind: str) -> bool:
    """Return True if each rank has two pieces of the sequence, so that a causal mask gives all ranks the same work.

    Args:
        kind: One of :data:`KINDS`. With ``"ulysses"``, each rank has some heads of all positions, so work is equal.
    """
    return kind != "ulysses"


def whole_keys(mask: Tensor) -> Tensor:
    """Return a mask of keys. Inside a layer that computes on shards, `Region` returns the mask of all keys instead.

    `ParallelAttention` calls it for layers that are sharded over tensor-parallel ranks too, because it joins masks
    before it calls torch's attention. In a region, it can be a collective.
    """
    if has_torch_function_unary(mask):
        return handle_torch_function(whole_keys, (mask,), mask)
    return mask


class _Options(NamedTuple):
    """The arguments of `F.scaled_dot_product_attention` that are passed on unchanged."""

    dropout_p: float
    scale: float | None
    enable_gqa: bool

    def scale_of(self, q: Tensor) -> float:
        return q.shape[3] ** -0.5 if self.scale is None else self.scale

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, is_causal: bool = False) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout_p, is_causal, scale=self.scale, enable_gqa=self.enable_gqa
        )


class Counts(NamedTuple):
    """The numbers of calls so far in one call of a layer. They are the place of the next call in a recomputation.

    Attributes:
        attentions: The calls of attention.
        draws: The calls of functions that draw this rank's own random numbers.
    """

    attentions: int = 0
    draws: int = 0


class Region(TorchFunctionMode):
    """A mode in which a layer computes on its sequence shard, and attention covers the full sequence.

    One region belongs to one call of a layer, and to the recomputations of this call.

    Args:
        name: The name of the layer, for messages.
        shares: The positions of each rank.
        kind: The method by which attention communicates, one of :data:`KINDS`.
        draws: The random numbers of the layer; `NoDraws` in a trial.
        hooks: Returns a context for the forward of the layer, which replaces the calls of hooks inside it.

    Attributes:
        name: The name of the layer.
        shares: The positions of each rank.
        draws: The random numbers of the layer.
        is_active: True while the mode is entered.
        counts: The numbers of calls in the layer so far. A recomputation resets them.
    """

    def __init__(
        self,
        name: str,
        shares: Shares,
        kind: str,
        draws: Draws | NoDraws,
        hooks: Callable[[Region], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__()
        self.name, self.shares, self.is_active, self._is_paused = name, shares, False, False
        self.draws, self._hooks = draws, hooks
        self._attend = {"ulysses": self._ulysses, "all_gather": self._all_gather, "ring": self._ring}[kind]
        self.counts = Counts()
        self._num_keys: dict[int, int] = {}  # keys of each attention; recomputation must not change them
        self._functions: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: self._attention,
            F.multi_head_attention_forward: self._multi_head,
            whole_keys: self._whole_keys,
            torch.matmul: self._product,
            Tensor.matmul: self._product,
            torch.add: partial(self._with_mask, torch.add),
            Tensor.add: partial(self._with_mask, Tensor.add),
            Tensor.masked_fill: partial(self._with_mask, Tensor.masked_fill),
        }

    def __enter__(self) -> Any:
        """Replace attention from here on."""
        self.is_active = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        """Stop replacing attention."""
        self.is_active = False
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    @contextmanager
    def entered(self, counts: Counts | None = None) -> Iterator[None]:
        """Replace attention inside the context. The region may be active already.

        Args:
            counts: The calls of the layer before the context, if a part of the layer is recomputed; else ``None``.
        """
        self.counts = self.counts if counts is None else counts
        if self.is_active:
            yield
            return
        with self, self._hooks(self):
            yield

    def paused(self) -> AbstractContextManager[None]:
        """Run code inside the context on full sequences, like code around the layer."""
        return replaced_attributes(self, _is_paused=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace a call of the layer."""
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        replacement = self._functions.get(func) or self.draws.find(func, self._next_draw) or func
        return replacement(*args, **kwargs) if kwargs else replacement(*args)

    def _next_draw(self) -> int:
        """Return the place in the layer of the next call that draws this rank's own random numbers."""
        self.counts = Counts(self.counts.attentions, self.counts.draws + 1)
        return self.counts.draws

    def refuse(self, what: str) -> WrongUseError:
        """Return the error about code that is not supported on sequence shards. The caller raises it.

        Args:
            what: Sentences with the cause and the remedy.
        """
        return WrongUseError(
            f"context_parallel_size={self.shares.group.size} shards the sequence in {self.name!r}. {what}"
        )

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the attention of `nn.MultiheadAttention`, which would reject masks of the full sequence.

        Raises:
            WrongUseError: If the attention returns its weights, adds keys, or has no batch dimension.
        """
        given = MULTI_HEAD.bind(*args, **kwargs).arguments
        if given.get("need_weights", True):
            raise self.refuse(
                "The attention of this layer returns its weights, but no rank has the weights of all positions. Call"
                " `nn.MultiheadAttention` with need_weights=False. [LH609]"
            )
        if given["bias_k"] is not None or given["bias_v"] is not None or given["add_zero_attn"]:
            raise self.refuse(
                "The attention of this layer adds keys that have no position in the sequence, which is not supported."
                " Turn off add_bias_kv and add_zero_attn. [LH610]"
            )
        if given["query"].ndim != 3 or given.get("static_k") is not None or given.get("static_v") is not None:
            raise self.refuse(
                "The attention of this layer is called without a batch dimension, or with static keys or values. Add a"
                " batch dimension to the inputs, and do not pass static_k or static_v. [LH611]"
            )
        q, k, v = (_heads_of(each, given["num_heads"]) for each in _projected(given))
        mask, is_causal = self._joined(given, q)
        dropout = given["dropout_p"] if given.get("training", True) else 0.0
        mixed = self._attention(q, k, v, mask, dropout, is_causal)
        mixed = mixed.permute(2, 0, 1, 3).flatten(2)
        return F.linear(mixed, given["out_proj_weight"], given["out_proj_bias"]), None

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        drops = dropout_p > 0.0 and isinstance(self.draws, Draws)
        options = _Options(dropout_p if drops else 0.0, scale, enable_gqa)
        self._compare_keys(key.shape[-2])
        own = self.shares.length
        if query.ndim != 4:
            raise self.refuse(
                f"The attention of this layer has queries of shape {list(query.shape)}. Queries must have four"
                " dimensions: batch, heads, positions, features. [LH612]"
            )
        with self.draws.own(self._next_draw()) if drops else nullcontext():
            if query.shape[2] != own:  # the trial of the layer tests attention that is not along the sequence
                return options.run(query, key, value, attn_mask, is_causal=is_causal)
            if key.shape[2] != own:
                return self._to_memory(query, key, value, attn_mask, is_causal, options)
            if attn_mask is not None and not is_causal:
                attn_mask = self._whole_mask(attn_mask)
            return self._attend(query, key, value, None if is_causal else attn_mask, is_causal, options)

    def _compare_keys(self, number: int) -> None:
        """Count an attention, and raise a `WrongUseError` if its number of keys has changed in a recomputation."""
        self.counts = Counts(self.counts.attentions + 1, self.counts.draws)
        before = self._num_keys.setdefault(self.counts.attentions, number)
        if before != number:
            raise self.refuse(
                f"The attention of this layer had {before} keys in forward, but {number} keys when it was recomputed in"
                " backward, because a key-value cache has grown. Turn off the cache with use_cache=False, or do not"
                " recompute this layer. [LH613]"
            )

    def _to_memory(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, options: _Options
    ) -> Tensor:
        """Compute attention from the queries of this shard to keys of another sequence, which every rank has.

        Nothing is communicated, because the keys are complete.
        """
        if is_causal:
            raise self.refuse(
                f"The causal attention of this layer has {query.shape[2]} queries but {key.shape[2]} keys, so the"
                " positions of the queries relative to the keys are unknown. Pass an explicit mask. [LH614]"
            )
        return options.run(query, key, value, None if mask is None else self._own_rows(mask))

    # -- kinds ---------------------------------------------------------------------------------------------------------

    def _ulysses(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, options: _Options
    ) -> Tensor:
        shares, size = self.shares, self.shares.group.size
        heads = query.shape[1]
        if heads % size:
            raise self.refuse(
                f"The attention of this layer has {heads} heads per rank, but context_parallel='ulysses' needs a"
                f" multiple of {size}. Use context_parallel='all_gather', or another context_parallel_size. [LH615]"
            )
        key, value = (_with_heads(each, size) for each in (key, value))
        if mask is not None and mask.ndim > 2 and mask.shape[-3] == heads:
            mask = mask.chunk(size, -3)[shares.group.rank]
        q, k, v = (to_heads(each, shares) for each in (query, key, value))
        return to_sequence(options.run(q, k, v, mask, is_causal=is_causal), shares)

    def _all_gather(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, options: _Options
    ) -> Tensor:
        shares = self.shares
        key, value = (gather_keys(each, 2, shares) for each in (key, value))
        if not is_causal:
            return options.run(query, key, value, None if mask is None else self._own_rows(mask))
        query, key, value = cast_by_autocast(query, key, value)
        pieces = shares.pieces[shares.group.rank]
        is_fused = find_kernel(query, value, None, options.dropout_p) is not Products
        if query.device.type == "cpu" and is_fused:  # on the CPU, torch would create a mask
            return causal_attention(query, key, value, pieces, options.scale_of(query))
        results = []
        for part, (start, length) in zip(torch.split(query, [length for _, length in pieces], 2), pieces, strict=True):
            end = start + length  # the queries do not see later keys
            results.append(options.run(part, key[:, :, :end], value[:, :, :end], causal_lower_right(length, end)))
        return torch.cat(results, 2)

    def _ring(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, options: _Options
    ) -> Tensor:
        seed = int(torch.randint(1 << 62, (), device="cpu")) if options.dropout_p else 0
        ring = Ring(self.shares, is_causal, options.scale_of(query), options.dropout_p, seed)
        return ring_attention(query, key, value, mask, ring)

    # -- written as matrix products ------------------------------------------------------------------------------------

    def _product(self, input: Tensor, other: Tensor, **options: Any) -> Tensor:
        """Multiply queries by the keys, or attention weights by the values, of the full sequence.

        Products are recognized by the shapes of their operands. All other products are unchanged.
        """
        own, total = self.shares.length, self.shares.total
        if input.ndim == other.ndim == 4 and input.shape[2] == own < total:
            if (input.shape[3], other.shape[2]) == (
                total,
                own,
            ):  # attention weights, and values of one shard
                other = gather_keys(other, 2, self.shares)
            elif other.shape[3] == own:
                self._compare_keys(own)
                other = gather_keys(other, 3, self.shares)
        return torch.matmul(input, other, **options)

    def _with_mask(self, func: Any, input: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        """Use the rows of a mask that belong to the queries of this shard."""
        if isinstance(input, Tensor) and isinstance(other, Tensor) and input.ndim == 4 and other.ndim > 1:
            own, total = self.shares.length, self.shares.total
            if input.shape[2:] == (own, total) and other.shape[-2:] == (total, total):
                other = self.shares.own(other, -2)
        return func(input, other, *args, **kwargs)

    # -- masks ---------------------------------------------------------------------------------------------------------

    def _joined(self, given: Mapping[str, Any], query: Tensor) -> tuple[Tensor | None, bool]:
        """Combine both masks of `nn.MultiheadAttention` into one mask for the full sequence.

        Returns:
            The mask, and True if attention is causal. A causal attention has no mask.
        """
        mask, padding, is_causal = (given.get(name) for name in ("attn_mask", "key_padding_mask", "is_causal"))
        if is_causal and padding is None:
            return None, True
        if is_causal:  # the mask may cover only a shard, if the layer created it
            total = self.shares.total
            mask = torch.ones(total, total, dtype=torch.bool, device=query.device).triu(1)
        if mask is not None:
            mask = additive_mask(mask, query.dtype).to(query.dtype)
            if mask.ndim == 3:
                mask = mask.view(query.shape[0], -1, *mask.shape[1:])
        if padding is None:
            return mask, False
        padding = additive_mask(self._whole_keys(padding), query.dtype).to(query.dtype)[:, None, None, :]
        return padding if mask is None else mask + padding, False

    def _whole_keys(self, mask: Tensor) -> Tensor:
        if mask.shape[-1] != self.shares.length:  # it covers all keys already, or the keys of another sequence
            return mask
        gather = gather_keys if mask.requires_grad else all_gather_shares
        return gather(mask, mask.ndim - 1, self.shares)

    def _whole_mask(self, mask: Tensor) -> Tensor:
        """Return a mask of the full sequence, or raise an error. A mask of a shard's keys is gathered."""
        rows, total = mask.shape[-2] if mask.ndim > 1 else 1, self.shares.total
        if rows == 1 and mask.shape[-1] == self.shares.length:
            mask = self._whole_keys(mask)
        if rows not in (1, total) or mask.shape[-1] not in (1, total):
            raise self.refuse(
                f"The attention of this layer has a mask of shape {list(mask.shape)}, which does not fit the full"
                f" sequence of {total} positions. A mask that the layer itself creates covers only its sequence shard."
                " Use is_causal=True, or create the mask outside the layers and pass it as an argument. [LH616]"
            )
        return mask

    def _own_rows(self, mask: Tensor) -> Tensor:
        return self.shares.own(mask, -2) if mask.ndim > 1 and mask.shape[-2] == self.shares.total else mask


def _projected(given: Mapping[str, Any]) -> Sequence[Tensor]:
    """Return the queries, keys and values of `nn.MultiheadAttention`."""
    inputs, bias = (given["query"], given["key"], given["value"]), given["in_proj_bias"]
    if given.get("use_separate_proj_weight"):
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    elif inputs[0] is inputs[1] is inputs[2]:
        return F.linear(inputs[0], given["in_proj_weight"], bias).chunk(3, -1)
    else:
        weights = given["in_proj_weight"].chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return [F.linear(*each) for each in zip(inputs, weights, biases, strict=True)]


def _heads_of(x: Tensor, num_heads: int) -> Tensor:
    """Convert (length, batch, features) to (batch, heads, length, features of a head)."""
    return x.view(*x.shape[:2], num_heads, -1).permute(1, 2, 0, 3)


def _with_heads(x: Tensor, size: int) -> Tensor:
    """Repeat grouped heads so that their number is divisible by the number of ranks."""
    return x.repeat_interleave(size // gcd(x.shape[1], size), 1) if x.shape[1] % size else x


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to scores. A boolean mask is ``True`` for hidden keys. Others keep their dtype.

    This is the convention of `nn.MultiheadAttention`. In `F.scaled_dot_product_attention`, ``True`` means visible.
    """
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))

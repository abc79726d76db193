"""Mixtures of experts in own code, whose experts are stacked. Nothing here knows of `lightning_hybrid`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.tensor import DIM, HEADS, CausalBlock, Sequences, Words

EXPERTS, HIDDEN = 4, 12


class Experts(nn.Module):
    """Stacked weights and biases; an expert computes its tokens at once."""

    def __init__(self, num_experts: int = EXPERTS, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, dim, hidden) / dim**0.5)
        self.up_bias = nn.Parameter(torch.randn(num_experts, hidden))
        self.down = nn.Parameter(torch.randn(num_experts, hidden, dim) / hidden**0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            if len(token):
                inner = torch.tanh(hidden_states[token] @ self.up[expert] + self.up_bias[expert])
                outer = inner @ self.down[expert] * top_k_weights[token, place, None]
                result = result.index_add(0, token, outer.to(result.dtype))
        return result


class Sparse(nn.Module):
    """A layer with a router, experts, and a shared expert.

    Args:
        favored: Added to the logits of the first two experts.
        k: The number of experts of a token.
    """

    def __init__(self, favored: float = 0.0, k: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, EXPERTS)
        self.experts = Experts()
        self.shared = nn.Linear(DIM, DIM)
        self.k = k
        with torch.no_grad():
            self.router.bias[:2] += favored

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        rows = h.flatten(0, -2)
        weights, index = self.router(rows).softmax(-1).topk(self.k)
        return x + self.experts(rows, index, weights).view_as(x) + torch.tanh(self.shared(h))


class SparseLayers(Sequences):
    """Attention and experts by turns, in a chain."""

    layers = 4

    def layer(self, index: int) -> nn.Module:
        if index % 2:
            return Sparse()
        return nn.TransformerEncoderLayer(DIM, HEADS, 32, 0.0, F.gelu, batch_first=True)

    def configure_optimizers(self) -> Any:
        # Weights without a gradient stay, and those whose gradient is zero decay.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class OneSided(SparseLayers):
    """No token chooses the last experts, whose weights decay all the same."""

    def layer(self, index: int) -> nn.Module:
        return Sparse(100.0) if index % 2 else super().layer(index)


class FirstChoice(SparseLayers):
    """One expert for each token."""

    def layer(self, index: int) -> nn.Module:
        return Sparse(k=1) if index % 2 else super().layer(index)


class FrozenExperts(SparseLayers):
    """The experts of a layer are frozen, and its router is not."""

    def build(self) -> None:
        super().build()
        self.body[1].experts.requires_grad_(False)


class SparseWords(Words):
    """A language model with a loop over its layers, experts in some, and a tied embedding."""

    def build(self) -> None:
        super().build()
        self.body = None
        self.blocks = nn.ModuleList(CausalBlock() if index % 2 else Sparse() for index in range(self.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SparseAround(SparseLayers):
    """A layer with experts that is called before the other layers and after them."""

    def build(self) -> None:
        super().build()
        self.around = Sparse()

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self.body(self.around(x)))

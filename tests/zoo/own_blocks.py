"""Blocks of a user's own: some that can be divided, and some of which a trial does not show everything."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.cli.demo.vit import Block as DemoBlock
from tests.zoo import tensor as zoo
from tests.zoo.tensor import DIM, HEADS


class SelfAttention(nn.Module):
    """As the Vision Transformer of Colossal-AI's tutorial has it: the weight is [heads, 3, head_dim]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_head_size = DIM // HEADS
        self.query_key_value, self.dense = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.attention_dropout, self.dropout, self.softmax = nn.Dropout(0.0), nn.Dropout(0.0), nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.query_key_value(x)
        all_head_size = qkv.shape[-1] // 3
        num_attention_heads = all_head_size // self.attention_head_size
        new_qkv_shape = qkv.shape[:-1] + (num_attention_heads, 3 * self.attention_head_size)  # noqa: RUF005 (as it is written there)
        qkv = qkv.view(new_qkv_shape)
        qkv = qkv.permute((0, 2, 1, 3))
        q, k, v = torch.chunk(qkv, 3, dim=-1)
        x = torch.matmul(q, k.transpose(-1, -2))
        x = x / math.sqrt(self.attention_head_size)
        x = self.softmax(x)
        x = self.attention_dropout(x)
        x = torch.matmul(x, v)
        x = x.transpose(1, 2)
        new_context_layer_shape = x.size()[:-2] + (all_head_size,)  # noqa: RUF005
        x = x.reshape(new_context_layer_shape)
        x = self.dense(x)
        return self.dropout(x)


class FeedForward(nn.Module):
    """The same tutorial's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.dense_1, self.dense_2 = nn.Linear(DIM, 32), nn.Linear(32, DIM)
        self.activation, self.dropout_1, self.dropout_2 = F.gelu, nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense_1(x)
        x = self.activation(x)
        x = self.dropout_1(x)
        x = self.dense_2(x)
        return self.dropout_2(x)


class TutorialBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(DIM), SelfAttention()
        self.norm2, self.mlp = nn.LayerNorm(DIM), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TutorialViT(zoo.ViT):
    """The Vision Transformer of the tutorial."""

    def build(self) -> None:
        super().build()
        self.body = nn.Sequential(*(TutorialBlock() for _ in range(self.layers)))


class DemoViT(zoo.ViT):
    """Blocks of the Vision Transformer that comes along."""

    def build(self) -> None:
        super().build()
        self.body = nn.Sequential(*(DemoBlock(DIM, HEADS, 32, 0.0, 0.0, 0.0) for _ in range(self.layers)))


class Counted(nn.Module):
    """Heads outermost in one weight, and an attribute that counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim = HEADS, DIM // HEADS
        self.query_key_value, self.dense = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.query_key_value(x).view(b, t, self.heads, 3 * self.head_dim).transpose(1, 2).chunk(3, -1)
        return self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two layers, and what a subclass does between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(DIM, 32), nn.Linear(32, DIM), nn.LayerNorm(32)
        self.calls, self.limit = 0, 100.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.between(F.relu(self.fc1(x))))

    def between(self, h: Tensor) -> Tensor:
        return h


class Branching(MLP):
    """Large values are mixed."""

    def between(self, h: Tensor) -> Tensor:
        if h.max() > self.limit:
            h = h.softmax(-1)
        return h


class BranchingByWhere(MLP):
    def between(self, h: Tensor) -> Tensor:
        return torch.where(h > self.limit, h.sum(-1, keepdim=True), h)


class Limited(MLP):
    """What is mixed shows if it is large."""

    def between(self, h: Tensor) -> Tensor:
        return h + F.relu(h.mean(-1, keepdim=True) - self.limit)


class WideNorm(MLP):
    def between(self, h: Tensor) -> Tensor:
        return self.norm(h)


class Counting(MLP):
    """Mixes later in the run."""

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h.softmax(-1) if self.calls > 100 else h


class LongSequences(MLP):
    def between(self, h: Tensor) -> Tensor:
        return h.softmax(-1) if h.shape[1] > 100 else h


class Flagged(MLP):
    """Somebody may set the flag."""

    def between(self, h: Tensor) -> Tensor:
        return h.softmax(-1) if self.calls else h


class Masked(MLP):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = F.relu(self.fc1(x))
        return self.fc2(h if mask is None else h.softmax(-1))


SWITCH: list[bool] = []


def by_switch(h: Tensor) -> Tensor:
    return h.softmax(-1) if SWITCH else h


class Switched(MLP):
    """Asks something outside."""

    def between(self, h: Tensor) -> Tensor:
        return by_switch(h)


class ByProperty(MLP):
    @property
    def factor(self) -> Any:
        return 1.0

    def between(self, h: Tensor) -> Tensor:
        return h * self.factor


class TalkingHeads(Counted):
    """Heads are mixed by a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Linear(HEADS, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.query_key_value(x).view(b, t, self.heads, 3 * self.head_dim).transpose(1, 2).chunk(3, -1)
        scores = self.talk((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.dense((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Arbitrary(MLP):
    """Code that is right in shards, written in other ways than torch's own modules are."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.drop = F.silu, nn.Dropout(0.1)

    def between(self, h: Tensor) -> Tensor:
        first, second = (f(h) for f in (self.act, torch.tanh))
        h: Tensor = scaled(first, 2) - second * 0.5
        length = h.shape[1]
        length += 1
        h = h / length
        return self.drop(h) if self.training else h


def scaled(h: Tensor, factor: int) -> Tensor:
    return h / math.sqrt(factor)


def hooked() -> nn.Module:
    module = MLP()
    module.fc1.register_forward_hook(lambda layer, args, output: output)
    return module


def replaced() -> nn.Module:
    module = MLP()
    module.fc1.forward = module.fc1.forward
    return module


#: What stays whole, and the words that say why.
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a branch by values": (Branching, "in another call (`h.max() > self.limit`"),
    "a choice by values": (BranchingByWhere, "in another call (`h > self.limit`"),
    "a limit that large values pass": (Limited, "from values of another rank"),
    "a norm of the whole width": (
        WideNorm,
        "No plan is known for this block, because it gives different results when it is sharded",
    ),
    "a counter": (Counting, "in another call (`self.calls += 1`"),
    "a branch by the length": (LongSequences, "in another call (`h.shape[1] > 100`"),
    "a flag": (Flagged, "in another call (`self.calls`"),
    "a mask": (Masked, "takes 'x', 'mask' instead of a single input"),
    "a global variable": (Switched, "in another call (`SWITCH`"),
    "a property": (ByProperty, "in another call (`self.factor`"),
    "talking heads": (
        TalkingHeads,
        "No plan is known for this block, because it gives different results when it is sharded",
    ),
    "hooks": (hooked, "with hooks, which would receive only shards"),
    "another forward": (replaced, "with a replaced `forward`"),
}

"""Modules whose layers can be shared by several ranks. Nothing here knows of `lightning_hybrid`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.basic import Example

DIM = 16
HEADS = 4
LENGTH = 8
TOKENS = 12


class Sequences(Example):
    """Sequences of vectors in, vectors out; six transformer layers of torch."""

    samples = 40

    def build(self) -> None:
        self.body = nn.Sequential(*(self.layer(index) for index in range(self.layers)))

    def layer(self, index: int) -> nn.Module:
        return nn.TransformerEncoderLayer(
            DIM, HEADS, 32, 0.0, batch_first=True, norm_first=index % 2 == 0, activation="gelu"
        )

    def sample(self, index: int, generator: torch.Generator) -> Any:
        x = torch.randn(LENGTH, DIM, generator=generator, dtype=torch.float64).to(self.dtype)
        return x, x.roll(1, 0).sin()

    def configure_optimizers(self) -> Any:
        # The gradient of a key's bias is zero but for rounding, which Adam would blow up.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Encoders(Sequences):
    """`nn.TransformerEncoderLayer`, before and after the norm."""


class SequenceFirst(Sequences):
    """Transformer layers with the batch in the second dimension, as is torch's default; code around the body."""

    def layer(self, index: int) -> nn.Module:
        return nn.TransformerEncoderLayer(DIM, HEADS, 32, 0.0, bias=index % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.transpose(0, 1)).transpose(0, 1)

    def split_body_input(self, x: Tensor, num_microbatches: int) -> list[Tensor]:
        return list(x.tensor_split(min(num_microbatches, x.shape[1]), dim=1))

    def join_body_output(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim=1)


class Decode(nn.Module):
    """A decoder layer that carries its memory along."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(DIM, HEADS, 32, 0.0, batch_first=True)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, memory = both
        return self.layer(x, memory), memory


class Decoders(Sequences):
    """`nn.TransformerDecoderLayer` with attention to a memory."""

    layers = 4

    def layer(self, index: int) -> nn.Module:
        return Decode()

    def forward(self, x: Tensor) -> Tensor:
        return self.body((x, x[:, ::2].cos()))[0]


class Attention(nn.Module):
    """Attention as users write it: projections, heads, a norm of each head's queries."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, DIM // HEADS
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(self.head_dim)
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            f(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(self.norm(q), k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, self.num_heads * self.head_dim))


class OwnBlock(nn.Module):
    """A block of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.up, self.gate, self.down = nn.Linear(DIM, 32), nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class OwnAttention(Sequences):
    """Blocks of the user's own, shared by a plan."""

    layers = 4

    def layer(self, index: int) -> nn.Module:
        return OwnBlock()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {
            "body.*": "sequence_region",
            "body.*.norm*": "sequence_parallel",
            "body.*.attention": "divide:num_heads + sequence_gathered",
            "body.*.attention.[qkv]": "colwise",
            "body.*.attention.norm": "on_shards",
            "body.*.attention.proj": "rowwise",
            "body.*.up": "colwise",
            "body.*.gate": "colwise",
            "body.*.down": "rowwise",
        }


class MLPs(Sequences):
    """Pairs of linear layers, in blocks and straight in the body."""

    def build(self) -> None:
        layers = [nn.Linear(DIM, 24), nn.ReLU(), nn.Linear(24, DIM), self.block(), self.block(), nn.LayerNorm(DIM)]
        self.body = nn.Sequential(*layers)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))


class Words(Example):
    """Tokens through transformer layers, to a head that shares the embedding's weight.

    Smooth: where a ReLU bends, float32 may fall on the other side of zero, which is another gradient.
    """

    samples = 40
    layers = 4

    def build(self) -> None:
        self.embed = nn.Embedding(TOKENS, DIM, padding_idx=0)
        self.body = nn.Sequential(
            *(nn.TransformerEncoderLayer(DIM, HEADS, 32, 0.0, F.gelu, batch_first=True) for _ in range(self.layers))
        )
        self.head = nn.Linear(DIM, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens) * math.sqrt(DIM)))

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        self.log("right", (logits.argmax(-1) == targets).float().mean(), sync_dist=True)
        return F.cross_entropy(logits.view(-1, TOKENS), targets.view(-1), label_smoothing=0.1)

    def sample(self, index: int, generator: torch.Generator) -> Any:
        tokens = torch.randint(TOKENS, (LENGTH + 1,), generator=generator)
        return tokens[:-1], tokens[1:]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class TiedWords(Words):
    """Embedding and head share their weight, across stages; clipped."""


class GPT(Words):
    """A decoder-only transformer: positions, causal attention by a mask, a head of its own; SGD with momentum."""

    def build(self) -> None:
        self.embed = nn.Embedding(TOKENS, DIM)
        self.positions = nn.Embedding(LENGTH, DIM)
        self.body = nn.Sequential(*(CausalBlock() for _ in range(self.layers)))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.body(self.embed(tokens) + positions)))

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).transpose(1, 2), targets)

    def configure_optimizers(self) -> Any:
        decayed = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


class CausalBlock(nn.Module):
    """`nn.MultiheadAttention` with a causal mask, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False, is_causal=True)[0]
        return x + self.mlp(self.norm2(x))


class Images(Example):
    """Small pictures and their classes."""

    samples = 40
    classes = 4

    def sample(self, index: int, generator: torch.Generator) -> Any:
        x = torch.randn(1, 8, 8, generator=generator, dtype=torch.float64).to(self.dtype)
        return x, torch.randint(self.classes, (), generator=generator)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)


class ViT(Images):
    """Patches, a class token, transformer layers, and what is left of the class token."""

    layers = 4

    def build(self) -> None:
        self.patches = nn.Conv2d(1, DIM, 4, 4)
        self.positions = nn.Parameter(torch.randn(1, 4, DIM) * 0.1)
        self.body = nn.Sequential(
            *(nn.TransformerEncoderLayer(DIM, HEADS, 32, 0.0, batch_first=True, norm_first=True) for _ in range(4))
        )
        self.head = nn.Linear(DIM, self.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.patches(x).flatten(2).transpose(1, 2) + self.positions).mean(1))

    def configure_optimizers(self) -> Any:
        # The gradient of a key's bias is zero but for rounding, which Adam would blow up.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class FusedAttention(nn.Module):
    """An attention as timm writes it: one projection to queries, keys and values, and the width read from the input."""

    __module__ = "timm.layers.attention"

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, DIM // HEADS
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.proj, self.proj_drop = nn.Linear(DIM, DIM), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, N, C)))


class MLP(nn.Module):
    """The two layers of timm's blocks."""

    __module__ = "timm.layers.mlp"

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(DIM, 32), nn.GELU(), nn.Dropout(0.0)
        self.norm, self.fc2, self.drop2 = nn.Identity(), nn.Linear(32, DIM), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class FusedBlock(nn.Module):
    """A block of timm's vision transformers."""

    __module__ = "timm.models.vision_transformer"

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn, self.mlp = FusedAttention(), MLP()
        self.gamma = nn.Parameter(torch.full((DIM,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma * self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TimmViT(ViT):
    """The same, of blocks as timm has them."""

    def build(self) -> None:
        super().build()
        self.body = nn.Sequential(*(FusedBlock() for _ in range(self.layers)))


class NanoAttention(nn.Module):
    """An attention as nanoGPT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.n_head, self.n_embd = HEADS, DIM

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class NanoBlock(nn.Module):
    """A block of nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(DIM), nn.LayerNorm(DIM), NanoAttention()
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(DIM, 32), "gelu": nn.GELU(), "c_proj": nn.Linear(32, DIM)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](self.mlp["gelu"](self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(GPT):
    """The same, of blocks as nanoGPT has them, with a plan; head and embedding share their weight."""

    def build(self) -> None:
        super().build()
        self.body = nn.Sequential(*(NanoBlock() for _ in range(self.layers)))
        self.head = nn.Linear(DIM, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {
            "embed": "vocab",
            "head": "vocab",
            "body.*.attn": "divide:n_head,n_embd + narrow_input:c_attn",
            "body.*.attn.c_attn": "packed_colwise_3",
            "body.*.attn.c_proj": "rowwise",
            "body.*.mlp.c_fc": "colwise",
            "body.*.mlp.c_proj": "rowwise",
        }


class Residual(nn.Module):
    """A convolution around which a shortcut leads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ResNet(Images):
    """Nothing that can be shared: every rank has it whole."""

    def build(self) -> None:
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.body = nn.Sequential(*(Residual() for _ in range(self.layers)))
        self.head = nn.Linear(4, self.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))

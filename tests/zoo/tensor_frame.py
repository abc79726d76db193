"""Models that are no chain, with layers that several ranks can share.

Nothing here knows of `lightning_hybrid`. Each module's docstring names its peculiarity.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.frame import FrameDrops
from tests.zoo.tensor import DIM, HEADS, LENGTH, TOKENS, CausalBlock, OwnAttention, OwnBlock, Sequences, Words


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(DIM, HEADS, 32, 0.0, F.gelu, batch_first=True, **options)


class ListedEncoders(Sequences):
    """`nn.TransformerEncoder`, which calls its layers in a loop, with a mask."""

    layers = 4

    def build(self) -> None:
        layer = encoder_layer(norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, self.layers, nn.LayerNorm(DIM), enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype))


class ListedOwn(Sequences):
    """Blocks of the user's own in a loop, divided by a plan; attributes that are divided are read around them."""

    layers = 4

    def build(self) -> None:
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(self.layers))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + 0.5 * first)

    def tensor_parallel_plan(self) -> dict[str, str]:
        plan = OwnAttention.tensor_parallel_plan(self)
        return {name.replace("body.", "blocks."): style for name, style in plan.items()}


class ListedWords(Words):
    """A language model with a loop over its layers, and a head of its own."""

    def build(self) -> None:
        self.embed, self.positions = nn.Embedding(TOKENS, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(CausalBlock() for _ in range(self.layers))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        logits = self(tokens)
        self.log("val", F.cross_entropy(logits.transpose(1, 2), targets), sync_dist=True)
        return {"logits": logits, "guesses": logits.argmax(-1)}


class ListedTied(ListedWords):
    """The head shares the embedding's weight; logits go on in masks, and are returned."""

    def build(self) -> None:
        super().build()
        self.head = nn.Linear(DIM, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        logits = self(tokens).float() if self.dtype == torch.float32 else self(tokens)
        chosen = logits[:, 1:] / 2
        loss = F.cross_entropy(chosen.reshape(-1, TOKENS), targets[:, 1:].reshape(-1), label_smoothing=0.1)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("sure", logits.detach().softmax(-1).amax(-1).mean(), sync_dist=True)
        return {"loss": loss, "logits": logits.detach()}


class WeightUsed(ListedWords):
    """The step computes with the embedding's weight itself."""

    def build(self) -> None:
        super().build()
        self.head = nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(super().forward(tokens), self.embed.weight)


class Translation(Words):
    """An encoder and a decoder of torch, one embedding for both and the head, used on several stages."""

    def build(self) -> None:
        self.embed = nn.Embedding(TOKENS, DIM, padding_idx=0)
        self.encoder = nn.ModuleList(encoder_layer() for _ in range(2))
        self.between = nn.LayerNorm(DIM)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(DIM, HEADS, 32, 0.0, F.gelu, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(DIM, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        memory, padding = self.embed(tokens) * math.sqrt(DIM), tokens == 0
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding)
        memory, x = self.between(memory), self.embed(tokens.flip(1))
        for layer in self.decoder:
            x = layer(x, memory, memory_key_padding_mask=padding)
        return self.head(x)

    def sample(self, index: int, generator: torch.Generator) -> Any:
        tokens, targets = super().sample(index, generator)
        tokens[0] = 1 + index % 3  # some are padding, never all
        return tokens, targets


class Exits(ListedWords):
    """A head after every layer: logits of the middle go into the loss at the end."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, logits = self.embed(tokens), []
        for block in self.blocks:
            x = block(x)
            logits.append(self.head(self.norm(x)))
        mean = logits[0]
        for other in logits[1:]:
            mean = mean + other
        return mean / len(logits)


class Clamped(ListedWords):
    """The step writes the weight of an embedding in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.embed.weight.clamp_(-1.5, 1.5)
        return super().training_step(batch, batch_idx)


class SharedAround(Sequences):
    """What is around the layers is divided too: an MLP before them, attention and a Sequential between them."""

    layers = 4

    def build(self) -> None:
        self.before = nn.Sequential(nn.Linear(DIM, 24), nn.GELU(), nn.Linear(24, DIM))
        self.early = nn.ModuleList(encoder_layer() for _ in range(2))
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.between = nn.Sequential(nn.Linear(DIM, 24), nn.Tanh(), nn.Linear(24, DIM))
        self.late = nn.ModuleList(encoder_layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.early:
            x = layer(x)
        mixed, weights = self.attention(x, x, x)
        x = x + mixed + weights.mean(-1, keepdim=True) + self.between(x)
        for layer in self.late:
            x = layer(x)
        return x


class SharedUnits(Sequences):
    """The units themselves are the layers that are divided: what passes between them is divided too."""

    def build(self) -> None:
        self.linears = nn.ModuleList(nn.Linear(*sizes) for sizes in ((DIM, 24), (24, DIM)) * 3)

    def forward(self, x: Tensor) -> Tensor:
        for number, linear in enumerate(self.linears):
            x = linear(x) if number % 2 else torch.tanh(linear(x))
        return x

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"linears.[024]": "colwise", "linears.[135]": "rowwise"}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class TwoViews(Sequences):
    """The layers are called twice in a step, with two views; a projection that gathers its output compares them."""

    layers = 4

    def build(self) -> None:
        self.blocks = nn.ModuleList(encoder_layer() for _ in range(self.layers))
        self.projection = nn.Linear(DIM, DIM)

    def embed(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = layer(x)
        return self.projection(x).mean(1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return 1 - F.cosine_similarity(self.embed(x), self.embed(x.flip(1) + y)).mean()

    def tensor_parallel_plan(self) -> dict[str, str]:
        layer = "blocks.*"
        return {
            f"{layer}.self_attn": "attention",
            f"{layer}.linear1": "colwise",
            f"{layer}.linear2": "rowwise",
            "projection": "colwise_gather_output",
        }


class GatheredDrops(FrameDrops):
    """Dropout, LayerDrop and stochastic depth, with layers that gather what they make."""

    def tensor_parallel_plan(self) -> dict[str, str]:
        names = ("embed", "blocks.*.0.0", "head")
        return dict.fromkeys(names, "colwise_gather_output")


class SharedDrops(SharedAround):
    """Dropout in attention and on shards, in the layers and around them."""

    def build(self) -> None:
        super().build()
        for layer in (*self.early, *self.late):
            layer.dropout.p = layer.dropout1.p = layer.self_attn.dropout = 0.2
        self.attention.dropout = 0.2
        self.before.insert(2, nn.Dropout(0.2))
        self.between.insert(2, nn.Dropout(0.2))

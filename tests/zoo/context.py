"""Models of sequences, of which ranks can have shares. Nothing here knows of `lightning_hybrid`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.gpt import GPT as ExampleModel
from tests.zoo import tensor as zoo
from tests.zoo.tensor import DIM, HEADS, LENGTH, TOKENS


class Uneven(zoo.NanoGPT):
    """Sequences whose length no number of ranks divides."""

    def sample(self, index: int, generator: torch.Generator) -> Any:
        tokens = torch.randint(TOKENS, (LENGTH + 1,), generator=generator)
        return tokens, tokens.roll(-1)

    def build(self) -> None:
        super().build()
        self.positions = nn.Embedding(LENGTH + 1, DIM)


class ExampleGPT(zoo.GPT):
    """The GPT of the examples; it shifts the labels by itself."""

    heads = HEADS

    def build(self) -> None:
        self.model = ExampleModel(vocabulary=TOKENS, length=LENGTH, dim=DIM, depth=self.layers, heads=self.heads)

    def loss(self, batch: Tensor) -> Tensor:
        return self.model._loss(batch)

    def sample(self, index: int, generator: torch.Generator) -> Any:
        return torch.randint(TOKENS, (LENGTH + 1,), generator=generator)


class WideGPT(ExampleGPT):
    """Heads enough for four ranks that exchange them, beside two that divide them."""

    heads = 2 * HEADS


class PaddedEncoder(zoo.Words):
    """`nn.TransformerEncoder` with padding, and in every second layer of a second stack a window."""

    heads = HEADS

    def build(self) -> None:
        self.embed = nn.Embedding(TOKENS, DIM)
        self.encoder = nn.TransformerEncoder(self.layer(), 2, nn.LayerNorm(DIM))
        self.windowed = nn.ModuleList(self.layer(norm_first=True) for _ in range(2))
        self.head = nn.Linear(DIM, TOKENS)

    def layer(self, norm_first: bool = False) -> nn.Module:
        return nn.TransformerEncoderLayer(DIM, self.heads, 32, 0.0, F.gelu, batch_first=True, norm_first=norm_first)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        padding[:, :2] = False
        h = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        far = (places[:, None] - places).abs() > 2
        for index, layer in enumerate(self.windowed):
            h = layer(h, src_mask=far if index else None, src_key_padding_mask=padding)
        return self.head(h) * ~padding[..., None]


class WideEncoder(PaddedEncoder):
    """Heads enough for four ranks that exchange them, beside two that divide them."""

    heads = 2 * HEADS


class SequenceFirst(zoo.SequenceFirst):
    """Layers that want the sequence in the first dimension."""

    layers = 4


class PaddedDecode(zoo.Decode):
    """A decoder layer whose memory has padding."""

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, memory = both
        padding = memory[..., 0] < 0.3
        padding[:, 0] = False
        return self.layer(x, memory, memory_key_padding_mask=padding), memory


class Decoder(zoo.Decoders):
    """Attention to a memory, which is whole on every rank."""

    def layer(self, index: int) -> nn.Module:
        return PaddedDecode() if index % 2 else super().layer(index)

    def forward(self, x: Tensor) -> Tensor:
        return self.body((x, x[:, :5].cos()))[0]


class BiasedBlock(zoo.NanoBlock):
    """A block with a mask that is learnt, and grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
        h = self.ln_1(x) * scale
        q = self.q(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(2, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
        x = x + y.transpose(1, 2).flatten(2)
        return x + self.mlp["c_proj"](self.mlp["gelu"](self.mlp["c_fc"](self.ln_2(x))))


class UsedTwice(zoo.Sequences):
    """Parameters that layers and the code around them use; what layers return is used, and changed, on the way."""

    layers = 4

    def build(self) -> None:
        self.blocks = nn.ModuleList(BiasedBlock() for _ in range(self.layers))
        self.bias = nn.Parameter(torch.zeros(HEADS, LENGTH, LENGTH))
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.means = []
        for index, block in enumerate(self.blocks):
            x = block(x, self.bias + index, scale=self.scale)
            if index == 1:
                x += self.scale
            self.means.append(x.mean(1))
        return x * self.scale

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y) + sum(mean.square().mean() for mean in self.means)
        return loss + 1e-2 * sum(parameter.square().sum() for parameter in self.penalised())

    def penalised(self) -> Iterable[Tensor]:
        return self.bias, self.scale


class Penalised(UsedTwice):
    """A penalty on all parameters, those of the layers too."""

    def penalised(self) -> Iterable[Tensor]:
        return self.parameters()


class Keeping(nn.Module):
    """Keeps what it was given, and something of its result."""

    calls: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.block, self.calls, self.kept = zoo.NanoBlock(), [], torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(x.shape[0])
        x = self.block(x)
        self.kept = x.square().mean()
        return x


class Leaking(zoo.Sequences):
    """The loss has a term that layers keep beside their results, or the number of their calls."""

    layers = 2
    leaks = True

    def layer(self, index: int) -> nn.Module:
        return Keeping()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        return loss + sum(layer.kept if self.leaks else len(layer.calls) for layer in self.body)


class Counting(Leaking):
    """The same, without such a term; it returns what layers keep beside the loss."""

    leaks = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "kept": self.body[0].kept}


class Hooked(Counting):
    """Forward hooks inside layers: one collects what the loss uses, others change what parts of a layer return."""

    kind = "collects"

    def build(self) -> None:
        super().build()
        self.seen: list[Tensor] = []
        for layer in self.body:
            layer.block.mlp["c_proj"].register_forward_hook(getattr(self, self.kind))

    def collects(self, part: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(output.flatten(0, 1))

    def centers(self, part: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Mixes positions."""
        return output - output.mean(1, keepdim=True)

    def writes(self, part: nn.Module, args: Any, output: Tensor) -> None:
        output += output.mean(1, keepdim=True)

    def writes_input(self, part: nn.Module, args: Any, output: Tensor) -> None:
        args[0].zero_()

    def loss(self, batch: Any) -> Tensor:
        self.seen.clear()
        loss = super().loss(batch)
        # A product of means: not the mean of those of two shares.
        return loss + sum((each.softmax(1).mean(0) * each.square().mean(0)).sum() for each in self.seen)


class Dropped(zoo.Sequences):
    """Layers that drop what they compute."""

    layers = 2

    def layer(self, index: int) -> nn.Module:
        return nn.TransformerEncoderLayer(DIM, HEADS, 32, 0.1, batch_first=True)


class Convolution(nn.Module):
    """Mixes positions by a convolution over time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"time": nn.Conv1d(DIM, DIM, 3, padding=1), "out": nn.Linear(DIM, DIM)})

    def forward(self, x: Tensor) -> Tensor:
        return self.inner["out"](self.inner["time"](x.transpose(1, 2)).transpose(1, 2))


class Recurrent(nn.Module):
    """Mixes positions by a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class ByHand(nn.Module):
    """Attention written with products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj((x @ x.transpose(1, 2)).softmax(-1) @ x)


class Pooled(nn.Module):
    """Adds the mean over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x + x.mean(1, keepdim=True))


class Normed(nn.Module):
    """Statistics of the batch, over all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Gated(nn.Module):
    """Adds a convolution over time, times what is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.conv = nn.Linear(DIM, DIM), nn.Conv1d(DIM, DIM, 3, padding=1)
        self.gate = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) + self.gate * self.conv(x.transpose(1, 2)).transpose(1, 2)


class Zeros(Gated):
    """Adds a convolution over time whose weights are zero at first."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.ones_(self.gate)
        nn.init.zeros_(self.conv.weight)


class Far(nn.Module):
    """Adds what was eight positions before."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) + F.pad(x, (0, 0, 8, 0))[:, : x.shape[1]]


class Shifted(nn.Module):
    """Adds what is made of each position and the one before, by weights that are zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.up(x + F.pad(x, (0, 0, 1, -1))).relu())


class Tempered(nn.Module):
    """Attention that grows sharper with the number of keys, from the ninth position on."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        sharper = torch.arange(1, x.shape[1] + 1, device=x.device).to(x.dtype).div(8).clamp(min=1).log() + 1
        q, k, v = self.proj(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q * sharper[:, None], k, v, is_causal=True)
        return x + y.transpose(1, 2).flatten(2)


class Added(nn.Module):
    """Adds the mean over the sequence, times what is zero at first, in no part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.gate = nn.Linear(DIM, DIM), nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) + self.gate * x.mean(1, keepdim=True)


class Rotary(nn.Module):
    """Attention to positions that it counts by itself, by queries that are zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.query = nn.Linear(DIM, 2 * DIM), nn.Parameter(torch.zeros(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.proj(x).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q = (x @ self.query).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10 ** torch.arange(q.shape[-1], dtype=x.dtype)
        q, k = (each * angles.cos() + each.roll(1, -1) * angles.sin() for each in (q, k))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Balanced(nn.Module):
    """Experts whose load moves a bias, which is a buffer."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, 3), nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.register_buffer("bias", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        best = (shares + self.bias).argmax(-1)
        load = shares.detach().mean((0, 1))
        self.bias += 0.1 * (load.mean() - load)
        return x + sum((best == i)[..., None] * shares[..., i : i + 1] * f(x) for i, f in enumerate(self.experts))


MIXING = {
    cls.__name__: cls
    for cls in (
        *(Convolution, Recurrent, ByHand, Pooled, Normed, Gated, Zeros, Far, Shifted, Tempered),
        *(Added, Rotary, Balanced),
    )
}


class Mixing(zoo.Sequences):
    """Layers of one of these kinds."""

    layers = 2
    kind = "Convolution"

    def layer(self, index: int) -> nn.Module:
        return MIXING[self.kind]()

    def sample(self, index: int, generator: torch.Generator) -> Any:
        x = torch.randn(4 * LENGTH, DIM, generator=generator, dtype=torch.float64).to(self.dtype)
        return x, x.roll(1, 0)


class Conformer(nn.Module):
    """Attention, and a convolution over time beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(DIM, HEADS, 32, 0.0, batch_first=True)
        self.convolution, self.mlp = Convolution(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.mlp(x + self.convolution(x)).tanh()


class Conformers(zoo.Sequences):
    """Layers of which only a part can have a share; there is no list of these parts alone."""

    layers = 3

    def build(self) -> None:
        self.blocks = nn.ModuleList(Conformer() for _ in range(self.layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Conditioned(nn.Module):
    """A layer with a condition for each sample, which is dropped at times, as its branch is.

    Attributes:
        drawn: The masks of training, in order.
        replayed: Others to take instead, if there are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.scale = nn.Linear(DIM, DIM), nn.Linear(5, DIM)
        self.drawn: list[Tensor] = []
        self.replayed: list[Tensor] = []

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        if self.training:
            condition = condition * self.mask(torch.rand(len(x), 1, device=x.device).to(x.dtype) < 0.7)
        y = self.proj(x) * (1 + self.scale(condition))[:, None]
        if self.training:
            y = y * self.mask(y.new_empty(len(x), 1, 1).bernoulli_(0.5))
        return x + y

    def mask(self, drawn: Tensor) -> Tensor:
        runs_again = torch._C._current_graph_task_id() != -1
        if torch.is_grad_enabled() and not runs_again:
            self.drawn.append(drawn)
        return self.replayed.pop(0) if self.replayed else drawn


class DroppedPath(Conditioned):
    """A layer of torch with dropout, which samples leave out at times; counted in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, 0.1, batch_first=True)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.steps += 1
        y = self.layer(x) * self.steps.sigmoid()
        return x + (y * self.mask((torch.rand(len(x), 1, 1) < 0.5).to(x.dtype)) if self.training else y)


class DroppedPaths(Dropped):
    """Such layers, and what the step draws behind them."""

    def build(self) -> None:
        super().build()
        self.drawn: list[Tensor] = []

    def layer(self, index: int) -> nn.Module:
        return DroppedPath()

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.drawn.append(torch.rand(3))
        return loss


class DropPath(zoo.Sequences):
    """Layers in which samples leave out what is computed, at random; batches of as many as a share is tried with."""

    layers = 3

    def build(self) -> None:
        self.blocks = nn.ModuleList(Conditioned() for _ in range(self.layers))

    def forward(self, x: Tensor) -> Tensor:
        condition = x[:, :4].mean(1)[:, :5]
        for block in self.blocks:
            x = block(x, condition)
        return x

    def sample(self, index: int, generator: torch.Generator) -> Any:
        x = torch.randn(4 * LENGTH, DIM, generator=generator, dtype=torch.float64).to(self.dtype)
        return x, x.roll(1, 0).sin()

"""Models for the table of models and layouts. Nothing here knows of `lightning_hybrid`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WIDTH, HEADS, LENGTH, CLASSES, DEPTH = 8, 2, 6, 5, 4


class Block(nn.Module):
    """A transformer layer before whose parts there are norms."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln_1(x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Model(LightningModule):
    """Blocks in a list over a sequence, a mean over its positions, and a head, in float64.

    Args:
        replicas: In one process, the number of parts of a batch of which each has a loss, and buffers, of its own, as
            replicas have with DDP; as there, buffers of the first one stay.
    """

    #: Whether samples are coupled by the loss, or by what layers write: then each replica has another part of it.
    couples = False
    #: Whether positions are mixed by attention alone.
    attends = True

    def __init__(self, replicas: int = 1) -> None:
        super().__init__()
        self.replicas = replicas if self.couples else 1
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.build()
        self.double()

    def build(self) -> None:
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def encode(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.mean(1)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(self.head(self.encode(batch[0])), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.replicas == 1:
            return self.loss(batch)
        losses = []
        for rank in reversed(range(self.replicas)):
            with self.own_buffers(stay=rank == 0):
                losses.append(self.loss([each[rank :: self.replicas] for each in batch]))
        return torch.stack(losses).mean()

    @contextmanager
    def own_buffers(self, *, stay: bool) -> Iterator[None]:
        """Inside, buffers are other tensors: backward needs those of the other parts."""
        parts = [(part, dict(part.named_buffers(recurse=False))) for part in self.modules()]
        for part, buffers in parts:
            part._buffers.update({name: buffer.clone() for name, buffer in buffers.items()})
        yield
        for part, buffers in () if stay else parts:
            part._buffers.update(buffers)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    @classmethod
    def data(cls, count: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(count, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        return [x, torch.randint(CLASSES, (count,), generator=generator)]


class SimCLR(Model):
    """Both views in one batch, and a loss of all samples together."""

    couples = True

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x = batch[0]
        z = F.normalize(self.head(self.encode(torch.cat([x, x.flip(2)]))), dim=1)
        scores = (z @ z.T / 0.3).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        return F.cross_entropy(scores, torch.arange(len(z)).roll(len(x)))


class SimSiam(Model):
    """One network for two views, with batch norm, a predictor, and a gradient that stops."""

    couples = True

    def build(self) -> None:
        super().build()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.predictor = nn.Sequential(nn.Linear(WIDTH, 4), nn.GELU(), nn.Linear(4, WIDTH))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        views = [self.head(self.encode(x)) for x in (batch[0], batch[0].flip(2))]
        pairs = zip(map(self.predictor, views), reversed(views), strict=True)
        return -torch.stack([F.cosine_similarity(p, z.detach()).mean() for p, z in pairs]).mean()


class L2Penalty(Model):
    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return super().loss(batch) + 1e-2 * sum(each.pow(2).sum() for each in self.parameters())


class OrthogonalityPenalty(Model):
    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        penalty = torch.zeros((), dtype=torch.float64)
        for block in self.blocks:
            weight = block.out.weight
            penalty = penalty + (weight @ weight.T - torch.eye(WIDTH, dtype=torch.float64)).pow(2).sum()
        return super().loss(batch) + 1e-2 * penalty


class Compiled(Model):
    backend = "eager"

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.compile(backend=self.backend)


class CompiledByAot(Compiled):
    backend = "aot_eager"


class Curriculum(Model):
    """From the third step on there is a loss of the layers between."""

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x, losses = self.embed(batch[0]), []
        for depth, block in enumerate(self.blocks):
            x = block(x)
            if depth == DEPTH - 1 or (self.global_step >= 2 and depth % 2):
                losses.append(F.cross_entropy(self.head(x.mean(1)), batch[1]))
        return sum(losses)


class DroppedLayers(Model):
    """Python's `random` says which layers are left out, in each step others."""

    def encode(self, x: Tensor) -> Tensor:
        draw, x = random.Random(self.global_step), self.embed(x)
        for block in self.blocks:
            if draw.random() > 0.4:
                x = block(x)
        return x.mean(1)


class Speech(Model):
    """Convolutions in a list, a bidirectional LSTM over packed lengths, a head, and CTC."""

    attends = False

    def build(self) -> None:
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(DEPTH))
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x, lengths, targets = batch
        for layer in self.layers:
            x = x + torch.tanh(layer(x.transpose(1, 2))).transpose(1, 2)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        x, lengths = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.ctc(x, lengths, targets)

    def ctc(self, x: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        log_probs = self.head(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, targets, lengths, torch.full_like(lengths, targets.shape[1]))

    @classmethod
    def data(cls, count: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(count, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        lengths = torch.randint(4, LENGTH + 1, (count,), generator=generator)
        return [x, lengths, torch.randint(1, CLASSES, (count, 2), generator=generator)]


class Subsampling(nn.Module):
    """A convolution that leaves every second position out, and returns the lengths that are left."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.conv(x.transpose(1, 2)).transpose(1, 2)), (lengths + 1) // 2


class PackedLayer(nn.Module):
    """A recurrent layer over packed lengths, which it returns beside its values."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)


class Listener(Speech):
    """Layers that return lengths beside values, which the next one packs."""

    def build(self) -> None:
        super().build()
        self.layers = nn.ModuleList([PackedLayer(), Subsampling(), PackedLayer(), PackedLayer()])

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x, lengths, targets = batch
        for layer in self.layers:
            x, lengths = layer(x, lengths)
        return self.ctc(x, lengths, targets[:, :1])


class Codebook(nn.Module):
    """Codes that are moving averages of what they stand for, in buffers that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randn(7, WIDTH)
        self.register_buffer("codes", codes)
        self.register_buffer("counts", torch.ones(7))
        self.register_buffer("sums", codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.detach().flatten(0, 1)
        nearest = torch.cdist(flat, self.codes).argmin(-1)
        quantised = self.codes[nearest].view_as(x)
        if self.training:
            chosen = F.one_hot(nearest, len(self.codes)).to(x)
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(chosen.t() @ flat, alpha=0.1)
            self.codes.copy_(self.sums / self.counts.clamp(min=1e-5)[:, None])
        return x + (quantised - x).detach(), F.mse_loss(x, quantised)


class VQVAE(Model):
    """An encoder, a codebook, and a decoder."""

    couples = True

    def build(self) -> None:
        super().build()
        self.codebook = Codebook()
        self.decoder = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        x, loss = self.codebook(x)
        for block in self.decoder:
            x = block(x)
        return F.mse_loss(self.head(x), batch[0]) + 0.25 * loss


MODELS: list[type[Model]] = [
    *(SimCLR, SimSiam, L2Penalty, OrthogonalityPenalty, Compiled, CompiledByAot, Curriculum, DroppedLayers),
    *(Speech, Listener, VQVAE),
]

"""The zoo: small LightningModules as users write them. Nothing here knows that `lightning_hybrid` exists.

All of them learn something from data that they make themselves, so a harness only has to say how large a batch is. Each
one has one peculiarity that makes it worth a place; its docstring names it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy

WIDTH = 6
VOCABULARY = 11
CLASSES = 3


class Samples(Dataset):
    """Samples, one after another."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


def block(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


class Example(LightningModule):
    """Data, optimizer and logging that the modules have in common; the loss is a mean over samples."""

    samples = 48
    layers = 6
    batch_per_step = 8

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.build()

    def build(self) -> None:
        self.body = nn.Sequential(*(block() for _ in range(self.layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)

    def sample(self, index: int, generator: torch.Generator) -> Any:
        x = torch.randn(WIDTH, generator=generator, dtype=torch.float64).to(self.dtype)
        return x, x.roll(1).sin()

    def collate(self, samples: list[Any]) -> Any:
        return torch.utils.data.default_collate(samples)

    def _loader(self, count: int, seed: int) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        samples = Samples([self.sample(index, generator) for index in range(count)])
        return DataLoader(samples, self.batch_size, collate_fn=self.collate)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.samples, seed=1)

    def val_dataloader(self) -> DataLoader:
        return self._loader(12, seed=2)


class Plain(Example):
    """The body, and nothing else."""


class Momentum(Example):
    """SGD, for which gradients matter by their size."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Around(Example):
    """Code with parameters before and after the body."""

    def build(self) -> None:
        self.embed = nn.Linear(WIDTH, 8)
        self.body = nn.Sequential(*(block(8) for _ in range(self.layers)))
        self.head = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)))


class Residual(Around):
    """What comes before the body is used again after it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head(self.body(h) + h)


class Language(Example):
    """Tokens in, logits out."""

    length = 5

    def build(self) -> None:
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(*(block() for _ in range(self.layers)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def sample(self, index: int, generator: torch.Generator) -> Any:
        tokens = torch.randint(VOCABULARY, (self.length + 1,), generator=generator)
        return tokens[:-1], tokens[1:]


class Tied(Language):
    """Embedding and head share their weight."""

    layers = 8

    def build(self) -> None:
        super().build()
        self.head.weight = self.embed.weight


class SharedLayer(Example):
    """One module object stands at several places of the body, on different stages."""

    layers = 7

    def build(self) -> None:
        again = block()
        layers = [block() for _ in range(self.layers)]
        layers[0] = layers[3] = layers[-1] = again
        self.body = nn.Sequential(*layers)


class SharedParameter(Example):
    """Layers of different stages share a parameter."""

    def build(self) -> None:
        super().build()
        self.body[-1][0].weight = self.body[0][0].weight
        self.body[3][0].bias = self.body[2][0].bias


class MaskedBlock(nn.Module):
    """A dictionary in, a dictionary out, with entries of every kind."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.index = index

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        update = torch.tanh(self.linear(state["h"]))
        if state["flip"]:
            update = -update
        if state["skip"] is not None:
            update = update + state["skip"]
        h = torch.where(state["mask"].unsqueeze(-1), update, state["h"])
        # A value that needs a gradient and that nobody uses; one that a later layer uses; None that becomes a tensor.
        skip = h if self.index == 2 else state["skip"]
        return {**state, "h": h, "unused": 2 * h, "skip": skip, "depth": state["depth"] + 1}


class DictActivations(Example):
    """Dictionaries with None, masks, token ids, booleans and plain numbers pass from layer to layer."""

    def build(self) -> None:
        self.body = nn.Sequential(*(MaskedBlock(index) for index in range(self.layers)))

    def loss(self, batch: Any) -> Tensor:
        x, mask, ids = batch["x"], batch["mask"], batch["ids"]
        state = {"h": x, "mask": mask, "ids": ids, "flip": batch["flip"], "skip": None, "depth": 0, "kind": "dense"}
        out = self.body(state)
        assert out["depth"] == self.layers
        assert out["kind"] == "dense"
        assert torch.equal(out["ids"], ids)
        weight = out["mask"].unsqueeze(-1) * (1 + out["ids"]).unsqueeze(-1)
        return (weight * (out["h"] - batch["y"]) ** 2).mean()

    def sample(self, index: int, generator: torch.Generator) -> Any:
        x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(self.dtype)
        mask = torch.rand(4, generator=generator) < 0.7
        ids = torch.randint(3, (4,), generator=generator)
        return {"x": x, "y": x.cos(), "mask": mask, "ids": ids, "index": index}

    def collate(self, samples: list[Any]) -> Any:
        batch = super().collate(samples)
        return {**batch, "flip": bool(samples[0]["index"] // 16 % 2)}


class Carry(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.index = index

    def forward(self, values: Any) -> Any:
        x, (h, trace) = values
        h = self.cell(x, h)
        return x, (h, [*trace, h.mean(1)] if self.index % 3 == 0 else trace)


class TupleActivations(Example):
    """Nested tuples and lists that grow pass from layer to layer; one tensor needs no gradient, and is used by all."""

    def build(self) -> None:
        self.body = nn.Sequential(*(Carry(index) for index in range(self.layers)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        _, (h, trace) = self.body((x, (torch.zeros_like(x), [])))
        return F.mse_loss(h, y) + torch.stack(trace).square().sum(0).mean()


class Ragged(Around):
    """The last batch is smaller, and is not divided evenly (replicas share the samples evenly, up to 4 of them)."""

    samples = 44


class Few(Around):
    """Batches with fewer samples than microbatches."""

    samples = 14
    batch_per_step = 3


class VaryingLength(Language):
    """Batches padded to their longest sequence; the loss of a sample is the mean over its tokens."""

    samples = 40

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1, reduction="none")
        return (losses.sum(1) / (targets >= 0).sum(1)).mean()

    def sample(self, index: int, generator: torch.Generator) -> Any:
        # Batches come in several lengths.
        length = int(torch.randint(1, 4, (1,), generator=generator)) + 2 * (index // 8 % 3)
        tokens = torch.randint(VOCABULARY, (length + 1,), generator=generator)
        return tokens[:-1], tokens[1:]

    def collate(self, samples: list[Any]) -> Any:
        inputs, targets = zip(*samples, strict=True)
        pad = nn.utils.rnn.pad_sequence
        return pad(list(inputs), batch_first=True), pad(list(targets), batch_first=True, padding_value=-1)


class TokenWeighted(VaryingLength):
    """The loss is a mean over the tokens of the batch, not over its samples."""

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        size = int((batch[1] >= 0).sum())
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=size, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss(batch), batch_size=int((batch[1] >= 0).sum()), sync_dist=True)

    def microbatch_weight(self, microbatch: Any) -> Tensor:
        return (microbatch[1] >= 0).sum()


class Summed(Around):
    """The loss is a sum over samples; the metric of a batch is each replica's own."""

    def build(self) -> None:
        super().build()
        self.signs = BinaryAccuracy()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        predicted = self(x)
        if self.training:
            self.signs((predicted > 0).int(), (y > 0).int())
        return F.mse_loss(predicted, y, reduction="sum") / 10

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("signs", self.signs, on_step=True, on_epoch=True)
        return loss


class LogsProduct(Around):
    """A module that logs a product, which is not a mean over samples. Its loss is a mean over samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("square", loss.detach() ** 2)
        return loss


class Normalised(Around):
    """Batch statistics, in the body, before it and after it.

    SGD: a bias before a normalisation has no influence, and Adam makes a step of what rounding leaves of its gradient.
    Microbatches of 4: with two samples a normalisation is nearly a sign, and multiplies rounding by a million.
    """

    batch_per_step = 12

    def build(self) -> None:
        super().build()
        self.norm_before = nn.BatchNorm1d(8)
        self.norm = nn.BatchNorm1d(8)
        momenta = [0.1, None, 0.1, 0.2, None, 0.1]  # None: the average of all batches
        self.body = nn.Sequential(*(nn.Sequential(block(8), nn.BatchNorm1d(8, 1e-2, m)) for m in momenta))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.norm_before(self.embed(x)))))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class FrozenFirst(Around):
    """Everything up to the middle of the body is frozen: no gradient flows back into the first stage."""

    def build(self) -> None:
        super().build()
        self.embed.requires_grad_(False)
        self.body[: self.layers // 2].requires_grad_(False)


class FrozenMiddle(Around):
    """Layers in the middle are frozen; gradients flow through them."""

    def build(self) -> None:
        super().build()
        self.body[1:5].requires_grad_(False)


class FrozenLast(Around):
    """The second half of the body and the head are frozen; gradients flow through them."""

    def build(self) -> None:
        super().build()
        self.body[self.layers // 2 :].requires_grad_(False)
        self.head.requires_grad_(False)


class Thawing(Around):
    """The first half is thawed while training goes on, as finetuning does."""

    def build(self) -> None:
        super().build()
        self.body[: self.layers // 2].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.body[: self.layers // 2].requires_grad_(self.current_epoch > 0)


class WithoutParameters(Around):
    """Stages whose layers have no parameters."""

    def build(self) -> None:
        super().build()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh(), nn.Softplus(), nn.Linear(8, 8), nn.ELU())


class InPlace(Around):
    """Every stage begins with a layer that changes its input in place."""

    def build(self) -> None:
        super().build()
        self.body = nn.Sequential(
            *(nn.Sequential(nn.LeakyReLU(0.3, inplace=True), nn.Linear(8, 8)) for _ in range(self.layers))
        )


class Noisy(Around):
    """Noise is drawn before the body, used again in the loss, and more is drawn after the body (as diffusion does)."""

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        noise = torch.randn_like(x) + random.random() + float(np.random.rand())
        predicted = self(x + noise)
        later = torch.rand_like(x)
        return ((predicted - noise) ** 2 * later).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("val", F.mse_loss(self(x), y), sync_dist=True)


class Augmenting(Noisy):
    """Code before the body takes another path by chance, and drops some of what only the first stage has."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.embed(x), 0.2, self.training)
        if self.training and random.random() < 0.5:
            x = x + torch.rand_like(x) * self.embed.bias
        return self.head(self.body(x))


class Dropping(Around):
    """Dropout in the layers."""

    def build(self) -> None:
        super().build()
        self.body = nn.Sequential(*(nn.Sequential(block(8), nn.Dropout(0.2)) for _ in range(self.layers)))


class Expert(nn.Module):
    """A branch that only flagged samples take."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.common = nn.Linear(width, width)
        self.special = nn.Linear(width, width)

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, flag = state
        y = self.common(x)
        if flag.any():
            y = y.index_add(0, flag.nonzero()[:, 0], self.special(x[flag]))
        return torch.tanh(y), flag


class Branching(Example):
    """A branch that is used by one replica only, by some microbatches only, and in some batches not at all."""

    def build(self) -> None:
        self.body = nn.Sequential(*(Expert(WIDTH) for _ in range(self.layers)))
        self.outside = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Any) -> Tensor:
        x, y, flag = batch
        out, _ = self.body((x, flag))
        if flag.any():
            out = out.index_add(0, flag.nonzero()[:, 0], self.outside(x[flag]))
        return F.mse_loss(out, y)

    def sample(self, index: int, generator: torch.Generator) -> Any:
        # Of 16 samples two even ones; a second replica, which has the odd ones, has none.
        return *super().sample(index, generator), torch.tensor(index < 16 and index in (2, 10, 12))


class Unused(Around):
    """Parameters that are never used, with weight decay: they must not change."""

    def build(self) -> None:
        super().build()
        self.forgotten = nn.Parameter(torch.ones(3))
        self.body[1].register_parameter("forgotten", nn.Parameter(torch.ones(3)))
        self.body[4].register_parameter("forgotten", nn.Parameter(torch.ones(3)))


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.Sequential(*(block() for _ in range(layers)))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(x * self.scale))


class Nested(Example):
    """The body is deep inside: `self.net.blocks`."""

    def build(self) -> None:
        self.net = Net(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Configured(Around):
    """Built in `configure_model`."""

    def build(self) -> None:
        self.built = False

    def configure_model(self) -> None:
        if not self.built:
            self.built = True
            with torch.random.fork_rng():
                torch.manual_seed(3)
                super().build()
            self.to(torch.float64)


class Grouped(Around):
    """Several parameter groups, of which a stage may have none, and a learning rate that changes with each step."""

    def configure_optimizers(self) -> Any:
        plain = [p for p in self.body.parameters() if p.ndim > 1]
        biases = [p for p in self.body.parameters() if p.ndim <= 1]
        groups = [
            {"params": plain, "weight_decay": 0.2},
            {"params": biases, "weight_decay": 0.0, "lr": 3e-2},
            {"params": list(self.embed.parameters()), "lr": 1e-3},
            {"params": list(self.head.parameters())},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rates = self.lr_schedulers().get_last_lr()
        self.log("rate", rates[1])
        return super().training_step(batch, batch_idx)


class Plateau(Around):
    """The learning rate follows a monitored value, which every rank must see."""

    samples = 24

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}

    def on_train_epoch_end(self) -> None:
        self.log("rate", self.optimizers().param_groups[0]["lr"])


class Classifier(Around):
    """torchmetrics and plain values with every reduction, in training and validation."""

    def build(self) -> None:
        super().build()
        self.head = nn.Linear(8, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES, dist_sync_on_step=True)
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self._log("train", loss, logits)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.val_accuracy.update(logits, y)
        self.log("val_accuracy", self.val_accuracy)
        self._log("val", F.cross_entropy(logits, y), logits)

    def _log(self, name: str, loss: Tensor, logits: Tensor) -> None:
        settings = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log_dict({f"{name}_mean": loss, f"{name}_second": 2 * loss}, **settings)
        self.log(f"{name}_sum", logits.sum(), reduce_fx="sum", **settings)
        self.log(f"{name}_min", logits.min(), reduce_fx="min", **settings)
        self.log(f"{name}_max", logits.max(), reduce_fx=torch.max, **settings)
        self.log(f"{name}_function", logits.mean(), reduce_fx=torch.mean, on_step=False, on_epoch=True, sync_dist=True)

    def sample(self, index: int, generator: torch.Generator) -> Any:
        x, _ = super().sample(index, generator)
        return x, int(x[:CLASSES].argmax())


class Outputs(Around):
    """`training_step` returns a dictionary with extras; validation collects outputs until the end of the epoch."""

    def build(self) -> None:
        super().build()
        self.collected: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        predicted = self(x)
        errors = ((predicted - y) ** 2).mean(1)
        return {"loss": errors.mean(), "errors": errors, "predicted": predicted.detach(), "mean": predicted.mean()}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.collected.append(loss)
        return {"value": loss, "batch": batch_idx}

    def on_validation_epoch_end(self) -> None:
        self.log("collected", torch.stack(self.collected).sum(), sync_dist=True)
        self.collected.clear()


@dataclass
class Pairs:
    x: Tensor
    y: Tensor
    names: list[str]
    gain: float


class Triple(NamedTuple):
    x: Tensor
    y: Tensor
    weights: Tensor


class DataclassBatch(Around):
    """Batches are instances of a dataclass, with strings and a plain number for the whole batch."""

    def loss(self, batch: Pairs) -> Tensor:
        assert len(batch.names) == len(batch.x)
        assert all(name == f"sample {float(x[0]):.6f}" for name, x in zip(batch.names, batch.x, strict=True))
        return batch.gain * F.mse_loss(self(batch.x), batch.y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch.x), sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss(batch), batch_size=len(batch.x), sync_dist=True)

    def collate(self, samples: list[Any]) -> Any:
        x, y = super().collate(samples)
        return Pairs(x, y, [f"sample {float(row[0]):.6f}" for row in x], gain=1.5)


class NamedTupleBatch(Around):
    """Batches are named tuples; one entry has one row for all samples and goes whole to every microbatch."""

    def loss(self, batch: Triple) -> Tensor:
        return (batch.weights * (self(batch.x) - batch.y) ** 2).mean()

    def collate(self, samples: list[Any]) -> Any:
        x, y = super().collate(samples)
        return Triple(x, y, torch.linspace(1, 2, WIDTH, dtype=self.dtype)[None])

"""Models whose bodies are no chain: as users write them, with lists, loops, skips and several stacks.

Nothing here knows that `lightning_hybrid` exists. Each module's docstring names its peculiarity.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import MulticlassAccuracy

from tests.zoo.basic import CLASSES, VOCABULARY, WIDTH, Example, Language, block


class Block(nn.Module):
    """A residual block that may take a mask."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        y = torch.tanh(self.linear(self.norm(x))) * scale
        return x + (y if mask is None else y * mask)


class Loop(Example):
    """A plain loop over a `ModuleList`, with parameters around it."""

    def build(self) -> None:
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(self.layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.blocks:
            x = layer(x)
        return self.head(x)


class Slices(Loop):
    """Slices, indices and keyword arguments; the first value is used again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.embed(x)
        for number, layer in enumerate(self.blocks[:3]):
            x = layer(x, scale=1.0 / (number + 1))
        x = self.blocks[3](x=x)
        for index in range(4, len(self.blocks)):
            x = self.blocks[index](x)
        return self.head(x + 0.5 * first)


class Keyed(Loop):
    """A `ModuleDict`, and a Sequential with a `forward` of its own."""

    class Doubling(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = 0.5 * (x + layer(x))
            return x

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleDict({name: Block() for name in ("one", "two", "three")})
        self.rest = self.Doubling(*(Block() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for name in ("one", "two", "three"):
            x = self.blocks[name](x)
        return self.head(self.rest(x))


class Masked(Loop):
    """A mask that is ``None`` where a microbatch needs none, as transformers has it."""

    def sample(self, index: int, generator: torch.Generator) -> Any:
        x, y = super().sample(index, generator)
        mask = torch.rand(WIDTH, generator=generator) > (0.2 if index % 3 else -1.0)
        return x, mask, y

    def loss(self, batch: Any) -> Tensor:
        x, mask, y = batch
        weights = None if mask.all() else mask.to(x.dtype)
        x = self.embed(x)
        for layer in self.blocks:
            x = layer(x, weights)
        return F.mse_loss(self.head(x), y)


class Skips(Example):
    """A U-Net: what goes down is used again on the way up, from a list."""

    def build(self) -> None:
        self.down = nn.ModuleList(Block() for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], -1)))
        return x


class AllStates(Loop):
    """The outputs of all layers are collected."""

    def forward(self, x: Tensor) -> Tensor:
        states = [self.embed(x)]
        for layer in self.blocks:
            states.append(layer(states[-1]))
        return self.head(torch.stack(states).mean(0))


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)

    def forward(self, z: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.tanh(self.net(z))
        return z * scale.exp(), log_det + scale.sum(-1)


class Flow(Example):
    """Two streams: a value and the logarithm of a determinant."""

    def build(self) -> None:
        self.flows = nn.ModuleList(Coupling() for _ in range(self.layers))

    def loss(self, batch: Any) -> Tensor:
        z, log_det = batch[0], batch[0].new_zeros(len(batch[0]))
        for flow in self.flows:
            z, log_det = flow(z, log_det)
        return (z.pow(2).sum(-1) - log_det).mean()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = Block()
        self.cross = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        bias = x.mean(-1, keepdim=True) if bias is None else bias
        return self.cross(torch.cat([self.own(x), memory], -1)) + bias, bias


class EncoderDecoder(Language):
    """Two stacks, a norm between them, one embedding for both and the head, and a bias handed from layer to layer."""

    def build(self) -> None:
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.between = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Decoder() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.shared(tokens)
        for layer in self.encoder:
            memory = layer(memory)
        memory, x, bias = self.between(memory), self.shared(tokens.flip(1)), None
        for layer in self.decoder:
            x, bias = layer(x, memory, bias)
        return self.head(x)


class CompiledLoop(Slices):
    """Layers that are compiled one by one, with keyword arguments; so is the head."""

    def build(self) -> None:
        super().build()
        for number, layer in enumerate(self.blocks):
            layer.compile(backend=("eager", "aot_eager")[number % 2])
        self.head.compile(backend="eager")


class CompiledParts(Loop):
    """One layer is wrapped by `torch.compile`, one has a compiled part, one a compiled copy of its class."""

    def build(self) -> None:
        super().build()
        self.blocks[0] = torch.compile(self.blocks[0], backend="eager")
        self.blocks[1].linear.compile(backend="aot_eager")
        self.blocks[2].compile(backend="eager", dynamic=True)


class Reentrant(Loop):
    """Layers run again in backward, by `use_reentrant=True`, each around the layer alone, with a mask that is made."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        mask = torch.ones_like(x[:, :1])
        for number, layer in enumerate(self.blocks):
            x = checkpoint(layer, x, mask, use_reentrant=True, preserve_rng_state=number % 2 == 0)
        return self.head(x)


class ReentrantWithoutGradients(Loop):
    """The first checkpoint is given nothing that requires grad, so its layer is not trained, as torch warns."""

    def forward(self, x: Tensor) -> Tensor:
        again = partial(checkpoint, use_reentrant=True)  # as models of transformers have it
        for layer in self.blocks[:3]:
            x = again(layer, x)
        x = self.embed(x)
        for layer in self.blocks[3:]:
            x = x + again(lambda x, layer=layer: layer(x) * 0.5, x)
        return self.head(x)


class Siamese(Example):
    """The layers are called twice in a step, with two views."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(Block() for _ in range(self.layers))

    def embed(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = layer(x)
        return x

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return 1 - F.cosine_similarity(self.embed(x), self.embed(x.flip(1) + y)).mean()


class TwoViews(Loop):
    """The layers are one `nn.Sequential`, which is called twice in a step, with parameters around it."""

    def build(self) -> None:
        super().build()
        self.blocks = nn.Sequential(*self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return 1 - F.cosine_similarity(self(x), self(x.flip(1) + y)).mean()


class LayerByLayer(TwoViews):
    """A Sequential whose layers are called one by one, in a loop; validation calls it as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if not self.training:
            return self.head(self.blocks(x))
        for number, layer in enumerate(self.blocks):
            x = layer(x, scale=1.0 / (number + 1))
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)


class Projected(TwoViews):
    """Both views at once through the Sequential, then its last layers again alone; a parameter is used in between."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.blocks(self.embed(torch.cat([x, y])))
        again = self.blocks[-1](hidden * self.head.bias)
        return (hidden - 0.1 * again).pow(2).mean() + self.head(hidden).pow(2).mean()


class InPlaceFrame(Loop):
    """The code around the layers writes into tensors, also through views of them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.blocks:
            x = layer(x)
            x += 0.1
            x[:, 0] = x[:, 1] * 2
            x.view(-1).mul_(0.9)
        return self.head(x)


class Stacks(Example):
    """A ResNet: four stacks in a numbered row, batch norm in them, before and between them."""

    def build(self) -> None:
        self.stem = nn.Linear(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8)
        for number in range(1, 5):
            layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)]
            setattr(self, f"layer{number}", nn.Sequential(*layers, nn.Linear(8, 8)))
        self.middle = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.norm(self.stem(x)))
        x = self.middle(self.layer2(self.layer1(x)))
        return self.head(self.layer4(self.layer3(x)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class Classes(Loop):
    """A step that goes on after the model: boolean masks, ``.item()``, metrics, logged values of the middle."""

    def build(self) -> None:
        super().build()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.seen = 0

    def sample(self, index: int, generator: torch.Generator) -> Any:
        x, _ = super().sample(index, generator)
        return x, int(x.sum() > 0) + int(x[0] > 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.seen += len(y)
        embedded = self.embed(x)
        self.log("embedded", embedded.pow(2).mean())
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        if batch_idx % 2:
            self.log("spread", logits.abs().mean(), on_step=True, on_epoch=False)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("sure", float((logits.detach().softmax(-1).amax(-1) > 0.4).double().mean().item()))
        chosen = logits.detach()[y != 0]
        return {"loss": loss, "logits": logits.detach(), "chosen": chosen.abs().sum() / len(y)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.log("val", F.cross_entropy(logits, y), sync_dist=True)
        return {"guesses": logits.argmax(-1)}


class Named(Loop):
    """Layers that are called in another order than they were made in, which the user says."""

    pipeline_body = ("late.*", "early.*")

    def build(self) -> None:
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.early = nn.ModuleList(Block() for _ in range(3))
        self.late = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in [*self.late, *self.early]:
            x = layer(x)
        return self.head(x)


class FrameDrops(Loop):
    """Dropout in the code around the layers and in them, LayerDrop, stochastic depth."""

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList(nn.Sequential(block(), nn.Dropout(0.2)) for _ in range(self.layers))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.embed(x))
        for layer in self.blocks:
            if self.training and torch.rand([]) < 0.3:
                continue
            x = x + layer(x) * torch.rand(len(x), 1, dtype=x.dtype)
        return self.head(self.drop(x))


class Penalised(Loop):
    """Penalties over all parameters: squares, orthogonality of the layers, distances from former weights, norms."""

    def build(self) -> None:
        super().build()
        self.former = {name: 0.9 * parameter.detach() + 0.05 for name, parameter in self.named_parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        absolute = sum(parameter.abs().sum() for parameter in self.parameters())
        loss = super().training_step(batch, batch_idx) + 1e-3 * absolute
        for layer in self.blocks:
            weight = layer.linear.weight
            loss = loss + 1e-2 * (weight.T @ weight - torch.eye(WIDTH, dtype=weight.dtype)).pow(2).sum()
        for name, parameter in self.named_parameters():
            loss = loss + 1e-2 * (parameter - self.former[name].to(parameter.dtype)).pow(2).sum()
        return loss + 1e-2 * torch.stack([parameter.norm() for parameter in self.parameters()]).sum()


class Averaged(Example):
    """Self-supervision with a teacher that the step moves at its end (DINO); projections outside of the layers too."""

    def build(self) -> None:
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.student = nn.ModuleList(Block() for _ in range(self.layers))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.teacher_head = copy.deepcopy(self.head).requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        pairs = [*zip(self.student.parameters(), self.teacher.parameters(), strict=True)]
        for now, average in [*pairs, *zip(self.head.parameters(), self.teacher_head.parameters(), strict=True)]:
            average.mul_(0.9).add_(now, alpha=0.1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.embed(x)
        for layer in self.student:
            x = layer(x)
        for layer in self.teacher:
            y = layer(y)
        return F.mse_loss(self.head(x), self.teacher_head(y).detach())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.update()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2, weight_decay=0.1)


class Momentum(Averaged):
    """The teacher is moved at the top of the step (MoCo v3, BYOL), by assignment to `data`."""

    @torch.no_grad()
    def update(self) -> None:
        for student, teacher in ((self.student, self.teacher), (self.head, self.teacher_head)):
            for now, average in zip(student.parameters(), teacher.parameters(), strict=True):
                average.data = average.data * 0.9 + now.data * (1.0 - 0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.update()
        return Example.training_step(self, batch, batch_idx)

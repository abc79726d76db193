"""Self-supervision with a momentum encoder, as its authors write it: MoCo (v1 with a queue, v3), BYOL, DINO."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

WIDTH, PATCHES, OUTPUTS = 8, 4, 6


class Block(nn.Module):
    """A block of a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class VisionTransformer(nn.Module):
    """A vision transformer over flattened patches, with a head."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(WIDTH, WIDTH)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), head

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x)[:, 0])
        return out


def mlp(in_features: int, out_features: int, *, normalizes: bool = False) -> nn.Sequential:
    """A projector or a predictor."""
    norm = [nn.BatchNorm1d(2 * WIDTH)] if normalizes else []
    layers = [nn.Linear(in_features, 2 * WIDTH, bias=not normalizes), *norm, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2 * WIDTH, out_features))


class SelfSupervised(LightningModule):
    """Two views of each sample; a momentum encoder in float64."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.build()
        self.double()

    def build(self) -> None:
        """Make the encoders."""
        raise NotImplementedError

    def views(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return two views of a batch."""
        x = batch[0]
        return x + 0.1 * x.roll(1, 1), 0.9 * x.flip(2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1, momentum=0.9)


class MoCoV3(SelfSupervised):
    """MoCo v3 as in LiBai: the momentum encoder is moved between the two forwards, by assignment to `data`."""

    def build(self) -> None:
        """Make the encoders."""
        self.base_encoder = VisionTransformer(mlp(WIDTH, OUTPUTS, normalizes=True))
        self.momentum_encoder = copy.deepcopy(self.base_encoder)
        self.predictor = mlp(OUTPUTS, OUTPUTS, normalizes=True)
        for param_b, param_m in zip(self.base_encoder.parameters(), self.momentum_encoder.parameters(), strict=True):
            param_m.data.copy_(param_b.data)
            param_m.requires_grad = False

    @torch.no_grad()
    def _update_momentum_encoder(self, m: float) -> None:
        for param_b, param_m in zip(self.base_encoder.parameters(), self.momentum_encoder.parameters(), strict=True):
            param_m.data = param_m.data * m + param_b.data * (1.0 - m)

    def contrastive_loss(self, q: Tensor, k: Tensor) -> Tensor:
        """Cross entropy of each sample with its other view, among all of the batch."""
        logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T / 0.2
        labels = torch.arange(len(logits), device=logits.device)
        return F.cross_entropy(logits, labels) * (2 * 0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x1, x2 = self.views(batch)
        q1 = self.predictor(self.base_encoder(x1))
        q2 = self.predictor(self.base_encoder(x2))
        with torch.no_grad():
            self._update_momentum_encoder(0.9)
            k1, k2 = self.momentum_encoder(x1), self.momentum_encoder(x2)
        return self.contrastive_loss(q1, k2) + self.contrastive_loss(q2, k1)


class MoCo(SelfSupervised):
    """MoCo v1: keys of earlier batches in a queue, and the key encoder moved at the top of the step."""

    def build(self) -> None:
        """Make the encoders and the queue."""
        self.encoder_q = VisionTransformer(mlp(WIDTH, OUTPUTS))
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(OUTPUTS, 24), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self) -> None:
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data = param_k.data * 0.9 + param_q.data * 0.1

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: Tensor) -> None:
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + len(keys)] = keys.T
        self.queue_ptr[0] = (ptr + len(keys)) % self.queue.shape[1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x1, x2 = self.views(batch)
        q = F.normalize(self.encoder_q(x1), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(x2), dim=1)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([positive, negative], 1) / 0.2
        labels = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        self._dequeue_and_enqueue(k)
        return F.cross_entropy(logits, labels)


class BYOL(SelfSupervised):
    """BYOL: the target network follows the online one at the end of the step, buffers too."""

    def build(self) -> None:
        """Make the networks."""
        self.online = VisionTransformer(mlp(WIDTH, OUTPUTS))
        self.online.register_buffer("mean", torch.randn(OUTPUTS))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        with torch.no_grad():
            self.target.mean.zero_()
        self.predictor = mlp(OUTPUTS, OUTPUTS)

    def loss(self, p: Tensor, z: Tensor) -> Tensor:
        """Return the distance of normalized vectors."""
        return (2 - 2 * F.cosine_similarity(p, z.detach(), dim=-1)).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x1, x2 = self.views(batch)
        p1, p2 = self.predictor(self.online(x1)), self.predictor(self.online(x2))
        with torch.no_grad():
            z1, z2 = self.target(x1), self.target(x2)
        loss = self.loss(p1, z2) + self.loss(p2, z1)
        self.update_target()
        self.log("loss", loss)
        return loss

    @torch.no_grad()
    def update_target(self) -> None:
        """Move the target network."""
        for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
            target.data = 0.9 * target.data + 0.1 * online.data
        for online, target in zip(self.online.buffers(), self.target.buffers(), strict=True):
            target.copy_(online)


class ForeachBYOL(BYOL):
    """The target network is moved at the top of the step, with torch's functions for lists."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            targets, online = list(self.target.parameters()), list(self.online.parameters())
            torch._foreach_mul_(targets, 0.9)
            torch._foreach_add_(targets, online, alpha=0.1)
        return super().training_step(batch, batch_idx)

    def update_target(self) -> None:
        """Do nothing."""


class DINOHead(nn.Module):
    """A projector, and a weight-normalized last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp(WIDTH, WIDTH)
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, OUTPUTS, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last_layer(F.normalize(self.mlp(x), dim=-1))
        return out


class DINO(SelfSupervised):
    """DINO: the center of the teacher's outputs is a buffer written from the batch; the teacher moves at the end."""

    def build(self) -> None:
        """Make the networks and the center."""
        self.student, self.teacher = VisionTransformer(DINOHead()), VisionTransformer(DINOHead())
        self.teacher.load_state_dict(self.student.state_dict())
        for p in self.teacher.parameters():
            p.requires_grad = False
        self.register_buffer("center", torch.zeros(1, OUTPUTS))

    @torch.no_grad()
    def update_center(self, teacher_output: Tensor) -> None:
        """Move the center."""
        self.center = self.center * 0.9 + teacher_output.mean(0, keepdim=True) * 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x1, x2 = self.views(batch)
        with torch.no_grad():
            outputs = torch.cat([self.teacher(x1), self.teacher(x2)])
        t1, t2 = F.softmax((outputs - self.center) / 0.04, dim=-1).chunk(2)
        s1, s2 = (F.log_softmax(self.student(x) / 0.1, dim=-1) for x in (x1, x2))
        loss = (-(t1 * s2).sum(-1).mean() - (t2 * s1).sum(-1).mean()) / 2
        self.update_center(outputs)
        with torch.no_grad():
            for param_q, param_k in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                param_k.data.mul_(0.9).add_((1 - 0.9) * param_q.detach().data)
        return loss


class InPlaceDINO(DINO):
    """The center is written in place."""

    @torch.no_grad()
    def update_center(self, teacher_output: Tensor) -> None:
        """Move the center."""
        self.center.mul_(0.9).add_(teacher_output.mean(0, keepdim=True) * 0.1)


MODULES = [MoCoV3, MoCo, BYOL, ForeachBYOL, DINO, InPlaceDINO]

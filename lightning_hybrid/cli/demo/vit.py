"""A Vision Transformer: an ordinary LightningModule without code for parallel training.

``lightning-hybrid demo`` trains :class:`ViT`, and so do the files in `configs` and `examples`. It shows that a module
needs no changes: the strategy finds the layers in ``body``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

__all__ = ["Attention", "Block", "DropPath", "Embedding", "ViT"]


class Embedding(nn.Module):
    """A layer that turns images into tokens: it projects each patch, prepends a class token, and adds positions.

    Shapes: ``(batch, channels, image_size, image_size)`` to ``(batch, 1 + number of patches, dim)``.
    """

    def __init__(self, image_size: int, patch_size: int, channels: int, dim: int) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image_size ({image_size}) must be a multiple of patch_size ({patch_size}) [LH1019]")
        self.project = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        # Same scale as the projected patches: with the usual 0.02, small models learn positions slowly on little data.
        self.positions = nn.Parameter(torch.randn(1, 1 + (image_size // patch_size) ** 2, dim) * 0.3)

    def forward(self, images: Tensor) -> Tensor:
        """Return the tokens of a batch of images."""
        patches: Tensor = self.project(images).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1) + self.positions


class Attention(nn.Module):
    """Multi-head self-attention over ``(batch, tokens, dim)``."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads}) [LH1019]")
        self.heads, self.head_dim = heads, dim // heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Let every token attend to every token."""
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class DropPath(nn.Module):
    """Stochastic depth (https://arxiv.org/abs/1603.09382): in training, the branch of random samples is skipped.

    Args:
        probability: Probability of skipping a branch. The other branches are scaled by ``1 / (1 - probability)``.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, ``(batch, ...)``, with random samples set to zero."""
        if not self.training or self.probability == 0.0:
            return x
        stays = torch.rand(len(x), *[1] * (x.ndim - 1), device=x.device) >= self.probability
        return x * stays.to(x.dtype) / (1 - self.probability)


class Block(nn.Module):
    """A pre-norm transformer block over ``(batch, tokens, dim)``."""

    def __init__(
        self, dim: int, heads: int, mlp_dim: int, dropout: float, attention_dropout: float, drop_path: float
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, attention_dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim))
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and MLP, each with a residual connection."""
        x = x + self.drop_path(self.dropout(self.attention(self.norm1(x))))
        output: Tensor = x + self.drop_path(self.dropout(self.mlp(self.norm2(x))))
        return output


class ViT(LightningModule):
    """A Vision Transformer (https://arxiv.org/abs/2010.11929) for classification.

    The defaults are for 8 x 8 handwritten digits. A pipeline splits the body, an ordinary ``nn.Sequential`` of blocks.

    Args:
        image_size: Height and width of the images, in pixels.
        patch_size: Height and width of a patch, in pixels.
        channels: Channels of the images.
        num_classes: Number of classes.
        dim: Number of features per token.
        depth: Number of blocks.
        heads: Number of attention heads per block.
        mlp_ratio: Width of the MLP of a block, relative to `dim`.
        dropout: Probability of dropping a value after each sub-layer.
        attention_dropout: Probability of dropping an attention weight; ``None``: the value of `dropout`.
        drop_path: Probability, for each sample, of skipping a sub-layer of the last block. The probability decreases
            linearly to 0 in the first block.
        representation_size: Width of an extra layer with tanh before the head; ``None``: no such layer.
        lr: Peak learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        warmup_epochs: Number of epochs of linear warm-up, followed by a cosine decay of the learning rate.
        label_smoothing: Fraction of a label that is spread over all classes.
    """

    def __init__(
        self,
        image_size: int = 8,
        patch_size: int = 2,
        channels: int = 1,
        num_classes: int = 10,
        dim: int = 64,
        depth: int = 8,
        heads: int = 4,
        mlp_ratio: float = 2.0,
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        drop_path: float = 0.0,
        representation_size: int | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        warmup_epochs: int = 2,
        label_smoothing: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.weight_decay, self.warmup_epochs = lr, weight_decay, warmup_epochs
        self.label_smoothing = label_smoothing

        self.embedding = Embedding(image_size, patch_size, channels, dim)
        of_attention = dropout if attention_dropout is None else attention_dropout
        of_paths = [drop_path * index / max(depth - 1, 1) for index in range(depth)]
        self.body = nn.Sequential(
            *(Block(dim, heads, int(mlp_ratio * dim), dropout, of_attention, of_path) for of_path in of_paths)
        )
        self.norm = nn.LayerNorm(dim)
        self.head: nn.Module = nn.Linear(representation_size or dim, num_classes)
        if representation_size is not None:
            self.head = nn.Sequential(nn.Linear(dim, representation_size), nn.Tanh(), self.head)

        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``(batch, num_classes)`` for images ``(batch, channels, image_size, image_size)``."""
        tokens = self.body(self.embedding(images))
        logits: Tensor = self.head(self.norm(tokens[:, 0]))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy of a batch of images and labels."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels, label_smoothing=self.label_smoothing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss and accuracy of a batch."""
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True, sync_dist=True)
        self.log("val_acc", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the accuracy of a batch."""
        images, labels = batch
        self.test_accuracy(self(images), labels)
        self.log("test_acc", self.test_accuracy)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the most likely class of each image, ``(batch,)``."""
        classes: Tensor = self(batch[0]).argmax(dim=-1)
        return classes

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW with a learning rate that is updated after each epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def lr_factor(self, epoch: int) -> float:
        """Return the learning rate of an epoch, relative to its peak."""
        if epoch < self.warmup_epochs:
            return (epoch + 1) / (self.warmup_epochs + 1)
        epochs = max((self.trainer.max_epochs or 1) - self.warmup_epochs, 1)
        return 0.5 * (1 + math.cos(math.pi * min((epoch - self.warmup_epochs) / epochs, 1.0)))

"""A small GPT, trained on Python code: an ordinary LightningModule without code for parallel training.

The model learns the source files of Python's standard library byte by byte, so nothing is downloaded. From the root of
the repository, run the example in one process or with any configuration::

    python examples/gpt.py fit --trainer.max_epochs 1
    python examples/gpt.py fit --config configs/gpt_hybrid.yaml
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

__all__ = ["GPT", "Block", "Sources", "Text"]


class Block(nn.Module):
    """A causal pre-norm transformer block over ``(batch, length, dim)``."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and MLP, each with a residual connection."""
        normed = self.norm1(x)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        mixed, _ = self.attention(normed, normed, normed, attn_mask=later, is_causal=True, need_weights=False)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(LightningModule):
    """A decoder-only transformer (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

    The embedding and the head have tied weights.

    Args:
        vocabulary: Number of different tokens.
        length: Maximum length of a sequence.
        dim: Number of features per token.
        depth: Number of blocks.
        heads: Number of attention heads per block.
        dropout: Dropout probability.
        lr: Peak learning rate of AdamW.
        weight_decay: Weight decay for matrices.
        warmup_steps: Number of steps of linear learning rate warm-up, followed by a cosine decay.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        length: int = 128,
        dim: int = 128,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
        lr: float = 2e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.weight_decay, self.warmup_steps = lr, weight_decay, warmup_steps
        self.embedding = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.randn(length, dim) * 0.02)
        self.body = nn.Sequential(*(Block(dim, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``(batch, length, vocabulary)`` of the next token for tokens of shape ``(batch, length)``."""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.norm(self.body(x)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the cross-entropy of the next token, in nats."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the cross-entropy of the next token, in nats."""
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW with weight decay for matrices only, and a scheduler that runs after each step."""
        matrices = [parameter for parameter in self.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_factor(self, step: int) -> float:
        """Return the learning rate of a step, relative to its peak."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        steps = max(int(self.trainer.estimated_stepping_batches) - self.warmup_steps, 1)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min((step - self.warmup_steps) / steps, 1.0)))


class Text(Dataset[Tensor]):
    """Pieces of a text with ``length + 1`` tokens each. The last token of a piece is used only as a target.

    Args:
        tokens: The text, int64 of shape ``(number of tokens,)``.
        length: Number of input tokens of a sequence.
    """

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.tokens[start : start + self.length + 1]


class Sources(LightningDataModule):
    """The source files of Python's standard library, as bytes.

    Args:
        batch_size: Number of sequences per batch and data-parallel replica.
        length: Length of a sequence, in bytes.
        num_bytes: Number of bytes to read. The last tenth of them is used for validation.
    """

    def __init__(self, batch_size: int = 16, length: int = 128, num_bytes: int = 400_000) -> None:
        super().__init__()
        self.batch_size, self.length, self.num_bytes = batch_size, length, num_bytes

    def setup(self, stage: str) -> None:
        """Read modules in the order of their names until `num_bytes` bytes have been read."""
        text = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= self.num_bytes:
                break
        tokens = torch.frombuffer(text[: self.num_bytes], dtype=torch.uint8).long()
        split = len(tokens) - len(tokens) // 10
        self.train, self.val = Text(tokens[:split], self.length), Text(tokens[split:], self.length)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the loader of the training data, in random order."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return the loader of the validation data, in the order of the text."""
        return DataLoader(self.val, self.batch_size)


if __name__ == "__main__":
    from lightning_hybrid.cli.main import main

    main(model="examples.gpt.GPT", data="examples.gpt.Sources")

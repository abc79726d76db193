"""A GPT-2 of transformers that reads Python: the class of transformers in a plain LightningModule, nothing rewritten.

Its data are those of `examples.gpt`. Run it, from the root of the repository, in one process or under a configuration::

    python examples/hf.py fit --trainer.max_epochs 1
    python examples/hf.py fit --config configs/hf_gpt2.yaml
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["GPT2", "WritingGPT2"]


class GPT2(LightningModule):
    """A language model of transformers, made from a configuration: nothing is downloaded.

    Args:
        vocabulary: The number of tokens.
        length: The longest sequence.
        dim: Width of a token.
        depth: Number of blocks.
        heads: Attention heads of a block.
        lr: Learning rate of AdamW.
    """

    def __init__(
        self, vocabulary: int = 256, length: int = 128, dim: int = 128, depth: int = 4, heads: int = 4, lr: float = 2e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=length + 1,
            n_embd=dim,
            n_layer=depth,
            n_head=heads,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Cross-entropy of the next token, in nats, as the model has it."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Cross-entropy of the next token, in nats."""
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)


class WritingGPT2(GPT2):
    """A GPT-2 that also generates in validation, and logs the fraction of tokens that are those of the text.

    `generate` runs under a pipeline as in one process. Arguments are those of `GPT2`.
    """

    written = 16  # tokens

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the cross-entropy of the next token, and the fraction of the last tokens that the model generates."""
        super().validation_step(batch, batch_idx)
        begin, end = batch[:, : -self.written], batch[:, -self.written :]
        options = {"max_new_tokens": self.written, "do_sample": False, "pad_token_id": 0}
        texts = self.model.generate(begin, attention_mask=torch.ones_like(begin), **options)
        is_written = texts[:, -self.written :] == end
        self.log("val_written", is_written.float().mean(), prog_bar=True, sync_dist=True)


if __name__ == "__main__":
    from lightning_hybrid.cli.main import main

    main(model="examples.hf.GPT2", data="examples.gpt.Sources")

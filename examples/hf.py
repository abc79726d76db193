"""Language models trained on Python code: unmodified classes of transformers in an ordinary LightningModule.

The training data comes from `examples.gpt`. From the root of the repository, run the example in one process or with a
configuration::

    python examples/hf.py fit --trainer.max_epochs 1
    python examples/hf.py fit --config configs/hf_gpt2.yaml
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM, PreTrainedModel

__all__ = ["GPT2", "Mixtral", "WritingGPT2"]


class GPT2(LightningModule):
    """A GPT-2 with random initial weights, created from a configuration. Nothing is downloaded.

    Args:
        vocabulary: Number of different tokens.
        length: Maximum length of a sequence.
        dim: Number of features per token.
        depth: Number of blocks.
        heads: Number of attention heads per block.
        lr: Learning rate of AdamW.
    """

    def __init__(
        self, vocabulary: int = 256, length: int = 128, dim: int = 128, depth: int = 4, heads: int = 4, lr: float = 2e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.model = self.make_model(vocabulary, length + 1, dim, depth, heads)

    def make_model(self, vocabulary: int, length: int, dim: int, depth: int, heads: int) -> PreTrainedModel:
        """Return the model of transformers. The arguments are the same as for the class."""
        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=length,
            n_embd=dim,
            n_layer=depth,
            n_head=heads,
            bos_token_id=None,
            eos_token_id=None,
        )
        return GPT2LMHeadModel(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the cross-entropy of the next token, in nats, which the model computes."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the cross-entropy of the next token, in nats."""
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)


class WritingGPT2(GPT2):
    """A GPT-2 that also generates text in validation, and logs the fraction of its tokens that match the data.

    `generate` works in a pipeline as it does in one process. The arguments are the same as for `GPT2`.
    """

    written = 16  # tokens

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the cross-entropy of the next token, and the fraction of the generated tokens that match the data."""
        super().validation_step(batch, batch_idx)
        begin, end = batch[:, : -self.written], batch[:, -self.written :]
        options = {"max_new_tokens": self.written, "do_sample": False, "pad_token_id": 0}
        texts = self.model.generate(begin, attention_mask=torch.ones_like(begin), **options)
        is_written = texts[:, -self.written :] == end
        self.log("val_written", is_written.float().mean(), prog_bar=True, sync_dist=True)


class Mixtral(GPT2):
    """A Mixtral with 4 experts in each layer, of which a router selects 2 for each token.

    The arguments are the same as for `GPT2`.
    """

    def make_model(self, vocabulary: int, length: int, dim: int, depth: int, heads: int) -> PreTrainedModel:
        """Return the model of transformers. The arguments are the same as for the class."""
        config = MixtralConfig(
            vocab_size=vocabulary,
            max_position_embeddings=length,
            hidden_size=dim,
            intermediate_size=2 * dim,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
        return MixtralForCausalLM(config)


if __name__ == "__main__":
    from lightning_hybrid.cli.main import main

    main(model="examples.hf.GPT2", data="examples.gpt.Sources")

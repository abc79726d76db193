"""The language models that parts train, as users of transformers train them."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu.place import Place

__all__ = ["CausalLM", "gpt2", "llama_lora", "token_loader"]


class CausalLM(LightningModule):
    """A causal language model of transformers with AdamW over the parameters that train.

    Args:
        network: The model; called with ``input_ids`` and ``labels``, it returns its loss.
        stays: If True, the module stays on its device after a run. Lightning moves modules to the host there, which
            takes longer than a round if they have 16 GB.
    """

    def __init__(self, network: nn.Module, *, stays: bool = False) -> None:
        super().__init__()
        self.network = network
        self._stays = stays

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self.network(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4)

    def cpu(self) -> CausalLM:
        """Move to the host, or stay."""
        return self if self._stays else super().cpu()


def gpt2(place: Place, *, layers: int = 24, width: int = 1024, length: int = 1024) -> nn.Module:
    """Return GPT-2 without dropout on the host; by default the "medium" one, with 355 M parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = place.pick(
        {"n_layer": layers, "n_embd": width, "n_head": width // 64, "vocab_size": 50257, "n_positions": length},
        {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32},
    )
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def llama_lora(place: Place, device: torch.device) -> nn.Module:
    """Return a model of Llama-3-8B's shape with random weights in bf16, and LoRA of rank 16 on all linear layers.

    Automodel's recipe ``llama3_1_8b_peft_benchmark`` is of this kind (rank 16, alpha 32).
    """
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = place.pick(
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
        },
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 64,
            "max_position_embeddings": 64,
        },
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            network = LlamaForCausalLM(LlamaConfig(**sizes, rope_theta=500000.0, use_cache=False))
            adapted: nn.Module = get_peft_model(
                network, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
            )
    finally:
        torch.set_default_dtype(before)
    return adapted.to(torch.bfloat16)


class _Tokens(Dataset[dict[str, Tensor]]):
    """Random tokens, all positions labelled."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(vocabulary, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def token_loader(place: Place, batches: int, batch_size: int, length: int) -> DataLoader[Any]:
    """Return a loader of so many batches; its tokens fit every vocabulary here."""
    return DataLoader(_Tokens(batches * batch_size, length, 64), batch_size, pin_memory=place.kind != "cpu")

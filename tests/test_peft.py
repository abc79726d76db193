"""Adapters of PEFT in models of transformers: the numbers of one process, and files that PEFT reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from tests.daily import daily
from tests.pool import Pools
from tests.training_jobs import Result, together, train

pytest.importorskip("peft")

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # PEFT's own
]

WORDS, BATCH = 32, 8
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {  # the configuration, and the layers that get adapters
    "GPT2": ({"n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 4}, ["c_attn", "c_fc"]),
    "Llama": (
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 16,
        },
        ["q_proj", "v_proj", "down_proj"],
    ),
}


class Adapted(LightningModule):
    """Low-rank adapters of which neither half is zero, so that all of them learn from the first step on."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers
        from peft import LoraConfig, get_peft_model

        transformers.utils.logging.set_verbosity_error()
        torch.manual_seed(3)
        sizes, targets = MODELS[name]
        config = getattr(transformers, f"{name}Config")(vocab_size=WORDS, bos_token_id=1, eos_token_id=2, **sizes)
        for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            setattr(config, dropout, 0.0)
        heads = {"GPT2": transformers.GPT2LMHeadModel, "Llama": transformers.LlamaForCausalLM}
        adapters = LoraConfig(
            r=2, target_modules=targets, fan_in_fan_out=name == "GPT2", init_lora_weights=False, task_type="CAUSAL_LM"
        )
        self.model = get_peft_model(heads[name](config), adapters).double()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1, momentum=0.5)

    def train_dataloader(self) -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(0)
        num_replicas = getattr(getattr(self.trainer.strategy, "sizes", None), "data", 1)
        return DataLoader(torch.randint(WORDS, (4 * BATCH, 12), generator=generator), BATCH // num_replicas)


def trained(name: str, layout: dict[str, Any] | None, folder: str | None = None) -> Result:
    """Train, and write a file of the adapters into a folder."""
    module = Adapted(name)
    result = train(module, layout)
    if folder is not None and result.trainer.is_global_zero:
        module.model.save_pretrained(folder)
    return result


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pipeline_parallel_size": 2, "num_microbatches": 4}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "zero3": (2, {"zero_stage": 3}),
    "pp2 tp2 recompute": (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "recompute": True}),
    "pp2 zero1": (4, {"pipeline_parallel_size": 2, "zero_stage": 1}),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    daily([(name, layout) for name in MODELS for layout in LAYOUTS], ("GPT2", "pp2"), ("Llama", "tp2")),
)
def test_adapters_train_as_in_one_process(ranks: Pools, name: str, layout: str) -> None:
    size, arguments = LAYOUTS[layout]
    expected = trained(name, None)
    results = ranks(size, lightning=True).run(trained, name, arguments)
    for result in results:  # replicas log what their samples gave
        assert "zero" in layout or result.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-6)
    found = together([result.weights for result in results])
    assert found.keys() == expected.weights.keys()
    initial = Adapted(name).state_dict()
    # The loss of transformers is computed in float32, whose sums over divided classes have another order.
    tolerance = 1e-6 if "tp2" in layout else 1e-10
    for key, value in expected.weights.items():
        torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance)
        assert torch.equal(value, initial[key]) != ("lora" in key), key


def test_the_file_of_the_adapters_is_that_of_one_process(ranks: Pools, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trained("GPT2", None, str(tmp_path / "one"))
    ranks(2, lightning=True).run(trained, "GPT2", LAYOUTS["pp2"][1], str(tmp_path / "two"))
    expected, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

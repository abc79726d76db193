"""Models of transformers, their classes unchanged, in tiny configurations: each a LightningModule as users write it.

Nothing is downloaded: models are made from configurations, and their data by themselves.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.zoo.basic import Example

VOCABULARY = 32
LENGTH = 10

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_HEADED = _GROUPED | {"head_dim": 4}
_WITHOUT_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = _SIZES | _WITHOUT_DROPOUT
_PAIR = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 16,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_IMAGES = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 3,
    **_WITHOUT_DROPOUT,
}
_GPT = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 16}
_GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}


class HuggingFace(Example):
    """A model of transformers; the loss is its own.

    Attributes:
        model_class: The name of its class.
        config_class: The name of the class of its configuration.
        config: The configuration.
    """

    model_class = ""
    config_class = ""
    config: ClassVar[dict[str, Any]] = {}
    samples = 24

    def build(self) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        torch.manual_seed(3)
        self.model = getattr(transformers, self.model_class)(getattr(transformers, self.config_class)(**self.config))
        self.model.train()

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss

    def collate(self, samples: list[Any]) -> Any:
        return torch.utils.data.default_collate(samples)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)

    def _loader(self, count: int, seed: int) -> DataLoader:
        return super()._loader(count if count == self.samples else 8, seed)


class Text(HuggingFace):
    """Padded tokens, of which equally many in each text count: then the mean over them is one over texts."""

    def sample(self, index: int, generator: torch.Generator) -> Any:
        tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        mask = torch.ones(LENGTH, dtype=torch.long)
        if index % 8 > 3:  # batches, and microbatches, with padding and without
            mask[LENGTH - 1 - index % 3 :] = 0
        tokens = tokens * mask
        counted = torch.randperm(6, generator=generator)[:5] + 1
        labels = torch.full_like(tokens, -100).scatter(0, counted, tokens[counted])
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


class Masked(Text):
    """The tokens that count are those at their own place."""


class TextClasses(HuggingFace):
    """One class for each text."""

    def sample(self, index: int, generator: torch.Generator) -> Any:
        sample = Text.sample(self, index, generator)
        return sample | {"labels": int(sample["input_ids"][0]) % 2}


class Images(HuggingFace):
    """One class for each image."""

    def sample(self, index: int, generator: torch.Generator) -> Any:
        size = self.config["image_size"]
        pixels = torch.randn(3, size, size, generator=generator, dtype=torch.float64).to(self.dtype)
        return {"pixel_values": pixels, "labels": index % 3}


class MaskedImages(HuggingFace):
    """A masked autoencoder, with the noise that it hides patches by."""

    def sample(self, index: int, generator: torch.Generator) -> Any:
        size = self.config["image_size"]
        pixels = torch.randn(3, size, size, generator=generator, dtype=torch.float64).to(self.dtype)
        patches = (size // self.config["patch_size"]) ** 2
        return {"pixel_values": pixels, "noise": torch.rand(patches, generator=generator, dtype=torch.float64)}


class Speech(Text):
    """Features of sound in, tokens out."""

    def sample(self, index: int, generator: torch.Generator) -> Any:
        sample = Text.sample(self, index, generator)
        features = torch.randn(8, 20, generator=generator, dtype=torch.float64).to(self.dtype)
        return {"input_features": features, "labels": sample["labels"]}


class Pairs(HuggingFace):
    """Images and texts, of which those in one batch are told apart: the loss couples them, so it is one microbatch."""

    def sample(self, index: int, generator: torch.Generator) -> Any:
        text = Text.sample(self, index, generator)
        pixels = torch.randn(3, 16, 16, generator=generator, dtype=torch.float64).to(self.dtype)
        return {"input_ids": text["input_ids"], "attention_mask": text["attention_mask"], "pixel_values": pixels}

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch, return_loss=True).loss


def in_float64(module: type[HuggingFace]) -> type[HuggingFace]:
    """The same module where transformers' own float32 is avoided: norms are torch's, the loss is made of the logits."""

    class Exact(module):  # type: ignore[valid-type, misc]
        def build(self) -> None:
            super().build()
            norms = [name for name, layer in self.model.named_modules() if type(layer).__name__ in _NORMS]
            for name in norms:
                old = self.model.get_submodule(name)
                new = nn.RMSNorm(len(old.weight), old.variance_epsilon)
                new.weight = old.weight
                self.model.set_submodule(name, new)

        def loss(self, batch: Any) -> Tensor:
            if module.__mro__[1] is not Text:
                return super().loss(batch)
            labels = batch.pop("labels")
            logits = self.model(**batch).logits
            return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])

    Exact.__name__ = Exact.__qualname__ = module.__name__
    return Exact


_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "T5LayerNorm"}


def _module(
    base: type[HuggingFace], name: str, model: str, config: dict[str, Any], prefix: str = ""
) -> type[HuggingFace]:
    config_class = f"{prefix or model.split('For')[0].removesuffix('LMHeadModel').removesuffix('Model')}Config"
    attributes = {"model_class": model, "config_class": config_class, "config": config, "__module__": __name__}
    return type(name, (base,), attributes)


#: By name: the base, the class of the model, its configuration, and the name of that where it is another.
_MODELS: dict[str, tuple[Any, ...]] = {
    "llama": (Text, "LlamaForCausalLM", _GROUPED),
    "qwen2": (Text, "Qwen2ForCausalLM", _GROUPED),
    "qwen3": (Text, "Qwen3ForCausalLM", _HEADED),
    "mistral": (Text, "MistralForCausalLM", _GROUPED | {"sliding_window": 4}),
    "phi3": (Text, "Phi3ForCausalLM", _GROUPED),
    "gemma": (Text, "GemmaForCausalLM", _HEADED),
    "gemma3": (Text, "Gemma3ForCausalLM", _HEADED | {"sliding_window": 4}, "Gemma3Text"),
    "olmo2": (Text, "Olmo2ForCausalLM", _GROUPED),
    "cohere": (Text, "CohereForCausalLM", _GROUPED),
    "stablelm": (Text, "StableLmForCausalLM", _GROUPED),
    "gpt_neox": (Text, "GPTNeoXForCausalLM", _SIZES | {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "opt": (
        Text,
        "OPTForCausalLM",
        {key: value for key, value in _SIZES.items() if key != "intermediate_size"}
        | {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    ),
    "bloom": (
        Text,
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 4, "n_head": 4}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "falcon": (
        Text,
        "FalconForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "gpt2": (Text, "GPT2LMHeadModel", _GPT),
    "gptj": (Text, "GPTJForCausalLM", _GPT | {"rotary_dim": 2}),
    "mpt": (
        Text,
        "MptForCausalLM",
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layers": 4, "n_heads": 4, "max_seq_len": 16},
    ),
    "mamba": (
        Text,
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 4, "time_step_rank": 2},
    ),
    "bert": (Masked, "BertForMaskedLM", _ENCODER),
    "distilbert": (
        Masked,
        "DistilBertForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": 16, "hidden_dim": 24, "n_layers": 4, "n_heads": 4}
        | {"max_position_embeddings": 16, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "modernbert": (Masked, "ModernBertForMaskedLM", _SIZES | {"cls_token_id": 1, "sep_token_id": 2}),
    "deberta2": (
        Masked,
        "DebertaV2ForMaskedLM",
        _ENCODER
        | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
        | {"norm_rel_ebd": "layer_norm", "share_att_key": True},
    ),
    "mpnet": (Masked, "MPNetForMaskedLM", _ENCODER),
    "roberta": (TextClasses, "RobertaForSequenceClassification", _ENCODER | {"num_labels": 2}),
    "electra": (TextClasses, "ElectraForSequenceClassification", _ENCODER | {"embedding_size": 8, "num_labels": 2}),
    "xlnet": (
        TextClasses,
        "XLNetForSequenceClassification",
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 4, "n_head": 4, "d_inner": 24}
        | {"dropout": 0.0, "summary_last_dropout": 0.0, "num_labels": 2},
    ),
    "t5": (
        Masked,
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "bart": (Masked, "BartForConditionalGeneration", _PAIR),
    "pegasus": (Masked, "PegasusForConditionalGeneration", _PAIR),
    "whisper": (
        Speech,
        "WhisperForConditionalGeneration",
        {key: value for key, value in _PAIR.items() if key != "max_position_embeddings"}
        | {"max_source_positions": 10, "max_target_positions": 16, "num_mel_bins": 8}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    "vit": (Images, "ViTForImageClassification", _IMAGES),
    "deit": (Images, "DeiTForImageClassification", _IMAGES),
    "beit": (Images, "BeitForImageClassification", _IMAGES | {"drop_path_rate": 0.0}),
    "beit_relative": (
        Images,
        "BeitForImageClassification",
        _IMAGES | {"drop_path_rate": 0.0, "use_relative_position_bias": True},
    ),
    "swin": (
        Images,
        "SwinForImageClassification",
        {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "image_size": 16, "patch_size": 2, "window_size": 4}
        | {"num_labels": 3, "drop_path_rate": 0.0, **_WITHOUT_DROPOUT},
    ),
    "vit_mae": (
        MaskedImages,
        "ViTMAEForPreTraining",
        _IMAGES
        | {"decoder_hidden_size": 8, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2}
        | {"decoder_intermediate_size": 16},
    ),
    "clip": (
        Pairs,
        "CLIPModel",
        {
            "text_config": _SIZES | {"num_hidden_layers": 3},
            "vision_config": {
                key: _IMAGES[key] for key in ("hidden_size", "intermediate_size", "image_size", "patch_size")
            }
            | {"num_hidden_layers": 3, "num_attention_heads": 4},
            "projection_dim": 8,
        },
    ),
}

MODULES = {name: _module(entry[0], name.title().replace("_", ""), *entry[1:]) for name, entry in _MODELS.items()}
#: Their losses couple samples.
COUPLED = {"clip"}
#: Their code turns numbers into float32: the loss of causal models, norms, rotary tables.
IN_FLOAT32 = {name for name, entry in _MODELS.items() if entry[0] is Text} | {"modernbert"}

"""Hugging Face folders with separate tensors for each expert, and versions of transformers without conversions."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lightning_hybrid.checkpoint.weights.conversions import conversions_of
from lightning_hybrid.checkpoint.weights.weights import Weights
from tests.test_mixture_of_experts import Experts

JOINED = "model.model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture
def mixtral(tmp_path: Path) -> Experts:
    module = Experts("Mixtral")
    module.model.save_pretrained(tmp_path)
    return module


def test_tensors_of_experts_are_joined(mixtral: Experts, tmp_path: Path) -> None:
    files = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in files
    shapes = Weights(tmp_path).shapes(mixtral)
    assert shapes == {name: value.shape for name, value in mixtral.state_dict().items()}


def test_an_expert_is_missing(mixtral: Experts, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    files = load_file(path)
    del files["model.layers.0.block_sparse_moe.experts.3.w1.weight"]
    save_file(files, path, {"format": "pt"})
    text = (
        r"cannot convert 7 tensors of the folder \('model\.layers\.0\.\S+w1.weight', .* to 'model\.layers\.0\..*LH937"
    )
    with pytest.raises(ValueError, match=text):
        Weights(tmp_path).shapes(mixtral)


def test_another_version_of_transformers_converts_nothing(
    mixtral: Experts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(conversions_of(mixtral))
    monkeypatch.delattr("transformers.core_model_loading.rename_source_key")
    assert not list(conversions_of(mixtral))
    assert JOINED not in Weights(tmp_path).shapes(mixtral)

"""Folders of Hugging Face: weights come from there, are trained under any layout, and go back there."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lightning_hybrid.checkpoint.weights import tensor_files
from lightning_hybrid.checkpoint.weights.weights import Weights
from lightning_hybrid.cli.export import export
from tests.pool import Pools
from tests.training_jobs import PP2, assert_same, users_trainer
from tests.zoo.hugging_face import MODULES

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.distributed

#: Tied, untied, an encoder with a tied head and bias, an encoder and a decoder.
NAMES = ["gpt2", "llama", "bert", "t5"]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, PP2),
    "dp2 zero 3": (2, {"zero_stage": 3}),
    "tp2": (2, {"tensor_parallel_size": 2}),
}
FORMS = ["one file", "shards", "torch", "torch shards"]


def made(name: str, seed: int = 3) -> Any:
    """A module in float64."""
    module = MODULES[name]()
    torch.manual_seed(seed)
    module.model.init_weights()
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module.double()


def write_torch(model: nn.Module, folder: Path, *, shards: bool) -> None:
    """As older versions of transformers did."""
    folder.mkdir()
    state = model.state_dict()
    if not shards:
        torch.save(state, folder / "pytorch_model.bin")
        return
    index: dict[str, str] = {}
    for number in range(3):
        part = {name: state[name].clone() for name in list(state)[number::3]}
        torch.save(part, folder / f"pytorch_model-{number}.bin")
        index |= dict.fromkeys(part, f"pytorch_model-{number}.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each model in each form."""
    root = tmp_path_factory.mktemp("folders")
    for name in NAMES:
        model = made(name, seed=11).model
        model.save_pretrained(root / f"{name} one file")
        model.save_pretrained(root / f"{name} shards", max_shard_size="10KB")
        assert len(list((root / f"{name} shards").glob("model-*.safetensors"))) > 2
        write_torch(model, root / f"{name} torch", shards=False)
        write_torch(model, root / f"{name} torch shards", shards=True)
    return root


class Reads:
    """Opens files as safetensors does, and remembers what is read of them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._open = tensor_files.safe_open

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        file, names = self._open(*arguments, **options), self.names

        class File:
            offset_keys, get_slice = staticmethod(file.offset_keys), staticmethod(file.get_slice)

            @staticmethod
            def get_tensor(name: str) -> Tensor:
                names.append(name)
                return file.get_tensor(name)

        return File


def made_on_meta(name: str) -> Any:
    """A module without values, but for tables that layers compute when they are made."""
    with torch.device("meta"):
        module = MODULES[name]()
    if name == "llama":
        module.model.model.rotary_emb = type(module.model.model.rotary_emb)(module.model.config)
    elif name == "bert":
        embeddings = module.model.bert.embeddings
        embeddings.position_ids = torch.arange(16).expand(1, -1)
        embeddings.token_type_ids = torch.zeros(1, 16, dtype=torch.long)
    return module.double()


def loaded(name: str, layout: Mapping[str, Any], folder: str, from_meta: bool) -> tuple[list[str], list[str], Any]:
    """Names of what this rank has read, of what it holds, and the module after a run without steps."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = made_on_meta(name) if from_meta else made(name)
    reads, held = Reads(), []
    layout = {**layout, "initial_weights": folder, "gather_module_on_teardown": False}
    trainer = users_trainer(layout, limit_train_batches=0)
    with mock.patch.object(tensor_files, "safe_open", reads):
        trainer.fit(module)
    held = [key for key, value in module.named_parameters(remove_duplicate=False) if not value.is_meta]
    trainer.strategy.gather_module()
    return reads.names, held, dict(module.state_dict())


def _marked(*axes: Sequence[str]) -> list[Any]:
    """All combinations, of which every day those are run in which each pair of values occurs about once."""
    combined = list(itertools.product(*axes))
    numbers = [sum(axis.index(value) for axis, value in zip(axes, values, strict=True)) for values in combined]
    longest = max(map(len, axes))
    return [
        pytest.param(*values, marks=() if number % longest == 0 else pytest.mark.thorough)
        for values, number in zip(combined, numbers, strict=True)
    ]


@pytest.mark.parametrize(("name", "layout", "form"), _marked(NAMES, list(LAYOUTS), FORMS))
def test_each_rank_reads_what_it_holds(ranks: Pools, folders: Path, name: str, layout: str, form: str) -> None:
    folder = folders / f"{name} {form}"
    expected = dict(made(name, seed=11).state_dict())
    size, strategy = LAYOUTS[layout]
    for reads, held, state in ranks(size, lightning=True).run(loaded, name, strategy, str(folder), form == "shards"):
        assert_same(state, expected, 0.0)
        if "torch" not in form:
            assert len(reads) == len(set(reads))
            assert {f"model.{key}" for key in reads} <= set(held)
            assert len(reads) < len(expected) or layout != "pp2"


@pytest.mark.parametrize("model", ["LlamaForCausalLM", "BertForSequenceClassification", "T5EncoderModel"])
def test_a_folder_of_another_head_gives_what_from_pretrained_takes(folders: Path, tmp_path: Path, model: str) -> None:
    """A model without its head, with another one, and half of a model."""
    name = model.split("For")[0].removesuffix("EncoderModel").lower()
    folder = folders / f"{name} shards"
    if name == "llama":
        made(name, seed=11).model.model.save_pretrained(tmp_path)
        folder = tmp_path
    loaded = getattr(transformers, model).from_pretrained(folder, dtype=torch.float64)
    module = LightningModule()
    module.strict_loading = name != "bert"
    torch.manual_seed(5)
    module.model = getattr(transformers, model)(loaded.config).double()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    Weights(folder).load(module, None)  # type: ignore[arg-type]
    heads = ("model.lm_head.", "model.classifier.", "model.bert.pooler.")
    for key, value in loaded.state_dict().items():
        found = module.state_dict()[f"model.{key}"]
        expected = before[f"model.{key}"] if f"model.{key}".startswith(heads) else value
        assert torch.equal(found, expected), key


# -- what comes out ----------------------------------------------------------------------------------------------------

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


class SavesInHook(Callback):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        with pytest.raises(ValueError, match="needs the full module"):
            pl_module.model.save_pretrained(self._folder)
        trainer.strategy.barrier()
        assert not self._folder.exists()
        with trainer.strategy.full_parameters():
            if trainer.is_global_zero:
                pl_module.model.save_pretrained(self._folder)


def saved_whole(
    name: str, layout: dict[str, Any], folder: str, tokens: Tensor
) -> tuple[dict[str, Any], Tensor, Tensor | None]:
    """Train, save the whole model on rank 0 alone; its weights, logits, and what it generates."""
    module = made(name)
    callback = SavesInHook(Path(f"{folder} hook"))
    trainer = users_trainer(layout, max_steps=2, limit_val_batches=0, callbacks=[callback])
    trainer.fit(module)
    model = module.model.eval()
    if trainer.is_global_zero:
        model.save_pretrained(folder)
    generates = name in ("gpt2", "llama")
    return dict(model.state_dict()), logits(model, tokens), model.generate(tokens, **GREEDY) if generates else None


@torch.no_grad()
def logits(model: Any, tokens: Tensor) -> Tensor:
    more = {"labels": tokens} if model.config.is_encoder_decoder else {}
    return model(tokens, **more).logits


def some_tokens() -> Tensor:
    return torch.randint(3, 32, (2, 6), generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize(
    ("name", "layout"), [(name, "pp2") for name in NAMES] + [("gpt2", "tp2"), ("llama", "dp2 zero 3")]
)
def test_the_whole_model_is_saved_and_generates_after_a_run(
    ranks: Pools, tmp_path: Path, name: str, layout: str
) -> None:
    tokens = some_tokens()
    before = made(name).model.state_dict()
    size, strategy = LAYOUTS[layout]
    results = ranks(size, lightning=True).run(saved_whole, name, strategy, str(tmp_path / "model"), tokens)
    model = type(made(name).model).from_pretrained(tmp_path / "model", dtype=torch.float64).eval()
    in_hook = type(made(name).model).from_pretrained(tmp_path / "model hook", dtype=torch.float64)
    assert_same(dict(in_hook.state_dict()), dict(model.state_dict()), 0.0)
    for state, found, text in results:
        assert_same(dict(model.state_dict()), state, 0.0)
        assert torch.equal(logits(model, tokens), found)
        assert text is None or torch.equal(model.generate(tokens, **GREEDY), text)
        assert sum(torch.equal(value, before[key]) for key, value in state.items()) * 4 < len(state)  # it was trained


# -- in, trained, and out again ----------------------------------------------------------------------------------------


def trained(
    name: str, layout: Mapping[str, Any], folder: str, path: str, tokens: Tensor
) -> tuple[dict[str, Any], Tensor]:
    """Train from a folder and save a checkpoint; the weights and logits of the whole model."""
    module = made(name)
    module.save_hyperparameters({"config": module.model.config})
    trainer = users_trainer({**layout, "initial_weights": folder}, max_steps=2, limit_val_batches=0)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    trainer.strategy.gather_module()
    return dict(module.model.state_dict()), logits(module.model.eval(), tokens)


@pytest.mark.parametrize(("name", "layout"), _marked(NAMES, list(LAYOUTS)))
def test_a_folder_trained_under_any_layout_goes_out_as_one(
    ranks: Pools, folders: Path, tmp_path: Path, name: str, layout: str
) -> None:
    size, strategy = LAYOUTS[layout]
    folder, tokens = folders / f"{name} shards", some_tokens()
    strategy = {**strategy, "save_distributed_checkpoint": NAMES.index(name) % 2 == list(LAYOUTS).index(layout) % 2}
    path = tmp_path / "checkpoint"
    (state, found), *_ = ranks(size, lightning=True).run(trained, name, strategy, str(folder), str(path), tokens)
    result = export(
        path,
        tmp_path / "out",
        max_shard_size=10_000,
        config=folder if layout == "tp2" else None,  # otherwise that of the checkpoint
    )
    assert result.prefix == "model."
    assert result.has_config
    model = type(made(name).model).from_pretrained(tmp_path / "out").eval()
    assert_same(dict(model.state_dict()), state, 0.0)
    assert torch.equal(logits(model, tokens), found)
    kept = torch.equal(next(iter(state.values())), next(iter(made(name, seed=11).model.state_dict().values())))
    assert not kept

"""The weights of a checkpoint as a folder that `safetensors`, and whoever else reads its format, opens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_hybrid.checkpoint.storage.dcp import DistributedCheckpoint
from lightning_hybrid.cli import export as module_under_test
from lightning_hybrid.cli.export import export
from lightning_hybrid.cli.main import main
from tests.pool import Pools
from tests.training_jobs import PP2, Regression, assert_same, loader, make_trainer

BOTH: dict[str, Any] = {
    **PP2,
    "tensor_parallel_size": 2,
    "tensor_parallel_plan": {"model.body.*.0": "colwise_gather_output"},
}


class Model(Regression):
    """Everything in one attribute; tied weights over two stages, and a counter."""

    def __init__(self) -> None:
        super().__init__(4)
        self.body[3][0].weight = self.body[0][0].weight
        self.model = nn.ModuleDict({"embed": self.embed, "body": self.body, "head": self.head})
        del self.embed, self.body, self.head
        self.model.register_buffer("steps", torch.ones((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.model["embed"](x)
        return self.model["head"](self.model["body"](h) + h)


def state_of(seed: int = 0) -> dict[str, Tensor]:
    """A state dict with all that a file may have: ties, views, other orders and dtypes."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(8, 6, generator=generator)
    return {
        "model.embed.weight": table,
        "model.layers.0.weight": torch.randn(6, 4, generator=generator).t(),
        "model.layers.1.weight": torch.randn(9, 6, generator=generator)[:4],
        "model.scale": torch.tensor(3.0),
        "model.steps": torch.arange(5),
        "model.none": torch.zeros(0, 2),
        "model.head.weight": table,
    }


def written(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, of which the index says the same as the files."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    index = folder / "model.safetensors.index.json"
    if len(files) == 1:
        assert files[0].name == "model.safetensors"
        assert not index.exists()
    else:
        content = json.loads(index.read_text())
        assert content["weight_map"] == {name: file.name for file in files for name in load_file(file)}
        assert content["metadata"] == {"total_size": sum(value.nbytes for value in tensors.values())}
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    return tensors


def saved(path: Path, state: Mapping[str, Any], **others: Any) -> Path:
    torch.save({"state_dict": dict(state), "epoch": 1, **others}, path)
    return path


def without_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is expected: the first name of each tensor, and none of the rest."""
    names = {name.removeprefix("model."): value for name, value in state.items()}
    return {name: value.contiguous() for name, value in names.items() if name != "head.weight"}


def test_a_file_goes_out_under_the_names_of_the_model(tmp_path: Path) -> None:
    state = state_of()
    result = export(saved(tmp_path / "c.ckpt", state), tmp_path / "out")
    assert_same(written(tmp_path / "out"), without_prefix(state), 0.0)
    assert result.files == ["model.safetensors"]
    assert (result.prefix, result.tied, result.left_out) == ("model.", {"head.weight": "embed.weight"}, [])
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_a_bare_state_dict_goes_out_too(tmp_path: Path) -> None:
    torch.save(state_of(), tmp_path / "weights.pt")
    export(tmp_path / "weights.pt", tmp_path / "out")
    assert_same(written(tmp_path / "out"), without_prefix(state_of()), 0.0)


@pytest.mark.parametrize("most", [1, 100, 200, 300])
def test_files_are_no_larger_than_asked_for(tmp_path: Path, most: int) -> None:
    state = state_of()
    result = export(saved(tmp_path / "c.ckpt", state), tmp_path / "out", max_shard_size=most)
    assert_same(written(tmp_path / "out"), without_prefix(state), 0.0)
    files = [load_file(tmp_path / "out" / file) for file in result.files if file.endswith(".safetensors")]
    assert all(len(file) == 1 or sum(value.nbytes for value in file.values()) <= most for file in files)
    assert len(files) == {1: 6, 100: 4, 200: 3, 300: 2}[most]
    assert all(file[:6] == "model-" and file[11:15] == "-of-" for file in result.files[:-1])


def test_floating_point_is_converted(tmp_path: Path) -> None:
    state = state_of()
    steps: list[tuple[int, int]] = []
    path = saved(tmp_path / "c.ckpt", state)
    export(path, tmp_path / "out", dtype=torch.bfloat16, progress=lambda *step: steps.append(step))
    converted = {
        name: value.bfloat16() if value.is_floating_point() else value for name, value in without_prefix(state).items()
    }
    assert_same(written(tmp_path / "out"), converted, 0.0)
    assert sum(done for done, _ in steps) == steps[0][1] == sum(value.nbytes for value in converted.values())


@pytest.mark.parametrize("prefix", ["model", "model."])
def test_one_of_several_attributes_is_named(tmp_path: Path, prefix: str) -> None:
    state = {**state_of(), "criterion.weight": torch.ones(2)}
    path = saved(tmp_path / "c.ckpt", state)
    result = export(path, tmp_path / "all")
    assert set(written(tmp_path / "all")) == state.keys() - {"model.head.weight"}
    assert (result.prefix, result.first_parts) == ("", {"model.": 7, "criterion.": 1})
    result = export(path, tmp_path / "one", prefix=prefix)
    assert_same(written(tmp_path / "one"), without_prefix(state_of()), 0.0)
    assert result.left_out == ["criterion.weight"]
    with pytest.raises(ValueError, match=r"starts with 'net\.'. The names start with 'model\.', 'criterion\.'\."):
        export(path, tmp_path / "none", prefix="net")
    assert not (tmp_path / "none").exists()


def test_names_may_stay_as_they_are(tmp_path: Path) -> None:
    result = export(saved(tmp_path / "c.ckpt", state_of()), tmp_path / "out", prefix="")
    assert set(written(tmp_path / "out")) == state_of().keys() - {"model.head.weight"}
    assert result.prefix == ""


# -- directories of shards ---------------------------------------------------------------------------------------------


def trained(path: str) -> dict[str, Tensor]:
    module = Model()
    trainer = make_trainer({**BOTH, "body": "model.body", "save_distributed_checkpoint": True}, max_steps=2)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    trainer.strategy.gather_module()
    return dict(module.state_dict())


def test_a_directory_goes_out_tensor_by_tensor(ranks: Pools, tmp_path: Path) -> None:
    path, out = tmp_path / "shards", tmp_path / "out"
    state, *_ = ranks(4, lightning=True).run(trained, str(path))
    calls: list[int] = []
    read, save = DistributedCheckpoint.read, module_under_test.save_file

    def reads(directory: DistributedCheckpoint, targets: Mapping[Any, Any]) -> dict[Any, Any]:
        calls.append(len(targets))
        return read(directory, targets)

    def saves(tensors: dict[str, Tensor], *arguments: Any, **options: Any) -> None:
        calls.append(-len(tensors))
        save(tensors, *arguments, **options)

    with (
        mock.patch.object(DistributedCheckpoint, "read", reads),
        mock.patch.object(module_under_test, "save_file", saves),
    ):
        result = export(path, out, max_shard_size=700)
    expected = {name.removeprefix("model."): value for name, value in state.items()}
    del expected["body.3.0.weight"]
    assert_same(written(out), expected, 0.0)
    assert result.tied == {"body.3.0.weight": "body.0.0.weight"}
    in_turn = [size for size in calls if size]
    files = [-size for size in in_turn if size < 0]
    assert len(files) > 2
    assert in_turn == [step for size in files for step in (*[1] * size, -size)]


# -- the configuration -------------------------------------------------------------------------------------------------


class Config:
    """As those of transformers are."""

    model_type = "tiny"

    def to_json_string(self) -> str:
        return json.dumps({"model_type": self.model_type, "torch_dtype": "float16"})


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "an object": ({"lr": 1.0, "config": Config()}, {"model_type": "tiny", "torch_dtype": "float32"}),
    "a dictionary": ({"config": {"model_type": "x", "n": 3}}, {"model_type": "x", "n": 3, "dtype": "float32"}),
    "none": ({"config": {"layers": 3}, "name": "tiny"}, None),
    "two": ({"one": Config(), "other": {"model_type": "x"}}, None),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_among_the_hyper_parameters_is_written(tmp_path: Path, case: str) -> None:
    parameters, expected = CONFIGS[case]
    result = export(saved(tmp_path / "c.ckpt", state_of(), hyper_parameters=parameters), tmp_path / "out")
    assert result.has_config == (expected is not None) == (tmp_path / "out" / "config.json").exists()
    if expected is not None:
        assert json.loads((tmp_path / "out" / "config.json").read_text()) == expected


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_configuration_that_is_given_lies_beside_the_weights(tmp_path: Path, is_folder: bool) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "given", "dtype": "float32"}')
    path = saved(tmp_path / "c.ckpt", state_of(), hyper_parameters={"config": Config()})
    given = tmp_path if is_folder else tmp_path / "config.json"
    export(path, tmp_path / "out", config=given, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "given", "dtype": "bfloat16"}


# -- what cannot be written --------------------------------------------------------------------------------------------


def test_a_folder_with_files_stays(tmp_path: Path) -> None:
    path, out = saved(tmp_path / "c.ckpt", state_of()), tmp_path / "out"
    out.mkdir()
    export(path, out)  # empty
    before = (out / "model.safetensors").read_bytes()
    for target in (out, path):
        with pytest.raises(FileExistsError, match="is not an empty folder\\. Use another path"):
            export(path, target, prefix="")
    assert (out / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("error", [SafetensorError("no space"), KeyboardInterrupt()])
def test_nothing_is_left_of_half_a_folder(tmp_path: Path, error: BaseException) -> None:
    path = saved(tmp_path / "c.ckpt", state_of())
    effects = [None, error]
    expected = OSError if isinstance(error, SafetensorError) else KeyboardInterrupt
    with mock.patch.object(module_under_test, "save_file", side_effect=effects), pytest.raises(expected):
        export(path, tmp_path / "out", max_shard_size=100)
    assert list(tmp_path.iterdir()) == [path]


def wrong(fault: str, folder: Path) -> list[str]:
    path = folder / "c.ckpt"
    saved(path, state_of())
    if fault == "damaged":
        path.write_bytes(path.read_bytes()[:500])
    elif fault == "no weights":
        torch.save({"epoch": 3}, path)
    elif fault == "no checkpoint":
        path.unlink()
    elif fault == "empty directory":
        path.unlink()
        path.mkdir()
    elif fault == "torn configuration":
        (folder / "config.json").write_text("{")
    options = {
        "no configuration": ["--config", str(folder)],
        "torn configuration": ["--config", str(folder)],
        "no size": ["--max-shard-size", "5XB"],
        "size of nothing": ["--max-shard-size", "0"],
        "prefix": ["--prefix", "net."],
    }
    return [str(path), str(folder / "out"), *options.get(fault, [])]


FAULTS = {
    "damaged": "is not a complete checkpoint",
    "no weights": "has no weights: neither the checkpoint nor its entry 'state_dict' is a dictionary of tensors. The"
    " keys of the checkpoint are ['epoch']",
    "no checkpoint": "Checkpoint not found",
    "empty directory": "is not a complete checkpoint",
    "no configuration": "No model configuration found at",
    "torn configuration": "is not a model configuration",
    "no size": "'5XB' is not a size in bytes, such as 5GB",
    "size of nothing": "'0' is not a size in bytes",
    "prefix": "starts with 'net.'",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_use_is_explained(tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["export", *wrong(fault, tmp_path)])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "lightning-hybrid export: " in error
    assert FAULTS[fault] in error
    assert not (tmp_path / "out").exists()


def test_the_program_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "c.ckpt", {**state_of(), "criterion.weight": torch.ones(2)})
    words = ["--prefix", "model.", "--max-shard-size", "0.2kB", "--dtype", "float16"]
    main(["export", str(path), str(tmp_path / "out"), *words])
    assert {value.dtype for value in written(tmp_path / "out").values()} == {torch.float16, torch.int64}
    text = capsys.readouterr().out
    for part in (
        "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, model.safetensors.index.json; ",
        "removed the prefix 'model.' from the names",
        "head.weight is tied to embed.weight and stored only once",
        "not exported: criterion.weight",
        "no config.json was written, because",
    ):
        assert part in text
    main(["export", str(path), str(tmp_path / "all")])
    assert (
        "which start with 'model.' (7), 'criterion.' (1); to export only one part, use --prefix"
        in capsys.readouterr().out
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_adapters_are_refused_and_the_remedy_works(tmp_path: Path) -> None:
    """transformers would load none of these weights, and start with random ones."""
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )

    def adapted() -> Any:
        model = transformers.AutoModelForCausalLM.from_config(config)
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        return peft.get_peft_model(model, lora)

    trained = adapted()
    file = tmp_path / "last.ckpt"
    torch.save({"state_dict": {f"model.{name}": value for name, value in trained.state_dict().items()}}, file)
    with pytest.raises(
        ValueError, match=r"weights of peft adapters, such as .*base_layer.*merge_and_unload\(\).*LH1020"
    ):
        export(file, tmp_path / "refused", prefix="model")
    assert not (tmp_path / "refused").exists()

    module = nn.ModuleDict({"model": adapted()})
    module.load_state_dict(torch.load(file)["state_dict"])
    module["model"].merge_and_unload().save_pretrained(tmp_path / "merged")  # type: ignore[operator]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens = torch.arange(6)[None]
    torch.testing.assert_close(loaded(tokens).logits, trained.eval()(tokens).logits)

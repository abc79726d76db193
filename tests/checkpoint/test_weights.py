"""Weights from files, directories and state dicts, straight to the rank that holds them."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_hybrid.checkpoint.weights.weights import Weights
from tests.checkpoint.test_checksums import flip
from tests.daily import daily
from tests.pool import Pools
from tests.training_jobs import PP2, assert_same, make_trainer
from tests.zoo import tensor as zoo

Layout = Mapping[str, Any]
TP2: dict[str, Any] = {"tensor_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "pp2": (2, PP2),
    "tp2": (2, TP2),
    "tp2 pp2": (4, {**TP2, **PP2}),
}
FORMATS = [
    "checkpoint.ckpt",
    "bare.pt",
    "old.pt",
    "file.safetensors",
    "directory",
    "without ties.safetensors",
    "folder",
]


class Words(zoo.TiedWords):
    """Tied words with a bias and a buffer; with values from the start, or without."""

    def __init__(self, from_meta: bool = False) -> None:
        self.from_meta = from_meta
        super().__init__(batch_size=8)

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if hasattr(self, "body"):
            return
        with torch.device("meta" if self.from_meta else "cpu"):
            super().build()
            self.head.bias = nn.Parameter(torch.zeros(zoo.TOKENS))
            self.body.append(nn.Sequential(nn.Linear(zoo.DIM, zoo.DIM), nn.BatchNorm1d(zoo.LENGTH)))
        self.double()


def made(seed: int) -> Words:
    torch.manual_seed(seed)
    module = Words()
    module.configure_model()
    for buffer in module.buffers():
        buffer.add_(3)
    return module


def write_safetensors(state: Mapping[str, Tensor], path: Path) -> None:
    """The format by itself, as its authors describe it."""
    names = {torch.float64: "F64", torch.float32: "F32", torch.int64: "I64", torch.bfloat16: "BF16"}
    names |= {torch.bool: "BOOL", torch.uint16: "U16"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in state.items():
        raw = bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_directory(path: str) -> None:
    module = made(5)
    trainer = make_trainer({**TP2, **PP2, "save_distributed_checkpoint": True}, max_steps=1, limit_train_batches=0)
    trainer.fit(module)
    trainer.save_checkpoint(path)


@pytest.fixture(scope="module")
def files(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, state = tmp_path_factory.mktemp("weights"), made(5).state_dict()
    torch.save({"state_dict": state, "epoch": 3, "optimizer_states": []}, folder / FORMATS[0])
    torch.save(state, folder / FORMATS[1])
    torch.save(state, folder / FORMATS[2], _use_new_zipfile_serialization=False)
    write_safetensors(state, folder / FORMATS[3])
    pools(4, lightning=True).run(write_directory, str(folder / FORMATS[4]))
    without_ties = {name: value for name, value in state.items() if name != "head.weight"}
    write_safetensors(without_ties, folder / FORMATS[5])
    (folder / FORMATS[6]).mkdir()
    write_safetensors(without_ties, folder / FORMATS[6] / "model.safetensors")
    return folder


def started(layout: Layout, from_meta: bool, path: str | None, **arguments: Any) -> dict[str, Any]:
    """The weights before the first step."""
    torch.manual_seed(0)
    module = Words(from_meta)
    trainer = make_trainer({**layout, "initial_weights": path, "gather_module_on_teardown": True}, **arguments)
    trainer.fit(module)
    return module.state_dict()


@pytest.mark.parametrize("from_meta", [False, True])
@pytest.mark.parametrize("name", daily(LAYOUTS, "one", "tp2 pp2"))
def test_every_rank_takes_what_it_holds(ranks: Pools, files: Path, name: str, from_meta: bool) -> None:
    expected = made(5).state_dict()
    size, layout = LAYOUTS[name]
    for state in ranks(size, lightning=True).run(started_from_all, layout, from_meta, str(files)):
        for file in FORMATS:
            assert_same(state[file], dict(expected), 0.0, file)


def started_from_all(layout: Layout, from_meta: bool, folder: str) -> dict[str, Any]:
    with mock.patch.object(nn.Linear, "reset_parameters") if from_meta else nullcontext():  # there is no need to
        return {file: dict(started(layout, from_meta, f"{folder}/{file}", limit_train_batches=0)) for file in FORMATS}


# -- in hooks, and beside checkpoints ----------------------------------------------------------------------------------


class InHook(Words):
    """Loads in a hook: before or after the module is divided."""

    def __init__(self, hook: str, source: Any) -> None:
        super().__init__(from_meta=True)
        self.hook, self.source = hook, source

    def setup(self, stage: str) -> None:
        if self.hook == "setup":
            self.trainer.strategy.load_weights(self.source)

    def on_fit_start(self) -> None:
        assert not any(parameter.isnan().any() for parameter in self.parameters() if not parameter.is_meta)
        if self.hook == "on_fit_start":
            self.trainer.strategy.load_weights(self.source)


def loaded_in(hook: str, source: Any, layout: Layout) -> dict[str, Any]:
    module = InHook(hook, source)
    make_trainer({**layout, "gather_module_on_teardown": True}, limit_train_batches=0).fit(module)
    return module.state_dict()


@pytest.mark.parametrize("hook", daily(["setup", "on_fit_start"], "on_fit_start"))
@pytest.mark.parametrize("kind", ["state dict", "directory", "file.safetensors", "folder"])
@pytest.mark.parametrize("layout", [{**TP2, **PP2}, {**TP2, "zero_stage": 3}], ids=["tp2 pp2", "tp2 zero 3"])
def test_weights_are_loaded_in_hooks(ranks: Pools, files: Path, hook: str, kind: str, layout: Layout) -> None:
    expected = made(5).state_dict()
    source = dict(expected) if kind == "state dict" else str(files / kind)
    for state in ranks(4, lightning=True).run(loaded_in, hook, source, layout):
        assert_same(dict(state), dict(expected), 0.0)


def resumed(file: str, checkpoint: str) -> tuple[dict[str, Any], dict[str, Any]]:
    torch.manual_seed(1)
    trainer, module = make_trainer(PP2, max_steps=1), Words()
    trainer.fit(module)
    trainer.save_checkpoint(checkpoint)
    trainer.strategy.barrier()
    trainer.strategy.gather_module()
    other = Words()
    arguments = {**PP2, "initial_weights": file, "gather_module_on_teardown": True}
    make_trainer(arguments, max_steps=1).fit(other, ckpt_path=checkpoint)
    return dict(module.state_dict()), dict(other.state_dict())


def test_a_resumed_checkpoint_wins(ranks: Pools, files: Path, tmp_path: Path) -> None:
    for expected, state in ranks(2, lightning=True).run(resumed, str(files / "bare.pt"), str(tmp_path / "c.ckpt")):
        assert_same(state, expected, 0.0)


def trained_before_another() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A module after its run, at the end, and what it began with; another one is attached in between."""
    file = made(5).state_dict()
    path = Path(tempfile.mkdtemp()) / "bare.pt"
    torch.save(file, path)
    layout = {**PP2, "initial_weights": str(path), "gather_module_on_teardown": True}
    trainer, module = make_trainer(layout, max_steps=1), Words()
    trainer.fit(module)
    trained = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.fit(Words())
    trainer.fit(module)
    return trained, dict(module.state_dict()), dict(file)


def test_a_module_gets_its_weights_once(ranks: Pools) -> None:
    for trained, at_end, file in ranks(2, lightning=True).run(trained_before_another):
        assert_same(at_end, trained, 0.0)
        assert not torch.equal(trained["head.bias"], file["head.bias"])


class Lenient(Words):
    def __init__(self) -> None:
        super().__init__(from_meta=True)
        self.strict_loading = False


def lenient(layout: Layout, path: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Lenient()
    layout = {**layout, "initial_weights": path, "gather_module_on_teardown": True}
    make_trainer(layout, limit_train_batches=0).fit(module)
    return dict(module.state_dict())


def test_what_a_file_lacks_initialises_itself(ranks: Pools, tmp_path: Path) -> None:
    path, state = tmp_path / "part.pt", made(5).state_dict()
    part = {name: value for name, value in state.items() if name.startswith(("body.1.", "embed."))}
    torch.save({**part, "foreign": torch.zeros(2)}, path)
    (initial,) = ranks(1, lightning=True).run(lenient, {}, None)
    expected = {**initial, **part, "head.weight": state["embed.weight"]}
    for found in ranks(4, lightning=True).run(lenient, {**TP2, **PP2}, str(path)):
        assert_same(found, expected, 0.0)


# -- what does not fit -------------------------------------------------------------------------------------------------


class Dangerous:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def broken(fault: str, folder: Path) -> Path:
    path, state = folder / ("wrong.safetensors" if "safetensors" in fault else "wrong.pt"), made(5).state_dict()
    if fault == "missing":
        del state["body.1.linear1.bias"]
    elif fault == "shape":
        state["body.3.linear2.bias"] = torch.zeros(3, dtype=torch.float64)
    torch.save(state, path)
    if fault == "dangerous":
        torch.save({"state_dict": state, "other": Dangerous()}, path)
    elif fault == "truncated":
        path.write_bytes(path.read_bytes()[:3000])
    elif fault == "bit":
        flip(path, "data/3")
    elif fault == "no state dict":
        torch.save({"weights": state}, path)
    elif fault.endswith("safetensors"):
        write_safetensors(state, path)
        whole = path.read_bytes()
        path.write_bytes(
            {"short": whole[:-5], "headless": whole[:40], "empty": b"", "listed": b"\3" + 7 * b"\0" + b"[1]"}[
                fault.split()[0]
            ]
        )
    elif fault.startswith("no file") or fault.endswith("index"):
        path.unlink()
    if fault.endswith("folder"):
        path.mkdir()
        (path / "other-1.safetensors").touch()
    elif fault.endswith("index"):
        path.mkdir()
        write_safetensors(state, path / "model-1.safetensors")
        shards = {"lost": "model-2.safetensors"} if fault.startswith("lost") else {"other": "model-1.safetensors"}
        index = "{" if fault.startswith("torn") else json.dumps({"weight_map": shards})
        (path / "model.safetensors.index.json").write_text(index)
    return path


def refused(path: str) -> str:
    with pytest.raises((RuntimeError, ValueError, FileNotFoundError)) as error:
        started(PP2, True, path)
    return f"{type(error.value).__name__}: {error.value}"


FAULTS = {
    "missing": 'RuntimeError: .*Missing key.*"body.1.linear1.bias"',
    "shape": "RuntimeError: .*size mismatch for body.3.linear2.bias",
    "dangerous": "ValueError: .*cannot be loaded as weights.*strategy.load_weights",
    "truncated": "ValueError: .*3000 bytes\\) cannot be read",
    "bit": f"ValueError: .*wrong.pt is damaged: the tensor '{list(made(5).state_dict())[3]}' failed the CRC-32 check",
    "no state dict": "ValueError: .*does not contain a state dict.*'weights'",
    "short safetensors": "ValueError: .*not a complete .safetensors file",
    "headless safetensors": "ValueError: .*not a complete .safetensors file",
    "empty safetensors": "ValueError: .*not a complete .safetensors file",
    "listed safetensors": "ValueError: .*not a complete .safetensors file",
    "no file but a folder": "ValueError: .*is a folder with .'other-1.safetensors'., but it is neither a checkpoint",
    "lost shard of an index": "FileNotFoundError: .*index.json lists the file 'model-2.safetensors'",
    "wrong index": "ValueError: .*index.json lists the tensor 'other' in 'model-1.safetensors'",
    "torn index": "ValueError: .*index.json is not a valid weight index",
    "no file": "FileNotFoundError: No weights found: .*wrong.pt is neither",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_an_error_on_every_rank(ranks: Pools, tmp_path: Path, fault: str) -> None:
    texts = ranks(2, lightning=True).run(refused, str(broken(fault, tmp_path)))
    assert texts[0] == texts[1]
    assert re.match(FAULTS[fault], texts[0], re.DOTALL), texts[0]


def test_files_of_the_library_safetensors_are_read(tmp_path: Path) -> None:
    state = {"a": torch.randn(3, 2), "b": torch.arange(5), "c": torch.randn(7).bfloat16(), "d": torch.tensor(True)}
    save_file(state, tmp_path / "x.safetensors")
    found = Weights(tmp_path / "x.safetensors")
    assert found.shapes(nn.Module()) == {name: value.shape for name, value in state.items()}


def test_a_file_is_mapped_and_odd_places_are_read(tmp_path: Path) -> None:
    state = {
        "on": torch.tensor([True, False, True]),
        "x": torch.randn(5, 3),
        "n": torch.tensor(7),
        "u": torch.tensor([1, 65535], dtype=torch.uint16),
        "none": torch.ones(0, 2),
    }
    write_safetensors(state, tmp_path / "x.safetensors")
    module = nn.Module()
    for name, value in state.items():
        module.register_buffer(name, torch.zeros_like(value))
    module.strict_loading = True  # type: ignore[assignment]
    Weights(tmp_path / "x.safetensors").load(module, None)  # type: ignore[arg-type]
    assert_same(dict(module.state_dict()), state, 0.0)


# -- folders of Hugging Face: for which part of a module they are ------------------------------------------------------


class Model(nn.Module):
    """Layers, and a table that the model makes itself."""

    def __init__(self, width: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("scale", torch.ones(2))


class Headed(nn.Module):
    _keys_to_ignore_on_load_unexpected = ("layers.*.mask",)

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.base = Model()
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.base.embed.weight


class Holder(LightningModule):
    def __init__(self, *, strict: bool = True, **parts: nn.Module) -> None:
        super().__init__()
        self.strict_loading = strict
        for name, part in parts.items():
            setattr(self, name, part)


def load_folder(module: LightningModule, state: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The state dict after a folder with this state dict was loaded."""
    folder.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")
    Weights(folder).load(module, None)  # type: ignore[arg-type]
    return dict(module.state_dict())


def filled(module: nn.Module, value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, value) for name, tensor in module.state_dict().items()}


PARTS: dict[str, tuple[Any, Any, str]] = {
    "the model": (lambda: Holder(model=Headed()), Headed, "model."),
    "the module itself": (lambda: Holder(base=Model(), head=nn.Linear(3, 5, bias=False)), Headed, ""),
    "deep inside": (lambda: Holder(wrapped=nn.Sequential(nn.Tanh(), Headed())), Headed, "wrapped.1."),
    "without the head": (lambda: Holder(model=Headed()), Model, "model.base."),
    "beside a head of the user's": (lambda: Holder(model=Model(), head=nn.Linear(2, 2)), Model, "model."),
    "the larger one": (lambda: Holder(small=Model(), large=Model(layers=4)), lambda: Model(layers=4), "large."),
    "the smaller one": (lambda: Holder(small=Model(), large=Model(layers=4)), Model, "small."),
    "the wider one": (lambda: Holder(narrow=Model(), wide=Model(width=4)), lambda: Model(width=4), "wide."),
}


@pytest.mark.parametrize("case", PARTS)
def test_a_folder_is_for_the_part_that_it_fits(tmp_path: Path, case: str) -> None:
    make, source, prefix = PARTS[case]
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = filled(source(), 7)
    loaded = {f"{prefix}{name}": value for name, value in state.items()}
    assert_same(load_folder(module, state, tmp_path), {**before, **loaded}, 0.0)


def test_one_part_by_two_names_is_one_part(tmp_path: Path) -> None:
    model = Model()
    found = load_folder(Holder(model=model, teacher=model), filled(Model(), 7), tmp_path)
    assert all((value == 7).all() for value in found.values())


def test_of_tied_parameters_a_folder_has_one_and_of_buffers_it_may_lack_some(tmp_path: Path) -> None:
    state = filled(Headed(tied=True), 7)
    del state["head.weight"], state["base.scale"]
    found = load_folder(Holder(model=Headed(tied=True)), state, tmp_path)
    assert (found["model.head.weight"] == 7).all()
    assert (found["model.base.scale"] == 1).all()


def test_tables_that_the_model_makes_itself_are_not_read(tmp_path: Path) -> None:
    made = {"base.table": torch.zeros(9), "layers.0.mask": torch.zeros(1), "base.rotary_emb.inv_freq": torch.zeros(1)}
    module = Holder(model=Headed())
    assert (load_folder(module, {**filled(Headed(), 7), **made}, tmp_path)["model.head.weight"] == 7).all()
    assert torch.equal(module.model.base.table, torch.arange(3.0))


def without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key != name}


WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "two copies": (
        lambda: Holder(student=Headed(), teacher=Headed()),
        lambda: filled(Headed(), 7),
        ValueError,
        r"match several parts of Holder equally well: \['student', 'teacher'\]",
    ),
    "no name": (
        lambda: Holder(model=Headed()),
        lambda: {"a.weight": torch.zeros(1), "b": torch.zeros(2)},
        ValueError,
        "first names in the folder are 'a.weight', 'b'; the first names in the module are 'model.base.embed",
    ),
    "one is missing": (
        lambda: Holder(model=Headed()),
        lambda: without(filled(Headed(), 7), "base.layers.1.bias"),
        RuntimeError,
        'Missing key.*"model.base.layers.1.bias". (?s:.*) match `model` best.*strict_loading = False',
    ),
    "another head": (
        lambda: Holder(model=Headed()),
        lambda: {**filled(Headed(), 7), "cls.weight": torch.zeros(1)},
        RuntimeError,
        'Unexpected key.*"model.cls.weight"',
    ),
    "another vocabulary": (
        lambda: Holder(strict=False, model=Headed()),
        lambda: {**filled(Headed(), 7), "base.embed.weight": torch.zeros(6, 3)},
        RuntimeError,
        "size mismatch for model.base.embed.weight",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_folder_that_does_not_fit_changes_nothing(tmp_path: Path, case: str) -> None:
    make, state, error, text = WRONG[case]
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(error, match=text):
        load_folder(module, state(), tmp_path)
    assert_same(dict(module.state_dict()), before, 0.0)


def test_another_head_is_left_out_where_loading_is_not_strict(tmp_path: Path) -> None:
    module = Holder(strict=False, model=Headed())
    before = module.model.head.weight.clone()
    state = {**without(filled(Headed(), 7), "head.weight"), "cls.weight": torch.zeros(1)}
    found = load_folder(module, state, tmp_path)
    assert torch.equal(found.pop("model.head.weight"), before)
    assert all((value == 7).all() for value in found.values())

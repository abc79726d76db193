"""Checkpoints as directories, and checkpoints that are written in the background, in the Trainer's hands."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_hybrid import HybridStrategy
from lightning_hybrid.checkpoint.file_io import FileIO
from lightning_hybrid.checkpoint.storage import dcp_writer
from lightning_hybrid.checkpoint.storage.atomic import new_file
from tests.checkpoint.test_checksums import flip
from tests.checkpoint.test_full import Resumable, Tested, everything, trained
from tests.pool import Pools
from tests.test_trainer_features import tuned
from tests.training_jobs import PP2, Regression, assert_same, loader, make_trainer, plain, together, weights

SHARDED: dict[str, Any] = {**PP2, "save_distributed_checkpoint": True}
TP2: dict[str, Any] = {"tensor_parallel_size": 2, "save_distributed_checkpoint": True}


# -- callbacks that save -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "arguments", [{}, {"save_weights_only": True}, {"every_n_epochs": 1, "save_last": "link"}], ids=str
)
def test_the_best_and_the_last_are_found(ranks: Pools, tmp_path: Path, arguments: Any, is_async: bool) -> None:
    arguments = {"every_n_epochs": 1, **arguments}
    link = {"save_last": arguments.pop("save_last")} if "save_last" in arguments else {}
    expected = evaluate_best_of(None, str(tmp_path / "one"), {**arguments, **link})
    layout = {**SHARDED, "async_save": is_async}
    for result in ranks(2, lightning=True).run(evaluate_best_of, layout, str(tmp_path / "two"), {**arguments, **link}):
        assert_same(result, expected)
    saved = sorted(path.name for path in (tmp_path / "two").iterdir())
    assert saved == sorted(path.name for path in (tmp_path / "one").iterdir())
    assert all((tmp_path / "two" / name / ".metadata").is_file() for name in saved)


def evaluate_best_of(layout: Any, directory: str, arguments: dict[str, Any]) -> dict[str, Any]:
    given = {"save_last": True, **arguments}
    saver = ModelCheckpoint(directory, "{epoch}", monitor="val_loss", save_top_k=1, **given)
    trainer = make_trainer(layout, max_epochs=4, enable_checkpointing=True, callbacks=[saver])
    module = Tested(learning_rate=0.05)
    trainer.fit(module, loader(8), loader(8, seed=2))
    last = trainer.test(module, loader(8, seed=2))[0]
    best = trainer.test(ckpt_path="best", dataloaders=loader(8, seed=2))[0]
    named = trainer.test(ckpt_path="last", dataloaders=loader(8, seed=2))[0]
    other = make_trainer(layout).test(Tested(), loader(8, seed=2), ckpt_path=saver.best_model_path)[0]
    return {"last": last, "best": best, "named": named, "other": other, "score": float(saver.best_model_score)}


def averaged(layout: Any, path: str, resume: bool) -> dict[str, Any]:
    trainer = make_trainer(layout, max_epochs=4 if resume else 2, callbacks=[EMAWeightAveraging(decay=0.5)])
    module = Resumable()
    trainer.fit(module, loader(), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return {"weights": _full(module), "metrics": plain(trainer.callback_metrics)}


def _full(module: nn.Module) -> dict[str, Tensor]:
    named = weights(module)
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in named.items()}


@pytest.mark.parametrize("layout", [SHARDED, TP2], ids=["pp2", "tp2"])
def test_averages_of_the_model_are_in_a_directory_too(ranks: Pools, tmp_path: Path, layout: Any) -> None:
    averaged(None, str(tmp_path / "one.ckpt"), False)
    expected = averaged(None, str(tmp_path / "one.ckpt"), True)
    pool = ranks(2, lightning=True)
    pool.run(averaged, layout, str(tmp_path / "two.ckpt"), False)
    results = pool.run(averaged, layout, str(tmp_path / "two.ckpt"), True)
    assert_same(together([result["weights"] for result in results]), expected["weights"])


class Extra(nn.Module):
    """A layer with state that is no tensor, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.note = "new"
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        return x

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


class WithExtra(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.body[5].append(Extra())
        self.outside = Extra()

    def on_train_start(self) -> None:
        self.found = (self.body[5][-1].note, self.outside.note)
        for extra in (self.body[5][-1], self.outside):
            extra.note = "old"


def noted(layout: Any, path: str) -> Any:
    trainer = make_trainer(layout)
    trainer.fit(WithExtra(), loader())
    trainer.save_checkpoint(path)
    module = WithExtra()
    make_trainer(layout, max_epochs=2).fit(module, loader(), ckpt_path=path)
    return module.found


def test_state_of_layers_that_is_no_tensor(ranks: Pools, tmp_path: Path) -> None:
    results = ranks(2, lightning=True).run(noted, SHARDED, str(tmp_path / "c.ckpt"))
    assert results[1] == ("old", "old")
    assert results[0][1] == "old"


# -- strictness, and what does not fit ---------------------------------------------------------------------------------


def load_wrong(layout: Any, path: str, strict: bool, kind: str) -> Any:
    module = {"another": WithExtra, "fewer": Regression, "same": Resumable}[kind]()
    module.strict_loading = strict
    before = weights(module)
    try:
        make_trainer(layout, max_epochs=3).fit(module, loader(), ckpt_path=path)
    except Exception as error:
        unchanged = all(torch.equal(value, before[name]) for name, value in weights(module).items())
        return type(error).__name__, str(error), unchanged
    return "", "", False


@pytest.mark.parametrize("form", ["file", "directory"])
@pytest.mark.parametrize(
    ("kind", "strict", "fault", "words"),
    [
        ("another", True, "", ["Missing key(s)", '"outside.count"', "Unexpected key(s)", '"steps"']),
        ("same", True, "rename", ["body.1.0.bias", "no 'body.1.0.bias', but it has 'body.1.0.bios'"]),
        ("same", True, "shape", ["size mismatch for body.5.0.weight", "torch.Size([8, 9])"]),
        ("same", False, "shape", ["size mismatch for body.5.0.weight", "torch.Size([8, 9])"]),
    ],
    ids=["another model", "another name", "another shape", "another shape, not strict"],
)
def test_another_models_checkpoint_is_refused_and_nothing_is_loaded(
    ranks: Pools, tmp_path: Path, kind: str, strict: bool, fault: str, words: list[str], form: str
) -> None:
    path = str(tmp_path / "c.ckpt")
    layout = SHARDED if form == "directory" else PP2
    ranks(2, lightning=True).run(changed, layout, path, fault)
    results = ranks(2, lightning=True).run(load_wrong, layout, path, strict, kind)
    assert results[0] == results[1]
    name, text, unchanged = results[0]
    assert name == "RuntimeError"
    assert unchanged
    for word in words:
        assert word in text, text


class Renamed(Resumable):
    """With one name, or one shape, that is another."""

    fault = ""

    def __init__(self) -> None:
        super().__init__()
        if self.fault == "rename":
            bias = self.body[1][0].bias
            del self.body[1][0].bias
            self.body[1][0].register_parameter("bias", None)
            self.body[1][0].bios = bias
        elif self.fault == "shape":
            self.body[5][0].spare = nn.Parameter(torch.zeros(8, 9, dtype=torch.float64))


def changed(layout: Any, path: str, fault: str) -> None:
    Renamed.fault = fault
    trainer = make_trainer(layout)
    module = Renamed()
    trainer.fit(module, loader())
    original = trainer.strategy.lightning_module_state_dict

    def other() -> dict[str, Any]:
        state = original()
        if fault == "shape" and state:
            state["body.5.0.weight"] = state.pop("body.5.0.spare")
        return state

    with mock.patch.object(trainer.strategy, "lightning_module_state_dict", other):
        trainer.save_checkpoint(path)


def test_names_that_differ_are_left_out_where_loading_is_not_strict(ranks: Pools, tmp_path: Path) -> None:
    path = str(tmp_path / "c.ckpt")
    ranks(2, lightning=True).run(trained, SHARDED, 8, 1, path, None)
    for found in ranks(2, lightning=True).run(evaluated_without_strictness, PP2, path):
        assert found


def evaluated_without_strictness(layout: Any, path: str) -> bool:
    module = Tested()
    module.strict_loading = False
    trainer = make_trainer(layout)
    before = weights(module)["head.weight"]
    trainer.test(module, loader(), ckpt_path=path)
    return not torch.equal(before, weights(module)["head.weight"])


# -- in the background -------------------------------------------------------------------------------------------------


class AtTheEnd(Callback):
    """Does something while the run is still on."""

    def __init__(self, action: Callable[[Any, Any], Any]) -> None:
        self.action = action
        self.result: Any = None

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.result = self.action(trainer, module)


def fit_and(action: Callable[[Any, Any], Any], layout: Any, **arguments: Any) -> Any:
    """What the action returns at the end of a run."""
    callback = AtTheEnd(action)
    make_trainer(layout, callbacks=[callback], **arguments).fit(Regression(), loader())
    return callback.result


def save_in_background(layout: Any, path: str) -> tuple[bool, dict[str, Tensor]]:
    """Save, go on at once, and change the weights while the save waits."""
    gate, write, plugin_write = threading.Event(), dcp_writer.write_directory, FileIO.save_checkpoint

    def waiting(*args: Any, **kwargs: Any) -> None:
        assert gate.wait(30)
        (plugin_write if isinstance(args[0], FileIO) else write)(*args, **kwargs)

    def save(trainer: Any, module: Any) -> Any:
        before = weights(module)
        trainer.save_checkpoint(path)
        was_there = Path(path).exists()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1.0)
        gate.set()
        return was_there, before

    with (
        mock.patch("lightning_hybrid.checkpoint.sharded.write_directory", waiting),
        mock.patch.object(FileIO, "save_checkpoint", waiting),
    ):
        return fit_and(save, {**layout, "async_save": True})


@pytest.mark.parametrize("layout", [PP2, SHARDED], ids=["file", "directory"])
def test_training_goes_on_while_a_copy_is_written(ranks: Pools, tmp_path: Path, layout: Any) -> None:
    path = tmp_path / "c.ckpt"
    results = ranks(2, lightning=True).run(save_in_background, layout, str(path))
    assert [was_there for was_there, _ in results] == [False, False]
    assert path.exists()
    (found, *_) = ranks(2, lightning=True).run(loaded_weights, PP2, str(path))
    assert_same(found, together([before for _, before in results]), 0.0)


def loaded_weights(layout: Any, path: str) -> dict[str, Tensor]:
    trainer = make_trainer(layout, max_steps=0, max_epochs=None)
    trainer.validate(Regression(), loader(), ckpt_path=path, verbose=False)
    return dict(trainer.strategy.lightning_module_state_dict())


def fail_in_background(layout: Any, path: str) -> str:
    def save(trainer: Any, module: Any) -> str:
        if trainer.global_rank == 0:
            Path(path).write_text("a file in the place of a directory")
        trainer.strategy.barrier()
        trainer.save_checkpoint(f"{path}/below.ckpt")
        with pytest.raises(OSError, match="could not be written") as caught:
            trainer.save_checkpoint(f"{path}.next")
        return str(caught.value)

    return fit_and(save, {**layout, "async_save": True})


@pytest.mark.parametrize("layout", [PP2, SHARDED], ids=["file", "directory"])
def test_a_failure_in_the_background_is_an_error_of_the_next_save_on_every_rank(
    ranks: Pools, tmp_path: Path, layout: Any
) -> None:
    texts = ranks(2, lightning=True).run(fail_in_background, layout, str(tmp_path / "c.ckpt"))
    assert texts[0] == texts[1]


def overlapped(layout: Any, path: str) -> tuple[bool, bool]:
    """Whether what is saved in a run, and after it, is written in the background."""
    names = []
    write = dcp_writer.write_directory

    def named(*args: Any) -> None:
        names.append(threading.current_thread().name)
        write(*args)

    with mock.patch("lightning_hybrid.checkpoint.sharded.write_directory", named):
        plugin = AsyncCheckpointIO()
        callback = AtTheEnd(lambda trainer, module: trainer.save_checkpoint(path))
        trainer = make_trainer(layout, callbacks=[callback], plugins=[plugin])
        trainer.fit(Regression(), loader())
        trainer.save_checkpoint(path)
    assert trainer.strategy.checkpoint_io is plugin
    in_run, after = (name != threading.main_thread().name for name in names)
    return in_run, after


def test_lightnings_asynchronous_plugin_works_with_directories(ranks: Pools, tmp_path: Path) -> None:
    results = ranks(2, lightning=True).run(overlapped, SHARDED, str(tmp_path / "c.ckpt"))
    assert results == [(True, False), (True, False)]


def saved_often(layout: Any, directory: str) -> int:
    """With a group of all ranks alone, the plugin's gathers come between those of the main thread."""
    saver = ModelCheckpoint(directory, every_n_train_steps=2, save_top_k=-1)
    plugin = AsyncCheckpointIO()
    trainer = make_trainer(layout, plugins=[plugin], enable_checkpointing=True, max_epochs=4, callbacks=[saver])
    trainer.fit(Regression(), loader())
    return len(list(Path(directory).iterdir()))


@pytest.mark.parametrize("layout", [SHARDED, {**SHARDED, "pipeline_parallel_size": 1}], ids=["pp2", "dp2"])
def test_lightnings_asynchronous_plugin_writes_beside_training(ranks: Pools, tmp_path: Path, layout: Any) -> None:
    found = ranks(2, lightning=True).run(saved_often, layout, str(tmp_path / "saved"))
    assert found[0] == found[1] >= 5


def kept(layout: Any, directory: str) -> list[str]:
    """What is there after the second of two asynchronous saves has failed."""
    saver = ModelCheckpoint(directory, "{epoch}", monitor="epoch", mode="max", save_top_k=1, every_n_epochs=1)
    trainer = make_trainer({**layout, "async_save": True}, max_epochs=2, enable_checkpointing=True, callbacks=[saver])
    count = itertools.count()

    def second_fails(path: Path) -> Any:
        if next(count) > 0:
            raise OSError("no space")
        return new_file(path)

    with mock.patch("lightning_hybrid.checkpoint.file_io.new_file", second_fails), contextlib.suppress(OSError):
        trainer.fit(Regression(), loader())
    return sorted(path.name for path in Path(directory).iterdir())


def test_a_failure_in_the_background_keeps_the_checkpoint_before(ranks: Pools, tmp_path: Path) -> None:
    (names,) = ranks(1, lightning=True).run(kept, {}, str(tmp_path))
    assert names == ["epoch=0.ckpt"]


class Growing(Callback):
    """Saves a list that grows."""

    def __init__(self, entry: Any) -> None:
        self.history = [entry]

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}


def grown(path: str) -> int:
    growing, write = Growing(0), FileIO.save_checkpoint

    def late(*args: Any, **kwargs: Any) -> None:
        growing.history.append(1)  # what training does meanwhile
        write(*args, **kwargs)

    callback = AtTheEnd(lambda trainer, module: trainer.save_checkpoint(path))
    with mock.patch.object(FileIO, "save_checkpoint", late):
        make_trainer({"async_save": True}, callbacks=[growing, callback]).fit(Regression(), loader())
    return len(torch.load(path)["callbacks"]["Growing"]["history"])


def test_what_grows_meanwhile_is_saved_as_it_was(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(1, lightning=True).run(grown, str(tmp_path / "c.ckpt")) == [1]


def test_two_ways_of_asynchronous_saving_are_refused() -> None:
    with pytest.raises(ValueError, match="both write checkpoints in the background"):
        make_trainer_alone(plugins=[AsyncCheckpointIO()], async_save=True)
    with pytest.raises(ValueError, match=r"plugins=\[Plugin\(\)\]"):
        make_trainer_alone(plugins=[AsyncCheckpointIO(Plugin())])


def unpicklable(layout: Any, path: str) -> str:
    def save(trainer: Any, module: Any) -> str:
        with pytest.raises(Exception, match=r"pickle|local object") as caught:
            trainer.save_checkpoint(path)
        return str(caught.value)

    growing, callback = Growing(lambda: None), AtTheEnd(save)
    make_trainer(layout, callbacks=[growing, callback]).fit(Regression(), loader())
    return str(callback.result)


@pytest.mark.parametrize("layout", [PP2, SHARDED], ids=["file", "directory"])
def test_what_cannot_be_pickled_is_an_error_on_every_rank(ranks: Pools, tmp_path: Path, layout: Any) -> None:
    texts = ranks(2, lightning=True).run(unpicklable, layout, str(tmp_path / "c.ckpt"))
    assert all("lambda" in text for text in texts)


class Turned(nn.Linear):
    """Its first version kept the weight transposed."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, local_metadata, *args)


class Versioned(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.body[4].append(Turned(8, 8).double())


def versioned(layout: Any, path: str, version: int) -> bool:
    """Whether the weights come back as they were saved."""
    trainer = make_trainer(layout)
    module = Versioned()
    Turned._version = version
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    Turned._version = 2
    other = Versioned()
    make_trainer(layout).validate(other, loader(), ckpt_path=path, verbose=False)
    expected = weights(module)
    if version == 1 and "body.4.3.weight" in expected:
        expected["body.4.3.weight"] = expected["body.4.3.weight"].t()
    found = weights(other)  # of what is around the body on the first and on the last stage, before any training
    return all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("layout", [PP2, SHARDED], ids=["file", "directory"])
def test_layers_know_the_version_of_what_they_load(ranks: Pools, tmp_path: Path, layout: Any, version: int) -> None:
    assert ranks(2, lightning=True).run(versioned, layout, str(tmp_path / "c.ckpt"), version) == [True, True]


def test_a_file_is_opened_as_safely_as_in_lightning(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "code": Plugin()}, tmp_path / "c.ckpt")
    for plugin in (FileIO(), TorchCheckpointIO()):
        with pytest.raises(pickle.UnpicklingError):
            plugin.load_checkpoint(tmp_path / "c.ckpt")
    assert "code" in FileIO().load_checkpoint(tmp_path / "c.ckpt", weights_only=False)


class Harmful:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_no_code_of_a_directory_runs_that_a_run_goes_on_from(ranks: Pools, tmp_path: Path) -> None:
    path, witness = tmp_path / "c.ckpt", tmp_path / "witness"
    everything(ranks(2, lightning=True).run(trained, SHARDED, 8, 1, str(path), None))
    extra = torch.load(path / "meta.pt", weights_only=False)
    torch.save({**extra, "code": Harmful(witness)}, path / "meta.pt")
    texts = ranks(2, lightning=True).run(load_damaged, SHARDED, str(path))
    assert texts[0] == texts[1]
    assert not witness.exists()


def test_a_home_directory_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    FileIO().save_checkpoint({"a": 1}, "~/c.ckpt")
    assert (tmp_path / "c.ckpt").is_file()
    assert FileIO().load_checkpoint(f"file://{tmp_path}/c.ckpt") == {"a": 1}
    FileIO().remove_checkpoint("~/c.ckpt")
    assert not (tmp_path / "c.ckpt").exists()


# -- plugins and options -----------------------------------------------------------------------------------------------


class Plugin(TorchCheckpointIO):
    """A user's way of writing files."""


def test_a_plugin_that_would_not_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match="the plugin would not be used"):
        make_trainer_alone(plugins=[Plugin()])


def make_trainer_alone(*, async_save: bool = False, **arguments: Any) -> Any:
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "1"}):
        return make_trainer({"save_distributed_checkpoint": True, "async_save": async_save}, **arguments)


def refused_options(path: str) -> str:
    trainer = make_trainer(SHARDED)
    trainer.fit(Regression(), loader())
    with pytest.raises(TypeError) as caught:
        trainer.save_checkpoint(path, storage_options={"a": 1})
    return str(caught.value)


def test_options_are_refused(ranks: Pools, tmp_path: Path) -> None:
    results = ranks(2, lightning=True).run(refused_options, str(tmp_path / "c.ckpt"))
    assert results[0] == results[1]
    assert "storage_options" in results[0]


def test_arguments_reach_the_settings() -> None:
    settings = HybridStrategy(save_distributed_checkpoint=True, async_save=True).settings
    assert (settings.save_distributed_checkpoint, settings.async_save) == (True, True)
    for wrong in ("save_distributed_checkpoint", "async_save"):
        with pytest.raises(TypeError, match=wrong):
            HybridStrategy(**{wrong: "yes"})  # type: ignore[arg-type]


# -- damaged files -----------------------------------------------------------------------------------------------------


def load_damaged(layout: Any, path: str) -> tuple[str, str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the test looks at it
        make_trainer(layout, max_epochs=3).fit(Resumable(), loader(), ckpt_path=path)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("layout", "fault", "words"),
    [
        (PP2, "short", "cannot be read"),
        (PP2, "empty", "cannot be read"),
        (PP2, "bit", "c.ckpt is damaged: the tensor 'state_dict.steps' failed the CRC-32 check ("),
        (SHARDED, "bit of the index", ".metadata is damaged: its CRC-32 checksum does not match, so the file changed"),
        (SHARDED, "unfinished", "not a complete checkpoint"),
        (SHARDED, "missing shard", "is incomplete on"),
        (SHARDED, "short shard", "is damaged"),
        (
            SHARDED,
            "bit of a shard",
            "__1_0.distcp is damaged: 'state_dict.head.weight' failed the CRC-32 check",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_checkpoint_is_an_error_on_every_rank(
    ranks: Pools, tmp_path: Path, layout: Any, fault: str, words: str
) -> None:
    path = tmp_path / "c.ckpt"
    layout = {**layout, "gather_module_on_teardown": False}  # each rank writes the values that no other rank has
    everything(ranks(2, lightning=True).run(trained, layout, 8, 1, str(path), None))
    if fault in ("short", "empty"):
        os.truncate(path, path.stat().st_size // 2 if fault == "short" else 0)
    elif fault == "bit":
        flip(path, "data/0")
    elif fault == "bit of the index":
        index = bytearray((path / ".metadata").read_bytes())
        index[index.index(b"head.weight")] ^= 1
        (path / ".metadata").write_bytes(index)
    elif fault == "bit of a shard":
        places = FileSystemReader(path).read_metadata().storage_data
        (place,) = (place for index, place in places.items() if index.fqn == "state_dict.head.weight")
        flip(path / place.relative_path, "data/0", place.offset, place.length)
    elif fault == "unfinished":
        (path / ".metadata").unlink()
    else:
        shard = path / "__1_0.distcp"
        os.truncate(shard, 100) if fault == "short shard" else shard.unlink()
    texts = ranks(2, lightning=True).run(load_damaged, layout, str(path))
    assert texts[0] == texts[1]
    assert texts[0][0] == "ValueError"
    assert words in texts[0][1]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_learning_rate_finder_saves_and_restores_a_directory(ranks: Pools, tmp_path: Path, is_async: bool) -> None:
    expected = tuned(None, str(tmp_path), False)
    layout = {**SHARDED, "async_save": is_async}
    results = ranks(2, lightning=True).run(tuned, layout, str(tmp_path), False)
    assert_same(results, [expected, expected], rtol=1e-8)
    assert [path.name for path in tmp_path.iterdir() if "lr_find" in path.name] == []

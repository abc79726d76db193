"""What a checkpoint holds, read without its tensors."""

from __future__ import annotations

import json
import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from lightning_hybrid.checkpoint.storage.dcp import DistributedCheckpoint
from lightning_hybrid.cli.consolidate import consolidate
from lightning_hybrid.cli.inspect import inspect_checkpoint
from lightning_hybrid.cli.main import main
from lightning_hybrid.version import __version__
from tests.pool import Pools
from tests.training_jobs import PP2, Regression, loader, make_trainer


class Model(Regression):
    def __init__(self) -> None:
        super().__init__(4)
        self.body[3][0].weight = self.body[0][0].weight

    def configure_optimizers(self) -> Any:
        outside = [*self.embed.parameters(), *self.head.parameters()]
        groups = [{"params": list(self.body.parameters()), "weight_decay": 0.1}, {"params": outside, "lr": 3e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def saved(layout: dict[str, Any] | None, directory: str) -> None:
    for sharded in (False, True) if layout is not None else (False,):
        arguments = {**layout, "save_distributed_checkpoint": sharded} if layout is not None else None
        trainer = make_trainer(arguments, max_epochs=2)
        trainer.fit(Model(), loader())
        trainer.save_checkpoint(f"{directory}/{'shards' if sharded else 'file'}")


END = """\
state_dict: 11 tensors, 289 elements, 2.3 kB
name                 shape  dtype
-----------------------------------
embed.weight         8x6    float64
embed.bias           8      float64
body.*.0.weight (3)  8x8    float64
body.*.0.bias (4)    8      float64
head.weight          1x8    float64
head.bias            1      float64
body.3.0.weight tied to body.0.0.weight

optimizer 0       exp_avg, exp_avg_sq, step for 11 parameters; 33 tensors, 589 elements, 4.7 kB
  group 0         7 parameters; lr 0.0001, betas (0.9, 0.999), decoupled_weight_decay True, eps 1e-08, \
initial_lr 0.01, weight_decay 0.1
  group 1         4 parameters; lr 3e-05, betas (0.9, 0.999), decoupled_weight_decay True, eps 1e-08, \
initial_lr 0.003, weight_decay 0.01
scheduler 0       step_size 1, gamma 0.1, base_lrs [0.01, 0.003], last_epoch 2
loops             fit_loop, validate_loop, test_loop, predict_loop
hyper-parameters  num_layers 4, learning_rate 0.01, dropout 0"""


def test_file_and_directory_of_a_run_say_the_same(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, lightning=True).run(saved, PP2, str(tmp_path))
    consolidate(tmp_path / "shards", tmp_path / "one")
    texts = [inspect_checkpoint(tmp_path / name).text() for name in ("file", "one", "shards")]
    heads, bodies = zip(*(text.split("\n", 1) for text in texts), strict=True)
    assert heads[0].startswith(f"{tmp_path / 'file'}: file, ")
    assert heads[2].startswith(f"{tmp_path / 'shards'}: directory of 4 files, ")
    assert bodies[0] == bodies[1] == bodies[2]
    assert f"written by  lightning_hybrid {__version__}, torch {torch.__version__}, lightning " in bodies[0]
    assert "data 1 x tensor 1 x pipeline 2, pp-dp-tp; '1f1b', 4 microbatches; 'body' in stages of 2 + 2" in bodies[0]
    assert "progress    epoch 2, step 10\n" in bodies[0]
    assert bodies[0].endswith(END)


def test_a_file_of_plain_lightning_has_no_layout(tmp_path: Path) -> None:
    saved(None, str(tmp_path))
    text = inspect_checkpoint(tmp_path / "file").text(every_name=True)
    assert "\nwritten by  lightning 2." in text
    assert "layout" not in text
    assert "\nbody.1.0.weight  8x8    float64\nbody.1.0.bias    8      float64\nbody.2.0.weight" in text


def test_other_files_are_shown_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3, bias=False)).state_dict(), path)
    assert inspect_checkpoint(path).text().split("\n", 2)[2] == (
        "state_dict: 3 tensors, 18 elements, 72 bytes\n"
        "name      shape  dtype\n------------------------\n"
        "0.weight  3x2    float32\n0.bias    3      float32\n1.weight  3x3    float32"
    )
    torch.save({"model": {"a": torch.zeros(2)}, "note": "x" * 100}, path)
    text = inspect_checkpoint(path).text()
    assert "model.a  2      float32" in text
    assert text.endswith("note  '" + "x" * 68 + "...")


class Settings:
    """A class of the user's project, which need not be where the checkpoint is looked at."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Table(dict[str, int]):
    pass


def without_project(path: Path) -> None:
    """Let the classes of this module be those of one that does not exist."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content.replace(b"tests.cli.test_inspect", b"tests.left_at_home___"))


def test_classes_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    values = {"settings": Settings(torch.zeros(2)), "table": Table(a=1)}
    torch.save({"state_dict": {"a": torch.zeros(3)}, "hyper_parameters": values}, path)
    without_project(path)
    text = inspect_checkpoint(path).text()
    assert "settings <tests.left_at_home___.Settings>, table <tests.left_at_home___.Table>" in text


def test_no_tensor_is_read(tmp_path: Path) -> None:
    """What a map would have to read is not there: the files have holes."""
    state = {"a": torch.empty(2**28)}  # 1 GiB
    with torch.serialization.skip_data():
        torch.save({"state_dict": state}, tmp_path / "file")
    before = os.times().user
    assert "268,435,456 elements, 1.1 GB" in inspect_checkpoint(tmp_path / "file").text()
    assert os.times().user - before < 0.5


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("nothing", "Checkpoint not found"),
        ("truncated", "900 bytes) is not a complete checkpoint"),
        ("text", "is not a complete checkpoint"),
        ("zip", "cannot be read"),
        ("tensor", "contains 1 tensor, 3 elements, 12 bytes, but a checkpoint must be"),
        ("unfinished", "The file '.metadata', which is written last, is missing"),
        ("shards", "the file '__0_0.distcp' (at least"),
        ("other shards", "does not contain a module: its entries are ['weights']"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, complaint: str
) -> None:
    path = tmp_path / "x.ckpt"
    if kind == "truncated":
        torch.save({"state_dict": {"a": torch.zeros(300)}}, path)
        os.truncate(path, 900)
    elif kind == "text":
        path.write_text("text")
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("page.xml", "text")
    elif kind == "tensor":
        torch.save(torch.zeros(3), path)
    elif kind == "unfinished":
        path.mkdir()
    elif kind in ("shards", "other shards"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            root = "state_dict" if kind == "shards" else "weights"
            dcp.save({root: {"a": torch.zeros(3)}}, checkpoint_id=path, no_dist=True)
        if kind == "shards":
            (path / "__0_0.distcp").unlink()
    with pytest.raises(SystemExit) as exit_:
        main(["inspect", str(path)])
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lightning-hybrid inspect: ")
    assert complaint in line


def test_the_program_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"state_dict": {"layer.0": torch.zeros(3), "layer.1": torch.zeros(3)}}, path)
    main(["inspect", str(path)])
    assert "layer.* (2)  3      float32\n" in capsys.readouterr().out
    main(["inspect", str(path), "--every-name"])
    assert "layer.0  3      float32\nlayer.1" in capsys.readouterr().out


def test_programs_get_it_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, shared = tmp_path / "x.ckpt", torch.zeros(3, 2)
    state = {"a": shared, "b": shared, "half": torch.zeros((), dtype=torch.float16)}
    groups = [{"lr": 0.1, "eps": float("nan"), "params": [0]}]
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": groups}
    parameters = {"width": 8, "path": tmp_path}
    torch.save({"state_dict": state, "epoch": 3, "optimizer_states": [optimizer], "hyper_parameters": parameters}, path)
    main(["inspect", str(path), "--json"])
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["tensors"] == [
        {"name": "a", "shape": [3, 2], "dtype": "float32", "tied_to": None},
        {"name": "b", "shape": [3, 2], "dtype": "float32", "tied_to": "a"},
        {"name": "half", "shape": [], "dtype": "float16", "tied_to": None},
    ]
    assert (found["epoch"], found["global_step"], found["kind"]) == (3, None, "file")
    assert found["num_bytes"] == path.stat().st_size
    assert found["optimizers"] == [{"num_states": 1, "param_groups": [{"lr": 0.1, "eps": "nan", "params": [0]}]}]
    assert found["hyper_parameters"]["width"] == 8
    assert "PosixPath" in found["hyper_parameters"]["path"]


class Evil:
    """Runs a command wherever it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("place", ["file", "meta.pt", ".metadata", "value"])
def test_no_code_of_a_checkpoint_runs(tmp_path: Path, place: str) -> None:
    """What is looked into is what nobody knows yet."""
    ran, path = tmp_path / "ran", tmp_path / "x.ckpt"
    content = {"state_dict": {"a": torch.zeros(3)}, "hyper_parameters": {"width": 8, "evil": Evil(ran)}}
    if place == "file":
        torch.save(content, path)
    else:
        state: dict[str, Any] = {"state_dict": {"a": torch.zeros(3)}}
        if place == "value":
            state["note"] = Evil(ran)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            dcp.save(state, checkpoint_id=path, no_dist=True)
        torch.save({**content, "state_dict": {}} if place == "meta.pt" else {}, path / "meta.pt")
        if place == ".metadata":
            (path / ".metadata").write_bytes(pickle.dumps(Evil(ran)))
    if place == ".metadata":
        with pytest.raises(
            ValueError, match="metadata cannot be read: TypeError: it contains a system instead of an index"
        ):
            inspect_checkpoint(path)
    else:
        text = inspect_checkpoint(path).text()
        assert "a     3      float32" in text
        assert place == "value" or "width 8, evil <posix.system>" in text
    assert not ran.exists()


def test_a_program_in_torchscript_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is going
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)
    with pytest.raises(ValueError, match="is a TorchScript program, not a checkpoint"):
        inspect_checkpoint(path)


def test_the_index_of_a_directory_runs_no_code(tmp_path: Path) -> None:
    """A run that resumes reads it too, and Lightning's `weights_only` says nothing of it."""
    ran = tmp_path / "ran"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save({"state_dict": {"a": torch.zeros(3)}, "note": Evil(ran)}, checkpoint_id=tmp_path / "x", no_dist=True)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        DistributedCheckpoint(tmp_path / "x").read({("note",): None})
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(Evil(ran)))
    with pytest.raises(ValueError, match="instead of an index"):
        DistributedCheckpoint(tmp_path / "x")
    assert not ran.exists()
